"""What agents read: lines of files and programs, values that change, and reading on after a cancellation."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from helpers import engine

from asyncllm_nb.agents import Output, Polled, Tail, evolving_context, listener, monitor
from asyncllm_nb.agents.feeds import LONGEST, Lines, items

SOON = 0.001
"""s between two looks."""


async def taken(feed: object, count: int) -> list[str]:
    """The next texts of a feed."""
    return [await anext(feed) for _ in range(count)]  # type: ignore[call-overload]  # any async iterator


async def all_of(feed: object) -> list[str]:
    return [text async for text in items(feed)]  # type: ignore[arg-type]  # of every kind


async def cancelled_reader(feed: object) -> None:
    """Somebody waits for the next text, and is cancelled."""
    reader = asyncio.ensure_future(anext(feed))  # type: ignore[call-overload]  # any async iterator
    for _ in range(5):
        await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader


# ---- lines ----------------------------------------------------------------------------------------


def test_lines_come_whole_from_pieces_of_any_size() -> None:
    data = "one\r\n\nzwei ä€\nlast".encode()
    for size in (1, 2, 3, 7, 100):
        lines = Lines()
        for at in range(0, len(data), size):
            lines.add(data[at : at + size])
        assert list(lines.ready) == ["one", "", "zwei ä€"]
        lines.add(b"", final=True)
        assert list(lines.ready)[3:] == ["last"]


def test_lines_that_are_too_long_or_no_text_still_come() -> None:
    lines = Lines()
    lines.add(b"x" * (2 * LONGEST + 3))
    lines.add(b"y\n\xff\n")
    assert [len(line) for line in lines.ready] == [LONGEST, LONGEST, 4, 1]
    assert lines.ready[-1] == "\ufffd"


async def test_a_single_text_is_no_feed() -> None:
    async with engine() as llm:
        for wrong in ("log.txt", b"log"):
            with pytest.raises(TypeError, match=r"put it into a list, or read a file with Tail\(file\)"):
                monitor(llm, "Rule: warn.", wrong)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="put it into a list"):
                listener(llm, wrong)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="put it into a list"):
                evolving_context(llm, wrong, "Which?")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="a list, an iterator or a queue of texts, not 3"):
            monitor(llm, "Rule: warn.", 3)  # type: ignore[arg-type]
        assert not llm.blocks


async def test_items_reads_lists_queues_and_generators() -> None:
    async def generator() -> AsyncIterator[str]:
        for text in ("a", "b"):
            yield text

    queue: asyncio.Queue[str | None] = asyncio.Queue()
    for item in ("a", "b", None, "c"):
        queue.put_nowait(item)
    assert await all_of(["a", "b"]) == await all_of(queue) == await all_of(generator()) == ["a", "b"]
    assert queue.get_nowait() == "c"


# ---- files ----------------------------------------------------------------------------------------


async def test_tail_follows_a_file_that_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = Tail(path, seconds=SOON)
    await cancelled_reader(tail)  # there is no file yet
    path.write_bytes(b"one\ntw")
    assert await taken(tail, 1) == ["one"]
    await cancelled_reader(tail)  # half a line is no line
    with path.open("ab") as file:
        file.write(b"o\nthree\nrest")
    assert await taken(tail, 2) == ["two", "three"]
    tail.close()
    assert await all_of(tail) == ["rest"]


async def test_tail_reads_a_file_anew_that_was_cut_or_replaced(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("one\ntwo\nhalf of a li")
    tail = Tail(path, seconds=SOON)
    assert await taken(tail, 2) == ["one", "two"]
    path.write_text("three\n")
    assert await taken(tail, 1) == ["three"]
    other = tmp_path / "other"
    other.write_text("four, in a longer file\nfive\n")
    os.replace(other, path)
    assert await taken(tail, 2) == ["four, in a longer file", "five"]


async def test_tail_may_leave_out_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("old\n")
    tail = Tail(path, seconds=SOON, new=True)
    with path.open("a") as file:
        file.write("new\n")
    tail.close()
    assert await all_of(tail) == ["new"]


# ---- programs -------------------------------------------------------------------------------------

PRINTS = "import sys; print('one'); print('two', file=sys.stderr, flush=True); sys.exit(3)"
STAYS = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(child.pid, flush=True)
child.wait()
"""


async def test_output_gives_the_lines_of_a_program_and_its_status() -> None:
    output = Output(sys.executable, "-u", "-c", PRINTS)
    assert output.status is None
    assert sorted(await all_of(output)) == ["one", "two"]
    assert output.status == 3
    await output.close()
    with pytest.raises(FileNotFoundError):
        await anext(Output("there-is-no-such-program"))


async def test_output_ends_a_program_with_what_it_started() -> None:
    async with Output(sys.executable, "-c", STAYS) as output:
        (child,) = map(int, await taken(output, 1))
        await cancelled_reader(output)  # ends the reader only
        assert output.status is None and is_alive(child)
    assert output.status is not None and output.status < 0
    async with asyncio.timeout(10):  # nobody waits for the child: whoever cleans up takes a moment
        while is_alive(child):
            await asyncio.sleep(0)


def is_alive(process: int) -> bool:
    """Is there such a process, other than a dead one that nobody has waited for?"""
    try:
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


# ---- values ---------------------------------------------------------------------------------------


async def test_polled_gives_each_change_of_a_value_once() -> None:
    values = iter([20, 20, 21, 21, 21, 20, 22])
    polled = Polled(lambda: next(values), seconds=SOON, count=4)
    assert await taken(polled, 2) == ["20", "21"]
    assert await all_of(polled) == ["20", "22"]
