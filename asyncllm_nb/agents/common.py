"""What ready-made agents have in common: whose agent it is, a question that is encoded once, a fresh start.

Knows the public API. Knows no pattern.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..agent import Agent

if TYPE_CHECKING:
    from ..engine.blocks import CacheBlock
    from ..llm import AsyncLLM

Question = str | Sequence[int]
"""What the user says, or token ids of a whole prompt with the assistant's turn open."""


def agent_of(llm: AsyncLLM | Agent, name: str) -> Agent:
    """The agent itself, or the engine's agent of this name."""
    return llm if isinstance(llm, Agent) else Agent(llm, name)


def check_choices(choices: Sequence[str]) -> None:
    """Raise ValueError unless there are two answers, for yes and for no."""
    if isinstance(choices, str) or len(choices) != 2:
        raise ValueError(f"choices are two answers, the first one for yes, not {choices!r}")


async def blocks_of(agent: Agent, *names: str) -> list[CacheBlock]:
    """The agent's blocks of these names."""
    return [await agent.block(name) for name in names]


async def with_note(agent: Agent, view: list[CacheBlock], note: str, block: str) -> list[CacheBlock]:
    """`view`, with `note` behind it in the agent's block of this name; as it is if there is no note."""
    if note:
        view = [*view, await agent.block(block)]
        if not view[-1].num_tokens:
            await agent.llm.forward(note, view, logits="none")
    return view


async def join(llm: AsyncLLM, left: CacheBlock, right: CacheBlock) -> None:
    """Move what `right` holds to the end of `left`, as one change."""
    async with llm.transaction(left, right):
        await llm.append_block(left, right)
        await llm.clear(right)


async def encode_again(llm: AsyncLLM, view: list[CacheBlock]) -> None:
    """Encode the last block of `view` anew, behind those before it, as one change."""
    async with llm.transaction(view[-1]):
        await llm.replace(view[-1], view[-1].token_ids, view)


async def changed(llm: AsyncLLM, block: CacheBlock, version: int, over: asyncio.Event) -> None:
    """Wait until `block`, which was read at `version`, has changed, whoever did it, or `over` is set by a
    coroutine that ends then."""
    news = asyncio.Event()
    unsubscribe = llm.observe(news.set)  # after each step, and each change of a coroutine
    try:
        while block.version == version and not over.is_set():
            await news.wait()
            news.clear()
    finally:
        unsubscribe()


async def ask(agent: Agent, question: Question, block: str = "prompt") -> CacheBlock:
    """The agent's block with the question in it, encoded when it is first asked for.

    Raises ValueError if the block holds something else.
    """
    prompt = await agent.block(block)
    llm = agent.llm
    ids = llm.chat_prompt(question) if isinstance(question, str) else list(question)
    if not prompt.num_tokens:
        await llm.forward(ids, [prompt], logits="none")
    elif prompt.token_ids != ids:
        raise ValueError(
            f"block {block!r} of agent {agent.name!r} holds another question: give the agent another "
            "name=, or free its blocks first"
        )
    return prompt


async def start_over(agent: Agent, *beginnings: str) -> None:
    """Clear those of the agent's blocks whose names begin so: what an earlier run has left in them."""
    for name, block in agent.blocks.items():
        if name.startswith(beginnings) and block.num_tokens:
            await agent.llm.clear(block)
