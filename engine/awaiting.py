"""Does a task wait for one of these futures, at the end of a chain of awaits?

Knows asyncio's tasks, `gather` and `TaskGroup`; what waits in another way (an Event, a Queue) counts as
waiting for something else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from typing import Any


def awaits_any(task: asyncio.Future[Any], futures: Collection[asyncio.Future[Any]]) -> bool:
    """Will `task` go on only after one of `futures` is done?"""
    seen: set[int] = set()
    open_: list[Any] = [task]
    while open_:
        future = open_.pop()
        if future in futures:
            return True
        if id(future) not in seen:
            seen.add(id(future))
            open_ += _awaited_by(future)
    return False


def _awaited_by(future: Any) -> Iterator[Any]:
    """What stands directly behind a future: a gathering's children, or what a task awaits."""
    yield from getattr(future, "_children", ())
    waiter = getattr(future, "_fut_waiter", None)
    if waiter is not None:
        yield waiter
        yield from _group_tasks(future)


def _group_tasks(task: asyncio.Task[Any]) -> Iterator[Any]:
    """The unfinished tasks of a group at whose end `task` waits."""
    coroutine: Any = task.get_coro()
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None)
        owner = frame.f_locals.get("self") if frame is not None else None
        if isinstance(owner, asyncio.TaskGroup):
            yield from getattr(owner, "_tasks", ())
        coroutine = getattr(coroutine, "cr_await", None)
