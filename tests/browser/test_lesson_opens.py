"""The first lesson opens with a recorded run, which moves before any model is loaded, and ends with a person
who types a correction."""

from __future__ import annotations

from pathlib import Path

from asyncllm_nb.replaying import BUNDLED, SUFFIX
from browser.board import Board, lesson_cells
from browser.conftest import Open

LESSON = Path(__file__).parents[2] / "notebooks" / "01_thinker_and_writer.ipynb"

QUICKLY = 3000  # ms from the key press to the second step that is shown
LARGEST = 200_000  # bytes of the recording

CORRECTED = (
    "asyncllm_nb.check",
    "AsyncLLM(",
    "Turns.of(",
    "def think_slowly",
    "controls.block",
    "await think_slowly(",
    "answer.text",
)
"""What the cells have in them that end in a corrected answer, in order."""
THINKS = "Object.values(view.store.live.requests)"

WATCH = """() => {
  window.begun = performance.now();
  window.moved = null;
  const steps = new Set();
  const look = () => {
    const store = document.querySelector(".allm")?.__asyncllm_debug.store;
    if (store?.steps.length) steps.add(store.cursor);
    if (steps.size > 2) window.moved = performance.now();
    else requestAnimationFrame(look);
  };
  look();
}"""


def test_replay_opens_the_lesson(open_notebook: Open) -> None:
    assert (BUNDLED / f"lesson-01{SUFFIX}").stat().st_size < LARGEST
    notebook = open_notebook(lesson_cells(LESSON)[0])
    notebook.page.evaluate(WATCH)
    notebook.run(0)
    notebook.page.wait_for_function("() => window.moved !== null")
    assert notebook.page.evaluate("() => window.moved - window.begun") < QUICKLY
    assert notebook.run("import sys; 'torch' in sys.modules").text == "False"
    board = Board(notebook.page)
    board.wait_for("view.store.cursor > 20")
    board.look_at("streams")
    assert "think" in board.summary("streams")
    board.look_at("attention")
    assert not notebook.faults


def test_a_correction_typed_while_it_thinks_changes_the_answer(open_notebook: Open) -> None:
    cells = [cell for cell in lesson_cells(LESSON) if "replay(" not in cell]
    *before, thinking, answer = (
        next(i for i, cell in enumerate(cells) if what in cell) for what in CORRECTED
    )
    notebook = open_notebook(*cells)
    for number in before:
        notebook.run(number)
    notebook.start(thinking)
    notebook.scroll_to(before[-1])
    board = Board(notebook.page)
    board.wait_for(f"{THINKS}.some(one => one.name === 'think_slowly' && one.tokens > 9)")
    box = notebook.page.locator(".allm input[aria-label=Message]").last
    box.fill("Correction: the red box holds 20 coins.")
    box.press("Enter")
    notebook.finish(thinking)
    notebook.run(answer)
    said = notebook.run("print(box.text, answer.text)").text
    assert "20 coins" in said and "49" in said and "33" not in said
    assert not notebook.faults
