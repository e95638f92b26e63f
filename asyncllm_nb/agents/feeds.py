"""Where the text comes from that agents read: files that grow, programs that print, values that change.

Knows files, processes and asyncio. Knows no model and no blocks. Each feed is an async iterator that can be
read on after its reader was cancelled, as when a cell defines the coroutine anew; an async generator ends
with its reader.
"""

from __future__ import annotations

import asyncio
import codecs
import os
import signal
import weakref
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any, Self

LONGEST = 2000
"""Characters of a line; a longer one comes in pieces, so that no line fills the memory."""
PIECE = 65536
"""Bytes that are read at a time."""

Feed = AsyncIterable[str] | Iterable[str] | asyncio.Queue[Any]
"""Texts that come one by one; a queue ends with None."""


def check_feed(feed: object) -> None:
    """Raise TypeError for what gives no texts one by one; a single text would give its letters."""
    if isinstance(feed, str | bytes):
        raise TypeError(
            f"a feed gives texts one by one, and {feed!r:.60} is a single one: put it into a list, or read a "
            "file with Tail(file)"
        )
    if not isinstance(feed, AsyncIterable | Iterable | asyncio.Queue):
        raise TypeError(f"a feed is a list, an iterator or a queue of texts, not {feed!r:.60}")


async def items(feed: Feed) -> AsyncIterator[str]:
    """The texts of a feed, whatever its kind."""
    if isinstance(feed, asyncio.Queue):
        while (item := await feed.get()) is not None:
            yield item
    elif isinstance(feed, AsyncIterable):
        async for item in feed:
            yield item
    else:
        for item in feed:
            yield item


class Lines:
    """Bytes that come in pieces, as lines without their ends. Bytes that are no UTF-8 become U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        self.ready: deque[str] = deque()

    def add(self, data: bytes, *, final: bool = False) -> None:
        """`final`: nothing comes behind; what is left is a line."""
        *whole, self._rest = (self._rest + self._decoder.decode(data, final)).split("\n")
        if final and self._rest:
            whole.append(self._rest)
            self._rest = ""
        while len(self._rest) > LONGEST:
            whole.append(self._rest[:LONGEST])
            self._rest = self._rest[LONGEST:]
        for line in whole:
            line = line.removesuffix("\r")
            self.ready.extend(line[at : at + LONGEST] for at in range(0, max(1, len(line)), LONGEST))


class Tail:
    """The lines of a file, then those that are appended to it. The file need not exist yet; if it is
    replaced or cut, it is read from its start.

    seconds: s from one look to the next. new: leave out what it holds already.
    It ends when `close` is called and all has been read.
    """

    def __init__(self, file: str | os.PathLike[str], *, seconds: float = 0.2, new: bool = False) -> None:
        self._path, self._seconds = Path(file), seconds
        self._lines = Lines()
        self._closing = asyncio.Event()
        status = self._path.stat() if new and self._path.exists() else None
        self._at = status.st_size if status else 0
        self._inode = status.st_ino if status else 0

    def close(self) -> None:
        """Nothing more will be appended."""
        self._closing.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        while not self._lines.ready:
            closing = self._closing.is_set()
            if self._look():
                continue
            if closing:
                self._lines.add(b"", final=True)
                if not self._lines.ready:
                    raise StopAsyncIteration
            else:
                try:
                    await asyncio.wait_for(self._closing.wait(), self._seconds)
                except TimeoutError:
                    pass
        return self._lines.ready.popleft()

    def _look(self) -> bool:
        """Read a piece, if there is more. The file is opened for each look, so none stays open."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._at:
                    self._inode, self._at, self._lines = status.st_ino, 0, Lines()
                file.seek(self._at)
                data = file.read(PIECE)
        except FileNotFoundError:
            return False
        self._at += len(data)
        self._lines.add(data)
        return bool(data)


class Output:
    """The lines that a program prints, errors included. It starts when it is first read.

    ``async with Output("make", "test") as lines:`` or `close` ends it, with all that it has started; so
    does dropping the last reference. The notebook's stop button does not reach it.
    """

    def __init__(self, program: str, *arguments: str, **options: Any) -> None:
        self._command, self._options = (program, *arguments), options
        self._lines = Lines()
        self._process: asyncio.subprocess.Process | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        if self._process is None:
            await self._start()
        process = self._process
        assert process is not None and process.stdout is not None
        while not self._lines.ready:
            data = await process.stdout.read(PIECE)
            self._lines.add(data, final=not data)
            if not data and not self._lines.ready:
                await process.wait()
                raise StopAsyncIteration
        return self._lines.ready.popleft()

    @property
    def status(self) -> int | None:
        """The program's exit status; None while it runs."""
        return self._process.returncode if self._process is not None else None

    async def close(self) -> None:
        """End the program, and return when it has ended."""
        if self._process is not None:
            _kill(self._process)
            await self._process.communicate()

    async def _start(self) -> None:
        pipe, both = asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=both,
            start_new_session=True, **self._options,
        )  # fmt: skip
        weakref.finalize(self, _kill, self._process)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _kill(process: asyncio.subprocess.Process) -> None:
    """End a process and what it has started, unless it has ended."""
    if process.returncode is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


class Polled:
    """What `read()` gives, as text, each time it differs from before: a sensor, a page, a clock.

    `read` is called in a thread every `seconds` s. `count`: how many texts there are; None: no end.
    """

    def __init__(self, read: Callable[[], object], *, seconds: float = 1.0, count: int | None = None) -> None:
        self._read, self._seconds, self._left = read, seconds, count
        self._last: str | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        if self._left == 0:
            raise StopAsyncIteration
        while True:
            if self._last is not None:
                await asyncio.sleep(self._seconds)
            text = str(await asyncio.to_thread(self._read))
            if text != self._last:
                break
        self._last = text
        self._left = self._left and self._left - 1
        return text
