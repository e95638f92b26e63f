"""A dashboard says how its kernel is: computing without giving way, killed, restarted."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from browser.board import Board, engine_cell
from browser.conftest import notebooks
from browser.harness import Lab, Notebook

SECONDS = 5
"""From the moment when the host knows that a kernel is gone until the dashboard says so, at most."""

WATCH_KERNEL = """() => {
  window.gone = null;
  window.harness.kernel.statusChanged.connect((_, status) => {
    if (["restarting", "autorestarting", "dead", "terminating"].includes(status))
      window.gone ??= performance.now();
  });
  const status = document.querySelector(".allm-status");
  window.said = null;
  new MutationObserver(() => {
    if (status.textContent.startsWith("disconnected")) window.said ??= performance.now();
  }).observe(status, {childList: true, subtree: true, characterData: true});
}"""


@pytest.fixture
def notebook(browser: Browser, lab: Lab, models: Path) -> Iterator[Notebook]:
    with notebooks(browser, lab) as open_notebook:
        notebook = open_notebook(engine_cell(models / "llama"))
        notebook.run(0)
        notebook.run("llm.dashboard()")
        Board(notebook.page).wait_for("view.link.status === 'live'")
        yield notebook


def kill(notebook: Notebook) -> None:
    pid = int(notebook.run("import os; print(os.getpid())").text)
    os.kill(pid, signal.SIGKILL)


def restart(notebook: Notebook) -> None:
    notebook.page.evaluate("async () => { await window.harness.kernel.restart(); }")


@pytest.mark.parametrize("end", [kill, restart])
def test_disconnected(notebook: Notebook, end: Callable[[Notebook], None]) -> None:
    notebook.page.evaluate(WATCH_KERNEL)
    end(notebook)
    notebook.page.wait_for_function("() => window.said !== null")
    gone, said = notebook.page.evaluate("() => [window.gone, window.said]")
    assert said - gone < 1000 * SECONDS
    board = Board(notebook.page)
    board.look_at("controls")
    for command in ("run", "pause", "step", "say"):
        assert board.panel("controls").locator(f'[data-command="{command}"]').is_disabled()
    assert board.panel("blocks").locator("[data-block]").count() == 2  # the last picture stays


def test_busy(notebook: Notebook, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    cell = notebook.start(f"open({str(pipe)!r}).read()")  # until something is written there
    board = Board(notebook.page)
    board.look_at("ledger")
    board.wait_for("view.status.textContent.startsWith('busy')")
    pipe.write_text("go on")
    notebook.finish(cell)
    board.wait_for("view.link.status === 'live'")
