"""What goes on whether or not anybody awaits it: ``agent.stop()`` in a cell, or ``await agent.stop()``.

Knows asyncio, and how a notebook shows an error.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Generator
from contextvars import copy_context
from typing import Any, Generic, TypeVar

from .notebook import error_text

T = TypeVar("T")

_tasks: set[asyncio.Task[Any]] = set()
"""The event loop itself holds tasks only weakly."""


class Doing(Generic[T]):
    """Work that has begun. Awaiting it gives its result; a cancelled wait leaves it going on.

    An error that nobody awaits is printed to the cell that began it.
    """

    def __init__(self, work: Coroutine[Any, Any, T], what: str) -> None:
        self._what = what
        self._awaited = False
        self._task = asyncio.get_running_loop().create_task(work, name=f"asyncllm_nb {what}")
        _tasks.add(self._task)
        self._task.add_done_callback(_tasks.discard)
        self._task.add_done_callback(self._ended, context=copy_context())

    def _ended(self, task: asyncio.Task[T]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self._awaited:
            print(f"{self._what}: failed\n{error_text(error)}", file=sys.stderr)

    @property
    def done(self) -> bool:
        """Has it ended?"""
        return self._task.done()

    def __await__(self) -> Generator[Any, None, T]:
        self._awaited = True
        return asyncio.shield(self._task).__await__()

    def __repr__(self) -> str:
        return f"<{self._what}{'' if self._task.done() else ', in progress'}>"
