"""An agent's panel in a page: it follows the agent, and its buttons act, also while a cell waits.

What the buttons did is read from the kernel: what coroutines returned, which states the engine recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator

from browser.board import Board, engine_cell, engine_truth
from browser.conftest import notebooks
from browser.harness import Lab, Notebook

AGENT = """
from asyncllm_nb import Agent, ToolDenied
agent = Agent(llm, "solver")

@agent.tool(approve=True)
def send(text):
    return text.upper()

async def may_send(text):
    try:
        return await send(text)
    except ToolDenied as denied:
        return str(denied)
"""

THINK = """
@agent.coroutine
async def think():
    try:
        await agent.event("VERSION").wait()
    finally:
        await agent.event("clean").wait()
    return "VERSION"
"""

ASK = """
@agent.coroutine
async def ask():
    return [await may_send("one"), await may_send("two")]
"""

FAIL = """
@agent.coroutine
async def fail():
    raise LookupError("no such thing")
"""


@pytest.fixture
def notebook(browser: Browser, lab: Lab, models: Path) -> Iterator[Notebook]:
    with notebooks(browser, lab) as open_notebook:
        notebook = open_notebook(engine_cell(models / "llama"), AGENT)
        notebook.run(0)
        notebook.run(1)
        yield notebook
        assert not notebook.faults


def shown(notebook: Notebook) -> Board:
    """The agent's own panel, as a cell's last expression."""
    notebook.run("agent")
    board = Board(notebook.page)
    board.look_at("agents")
    return board


def row(board: Board, name: str) -> Locator:
    """A row of the panel by its name, as a screen reader has it."""
    return board.panel("agents").get_by_role("group", name=name, exact=True)


def wait_for_words(board: Board, name: str, words: str) -> None:
    """Wait until a row says `words`."""
    row(board, name).filter(has_text=words).wait_for()


def press(board: Board, words: str) -> None:
    board.panel("agents").get_by_role("button", name=words, exact=True).click()


def test_the_panel_follows_a_coroutine_that_is_redefined(notebook: Notebook) -> None:
    board = shown(notebook)
    notebook.run(THINK.replace("VERSION", "first"))
    wait_for_words(board, "think", "· not started v1")
    notebook.run("agent.start()\npass")
    wait_for_words(board, "think", "◷ waiting at")
    notebook.run(THINK.replace("VERSION", "second"))
    wait_for_words(board, "think", "◐ being replaced v2")
    assert board.ask("view.store.live.agents['solver.think'].k") == 1  # the old one, in its finally
    notebook.run("agent.event('clean').set()")
    wait_for_words(board, "think", "◷ waiting at")
    assert "v2" in row(board, "think").inner_text()
    assert notebook.run("agent.event('second').set(); print(await agent)").text == "{'think': 'second'}\n"
    wait_for_words(board, "think", "✓ done v2")
    assert [r[1:5] for r in board.table("agents")] == [
        ["agent", "solver", "✓ done", ""],
        ["coroutine", "think", "✓ done", "v2"],
    ]
    board.wait_for_records(engine_truth(notebook)["next"])
    states = [(record["state"], record["version"]) for record in board.records("agent")]
    assert states == [
        ("new", 1),
        ("running", 1),
        ("replacing", 2),
        ("replacing", 2),
        ("running", 2),
        ("done", 2),
    ]


def test_one_call_is_approved_and_one_denied_while_a_cell_waits(notebook: Notebook) -> None:
    board = shown(notebook)
    notebook.run(ASK)
    cell = notebook.start("print(await agent.start())")
    wait_for_words(board, "send(text='one')", "? waits for approval by ask")
    press(board, "Approve send(text='one')")
    wait_for_words(board, "send(text='one')", "✓ done")
    reason = row(board, "send(text='two')").get_by_label("Reason to deny")
    reason.press_sequentially("not dd now")  # two d delete a cell, if the notebook gets them
    wait_for_words(board, "send(text='two')", "? waits for approval")
    assert not notebook.is_done(cell)
    press(board, "Deny send(text='two')")
    wait_for_words(board, "send(text='two')", "⊘ denied: not dd now")
    assert notebook.finish(cell).text == "{'ask': ['ONE', \"call 2, send(text='two'): not dd now\"]}\n"
    assert row(board, "send(text='two')").get_by_role("button").count() == 0
    assert board.answers() == [
        "approve done call 1, send(text='one') is approved",
        "deny done call 2, send(text='two') is denied",
    ]


def test_calls_are_decided_and_coroutines_told_by_keys_between_cells(notebook: Notebook) -> None:
    board = shown(notebook)
    notebook.run(ASK + THINK.replace("VERSION", "never") + FAIL)
    wait_for_words(board, "fail", "· not started")
    panel = board.panel("agents")
    start = panel.get_by_role("button", name="Start ask", exact=True)
    start.focus()
    start.press("Enter")
    wait_for_words(board, "send(text='one')", "? waits for approval")
    others = ("Start think", "Restart think", "Start fail", "Restart fail")
    for words in ("Stop ask", "Restart ask", *others, "Approve send(text='one')"):
        panel.page.keyboard.press("Tab")
        focused = panel.page.evaluate("document.activeElement.getAttribute('aria-label')")
        assert focused == words
    panel.page.keyboard.press("Space")
    wait_for_words(board, "send(text='one')", "✓ done")
    row(board, "send(text='two')").get_by_label("Reason to deny").press("Enter")
    wait_for_words(board, "send(text='two')", "⊘ denied by ask")
    press(board, "Restart fail")
    wait_for_words(board, "fail", "✗ failed")
    assert row(board, "fail").locator(".allm-error").inner_text().startswith("LookupError: no such thing\n")
    assert "fail failed" in notebook.run("print(agent)").text


def test_a_button_shows_as_queued_until_the_kernel_gives_way(notebook: Notebook, tmp_path: Path) -> None:
    board = shown(notebook)
    notebook.run(THINK.replace("VERSION", "never"))
    over = tmp_path / "over"
    cell = notebook.start(f"""
import pathlib, time
print("computes", flush=True)
while not pathlib.Path({str(over)!r}).exists(): time.sleep(0.01)""")
    notebook.wait_for_text(cell, "computes")
    press(board, "Start think")
    wait_for_words(board, "think", "· not started v1 StartStopRestartStart: queued")
    assert board.panel("agents").get_by_role("button", name="Start think", exact=True).is_disabled()
    board.panel("agents").get_by_text("Still queued.").wait_for()
    over.touch()
    wait_for_words(board, "think", "◷ waiting at")
    assert "queued" not in board.panel("agents").inner_text()
    notebook.run("agent.event('clean').set()")
    press(board, "Stop think")
    wait_for_words(board, "think", "⊘ stopped")


def test_waiting_denied_and_timed_out_calls_are_on_the_timeline(notebook: Notebook) -> None:
    notebook.run("llm.dashboard('timeline', 'agents')")
    board = Board(notebook.page)
    board.look_at("timeline")
    notebook.run("""
@agent.tool(gate="thought", timeout=0.05)
def act(): ...

@agent.coroutine
async def hasty():
    await talk(3)
    try:
        await act()
    except TimeoutError:
        pass
    return await may_send("late")
""")
    cell = notebook.start("await agent.start(); await talk(5)")
    wait_for_words(board, "send(text='late')", "? waits for approval")
    assert "tool calls" in board.ask("[...view.places[0].ctx.local.lanes.keys()]")
    assert "send(text='late') ? waits for approval" in board.summary("timeline")
    press(board, "Deny send(text='late')")
    notebook.finish(cell)
    board.wait_for_records(engine_truth(notebook)["next"])
    marked = [r for r in board.table("timeline") if "act() ✗ timed out" in r[4]]
    assert len(marked) == 1 and "send(text='late') ⊘ denied" in marked[0][4]
    canvas = board.panel("timeline").locator("canvas")
    canvas.press("End")  # chooses a step, the last one
    canvas.press("Home")
    for _ in range(int(marked[0][0]) - 1):
        canvas.press("ArrowRight")
    detail = board.panel("timeline").locator(".allm-detail")
    detail.filter(has_text=f"Step {marked[0][0]} ").wait_for()
    assert "Then: act() ✗ timed out; send(text='late') ⊘ denied" in detail.inner_text()
    assert board.panel("timeline").get_by_text("✗ timed out", exact=False).first.is_visible()


def test_the_saved_notebook_has_the_static_form(notebook: Notebook) -> None:
    notebook.run(FAIL)
    notebook.run("agent.start()")
    index = 3
    notebook.wait_for_text(index, "fail failed: no such thing")
    displays = [o["data"] for o in notebook.outputs(index).raw if "data" in o]
    assert [("application/vnd.jupyter.widget-view+json" in d, "text/html" in d) for d in displays] == [
        (True, False),
        (False, True),
    ]
    html = notebook.outputs(index).data("text/html")[0]
    assert html.startswith("<details><summary>Last picture of agent solver, ended; fail failed")
