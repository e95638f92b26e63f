"""The coroutines that read streams: what each is doing now, and at which line of source it waits.

Knows asyncio's tasks and Python's frames. Nothing is patched: a suspended coroutine is asked what it
awaits. What it finds out is recorded by `recording`.
"""

from __future__ import annotations

import asyncio
import linecache
import sysconfig
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal

TaskState = Literal["running", "waiting", "done", "failed", "cancelled"]

PACKAGE = __name__.partition(".")[0] + "."
"""Frames of its modules are the engine's own, not the person's."""
LIBRARIES = tuple({sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib")})
CellName = Callable[[str], str | None]


@dataclass(slots=True)
class Seen:
    """A coroutine as it was last seen. `line`: where it waits or failed, as people read it."""

    number: int
    name: str
    task: weakref.ref[asyncio.Task[Any]]
    state: TaskState = "running"
    line: str = ""
    error: str = ""


class TaskObserver:
    """Numbers tasks and watches them until they end. Tells `changed` about each change.

    `cell_name` turns a file name into what a notebook calls the cell, None for other files. `shows_errors`:
    does somebody see what a task fails with? Then asyncio need not complain that nobody has taken note.
    `shows_agents`: the same of the tasks that run an agent's coroutines.
    """

    def __init__(self, changed: Callable[[Seen], None]) -> None:
        self._changed = changed
        self._seen: dict[int, Seen] = {}  # live ones by id(task)
        self._count = 0
        self.cell_name: CellName = lambda _: None
        self.shows_errors: Callable[[], bool] = lambda: False
        self.shows_agents: Callable[[], bool] = lambda: False

    def watch(self, task: asyncio.Task[Any] | None, name: str) -> int:
        """The number of a task; 0 without one. The first time it is shown as running."""
        if task is None:
            return 0
        seen = self._seen.get(id(task))
        if seen is None:
            self._count += 1
            seen = self._seen[id(task)] = Seen(self._count, name, weakref.ref(task))
            task.add_done_callback(self._done)
            self._changed(seen)
        return seen.number

    def task(self, number: int) -> asyncio.Task[Any] | None:
        """The live task of a number."""
        found = (seen.task() for seen in self._seen.values() if seen.number == number)
        return next(found, None)

    def look(self, is_reading: Callable[[asyncio.Task[Any]], bool]) -> None:
        """Look at all live tasks. `is_reading`: does it wait for a stream's next token?"""
        for seen in list(self._seen.values()):
            task = seen.task()
            if task is None or task.done():
                continue
            state: TaskState = "running"
            line = ""
            if not is_reading(task):
                state, line = self.where(task)
            if (state, line) != (seen.state, seen.line):
                seen.state, seen.line = state, line
                self._changed(seen)

    def where(self, task: asyncio.Task[Any]) -> tuple[TaskState, str]:
        """Running inside of the engine or in code of its own, or waiting at a line for something else."""
        frames = list(_await_chain(task.get_coro()))
        if not frames or task is asyncio.current_task():
            return "running", ""
        if _is_own(frames[-1]):
            return "running", ""
        return "waiting", self._innermost([(f, f.f_lineno) for f in frames])

    def failed_at(self, error: BaseException) -> str:
        """Where an exception was raised, or where code of the person's own called what raised it."""
        return self._innermost(list(_traceback_places(error.__traceback__)))

    def _innermost(self, places: list[tuple[FrameType, int]]) -> str:
        """The last place that is in neither this package nor a library, as people read it."""
        own = [place for place in places if not (_is_own(place[0]) or _is_library(place[0]))]
        return self._place(*own[-1]) if own else ""

    def _place(self, frame: FrameType, number: int) -> str:
        file = frame.f_code.co_filename
        source = linecache.getline(file, number, frame.f_globals).strip()
        return f"{self.cell_name(file) or Path(file).name}, line {number}: {source}"

    def _done(self, task: asyncio.Task[Any]) -> None:
        seen = self._seen.pop(id(task), None)
        if seen is None:
            return
        seen.line = ""
        # Read without `task.exception()`, which would tell asyncio that somebody has taken note.
        error: BaseException | None = getattr(task, "_exception", None)
        if task.cancelled():
            seen.state = "cancelled"
        elif error is not None:
            seen.state, seen.error = "failed", f"{type(error).__name__}: {error}"
            seen.line = self.failed_at(error)
            if self.shows_errors():
                task.exception()
        else:
            seen.state = "done"
        self._changed(seen)


def _await_chain(coroutine: Any) -> Iterator[FrameType]:
    """Frames of a suspended coroutine and of what it awaits, outermost first."""
    while coroutine is not None:
        for kind in ("cr", "gi", "ag"):
            frame = getattr(coroutine, f"{kind}_frame", None)
            if frame is not None:
                yield frame
                break
        else:
            return
        coroutine = getattr(coroutine, "gi_yieldfrom" if kind == "gi" else f"{kind}_await", None)


def _traceback_places(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def _is_own(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(PACKAGE)


def _is_library(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(("<frozen", *LIBRARIES))
