"""Runs the first lesson in a real JupyterLab, takes its picture, and keeps its recording.

    .venv/bin/python docs/make_screenshot.py

writes docs/screenshot.png, a picture of the run half way, and asyncllm_nb/lesson-01.trace.json.gz, which the
lesson plays before anything is loaded. Needs Debian's Chromium. Knows the harness
of the browser tests.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from browser.board import Board, lesson_cells  # noqa: E402 (the tests are no package)
from browser.harness import Lab, Notebook, chromium  # noqa: E402

LESSON = ROOT / "notebooks" / "01_thinker_and_writer.ipynb"
PICTURE = ROOT / "docs" / "screenshot.png"
RECORDING = ROOT / "asyncllm_nb" / "lesson-01.trace.json.gz"

SIZE = {"width": 1600, "height": 1160}
PANELS = '"ledger", "controls", "streams", "views", "blocks", "timeline", "attention", pin="right"'

HALF_WAY = (
    "Object.values(view.store.live.requests).filter(one => one.name === 'write' && one.tokens > 4).length"
)
"""How many sentences the writer has begun in earnest."""
SLOWLY, FULLY = "10 steps/s", "full speed"
"""For the picture, which is taken while both coroutines write; the recording is of a run at full speed."""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, Lab(Path(folder)) as lab, chromium() as browser:
        page = browser.new_page(device_scale_factor=1)
        cells = [c for c in lesson_cells(LESSON) if "replay(" not in c]
        cells = [c.replace("llm.dashboard()", f"llm.dashboard({PANELS})") for c in cells]
        notebook = Notebook.open(page, lab, LESSON.name, *cells)
        page.set_viewport_size({"width": SIZE["width"], "height": SIZE["height"]})
        notebook.command("application:toggle-left-area")
        run_lesson(notebook, cells)


def run_lesson(notebook: Notebook, cells: list[str]) -> None:
    together = next(i for i, cell in enumerate(cells) if "gather(" in cell)
    for index in range(together):
        notebook.run(index)
    board = Board(notebook.page)
    board.wait_for("view.painted > 0")
    speed = board.panel("controls").get_by_label("Speed")
    speed.select_option(SLOWLY)
    notebook.start(together)
    notebook.scroll_to(together)
    board.wait_for(f"{HALF_WAY} >= 2")
    board.wait_until_painted()
    notebook.page.screenshot(path=PICTURE)
    speed.select_option(FULLY)
    notebook.finish(together)
    for index in range(together + 1):
        notebook.run(index)
    notebook.run(f"await llm.drain(); llm.trace.save({str(RECORDING)!r})")
    for path in (PICTURE, RECORDING):
        path.chmod(0o644)
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
