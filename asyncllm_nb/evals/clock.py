"""Time in forward passes, for what arrives while a model works. Knows the public API.

A tick is a forward pass of the engine; while nothing can run, ticks pass without one. So a run is the same on
a fast machine and on a slow one, and all that take part have the same time.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Coroutine, Iterable
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from ..agent import Agent
    from ..llm import AsyncLLM

T = TypeVar("T")

TURNS = 8
"""Of the event loop without a change, until all who were woken count as having asked for what they want."""
PATIENCE = 3
"""Ticks in a row in which nothing runs and nobody waits for a later one, until the run counts as stuck."""


class Clock:
    """``await clock.run(work)`` does `work`; in it, `now` is the time and `until` waits for one."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.now = 0  # ticks
        self._llm = llm
        self._noted = False  # has the engine changed something lately?
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = count()  # in which order those who wait for the same tick go on

    async def until(self, tick: int) -> None:
        """Wait until the clock shows `tick`, or return at once if it has."""
        if tick > self.now:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (tick, next(self._numbers), future))
            await future

    async def paced(self, texts: Iterable[str], gap: int) -> AsyncIterator[str]:
        """`texts`, the first one now and then one every `gap` ticks, whether or not the last was taken."""
        start = self.now
        for number, text in enumerate(texts):
            await self.until(start + number * gap)
            yield text

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns. Raises RuntimeError if it waits for something that never comes."""
        unsubscribe = self._llm.observe(self._note)
        task, idle = asyncio.ensure_future(work), 0
        try:
            self._llm.pause()
            await self._settle()
            while not task.done():
                self.now += 1
                ran = await self._llm.step()
                while self._waiting and self._waiting[0][0] <= self.now:
                    future = heapq.heappop(self._waiting)[2]
                    if not future.done():
                        future.set_result(None)
                await self._settle()
                idle = 0 if ran or self._waiting else idle + 1
                if idle > PATIENCE and not task.done():
                    raise RuntimeError("nothing runs, and nobody waits for a later tick: it would never end")
        finally:
            unsubscribe()
            self._llm.resume()
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
        return task.result()

    async def _settle(self) -> None:
        """Return when all that a step has set in motion waits for the next one: who was woken has asked for
        what is wanted, and operations on blocks are done, some of which copy on the engine's thread."""
        engine, loop = self._llm._engine, asyncio.get_running_loop()
        quiet = 0
        while quiet < 2:
            self._noted = False
            for _ in range(TURNS):
                await asyncio.sleep(0)
            await loop.run_in_executor(engine.executor, _nothing)
            quiet = 0 if self._noted else quiet + 1

    def _note(self) -> None:
        self._noted = True


async def results_of(agent: Agent) -> dict[str, Any]:
    """Start it, and what it returns. (Awaiting a running agent says after a while that its engine is paused,
    as this one is between two ticks.)"""
    agent.start()
    tasks = [one.task for one in agent.coroutines.values() if one.task is not None]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    return await agent


def _nothing() -> None: ...
