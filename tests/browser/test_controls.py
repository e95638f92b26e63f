"""Every control, pressed five times while a cell awaits, has five effects.

Effects are read from the records of the engine, never from the button. Delays are counted in steps: at
four steps a second, one that acts within a step and 60 ms comes at most two steps after the one that
the page knew.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from browser.board import Board
from browser.conftest import notebooks
from browser.harness import SUBSHELLS, Lab, Notebook

TIMES = 5

SETUP = """
import asyncio
import torch; torch.set_num_threads(1)
from asyncllm_nb import AsyncLLM

llm = AsyncLLM(MODEL, cache_tokens=16384)
prompt, inbox = await llm.create_blocks("prompt", "inbox")
await llm.forward(llm.chat_prompt("Hello?"), [prompt])

async def talk(notes):
    while True:
        await llm.clear(notes)
        view = [prompt, inbox, notes]
        await llm.generate("so", view, max_tokens=300, temperature=1.0, forbid=[256, 257, 258])

talks = [type(talk)(talk.__code__.replace(co_qualname=f"talk{n}"), globals()) for n in range(5)]
"""

AWAITING = """
notes = await llm.create_blocks(*(f"notes{n}" for n in range(5)))
tasks = [asyncio.create_task(talks[n](notes[n])) for n in range(5)]
print("awaiting")
try:
    await asyncio.wait(tasks)
finally:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    llm.resume()
    for block in notes:
        await llm.free_block(block)
    print("over")
"""


@pytest.fixture(scope="module", params=["perCommTarget", "disabled"])
def notebook(request: pytest.FixtureRequest, browser: Browser, lab: Lab, models: Path) -> Iterator[Notebook]:
    with notebooks(browser, lab) as open_notebook:
        with lab.settings(SUBSHELLS, commsOverSubshells=request.param):
            notebook = open_notebook()
        notebook.run(SETUP.replace("MODEL", repr(str(models / "llama"))))
        notebook.run('llm.dashboard("controls", "scrubber", "streams")')
        yield notebook
        assert not notebook.faults


@pytest.fixture
def cell(notebook: Notebook) -> Iterator[int]:
    """The index of a cell that awaits five coroutines until they are cancelled."""
    index = notebook.start(AWAITING)
    notebook.wait_for_text(index, "awaiting")
    board = Board(notebook.page)
    set_speed(board, 0.25)
    yield index
    if not notebook.is_done(index):
        notebook.command("notebook:interrupt-kernel")
    assert "over" in notebook.finish(index).text
    set_speed(board, 0)


def set_speed(board: Board, interval: float) -> None:
    """Choose a speed and wait until the engine has it. (What is off screen is told nothing.)"""
    board.look_at("controls")
    board.panel("controls").get_by_label("Speed").select_option(f"{interval:g}")
    board.wait_for("view.store.live.interval === arg", interval)


@pytest.fixture
def board(notebook: Notebook, cell: int) -> Board:
    return Board(notebook.page)


def test_pause_and_run(board: Board) -> None:
    pauses, resumes = len(board.records("pause")), len(board.records("resume"))
    for _ in range(TIMES):
        known = board.step
        board.press("pause")
        board.wait_for("view.store.live.paused")
        board.wait_until_answered()
        stopped = board.step
        assert stopped <= known + 2
        board.press("run")
        board.wait_for("!view.store.live.paused && view.store.live.step > arg", stopped)
    assert len(board.records("pause")) == pauses + TIMES
    assert len(board.records("resume")) == resumes + TIMES


def test_step(board: Board) -> None:
    board.press("pause")
    board.wait_for("view.store.live.paused")
    board.wait_until_answered()
    known = board.step
    for _ in range(TIMES):
        board.press("step")
    board.wait_until_answered()
    board.wait_for("view.store.live.step >= arg", known + TIMES)
    assert board.step == known + TIMES
    assert board.answers()[-TIMES:] == ["step done 1 step made"] * TIMES


def test_speed(board: Board) -> None:
    before = len(board.records("speed"))
    wanted = [0.1, 0, 1, 0.1, 0.25]
    for interval in wanted:
        set_speed(board, interval)
    assert [speed["interval"] for speed in board.records("speed")[before:]] == wanted
    known = board.step
    board.wait_for("view.store.live.step >= arg", known + 3)
    begun = [step["b"] for step in board.records("step") if step["n"] > known]
    assert all(later - earlier >= 0.249 for earlier, later in pairwise(begun))


def test_cancel(board: Board, notebook: Notebook, cell: int) -> None:
    known = board.step
    for number in (3, 0, 4, 1, 2):
        board.press("cancel", f"talk{number}")
        is_it = f"r.t === 'task' && r.name === 'talk{number}' && r.state === 'cancelled'"
        ended = f"view.store.records.some(r => {is_it})"
        board.wait_for(ended)
    assert board.step <= known + 2 * TIMES
    notebook.finish(cell)  # it waited for these five
    assert notebook.run("print(sum(task.cancelled() for task in tasks))").text == f"{TIMES}\n"


def test_say(board: Board, notebook: Notebook) -> None:
    messages = [f"{number}: <|im_end|> né?" for number in range(TIMES)]
    panel = board.panel("controls")
    panel.get_by_label("Block that gets the message").select_option(label="inbox")
    field = panel.get_by_label("Message", exact=True)
    inbox = str(board.ask("Object.values(view.store.live.blocks).find(b => b.name === 'inbox').id"))
    for number, message in enumerate(messages):
        field.fill(message)
        if number % 2:
            field.press("Enter")
        else:
            board.press("say")
    board.wait_until_answered()
    num_bytes = len("".join(messages).encode())  # a token each: no marker among them
    board.wait_for("view.store.live.blocks[arg[0]].n === arg[1]", [inbox, num_bytes])
    assert board.answers()[-TIMES:] == [
        f"say done {len(message.encode())} tokens in inbox" for message in messages
    ]
    texts = board.ask("view.store.live.blocks[arg].texts", inbox)
    assert "".join(texts) == "".join(messages)


def test_a_message_to_a_paused_engine_says_what_it_waits_for(board: Board) -> None:
    board.press("pause")
    board.wait_until_answered()
    panel = board.panel("controls")
    panel.get_by_label("Block that gets the message").select_option(label="inbox")
    field = panel.get_by_label("Message", exact=True)
    field.fill("so")
    field.press("Enter")
    panel.get_by_text("A message is written at the next step: press Run or Step.").wait_for()
    board.press("step")
    board.wait_until_answered()
    assert "say done 2 tokens in inbox" in board.answers()[-2:]
    panel.get_by_text("Still queued.").wait_for(state="hidden")
    board.press("run")
    board.wait_until_answered()


def test_mark(board: Board) -> None:
    before = len(board.records("mark"))
    mark = board.panel("scrubber").get_by_label("Mark this step")
    for number in range(before + 1, before + TIMES + 1):
        mark.click()
        board.wait_for("view.store.live.marks.length === arg", number)
        board.wait_for("view.store.live.step > view.store.live.marks.at(-1).n")
    marks = [record["n"] for record in board.records("mark")[before:]]
    assert len(set(marks)) == len(marks) == TIMES
