"""A listener: words come one by one, it decides by a probe when to answer, and stops when it is interrupted.

Blocks, and who reads them (each line is a view; the last block is written):

    memory heard        hear: a new word
    memory heard        respond: asks after each word by a probe, which writes nothing
    memory speech       respond: speaks until a word comes; what was heard and what was said join the memory
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..agent import Agent
from .common import agent_of, blocks_of, changed, check_choices, encode_again, join
from .feeds import Feed, check_feed, items
from .turns import Turns

if TYPE_CHECKING:
    from ..engine.blocks import CacheBlock
    from ..llm import AsyncLLM


@dataclass(frozen=True)
class Exchange:
    """What was heard, what was said to it, and whether a word broke that off."""

    heard: str
    said: str
    interrupted: bool


def listener(
    llm: AsyncLLM | Agent,
    words: Feed,
    *,
    opening: str = "Heard:",
    question: str = "\nAnswer now?",
    choices: tuple[str, str] = (" yes", " no"),
    threshold: float = 0.5,
    closing: str = "\nAnswer now? yes\n",
    speak: Callable[[str], Any] = lambda token: None,
    max_tokens: int = 60,
    name: str = "listener",
    **template_args: Any,
) -> Agent:
    """An agent with coroutines "hear", which takes the words, and "respond", which gives all `Exchange`s when
    they have ended; what was heard last is then answered in any case.

    words: text from outside. ``agent.say(" no wait", to="heard")`` is heard as well.
    opening, closing: around what is heard. question, choices: asked after each word; to answer, to wait.
    speak: called with each token. template_args: of the chat template, such as enable_thinking=False.
    """
    check_feed(words)
    check_choices(choices)
    agent = agent_of(llm, name)
    llm = agent.llm
    turns = Turns.of(llm, **template_args)
    quiet, word_comes, over = asyncio.Event(), asyncio.Event(), asyncio.Event()
    exchanges, placed = list[Exchange](), [0]  # tokens that `heard` holds, or will, from the words

    @agent.coroutine
    async def hear() -> None:
        view = await blocks_of(agent, "memory", "heard")
        async for word in items(words):
            word_comes.set()
            await quiet.wait()  # until what was said is in the memory
            placed[0] += len(ids := llm.encode(f" {word}", control=False))
            await llm.forward(ids, view, logits="none")
        over.set()

    async def answer(version: int, memory: CacheBlock, heard: CacheBlock, speech: CacheBlock) -> None:
        """Answer what was heard, unless there is more by now than in `version`."""
        quiet.clear()
        word_comes.clear()
        async with llm.transaction(memory, heard):
            if heard.version != version:
                return quiet.set()
            said, placed[0] = heard.text.strip(), placed[0] - heard.num_tokens
            await llm.append_block(memory, heard)
            await llm.clear(heard)
        interrupted, view = False, [memory, speech]
        stream = llm.generate(closing + turns.answering, view, max_tokens=max_tokens, name="speak")
        async for token in stream:
            speak(token)
            if interrupted := word_comes.is_set() or heard.num_tokens > 0:
                break
        exchanges.append(Exchange(said, stream.text, interrupted))
        await remember(memory, speech)

    async def remember(memory: CacheBlock, speech: CacheBlock) -> None:
        await join(llm, memory, speech)
        await llm.forward(turns.next + opening, [memory], logits="none")
        quiet.set()

    @agent.coroutine
    async def respond() -> tuple[Exchange, ...]:
        memory, heard, speech = await blocks_of(agent, "memory", "heard", "speech")
        if not memory.num_tokens:
            await llm.forward(turns.opening + opening, [memory], logits="none")
        elif speech.num_tokens:  # left by a run that was stopped
            await remember(memory, speech)
        quiet.set()
        view = [memory, heard]
        while heard.num_tokens or not over.is_set():
            if heard.num_tokens > placed[0]:  # others have said something, which was encoded by itself
                await encode_again(llm, view)
                placed[0] = heard.num_tokens
            asked = heard.version
            if heard.num_tokens:
                if over.is_set() or (await llm.probe(question, view, choices))[choices[0]] >= threshold:
                    await answer(asked, memory, heard, speech)
            await changed(llm, heard, asked, over)
        return tuple(exchanges)

    return agent
