"""An evolving context: a block is replaced in place while a reader goes on, who knows what it has read.

Blocks, and who reads them (each line is a view; the last block is written):

    prompt context            refresh: puts the newest state into the context's place, in one change
    prompt context reader     read: the question, and the answer

The reader's view is read at each step, so each token of an answer is of the state that there is then. The
context's version tells whether that was one and the same for all of the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..agent import Agent
from .common import agent_of, ask, blocks_of, changed
from .feeds import Feed, check_feed, items
from .turns import Turns

if TYPE_CHECKING:
    from ..llm import AsyncLLM


@dataclass(frozen=True)
class Reading:
    """An answer, the version of the context when it began, and the one when it ended. If they are the same,
    every token of it was read from just that version."""

    text: str
    version: int
    latest: int

    def __str__(self) -> str:
        changed = f"; now {self.latest}" if self.latest != self.version else ""
        return f"{self.text} [version {self.version}{changed}]"


def evolving_context(
    llm: AsyncLLM | Agent,
    states: Feed,
    question: str,
    *,
    prompt: str = "",
    restarts: int = 1,
    on_reading: Callable[[Reading], Any] = lambda reading: None,
    max_tokens: int = 60,
    name: str = "context",
    **template_args: Any,
) -> Agent:
    """An agent with coroutines "refresh", which gives the number of states, and "read", which answers the
    question for each new state, and when they have ended gives all `Reading`s.

    states: what the context holds, one after the other; text from outside. States that come faster than they
        are answered are skipped.
    question: what the user asks behind the context. prompt: what stands before it.
    restarts: how often an answer is begun anew because the context has changed since it began; the next one
        is finished, and says so. 0: never.
    on_reading: called with each reading.
    template_args: of the chat template, such as enable_thinking=False.
    """
    check_feed(states)
    if restarts < 0:
        raise ValueError(f"restarts must be 0 or more, not {restarts}")
    agent = agent_of(llm, name)
    llm = agent.llm
    turns = Turns.of(llm, **template_args)
    over = asyncio.Event()
    readings: list[Reading] = []

    @agent.coroutine
    async def refresh() -> int:
        context, count = await agent.block("context"), 0
        view = [await ask(agent, llm.encode(turns.opening + prompt)), context]
        async for state in items(states):
            await llm.replace(context, llm.encode(state, control=False), view)
            count += 1
        over.set()
        return count

    async def answer(to_the_end: bool) -> Reading:
        """Answer for the newest state; whether or not `to_the_end` if that changes."""
        view = await blocks_of(agent, "prompt", "context", "reader")
        context, reader = view[1:]
        await llm.clear(reader)
        version = context.version
        stream = llm.generate(question + turns.answering, view, max_tokens=max_tokens, name="read")
        async for _ in stream:
            if context.version != version and not to_the_end:
                break
        return Reading(stream.text, version, context.version)

    @agent.coroutine
    async def read() -> tuple[Reading, ...]:
        context, answered = await agent.block("context"), 0
        while context.version != answered or not over.is_set():
            if context.version != answered:
                for left in range(restarts, -1, -1):
                    reading = await answer(left == 0)
                    if reading.version == reading.latest:
                        break
                answered = reading.version
                readings.append(reading)
                on_reading(reading)
            await changed(llm, context, answered, over)
        return tuple(readings)

    return agent
