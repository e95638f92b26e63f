"""Every lesson runs from top to bottom in a kernel, and is committed without outputs.

An exercise is a cell of its own, "exercise", and one behind it, "check", says what is still missing. The
lesson runs as it is, and then, in the same kernel, with the exercise solved.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from lesson_solutions import SOLUTIONS
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
LESSONS = sorted(NOTEBOOKS.glob("*.ipynb"))
TIMEOUT = 300  # s for one cell; a whole lesson takes well under two minutes on one thread

MOST_TOKENS = 600
"""Tokens that a lesson may generate, its exercise included."""
EVALUATION = "04_an_input_arrives"
"""Its first cell says how many it makes."""

COUNT = "print(llm.stats()['tokens_generated'])"

EXERCISES = [path for path in LESSONS if '"id": "exercise"' in path.read_text(encoding="utf-8")]

each_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, nbformat.NotebookNode]:
    """Lessons by name that have been executed, so that each is run once."""
    return {}


def execute(lesson: Path, folder: Path, executed: dict[str, nbformat.NotebookNode]) -> nbformat.NotebookNode:
    """The executed lesson, behind it its exercise solved. nbclient raises at the first cell that fails."""
    if lesson.stem not in executed:
        notebook = nbformat.read(lesson, as_version=4)
        if lesson in EXERCISES:
            (check,) = [cell for cell in notebook.cells if cell.id == "check"]
            again = {"solution": SOLUTIONS[lesson.stem], "check-again": check.source, "count-tokens": COUNT}
            notebook.cells += [new_code_cell(source, id=name) for name, source in again.items()]
        client = NotebookClient(notebook, timeout=TIMEOUT, resources={"metadata": {"path": str(folder)}})
        executed[lesson.stem] = client.execute()
    return executed[lesson.stem]


def test_there_are_lessons() -> None:
    assert "01_thinker_and_writer" in {path.stem for path in LESSONS}


@each_lesson
def test_lesson_is_committed_without_outputs(lesson: Path) -> None:
    notebook: dict[str, Any] = json.loads(lesson.read_text(encoding="utf-8"))
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert set(notebook["metadata"]) <= {"kernelspec", "language_info"}
    for cell in notebook["cells"]:
        assert cell["metadata"] == {}, cell["id"]
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None, cell["id"]
    nbformat.validate(nbformat.read(lesson, as_version=4))


@each_lesson
def test_lesson_begins_with_a_title_and_has_no_empty_cell(lesson: Path) -> None:
    cells = nbformat.read(lesson, as_version=4).cells
    assert cells[0].cell_type == "markdown" and cells[0].source.startswith("# ")
    assert all(cell.source.strip() for cell in cells)


@pytest.mark.notebook
@each_lesson
def test_lesson_runs(lesson: Path, tmp_path: Path, executed: dict[str, nbformat.NotebookNode]) -> None:
    notebook = execute(lesson, tmp_path, executed)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            assert output.output_type != "error", output
            stderr = output.output_type == "stream" and output.name == "stderr"
            assert not stderr, output.text


def outputs_of(notebook: nbformat.NotebookNode, cell_id: str) -> str:
    """All texts, plain and HTML, that a cell shows."""
    (cell,) = [cell for cell in notebook.cells if cell.id == cell_id]
    parts = []
    for output in cell.outputs:
        parts.append(output.get("text", ""))
        parts.extend(str(value) for value in output.get("data", {}).values())
    return "\n".join(parts)


@pytest.mark.notebook
@pytest.mark.parametrize("lesson", EXERCISES, ids=lambda path: path.stem)
def test_exercise_is_checked(
    lesson: Path, tmp_path: Path, executed: dict[str, nbformat.NotebookNode]
) -> None:
    notebook = execute(lesson, tmp_path, executed)
    assert outputs_of(notebook, "check").startswith("not yet: ")
    assert outputs_of(notebook, "check-again").startswith("done: ")
    if lesson.stem != EVALUATION:
        assert int(outputs_of(notebook, "count-tokens")) <= MOST_TOKENS


@pytest.mark.notebook
def test_the_first_lesson_says_what_its_text_promises(
    tmp_path: Path, executed: dict[str, nbformat.NotebookNode]
) -> None:
    notebook = execute(NOTEBOOKS / "01_thinker_and_writer.ipynb", tmp_path, executed)
    sentences = re.findall(r"^- (.+)$", outputs_of(notebook, "sentences"), re.MULTILINE)
    assert len(sentences) >= 2
    assert all(re.fullmatch(r"In short, .*\d.*\.", sentence) for sentence in sentences), sentences

    thoughts = outputs_of(notebook, "thinker")
    assert "38" in thoughts and "In short" not in thoughts

    *written, encoded = map(int, re.findall(r"\d+", outputs_of(notebook, "count")))
    assert len(written) == 3 and sum(written) == encoded

    blocks = outputs_of(notebook, "blocks")
    assert all(name in blocks for name in ("prompt", "thinker", "writer", "input", "thoughts"))
    assert "<table" in blocks


@pytest.mark.notebook
def test_the_first_lesson_ends_with_a_correction_that_changes_the_answer(
    tmp_path: Path, executed: dict[str, nbformat.NotebookNode]
) -> None:
    notebook = execute(NOTEBOOKS / "01_thinker_and_writer.ipynb", tmp_path, executed)
    assert "15" in outputs_of(notebook, "correct")
    said, answer = outputs_of(notebook, "answer").split("\n\n", 1)
    assert "15 coins" in said and "39" in answer and "33" not in answer


@pytest.mark.notebook
def test_the_evaluation_lesson_plots_its_curve(
    tmp_path: Path, executed: dict[str, nbformat.NotebookNode]
) -> None:
    notebook = execute(NOTEBOOKS / f"{EVALUATION}.ipynb", tmp_path, executed)
    table = outputs_of(notebook, "table")
    assert "<table" in table and "taken up" in table
    bars = outputs_of(notebook, "bars").splitlines()
    assert [bar.split("%")[0].split()[:-1] for bar in bars] == [
        *([routing + ",", str(k)] for routing in ("before", "writer") for k in (0, 64, 96, 128)),
        ["never"],
    ]
    (plot,) = [cell for cell in notebook.cells if cell.id == "plot"]
    curves = [data["application/vnd.plotly.v1+json"]["data"] for o in plot.outputs if (data := o.get("data"))]
    assert [len(curve["x"]) for curve in curves[0]] == [5, 5, 1]


PATTERNS = {
    "06_probe": ("probe reads prompt, log and writes nothing", r"monitor: \d.*loop: \d"),
    "07_parallel_streams": (
        "worker 2 reads prompt, history, lane 1 and writes lane 2",
        r"alone \d.*workers \d",
    ),
    "08_delegation": ("helper 1 reads prompt and writes helper 1", r"delegation: +\d.*loop: +\d"),
    "09_interruptions": ("speak reads memory and writes speech", r"listener: .*begun \d.*turns: .*begun \d"),
    "10_evolving_context": ("replace reads prompt and writes context", r"reader: \d.*loop: \d"),
}
"""For each ready-made agent's lesson a row of its diagram, and how its figures beside the loop look."""


@pytest.mark.notebook
@pytest.mark.parametrize("name", PATTERNS)
def test_pattern_lesson_draws_its_views_and_runs_the_loop_beside_it(
    name: str, tmp_path: Path, executed: dict[str, nbformat.NotebookNode]
) -> None:
    notebook = execute(NOTEBOOKS / f"{name}.ipynb", tmp_path, executed)
    row, figures = PATTERNS[name]
    drawn = outputs_of(notebook, "diagram")
    assert row in drawn and 'src="data:image/svg+xml;base64,' in drawn
    assert re.search(figures, outputs_of(notebook, "loop"), re.DOTALL)


@pytest.mark.notebook
def test_the_lesson_on_probes_warns_of_what_its_rule_says(
    tmp_path: Path, executed: dict[str, nbformat.NotebookNode]
) -> None:
    notebook = execute(NOTEBOOKS / "06_probe.ipynb", tmp_path, executed)
    warned = re.findall(r"warned +(.+)", outputs_of(notebook, "judged"))
    assert warned == ["09:16 pump temperature 75", "09:18 pump temperature 71"]


@pytest.mark.notebook
def test_the_lesson_on_contexts_shows_an_answer_read_from_two_versions(
    tmp_path: Path, executed: dict[str, nbformat.NotebookNode]
) -> None:
    notebook = execute(NOTEBOOKS / "10_evolving_context.ipynb", tmp_path, executed)
    assert "[version 1; now 2]" in outputs_of(notebook, "change")
    versions = re.findall(r"^version (\d+): ", outputs_of(notebook, "trace"), re.MULTILINE)
    assert versions == ["1", "2", "2"]  # of the first answer twice, and of the second
