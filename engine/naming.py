"""Names that people read: unique among the living, and taken from the coroutine that runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any


def unique_name(name: str, taken: set[str]) -> str:
    """`name`, or ``name·2``, ``name·3``, … if it is taken."""
    return next(candidate for candidate in _candidates(name) if candidate not in taken)


def _candidates(name: str) -> Iterator[str]:
    yield name
    number = 2
    while True:
        yield f"{name}·{number}"
        number += 1


def coroutine_name(task: asyncio.Task[Any] | None) -> str:
    """The qualified name of a task's coroutine, without the function that it is local to."""
    name = getattr(task.get_coro(), "__qualname__", "") if task is not None else ""
    name = name.rpartition("<locals>.")[2]
    runs_a_cell = name.rpartition(".")[2] in ("run_code", "run_cell_async")  # IPython's own
    return "cell" if not name or "<" in name or runs_a_cell else name
