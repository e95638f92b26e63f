"""What a notebook shows of a run when its kernel is gone: reopened, exported, and while one types.

The pictures are judged by their pixels, the tables by the counts that the engine had at the end.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from browser.board import COLOURS, Board, engine_cell, engine_truth
from browser.conftest import notebooks
from browser.harness import Lab, Notebook

SHOWN = 1
"""The cell that shows the dashboard."""

RERUNS, HEAP_LIMIT = 50, 20e6
"""Times that the cell runs again, and bytes by which the page's heap may grow meanwhile."""

FOLDS = "details:has(> summary:text('Last picture of'))"

WHOLE = "image => image.decode().then(() => [image.naturalWidth, image.naturalHeight])"

PIXELS = """(image, colour) => {
  const canvas = new OffscreenCanvas(image.naturalWidth, image.naturalHeight);
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
  const wanted = [1, 3, 5].map(at => parseInt(colour.slice(at, at + 2), 16));
  let found = 0;
  for (let i = 0; i < data.length; i += 4)
    found += data[i + 3] === 255 && wanted.every((value, k) => data[i + k] === value);
  return found;
}"""


@dataclass(frozen=True)
class Saved:
    """A notebook's file after a run, and the engine's snapshot at the end of it."""

    path: Path
    snapshot: dict[str, Any]


@pytest.fixture(scope="module")
def saved(browser: Browser, lab: Lab, models: Path) -> Saved:
    """A run under a dashboard, saved the way a person saves. Its kernel and its page are gone."""
    with notebooks(browser, lab) as open_notebook:
        notebook = open_notebook(
            engine_cell(models / "llama"),
            "llm.dashboard()",
            "await talk(17); await talk(5); await llm.drain()",
        )
        for index in range(3):
            notebook.run(index)
        snapshot = engine_truth(notebook)["snapshot"]
        notebook.wait_for_text(SHOWN, f"step {snapshot['step']} ·")
        notebook.command("docmanager:save")
        assert not notebook.faults
        return Saved(lab.root / notebook.name, snapshot)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The JupyterLab of somebody who did not run the notebook, and so does not trust it."""
    with Lab(tmp_path_factory.mktemp("stranger")) as running:
        yield running


@contextmanager
def reopened(browser: Browser, lab: Lab, name: str) -> Iterator[Notebook]:
    """A notebook of `lab` in a new page with a new kernel, none of its cells run."""
    with browser.new_context() as context:
        notebook = Notebook.open(context.new_page(), lab, name)
        notebook.scroll_to(SHOWN)
        try:
            yield notebook
        finally:
            notebook.shut_down()


def assert_shows_the_last_picture(page: Page, snapshot: dict[str, Any]) -> None:
    """One closed fold, with an image that is painted in the blocks' colours, and their last counts."""
    fold = page.locator(FOLDS)
    fold.locator("img").wait_for(state="attached")
    assert fold.count() == 1
    assert f"step {snapshot['step']} ·" in fold.locator("summary").inner_text()
    image = fold.locator("img")
    assert not image.is_visible()
    fold.locator("summary").click()
    image.wait_for(state="visible")
    assert (image.get_attribute("src") or "").startswith("data:image/png;base64,")
    assert min(image.evaluate(WHOLE)) > 0
    for block in snapshot["blocks"]:
        assert image.evaluate(PIXELS, COLOURS[block["id"] % len(COLOURS)]) > 50, block["name"]
    script = "table => [...table.rows].map(row => [...row.cells].map(cell => cell.innerText.trim()))"
    header, *rows = fold.locator("table").first.evaluate(script)
    assert header[:2] == ["block", "tokens"]
    counts = {row[0].split()[-1]: int(row[1]) for row in rows}
    assert counts == {block["name"]: block["tokens"] for block in snapshot["blocks"]}


def is_trusted(notebook: Notebook) -> bool:
    script = "index => window.harness.panel.content.model.cells.get(index).trusted"
    return bool(notebook.page.evaluate(script, SHOWN))


def test_the_file_holds_no_widget_state(saved: Saved) -> None:
    """What the other tests see comes from the output alone: a widget beside HTML, not in one bundle."""
    document = json.loads(saved.path.read_text(encoding="utf-8"))
    assert "widgets" not in document["metadata"]
    bundles = [set(output["data"]) for output in document["cells"][SHOWN]["outputs"]]
    assert len(bundles) == 2
    assert "application/vnd.jupyter.widget-view+json" in bundles[0]
    assert bundles[1] == {"text/html", "text/plain"}


def test_reopened_by_who_ran_it(browser: Browser, lab: Lab, saved: Saved) -> None:
    with reopened(browser, lab, saved.path.name) as notebook:
        assert is_trusted(notebook)
        assert_shows_the_last_picture(notebook.page, saved.snapshot)


def test_reopened_by_somebody_else(browser: Browser, stranger: Lab, saved: Saved) -> None:
    """JupyterLab sanitizes the HTML of a notebook that it does not trust."""
    (stranger.root / "theirs.ipynb").write_bytes(saved.path.read_bytes())
    with reopened(browser, stranger, "theirs.ipynb") as notebook:
        assert not is_trusted(notebook)
        assert_shows_the_last_picture(notebook.page, saved.snapshot)


def test_exported_by_nbconvert(browser: Browser, saved: Saved, tmp_path: Path) -> None:
    """Opened from disk with no network."""
    command = [sys.executable, "-m", "nbconvert", "--to", "html", "--output-dir", str(tmp_path)]
    subprocess.run([*command, str(saved.path)], check=True, capture_output=True)
    with browser.new_context(offline=True) as context:
        page = context.new_page()
        page.goto((tmp_path / saved.path.with_suffix(".html").name).as_uri())
        assert_shows_the_last_picture(page, saved.snapshot)


ONLY_PAUSES = "import asyncllm_nb.static_form; asyncllm_nb.static_form.INTERVAL = 3600"
"""Within a cell, only a pause or an end updates a static form that is shown after this."""


@pytest.fixture(scope="module")
def notebook(browser: Browser, lab: Lab, models: Path) -> Iterator[Notebook]:
    """A notebook with a dashboard of an engine that has run a little."""
    with notebooks(browser, lab) as open_notebook:
        notebook = open_notebook(engine_cell(models / "llama"), "llm.dashboard()")
        for cell in (0, ONLY_PAUSES, SHOWN, "await talk(5)"):
            notebook.run(cell)
        yield notebook
        assert not notebook.faults


def test_running_the_cell_again_does_not_grow_the_heap(notebook: Notebook) -> None:
    notebook.run(SHOWN)
    before = heap(notebook.page)
    for _ in range(RERUNS):
        notebook.run(SHOWN)
    assert heap(notebook.page) - before < HEAP_LIMIT
    assert notebook.page.locator(FOLDS).count() == 1


def heap(page: Page) -> float:
    """Bytes that a page's scripts hold on to: objects, and the numbers in their buffers."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    usage = session.send("Runtime.getHeapUsage")
    session.detach()
    return float(usage["usedSize"] + usage["backingStorageSize"])


PAUSE_ONCE_TYPED = """
async def typed(text):
    while llm.dashboard().choices.get("controls.text") != text: await asyncio.sleep(0.01)

await typed("half a mess")
llm.pause()
await typed("half a message")
llm.resume()
"""


def test_typing_goes_on_over_an_update(notebook: Notebook) -> None:
    """Text, caret and focus are those of before, and the next key reaches the same box."""
    board = Board(notebook.page)
    board.look_at("controls")
    box = board.panel("controls").get_by_label("Message", exact=True)
    pausing = notebook.start(PAUSE_ONCE_TYPED)
    box.click()
    box.press_sequentially("half a mess")
    update = notebook.page.locator(FOLDS).get_by_text("paused")
    update.first.wait_for(state="attached")
    assert not notebook.is_done(pausing)
    assert box.input_value() == "half a mess"
    assert box.evaluate("box => box === document.activeElement && box.selectionStart === 11")
    notebook.page.keyboard.type("age")
    assert box.input_value() == "half a message"
    assert not notebook.finish(pausing).error
    box.fill("")
