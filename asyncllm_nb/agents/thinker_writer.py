"""A thinker, and a writer that decides after each paragraph of the thinking whether to write now or to wait.

Blocks, and who reads them (each line is a view; the last block is written):

    prompt thinker              the thinker
    prompt thinker              the probe that decides; it writes nothing
    prompt thinker writer       the writer

The writer's mode is the model's own answer to a question behind the thinking so far. In mode "wait" it
sleeps until the next paragraph; in mode "write" it answers, while the thinker goes on, and reads what the
thinker adds meanwhile. When the thinking has ended it writes in any case.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..agent import Agent
from .common import Question, agent_of, ask, check_choices, start_over

if TYPE_CHECKING:
    from ..llm import AsyncLLM

END = "\n</think>\n\n"
"""Closes the thinking, wherever it stands."""


@dataclass(frozen=True)
class Writing:
    """What the writer wrote, and for each paragraph the probability of "write now" that it saw before."""

    text: str
    modes: tuple[float, ...]


def thinker_writer(
    llm: AsyncLLM | Agent,
    question: Question,
    *,
    probe: str = "\n\nCan the question be answered from this? (yes or no)",
    choices: tuple[str, str] = (" yes", " no"),
    threshold: float = 0.5,
    opening: str = END,
    paragraph: str = "\n\n",
    think_end: str = "</think>",
    max_thinking: int = 400,
    max_writing: int = 60,
    name: str = "thinker and writer",
) -> Agent:
    """An agent with coroutines "think", whose result is the thinking, and "write", which returns a `Writing`.

    probe, choices: what is asked behind the thinking so far, and the answers for "write now" and "wait".
    threshold: how probable "write now" has to be, against "wait".
    opening: what the writer puts between the thinking and its answer.
    paragraph, think_end: what ends a paragraph, and the thinking.
    """
    check_choices(choices)
    agent = agent_of(llm, name)
    llm = agent.llm
    asked, new_paragraph, thought = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @agent.coroutine
    async def think() -> str:
        prompt, thinker = await ask(agent, question), await agent.block("thinker")
        if not asked.is_set():
            await start_over(agent, "thinker", "writer")
            asked.set()
        stream = llm.generate(None, [prompt, thinker], stop=think_end, max_tokens=max_thinking, name="think")
        async for _ in stream.split(paragraph):
            new_paragraph.set()
        thought.set()
        new_paragraph.set()
        return thinker.text

    @agent.coroutine
    async def write() -> Writing:
        await asked.wait()
        prompt, thinker = await agent.block("prompt"), await agent.block("thinker")
        writer = await agent.block("writer")
        modes: list[float] = []
        while not thought.is_set():
            await new_paragraph.wait()
            new_paragraph.clear()
            if not thought.is_set():
                modes.append((await llm.probe(probe, [prompt, thinker], choices))[choices[0]])
                if modes[-1] >= threshold:
                    break
        closing = opening
        if thought.is_set() and think_end in thinker.text:  # the thinker has closed it
            closing = opening.rpartition(think_end)[2] or paragraph
        await llm.generate(closing, [prompt, thinker, writer], max_tokens=max_writing, name="write")
        return Writing(writer.text, tuple(modes))

    return agent
