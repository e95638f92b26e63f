"""Parallel streams: workers on one problem who see each other's work while it is written.

Blocks, and who reads them (each line is a view; the last block is written):

    prompt history lane 2 lane 1      worker 1
    prompt history lane 1 lane 2      worker 2
    prompt history answer             conclude

A worker takes a piece of the work, writes it into its own lane, and reads the others' lanes word by word. A
finished piece moves from the lane to the end of the history in one transaction: nobody ever reads it twice,
or not at all. Nothing is encoded again by moving.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..agent import Agent
from .common import Question, agent_of, ask, start_over

if TYPE_CHECKING:
    from ..llm import AsyncLLM


def workers(
    llm: AsyncLLM | Agent,
    question: Question,
    pieces: Sequence[Iterable[str]],
    *,
    is_finished: Callable[[str], bool] = lambda piece: piece.endswith("\n\n"),
    is_answer: Callable[[str], bool] = lambda piece: False,
    conclusion: str = "\n\nSo the answer is",
    max_tokens: int = 200,
    name: str = "workers",
) -> Agent:
    """An agent with coroutines "worker 1", "worker 2", … and "conclude", whose result is the answer.

    pieces: for each worker, how the pieces of its work begin: a headline, or the first words. They may have
        no end. If all get the same iterator, whoever is free takes the next one.
    is_finished: of a piece as far as it is written, beginning included: is it complete? A worker may read a
        half-written piece just before its own. Where pieces are lines, let them begin with a break and not
        end with one: then its own reads as a line there, too.
    is_answer: of a complete piece: does the answer stand now? Then all workers stop.
    conclusion: how the answer begins that is written behind the history when the workers have ended.
    max_tokens: most tokens of a piece, and of the answer.
    """
    if isinstance(pieces, str) or not pieces or any(isinstance(one, str) for one in pieces):
        raise ValueError('pieces are lists of beginnings, one list a worker, such as [["First,"], ["Then,"]]')
    agent = agent_of(llm, name)
    llm = agent.llm
    todo = [iter(one) for one in pieces]
    taken: dict[int, str | None] = {}  # what each worker has in hand, also when it is started anew
    asked, answered = asyncio.Event(), asyncio.Event()
    ended = [asyncio.Event() for _ in pieces]

    def worker(number: int) -> Callable[[], Coroutine[Any, Any, int]]:
        async def work() -> int:
            await asked.wait()
            prompt, history = await agent.block("prompt"), await agent.block("history")
            lanes = [await agent.block(f"lane {one}") for one in range(1, len(pieces) + 1)]
            own = lanes.pop(number - 1)
            view = [prompt, history, *lanes, own]
            finished = 0
            while not answered.is_set():
                piece = taken[number] = taken.get(number) or next(todo[number - 1], None)
                if piece is None:
                    break
                if own.num_tokens:  # left by a run that was stopped
                    await llm.clear(own)
                stream = llm.generate(piece, view, max_tokens=max_tokens, name=f"worker {number}")
                async for _ in stream:
                    if is_finished(own.text) or answered.is_set():
                        break
                text = own.text
                async with llm.transaction(history, own):
                    await llm.append_block(history, own)
                    await llm.clear(own)
                taken[number] = None
                finished += 1
                if is_answer(text):
                    answered.set()
            ended[number - 1].set()
            return finished

        return work

    @agent.coroutine
    async def conclude() -> str:
        prompt = await ask(agent, question)
        history, answer = await agent.block("history"), await agent.block("answer")
        if not asked.is_set():
            await start_over(agent, "history", "lane ")
            asked.set()
        await start_over(agent, "answer")
        for end in ended:
            await end.wait()
        await llm.generate(conclusion, [prompt, history, answer], max_tokens=max_tokens, name="conclude")
        return answer.text

    for number in range(1, len(pieces) + 1):
        agent.add(worker(number), name=f"worker {number}")
    return agent
