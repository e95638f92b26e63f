"""Subroutine delegation: a caller hands a question to a helper, goes on, and finds the result in its view.

Blocks, and who reads them (each line is a view; the last block is written):

    prompt caller 1                       the caller asks, and goes on with its next question
    prompt helper 1                       the helper of the first question
    prompt helper 1 helper 2              that of the second one, which waits for its turn
    prompt helper 1 helper 2 caller 3     the caller goes on behind the results

A helper begins with its question, which is all that is passed as text; what it found out is not encoded
again, but stands in the view of all who come later. A helper may ask, too: its own helper's block is appended
to its own when it has the result.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from ..agent import Agent
from .common import Question, agent_of, ask, start_over

if TYPE_CHECKING:
    from ..engine.blocks import CacheBlock
    from ..llm import AsyncLLM

BREAK = "\n\n"  # between two lines


def delegation(
    llm: AsyncLLM | Agent,
    question: Question,
    *,
    asks: str = r"Sub-question:.*\?",
    results: str = r"Sub-answer:.*\.",
    ahead: int = 2,
    at_once: int = 1,
    opening: str = "Sub-question:",
    max_depth: int = 1,
    max_calls: int = 6,
    max_tokens: int = 300,
    name: str = "delegation",
) -> Agent:
    """An agent with a coroutine "call", whose result is what the caller wrote, without the helpers' parts.

    asks, results: patterns of the line that asks a helper, and of the one that ends a helper's work.
    opening: how each of its questions begins that it asks without waiting, the first one included.
    ahead: how many it asks before it waits for their results. Then it goes on by itself, and may ask more.
    at_once: how many helpers work at the same time. They do not read what is not finished, so with more than
        one they work independently of each other.
    max_depth: how deep helpers may ask helpers; 1: not at all. Deeper raises RecursionError.
    max_calls: how many questions the caller may ask; more raise RuntimeError.
    max_tokens: most tokens of one block.
    """
    if min(ahead, at_once, max_depth, max_calls) < 1:
        raise ValueError("ahead, at_once, max_depth and max_calls must each be 1 or more")
    agent = agent_of(llm, name)
    llm = agent.llm

    async def write(inputs: str | None, view: list[CacheBlock], who: str) -> str:
        """Write behind `view` until a line asks or gives a result; "" if the text ends before."""
        stream = llm.generate(inputs, view, max_tokens=max_tokens, name=who)
        async for _ in stream:
            line = view[-1].text.rpartition(BREAK)[2]
            if re.fullmatch(asks, line) or re.fullmatch(results, line):
                return line
        return ""

    async def help_with(inputs: str, view: list[CacheBlock], depth: int) -> None:
        """Work on a question into the last block of `view` until its result stands there."""
        helper = view[-1]
        while re.fullmatch(asks, line := await write(inputs, view, helper.name)):
            if depth == max_depth:
                raise RecursionError(
                    f"{helper.name!r} asks a helper in turn ({line!r}), deeper than max_depth={max_depth}: "
                    "raise max_depth, or tell the model not to"
                )
            inner = await llm.create_block(f"{helper.name}.{depth + 1}")
            await help_with(BREAK, [*view, inner], depth + 1)
            await llm.append_block(helper, inner)
            await llm.free_block(inner)
            inputs = BREAK

    async def helped(line: str, helper: CacheBlock, turn: asyncio.Semaphore, done: list[CacheBlock]) -> None:
        """Wait for a turn, then work on `line` behind the results that are there; `done` gets the block."""
        async with turn:
            lead = BREAK if helper is not agent.blocks["helper 1"] else ""
            await help_with(lead + line + BREAK, [agent.blocks["prompt"], *done, helper], 1)
        done.append(helper)
        done.sort(key=lambda block: block.id)  # read in the order of the questions, whoever was faster

    @agent.coroutine
    async def call() -> str:
        await start_over(agent, "caller ", "helper ")
        view, turn = [await ask(agent, question)], asyncio.Semaphore(at_once)
        done: list[CacheBlock] = []
        working: set[asyncio.Task[None]] = set()
        caller, inputs, said, number = await agent.block("caller 1"), opening, "", 0
        async with asyncio.TaskGroup() as group:
            while True:
                line = await write(inputs, [*view, caller], "caller")
                asked = re.fullmatch(asks, line) is not None
                if not asked and not working:
                    return said + caller.text
                if asked:
                    number += 1
                    if number > max_calls:
                        raise RuntimeError(f"the caller asks more than max_calls={max_calls} questions")
                    helper = await agent.block(f"helper {number}")
                    working.add(group.create_task(helped(line, helper, turn, done)))
                    inputs = BREAK + opening
                if len(working) == ahead or not asked:  # results are wanted before the next word
                    await asyncio.wait(working)
                    view, working = [view[0], *done], set()
                    said, inputs = said + caller.text, BREAK
                    caller = await agent.block(f"caller {number + 1}")

    return agent
