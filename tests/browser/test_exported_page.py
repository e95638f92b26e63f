"""Saved runs in a browser: a page plays from disk with no network, a replay in a notebook with no model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route

from asyncllm_nb import AsyncLLM
from asyncllm_nb.engine.reducer import reduce
from asyncllm_nb.engine.trace import Trace
from browser.board import Board
from browser.conftest import Open

PAINTED = """canvas => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return data.filter((value, index) => index % 4 === 3 && value).length;
}"""

QUICKLY = 3000  # ms until a page has to move


@pytest.fixture(scope="module")
def exported(models: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trace]:
    """The page of a short run of two streams under readings, and its recording. The last step is marked."""
    folder = tmp_path_factory.mktemp("page")

    async def run() -> Path:
        async with AsyncLLM(models / "qwen3_5", cache_tokens=2048, max_blocks=16) as llm:
            rules, notes, answer = await llm.create_blocks("rules", "notes", "answer")
            await llm.forward("Be brief.", [rules])
            await llm.forward("The hive is full.", [rules, notes])
            llm.instruments.watch(shares=True, norms=True, tokens=True, states=[0])
            say: dict[str, Any] = {"temperature": 1.0, "max_tokens": 20, "forbid": [256, 257, 258]}
            await asyncio.gather(
                llm.generate(" Bees?", [rules, notes, answer], name="think", seed=1, **say)._whole_text(),
                llm.generate(" Well?", [notes, rules], name="ask", seed=2, **say)._whole_text(),
            )
            await llm.drain()
            llm.instruments.mark(llm.instruments.steps[-1])
            llm.trace.save(folder / "run.json")
            return llm.trace.to_html(folder / "run.html")

    with ThreadPoolExecutor(1) as thread:  # in this thread Playwright's own loop runs
        page = thread.submit(lambda: asyncio.run(run())).result()
    return page, Trace.load(folder / "run.json")


@pytest.fixture
def page(browser: Browser, exported: tuple[Path, Trace]) -> Iterator[Page]:
    """The page, opened from disk. Whatever it tries to load fails the test; so does any error in it."""
    context = browser.new_context(viewport={"width": 1000, "height": 1200}, offline=True)
    faults: list[str] = []

    def refuse(route: Route) -> None:
        if not route.request.url.startswith("file:"):
            faults.append(route.request.url)
        route.continue_()

    context.route("**/*", refuse)
    page = context.new_page()
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
    page.goto(exported[0].as_uri())
    yield page
    context.close()
    assert not faults


def stopped_at_the_end(page: Page) -> Board:
    """The page with its playing stopped, at the last step, everything painted."""
    board = Board(page)
    board.wait_for("view.store.steps.length > 0")
    page.get_by_label("Play the recording").click()
    board.ask("view.store.show(view.store.steps.at(-1).n)")
    painted = int(board.ask("(view.redraw(), view.painted)"))
    board.wait_for("view.painted > arg", painted)
    return board


def test_a_page_moves_by_itself_to_its_end(page: Page, exported: tuple[Path, Trace]) -> None:
    board = Board(page)
    page.set_default_timeout(QUICKLY)
    board.wait_for("view.store.cursor > 2")
    page.set_default_timeout(30_000)
    board.wait_for("view.store.cursor === arg", len(exported[1]))
    assert "replay" in board.status


def test_a_page_shows_what_was_recorded(page: Page, exported: tuple[Path, Trace]) -> None:
    trace = exported[1]
    board = stopped_at_the_end(page)
    for number in (3, 9, len(trace)):
        board.ask("view.store.show(arg)", number)
        found = next(i for i, r in enumerate(trace.plain(0)) if r["t"] == "step" and r["n"] == number)
        state = board.state()
        assert state["step"] == number
        assert state["blocks"] == _blocks_after(trace, found + 1)


def _blocks_after(trace: Trace, count: int) -> dict[str, Any]:
    blocks = json.loads(json.dumps(reduce(trace.plain(0, count))["blocks"]))
    assert isinstance(blocks, dict)
    return blocks


def test_attention_in_a_page(page: Page, exported: tuple[Path, Trace]) -> None:
    """Shares as recorded; a click on a cell chooses its layer and head; tokens of the marked step."""
    trace = exported[1]
    board = stopped_at_the_end(page)
    record = [r for r in trace.plain(0) if r["t"] == "shares"][-1]
    shares = {r["r"]: r for r in record["rows"]}
    summary = board.summary("attention")
    thinker = next(r for r in trace.state()["requests"].values() if r["name"] == "think")
    assert "think" in summary or "ask" in summary
    page.get_by_label("coroutine").first.select_option(str(thinker["r"]))
    board.wait_for("view.choices['attention.request'] === arg", str(thinker["r"]))
    board.ask("view._paint()")
    for name, share in zip(("rules", "notes", "answer"), shares[thinker["r"]]["mean"], strict=True):
        shown = float(board.summary("attention").split(f"{name} ")[1].split(" ")[0])
        assert shown == pytest.approx(100 * share, abs=0.6)
    assert all(board.pixels("attention", colour) > 20 for colour in ("#D55E00", "#00875F", "#A3539B"))
    panel = board.panel("attention")
    panel.locator("canvas").nth(1).click(position={"x": 3, "y": 18})
    board.wait_for("view.choices['attention.layer'] === '0' && view.choices['attention.head'] === '0'")
    board.ask("view._paint()")
    assert "layer 3, head 0" in board.summary("attention")
    panel.get_by_role("button", name="Tokens").click()
    panel.locator(".allm-tokens").wait_for()
    text = panel.locator(".allm-tokens").inner_text()
    assert "notes The hive is full." in text and f"at step {record['n']}" in text
    board.ask("view.store.show(3)")
    board.ask("view._paint()")
    assert "not recorded at this step" in panel.locator(".allm-tokens").inner_text()


def test_states_in_a_page(page: Page, exported: tuple[Path, Trace]) -> None:
    """The marked step has them; others say that they do not."""
    board = stopped_at_the_end(page)
    board.ask("view._paint()")
    summary = board.summary("states")
    assert f"layer 0, state at step {len(exported[1])}" in summary
    assert "lets" in summary
    canvas = board.panel("states").locator("canvas").first
    painted = canvas.evaluate(PAINTED)
    assert painted > 5000
    rows = board.table("states")
    assert [row[0] for row in rows][:2] in (["rules", "notes"], ["notes", "rules"])
    board.ask("view.store.show(5)")
    board.ask("view._paint()")
    assert "not recorded at this step (it is at" in board.summary("states")


def test_a_replay_plays_in_a_notebook(open_notebook: Open, exported: tuple[Path, Trace]) -> None:
    """In the widgets that showed it live, without a model; it moves by itself and leaves a static form."""
    trace = exported[1]
    file = exported[0].with_suffix(".json")
    notebook = open_notebook(f"import asyncllm_nb\nasyncllm_nb.replay({str(file)!r})")
    outputs = notebook.run(0)
    board = Board(notebook.page)
    board.wait_for("view.store.cursor > 2")
    assert any("A recorded run of" in html for html in outputs.data("text/html"))
    board.wait_for("view.store.cursor === arg", len(trace))
    last = next(i for i, r in enumerate(trace.plain(0)) if r["t"] == "step" and r["n"] == len(trace))
    assert board.state()["blocks"] == _blocks_after(trace, last + 1)
    assert board.panel("controls").count() == 0
    board.look_at("states")
    board.ask("view.store.show(5)")
    board.wait_until_painted()
    assert "not recorded at this step (it is at" in board.summary("states")
    assert notebook.run("import sys; print('torch' in sys.modules)").text.strip() == "False"
