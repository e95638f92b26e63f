"""Blocks, events and queues that an agent's coroutines find by name: made once, then the same again.

Knows the public engine. A cell that runs again gets what it got before, so that nobody who waits for
the old one is stranded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .engine.blocks import CacheBlock
from .engine.views import check_block
from .inputs import known_name

if TYPE_CHECKING:
    from .llm import AsyncLLM


class Shared:
    """What coroutines share. `notify` is called when there is something new."""

    def __init__(self, llm: AsyncLLM, notify: Callable[[], None]) -> None:
        self._llm = llm
        self._notify = notify
        self._blocks: dict[str, CacheBlock] = {}
        self.events: dict[str, asyncio.Event] = {}
        self.queues: dict[str, asyncio.Queue[Any]] = {}

    @property
    def blocks(self) -> dict[str, CacheBlock]:
        """Those that are not freed, by the names that they are asked for with."""
        return {name: block for name, block in self._blocks.items() if not block._record.freed}

    async def block(self, name: str) -> CacheBlock:
        """The block of this name; a new one the first time, and after it was freed."""
        self._llm._engine.check_usable()
        _check_name("block", name)
        found = self.blocks.get(name)
        if found is None:
            found = self._blocks[name] = await self._llm.create_block(name)
            self._notify()
        return found

    def adopt(self, name: str, block: CacheBlock) -> CacheBlock:
        """`block` is the block of this name from now on. Raises ValueError if there is another one."""
        _check_name("block", name)
        check_block(self._llm._engine, block)
        if self.blocks.get(name, block) is not block:
            raise ValueError(f"there is a block {name!r} already: free it first, or take another name")
        self._blocks[name] = block
        self._notify()
        return block

    def become(self, blocks: dict[str, CacheBlock]) -> None:
        """Have these blocks from now on, and none that there were."""
        self._blocks = dict(blocks)
        self._notify()

    def find(self, block: CacheBlock | str) -> CacheBlock:
        """The block itself, or the live one of that name. Raises ValueError with the nearest name."""
        if isinstance(block, str):
            return self.blocks[known_name(block, self.blocks, "block of this agent")]
        return block

    def event(self, name: str) -> asyncio.Event:
        """The event of this name."""
        _check_name("event", name)
        return self.events.setdefault(name, asyncio.Event())

    def queue(self, name: str, maxsize: int) -> asyncio.Queue[Any]:
        """The queue of this name. Raises ValueError for another size than it has."""
        _check_name("queue", name)
        found = self.queues.get(name)
        if found is None:
            found = self.queues[name] = asyncio.Queue(maxsize)
        elif maxsize not in (0, found.maxsize):
            raise ValueError(
                f"queue {name!r} exists with maxsize {found.maxsize}, which cannot change: take another name"
            )
        return found


def _check_name(what: str, name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"the name of an agent's {what} is a string, not {name!r:.60}")
    if not name:
        raise ValueError(f"the name of an agent's {what} is not empty")
