"""The first lesson opens with a recorded run, which moves before any model is loaded."""

from __future__ import annotations

from pathlib import Path

from asyncllm_nb.replaying import BUNDLED, SUFFIX
from browser.board import Board, lesson_cells
from browser.conftest import Open

LESSON = Path(__file__).parents[2] / "notebooks" / "01_thinker_and_writer.ipynb"

QUICKLY = 3000  # ms from the key press to the second step that is shown
LARGEST = 200_000  # bytes of the recording

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
