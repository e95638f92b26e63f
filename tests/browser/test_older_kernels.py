"""What differs with older ipykernels: the picture follows as ever, and the panel says when controls act."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from browser.board import Board, engine_cell
from browser.conftest import notebooks, overlays
from browser.harness import SUBSHELLS, Lab, Notebook

AWAITING = """
print("awaiting")
for _ in range(TURNS):
    await llm.clear(notes)
    await talk(10)
    await asyncio.sleep(0.1)
    if llm._engine.step_interval: break
"""
"""A cell that awaits until somebody chooses a speed, or for about TURNS / 10 seconds."""

DEAF = [("ipykernel-6.31.0", "perCommTarget"), ("ipykernel-7.3.0", "disabled")]
"""Kernel and setting with which messages wait until the running cell has ended."""

HEARING = [("ipykernel-7.3.0", "perCommTarget")]


@pytest.fixture
def notebook(request: pytest.FixtureRequest, browser: Browser, lab: Lab, models: Path) -> Iterator[Notebook]:
    kernel, subshells = request.param
    assert kernel in overlays(), "run `make overlays` first"
    with notebooks(browser, lab) as open_notebook:
        with lab.settings(SUBSHELLS, commsOverSubshells=subshells):
            notebook = open_notebook(engine_cell(models / "llama"), kernel=kernel)
        notebook.run(0)
        notebook.run('llm.dashboard("controls", "blocks", "timeline")')
        yield notebook
        assert not notebook.faults


def start_awaiting(notebook: Notebook, turns: int) -> tuple[int, Board]:
    cell = notebook.start(AWAITING.replace("TURNS", str(turns)))
    notebook.wait_for_text(cell, "awaiting")
    board = Board(notebook.page)
    board.look_at("controls")
    return cell, board


def choose_speed(board: Board, interval: float) -> None:
    board.panel("controls").get_by_label("Speed").select_option(f"{interval:g}")


@pytest.mark.parametrize("notebook", DEAF, indirect=True)
def test_controls_wait_for_the_cell_and_the_panel_says_so(notebook: Notebook) -> None:
    cell, board = start_awaiting(notebook, turns=80)
    choose_speed(board, 0.1)
    known = board.step
    board.wait_for("view.store.live.step >= arg", known + 100)  # it follows, though nobody can answer
    note = board.panel("controls").locator("[data-note]")
    note.wait_for()
    assert "when the" in note.inner_text() and "cell has ended" in note.inner_text()
    known = board.step
    board.wait_for("view.store.live.step >= arg", known + 100)
    assert not notebook.is_done(cell)
    assert board.ask("view.link.controls.map(one => one.status)") == ["queued"]
    notebook.finish(cell)
    board.wait_until_answered()
    board.wait_for("view.store.live.interval === 0.1")
    press_between_cells(board)


@pytest.mark.parametrize("notebook", HEARING, indirect=True)
def test_controls_act_at_once(notebook: Notebook) -> None:
    cell, board = start_awaiting(notebook, turns=10_000)
    choose_speed(board, 0.1)
    notebook.finish(cell)
    board.wait_for("view.store.live.interval === 0.1")
    press_between_cells(board)


def press_between_cells(board: Board) -> None:
    """Without a running cell, controls act with every kernel."""
    for command, paused in [("pause", True), ("run", False)] * 3:
        board.press(command)
        board.wait_for("view.store.live.paused === arg", paused)
