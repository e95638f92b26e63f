"""A pinned dashboard stays at its edge of the window while the notebook scrolls."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser

from browser.board import Board, engine_cell
from browser.conftest import notebooks
from browser.harness import SIZE, Lab, Notebook

LONG = "# a cell to make the notebook long\n" * 9


@pytest.fixture(scope="module", params=["lab", "notebook"])
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """JupyterLab, and Notebook 7."""
    if request.param == "lab":
        running: Lab = request.getfixturevalue("lab")
        return running
    server = Lab(tmp_path_factory.mktemp("notebook"), app="notebook").__enter__()
    request.addfinalizer(server.stop)
    return server


def test_pin(browser: Browser, host: Lab, models: Path) -> None:
    with notebooks(browser, host) as open_notebook:
        cells = [engine_cell(models / "llama"), 'llm.dashboard(pin="right")', *[LONG] * 12]
        notebook = open_notebook(*cells)
        notebook.run(0)
        notebook.run(1)
        board = Board(notebook.page)
        board.wait_for("view.painted > 0")
        for index in (0, len(cells) - 1):
            notebook.scroll_to(index)
            assert_at_the_edge(notebook, board, "right")
            assert_beside_the_cell(notebook, board, index)
        board.root.get_by_role("button", name="Pin bottom").click()
        assert_at_the_edge(notebook, board, "bottom")
        notebook.run("await talk(5)")  # it is on screen, so it follows
        board.wait_for("view.store.live.step >= arg", int(notebook.run("llm.stats()['steps']").text))

        notebook.save()
        notebook.reload()
        board.wait_for("view.painted > 0 && view.root.dataset.pin === 'bottom'")
        assert_at_the_edge(notebook, board, "bottom")
        board.root.get_by_role("button", name="Pin bottom").click()
        board.wait_for("view.root.dataset.pin === ''")
        assert notebook.page.evaluate(PADDING) == ["", ""]
        assert not notebook.faults


PADDING = """() => {
  const { paddingRight, paddingBottom } = document.querySelector(".jp-WindowedPanel-viewport").style;
  return [paddingRight, paddingBottom];
}"""


def assert_beside_the_cell(notebook: Notebook, board: Board, index: int) -> None:
    """The dashboard hides nothing of a cell."""
    script = "index => window.harness.panel.content.widgets[index].node.getBoundingClientRect().right"
    right = notebook.page.evaluate(script, index)
    assert 300 < right <= board.root.evaluate("root => root.getBoundingClientRect().left")


def assert_at_the_edge(notebook: Notebook, board: Board, edge: str) -> None:
    """It touches the edge of the window, lies above everything else and is inside the window."""
    script = """(root, edge) => {
      const box = root.getBoundingClientRect();
      const middle = [box.left + box.width / 2, box.top + box.height / 2];
      const top = document.elementFromPoint(...middle);
      return [box.left, box.top, box.right, box.bottom, root.contains(top)];
    }"""
    left, top, right, bottom, on_top = board.root.evaluate(script, edge)
    assert left >= 0 and top >= 0 and right <= SIZE["width"] and bottom <= SIZE["height"]
    gap = SIZE["width"] - right if edge == "right" else SIZE["height"] - bottom
    assert gap < 60
    assert right - left > 300 and bottom - top > 100
    assert on_top
