"""Every lesson runs from top to bottom in a kernel, and is committed without outputs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from asyncllm_nb.models import resolve

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
LESSONS = sorted(NOTEBOOKS.glob("*.ipynb"))
TIMEOUT = 200  # s for one cell; a whole lesson takes well under two minutes on one thread

each_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, nbformat.NotebookNode]:
    """Lessons by name that have been executed, so that each is run once."""
    return {}


def execute(lesson: Path, folder: Path, executed: dict[str, nbformat.NotebookNode]) -> nbformat.NotebookNode:
    """The executed lesson. nbclient raises at the first cell that fails."""
    if lesson.stem not in executed:
        if "smollm2" in lesson.read_text(encoding="utf-8"):
            resolve("smollm2")  # says what to do if the model is not there
        notebook = nbformat.read(lesson, as_version=4)
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
def test_the_first_lesson_says_what_its_text_promises(
    tmp_path: Path, executed: dict[str, nbformat.NotebookNode]
) -> None:
    notebook = execute(NOTEBOOKS / "01_thinker_and_writer.ipynb", tmp_path, executed)
    sentences = re.findall(r"^- (.+)$", outputs_of(notebook, "sentences"), re.MULTILINE)
    assert len(sentences) >= 2
    assert all(len(sentence.split()) > 4 for sentence in sentences), sentences

    thoughts = outputs_of(notebook, "thinker")
    assert len(thoughts.split()) > 50 and "In short" not in thoughts

    held, encoded = map(int, re.findall(r"\d+", outputs_of(notebook, "count")))
    assert held == encoded <= 400

    blocks = outputs_of(notebook, "blocks")
    assert all(name in blocks for name in ("prompt", "thinker", "writer"))
    assert "<table" in blocks
