"""A view tells the truth whatever happens to it: reloaded, doubled, scrolled away, pinned, run again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from browser.board import BOARDS, Board, engine_cell, engine_truth
from browser.conftest import notebooks
from browser.harness import Lab, Notebook

RERUNS = 50

CLOSE_OTHERS = """() => {
  for (const one of [...window.jupyterapp.shell.widgets("main")])
    if (one !== window.harness.panel) one.close();
}"""


@pytest.fixture(scope="module")
def notebook(browser: Browser, lab: Lab, models: Path) -> Iterator[Notebook]:
    with notebooks(browser, lab) as open_notebook:
        notebook = open_notebook(engine_cell(models / "llama"), "llm.dashboard()")
        notebook.run(0)
        notebook.run(1)
        yield notebook
        assert not notebook.faults


def run_some(notebook: Notebook) -> None:
    notebook.run("await talk(7); await llm.drain()")


def assert_shows_the_truth(notebook: Notebook, number: int = 0) -> None:
    """Every view that is looked at gets to the engine's state."""
    truth = engine_truth(notebook)
    board = Board(notebook.page, number)
    board.look_at("blocks")
    board.wait_for_records(truth["next"])
    assert board.state() == truth["state"]
    for block in truth["snapshot"]["blocks"]:
        words = f"{block['tokens']} tokens · v{block['version']}"
        assert words in board.panel("blocks").locator(f'[data-block="{block["id"]}"]').inner_text()


def test_reload(notebook: Notebook) -> None:
    run_some(notebook)
    board = Board(notebook.page)
    board.look_at("controls")
    board.panel("controls").get_by_label("Message", exact=True).fill("half a mess")
    board.table("blocks")
    notebook.save()
    wait_for_choices(notebook, "controls.text", "half a mess")
    notebook.reload()
    notebook.scroll_to(1)
    run_some(notebook)
    assert_shows_the_truth(notebook)
    board = Board(notebook.page)  # what was typed and chosen came back
    assert board.panel("controls").get_by_label("Message", exact=True).input_value() == "half a mess"
    assert board.panel("blocks").locator(".allm-table").is_visible()
    board.panel("controls").get_by_label("Message", exact=True).fill("")


def wait_for_choices(notebook: Notebook, key: str, value: object) -> None:
    """Wait until the kernel has a choice that was made in a view."""
    code = f"llm.dashboard().choices.get({key!r}) == {value!r}"
    index = notebook.start(f"while not {code}: await asyncio.sleep(0.01)")
    notebook.finish(index)


def test_second_view(notebook: Notebook) -> None:
    notebook.select(1)
    notebook.command("notebook:create-output-view")
    notebook.page.wait_for_function(f"() => document.querySelectorAll('{BOARDS}').length === 2")
    run_some(notebook)
    for number in (0, 1):
        assert_shows_the_truth(notebook, number)
    notebook.page.evaluate(CLOSE_OTHERS)
    notebook.page.wait_for_function(f"() => document.querySelectorAll('{BOARDS}').length === 1")


def test_scroll_away_and_back(notebook: Notebook) -> None:
    board = Board(notebook.page)
    board.look_at("blocks")
    for _ in range(40):
        notebook.add("# a cell to make the notebook long")
    notebook.scroll_to(notebook.add("# the end"))
    board.wait_for("view.visiblePanels().length === 0")
    run_some(notebook)
    assert_shows_the_truth(notebook)
    assert board.pixels("blocks", "#0072B2") + board.pixels("blocks", "#D55E00") > 0


def test_theme(notebook: Notebook) -> None:
    board = Board(notebook.page)
    board.look_at("timeline")
    grounds = {}
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        notebook.set_theme(theme)
        board.wait_until_painted()
        style = "({ground: getComputedStyle(root).backgroundColor, text: getComputedStyle(root).color})"
        grounds[theme] = board.ask(style)
        ground = board.ask("view.places.find(p => p.panel.name === 'timeline').ctx.theme().ground")
        assert board.pixels("timeline", ground) > 1000
    dark, light = grounds["JupyterLab Dark"], grounds["JupyterLab Light"]
    assert brightness(dark["ground"]) < 80 < 175 < brightness(dark["text"])
    assert brightness(light["text"]) < 80 < 175 < brightness(light["ground"])


COUNT = """
import gc, comm
from ipywidgets.widgets.widget import _instances
gc.collect()
print(len(_instances), len(comm.get_comm_manager().comms), len(llm._engine.observers))
"""
"""Widgets, comms, and listeners of the engine."""


def brightness(colour: str) -> float:
    """Mean of red, green and blue of "rgb(1, 2, 3)"."""
    parts = colour.removeprefix("rgba(").removeprefix("rgb(").rstrip(")").split(",")[:3]
    return sum(map(float, parts)) / 3


def test_running_the_cell_again_adds_nothing(notebook: Notebook) -> None:
    notebook.run(1)
    before = notebook.run(COUNT).text
    listeners = "[view.store.listeners.size, view.link.listeners.size, view.link._shown.size]"
    listening = Board(notebook.page).ask(listeners)
    for _ in range(RERUNS):
        notebook.run(1)
    assert notebook.run(COUNT).text == before
    assert Board(notebook.page).ask(listeners) == listening
    views = f"() => document.querySelectorAll('{BOARDS}').length"
    assert notebook.page.evaluate(views) == 1
    assert_shows_the_truth(notebook)
