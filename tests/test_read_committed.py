"""What a coroutine reads: all that was yielded or returned when it asked, of each block a version.

Neither the chunks that an input is cut into nor what else shares the batch changes what is read.
The trace says which version of which block a row read; replaying it tells what a version holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from helpers import (
    BOTH_KINDS,
    answer_of,
    assert_close,
    checkpoint,
    engine,
    is_close,
    literal,
    read,
    tokens,
    until,
)
from literal import LiteralBlock
from torch import Tensor

from asyncllm_nb import AsyncLLM, CacheBlock, Token
from asyncllm_nb.engine.trace import RowRecord

PROMPT = tokens(40)
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 3}


def rows_of(llm: AsyncLLM, name: str | None) -> list[tuple[int, RowRecord]]:
    """All rows of a stream or request: (step number, row)."""
    return [(s.number, row) for s in llm.trace.steps for row in s.rows if row.name == name]


def view_read(llm: AsyncLLM, token: Token, name: str | None) -> dict[str, int]:
    """The versions that were read by the row which the token was sampled from."""
    (row,) = (row for number, row in rows_of(llm, name) if number == token.step)
    return dict(row.view)


@asynccontextmanager
async def crowd(llm: AsyncLLM, size: int) -> AsyncIterator[None]:
    """`size` unrelated streams that share the batch all the while, with inputs of odd lengths."""

    async def chatter(number: int) -> None:
        while True:
            stream = llm.generate(tokens(7 + 9 * number, seed=number), max_tokens=6)
            async for _ in stream:
                pass

    tasks = [asyncio.create_task(chatter(number)) for number in range(size)]
    await until(lambda: llm.trace.steps or not size)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class Reading:
    """What the coroutines of `conversation` read, and what the model told them."""

    versions: list[dict[str, int]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


async def conversation(llm: AsyncLLM) -> Reading:
    """Two streams that read each other, taken in turns; now and then a forward that reads both."""
    reading = Reading()
    prompt, left, right, notes = await llm.create_blocks("prompt", "left", "right", "notes")
    await llm.forward(PROMPT, prompt)
    streams = [
        llm.generate(tokens(11), [prompt, right, left], name="left stream", **SAMPLED),
        llm.generate(tokens(30), [prompt, left, right], name="right stream", **SAMPLED),
    ]
    iterators = [aiter(stream) for stream in streams]
    for turn in range(6):
        for stream, iterator in zip(streams, iterators, strict=True):
            token = await anext(iterator)
            reading.versions.append(view_read(llm, token, stream.name))
            reading.token_ids.append(token.id)
            reading.logprobs.append(token.logprob)
        if turn % 2:
            output = await llm.forward(tokens(50, seed=turn), [prompt, left, right, notes])
            assert output.logits is not None
            reading.logits.append(output.logits)
    return reading


@pytest.mark.parametrize("family", BOTH_KINDS)
async def test_reads_depend_neither_on_chunks_nor_on_the_crowd(family: str) -> None:
    readings = []
    for size, budget in [(0, 256), (1, 256), (8, 256), (0, 16), (1, 17), (8, 64)]:
        async with engine(family, max_batch_tokens=budget, cache_tokens=8192) as llm:
            async with crowd(llm, size):
                readings.append(await conversation(llm))
    first = readings[0]
    for other in readings[1:]:
        assert other.versions == first.versions
        assert other.token_ids == first.token_ids
        assert other.logprobs == pytest.approx(first.logprobs, abs=1e-4)
        for actual, expected in zip(other.logits, first.logits, strict=True):
            assert_close(actual, expected.double())


class Replay:
    """Recomputes a trace row by row with the literal model, from the versions it says were read."""

    def __init__(self, folder: Path) -> None:
        self.model = literal(folder)
        self.history: dict[str, list[LiteralBlock]] = {}  # by block; the last is being written
        self.versions: dict[str, int] = {}  # of the second last in the history

    def block(self, name: str, version: int) -> LiteralBlock:
        """The block as it was at `version`: committed before, or just now by what was written."""
        if name not in self.history:
            self.history[name], self.versions[name] = [LiteralBlock()] * 2, version
        age = self.versions[name] - version
        assert age >= -1, f"{name} is read at version {version}, which nobody has written"
        if age == -1:
            self.versions[name] = version
            self.history[name].append(self.history[name][-1])
            age = 0
        return self.history[name][-2 - age]

    def row(self, row: RowRecord) -> Tensor:
        """Log-probabilities [num_tokens, vocab] of one row of a step."""
        *view, own = (self.block(name, version) for name, version in row.view)
        if row.kind == "prefill" and row.block:
            own = self.history[row.block][-1]  # its earlier chunks, not committed yet
        written, logits = self.model.encode(row.token_ids, [*view, own])
        if row.block:
            self.history[row.block][-1] = written
        return logits.log_softmax(-1)


@pytest.mark.parametrize("family", BOTH_KINDS)
async def test_every_row_reads_what_the_trace_says(family: str) -> None:
    """Coroutines at full speed: each token's probability follows from the versions that it read."""
    async with engine(family, max_batch_tokens=24) as llm:
        prompt, left, right, notes = await llm.create_blocks("prompt", "left", "right", "notes")
        made: dict[tuple[int, str | None], Token] = {}

        async def speak(view: list[CacheBlock], size: int) -> None:
            stream = llm.generate(tokens(size), view, max_tokens=14, **SAMPLED)
            async for token in stream:
                made[token.step, stream.name] = token

        async def take_notes() -> None:
            for size in (60, 5, 31):
                await llm.forward(tokens(size), [prompt, right, left, notes])

        await llm.forward(PROMPT, prompt)
        await asyncio.gather(
            speak([prompt, right, left], 5), speak([prompt, notes, left, right], 37), take_notes()
        )
        await llm.drain()
        replay = Replay(checkpoint(family))
        for step in llm.trace.steps:
            said = [(row, replay.row(row)) for row in step.rows]
            for row, logprobs in said:
                if token := made.pop((step.number, row.name), None):
                    assert token.logprob == pytest.approx(float(logprobs[-1, token.id]), abs=1e-4)
        assert not made, "every token was sampled from a row of the trace"


@pytest.mark.parametrize("family", BOTH_KINDS)
async def test_request_sees_all_that_was_yielded(family: str) -> None:
    """A forward, a probe and another stream's input, each asked for in the body of a stream."""
    model = literal(checkpoint(family))
    async with engine(family) as llm:
        prompt, left, right = await llm.create_blocks("prompt", "left", "right")
        await llm.forward(PROMPT, prompt)
        async for _ in llm.generate(tokens(3), [prompt, left], max_tokens=4, **SAMPLED):
            twins = [*read(model, PROMPT, left.token_ids), LiteralBlock()]
            said = model.encode(tokens(9), twins)[1]
            output = await llm.forward(tokens(9), [prompt, left, right], logits="all")
            assert_close(output.logits, said)
            await llm.clear(right)
            other = llm.generate(tokens(9), [prompt, left, right], max_tokens=1)
            (token,) = [token async for token in other]
            assert token.logprob == pytest.approx(float(said[-1].log_softmax(-1).max()), abs=1e-4)
            await llm.clear(right)


@pytest.mark.parametrize("family", BOTH_KINDS)
async def test_forward_reads_one_snapshot(family: str) -> None:
    """In chunks, while a block of its view grows with every step."""
    model = literal(checkpoint(family))
    async with engine(family, max_batch_tokens=16) as llm:
        prompt, left, notes = await llm.create_blocks("prompt", "left", "notes")
        await llm.forward(PROMPT, prompt)
        stream = llm.generate(tokens(3), [prompt, left], max_tokens=60, **SAMPLED)
        writing = asyncio.create_task(answer_of(stream))
        await until(lambda: left.num_tokens >= 8)
        seen = left.num_tokens
        output = await llm.forward(tokens(120), [prompt, left, notes], logits="all")
        await writing
        rows = [row for s in llm.trace.steps for row in s.rows if row.block == "notes"]
        assert len(rows) > 5
        assert len({row.view for row in rows}) == 1
        left_rows = [row for s in llm.trace.steps for row in s.rows if row.block == "left"]
        base = dict(left_rows[0].view)["left"]
        length = len(tokens(3)) + dict(rows[0].view)["left"] - base - 1
        assert length >= seen
        twins = read(model, PROMPT, left.token_ids[:length])
        assert_close(output.logits, model.encode(tokens(120), [*twins, LiteralBlock()])[1])


async def test_forward_commits_once() -> None:
    """Whoever looks or reads meanwhile meets none of its tokens, or all."""
    async with engine(max_batch_tokens=16) as llm:
        block = (await llm.forward(tokens(10))).block
        version, lengths = block.version, set()
        writing = asyncio.create_task(llm.forward(tokens(150, seed=1), block))
        while not writing.done():
            await llm.probe("Is it?", [block])
            lengths.add((block.num_tokens, block.version))
        assert lengths <= {(10, version), (160, version + 1)}
        assert (10, version) in lengths
        probes = [row for s in llm.trace.steps for row in s.rows if row.kind == "probe"]
        assert {dict(row.view)[block.name] for row in probes} <= {version, version + 1}


@pytest.mark.parametrize("family", BOTH_KINDS)
async def test_replace_shows_old_or_new(family: str) -> None:
    model, old, new = literal(checkpoint(family)), tokens(20), tokens(130, seed=2)
    async with engine(family, max_batch_tokens=16) as llm:
        block = (await llm.forward(old)).block
        expected = {
            kept: model.encode(tokens(3), [*read(model, ids), LiteralBlock()])[1]
            for kept, ids in (("old", old), ("new", new))
        }
        seen = []
        replacing = asyncio.create_task(llm.replace(block, new))
        while not replacing.done():
            output = await llm.forward(tokens(3), [block, await llm.create_block()], logits="all")
            (kept,) = (k for k, logits in expected.items() if is_close(output.logits, logits))
            seen.append(kept)
        assert seen[0] == "old"
        assert seen == sorted(seen, reverse=True)
        assert block.token_ids == new


async def test_stream_sees_from_the_next_step_on_what_others_add() -> None:
    async with engine() as llm:
        notes, block = await llm.create_blocks("notes", "block")
        stream = llm.generate(tokens(3), [notes, block], **SAMPLED)
        iterator = aiter(stream)
        await anext(iterator)
        await llm.forward(tokens(12), notes)
        await anext(iterator)
        third = await anext(iterator)
        assert view_read(llm, third, stream.name)["notes"] == notes.version


async def test_version_grows_by_one_with_each_write() -> None:
    async with engine(max_batch_tokens=16) as llm:
        block, extra = await llm.create_blocks("block", "extra")
        await llm.forward(tokens(3), extra)
        versions = [block.version]
        for write in (
            llm.forward(tokens(40), block),
            llm.append_block(block, extra),
            llm.replace(block, tokens(35)),
            llm.clear(block),
            llm.forward(tokens(2), block),
        ):
            await write
            versions.append(block.version)
        assert versions == list(range(versions[0], versions[0] + 6))
        assert [token async for token in llm.generate(tokens(2), block, max_tokens=3)]
        await llm.drain()
        assert block.version == versions[-1] + 1 + 3  # its input, and each token
        before = block.version
        await llm.fork(block)
        await llm.merge_blocks(block, extra)
        await llm.probe("Is it?", [block])
        assert block.version == before
