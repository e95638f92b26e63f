"""What it costs a writer to read a growing thinker: by shared blocks, and by passing text.

Knows the public API only. The thinker's tokens are given, so that all three ways read the same; the
writer adds a note after every few of them, and reads its earlier notes too:

- *shared*: the writer's view is [prompt, thinker, writer]; only its own tokens are encoded.
- *text*: it encodes prompt, thoughts and notes so far anew each time, as a plain call of a model does.
- *prefix*: the same with a cache of what did not change since the last reading. The new thoughts stand
  before the notes, so these are encoded again.

The three take turns, portion by portion, so that a machine that slows down slows all of them down.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from typing import Any

from asyncllm_nb import AsyncLLM
from asyncllm_nb.engine.blocks import CacheBlock


@dataclass(frozen=True)
class Job:
    """A thinker of `thoughts` tokens, and a writer that adds a note after every `every` of them."""

    prompt: list[int]
    thoughts: list[int]
    opening: list[int]  # begins each note
    every: int = 20
    note: int = 8  # tokens generated in a note

    @property
    def portions(self) -> list[list[int]]:
        """The thoughts as they come."""
        return [self.thoughts[i : i + self.every] for i in range(0, len(self.thoughts), self.every)]


@dataclass(frozen=True)
class Cost:
    """Tokens that went through the model, and seconds, for the whole job (the thinker's included)."""

    encoded: int
    seconds: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.encoded + other.encoded, self.seconds + other.seconds)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


Way = Callable[[AsyncLLM, Job], AsyncIterator[None]]
"""Does the job, and yields after each portion."""

_ENDED = object()


def make_job(llm: AsyncLLM, prompt: list[int], thoughts: int) -> Job:
    """A job whose thoughts are drawn from the prompt's tokens: what they say costs nothing."""
    drawn = random.Random(0).choices(prompt, k=thoughts)
    return Job(prompt, drawn, llm.encode("\n\nIn short,"))


async def compare_sharing(llm: AsyncLLM, job: Job) -> dict[str, Cost]:
    """The cost of each way. No block is left."""
    ways: dict[str, Way] = {"shared": _shared, "prefix": _prefix, "text": _text}
    running = {name: way(llm, job) for name, way in ways.items()}
    costs = {name: Cost(0, 0.0) for name in ways}
    while running:
        for name, way in list(running.items()):
            before, began = llm.stats()["tokens_encoded"], time.perf_counter()
            if await anext(way, _ENDED) is _ENDED:
                del running[name]
            encoded = llm.stats()["tokens_encoded"] - before
            costs[name] += Cost(encoded, time.perf_counter() - began)
    return costs


async def _shared(llm: AsyncLLM, job: Job) -> AsyncIterator[None]:
    prompt, thinker, writer = await llm.create_blocks("prompt", "thinker", "writer")
    await llm.forward(job.prompt, [prompt], logits="none")
    for portion in job.portions:
        await llm.forward(portion, [prompt, thinker], logits="none")
        await _note(llm, job, [prompt, thinker, writer], job.opening)
        yield
    await _free(llm, prompt, thinker, writer)


async def _text(llm: AsyncLLM, job: Job) -> AsyncIterator[None]:
    thinker = await llm.create_block("thinker of text")
    await llm.forward(job.prompt, [thinker], logits="none")
    thoughts, notes = list[int](), list[int]()
    for portion in job.portions:
        await llm.forward(portion, [thinker], logits="none")
        thoughts += portion
        whole = await llm.create_block("whole text")
        notes += job.opening
        notes += await _note(llm, job, [whole], [*job.prompt, *thoughts, *notes])
        await _free(llm, whole)
        yield
    await _free(llm, thinker)


async def _prefix(llm: AsyncLLM, job: Job) -> AsyncIterator[None]:
    thinker, copy = await llm.create_blocks("thinker that is copied", "the writer's copy")
    await llm.forward(job.prompt, [thinker], logits="none")
    await llm.forward(job.prompt, [copy], logits="none")
    notes = list[int]()
    for portion in job.portions:
        await llm.forward(portion, [thinker], logits="none")
        await llm.forward(portion, [copy], logits="none")
        tail = await llm.create_block("notes")
        notes += job.opening
        notes += await _note(llm, job, [copy, tail], notes)
        await _free(llm, tail)
        yield
    await _free(llm, thinker, copy)


async def _note(llm: AsyncLLM, job: Job, view: list[CacheBlock], inputs: list[int]) -> list[int]:
    """Generate a note behind `inputs`; its ids."""
    never = list(llm.config.eos_token_ids)
    stream = llm.generate(inputs, view, max_tokens=job.note, forbid=never)
    await stream
    await llm.drain()  # the last token is encoded too: the next note reads it
    return stream.token_ids


async def _free(llm: AsyncLLM, *blocks: CacheBlock) -> None:
    for block in blocks:
        await llm.free_block(block)
