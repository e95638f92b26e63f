"""Random programs over blocks agree with the literal model: reordered views, forks, merges and all.

Each program runs twice, operation by operation: on the engine, and on immutable literal blocks.
After every write the tokens agree; every forward's logits agree; at the end all blocks are read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from helpers import (
    BOTH_KINDS,
    FAMILIES,
    Bench,
    assert_close,
    checkpoint,
    engine,
    flatten,
    literal,
    read,
    tokens,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from literal import LiteralBlock, LiteralModel
from test_exactness import transformers_logits
from torch import Tensor, cat

from asyncllm_nb import AsyncLLM, CacheBlock
from asyncllm_nb.testing import TOLERANCE, assert_close_logits

MAX_BLOCKS = 6
MAX_TOKENS = 260


class Undo(Exception):
    """Raised inside a transaction to have it undone."""


@dataclass(frozen=True)
class Op:
    """One operation; `first`, `second`, `third` choose blocks, `size` the number of new tokens."""

    kind: str
    first: int
    second: int
    third: int
    size: int
    keeps: bool = True  # a transaction is left without an exception; a stream is sampled, not greedy


KINDS = ("create", "forward", "forward", "merge", "append", "fork", "replace", "clear", "free")
OP = st.builds(
    Op,
    kind=st.sampled_from((*KINDS, "stream", "transaction")),
    first=st.integers(0, MAX_BLOCKS - 1),
    second=st.integers(0, MAX_BLOCKS - 1),
    third=st.integers(0, MAX_BLOCKS - 1),
    size=st.one_of(st.integers(1, 4), st.integers(1, 40)),
    keeps=st.booleans(),
)


@dataclass
class Program:
    """The engine's blocks and their literal twins, at the same indices."""

    llm: AsyncLLM
    model: LiteralModel
    dtype: torch.dtype = torch.float32  # of the engine: its line of the table of tolerances
    blocks: list[CacheBlock] = field(default_factory=list)
    twins: list[LiteralBlock] = field(default_factory=list)
    num_done: int = 0

    async def run(self, ops: list[Op]) -> None:
        await self.create()
        for op in ops:
            self.num_done += 1
            if op.kind == "transaction":
                await self.transaction(op)
            else:
                await self.apply(op)
            self.check_tokens()
        await self.check_whole_view()

    async def apply(self, op: Op) -> None:
        first, second, third = (i % len(self.blocks) for i in (op.first, op.second, op.third))
        view = list(dict.fromkeys((first, second, third)))
        new = tokens(op.size, seed=self.num_done)
        if op.kind in ("create", "merge", "fork") and len(self.blocks) == MAX_BLOCKS:
            return
        if op.kind in ("append", "merge") and self.num_tokens(first, second) > MAX_TOKENS:
            return
        match op.kind:
            case "create":
                await self.create()
            case "forward":
                await self.forward(view, new)
            case "stream":
                await self.stream(view, new[:3], 1 + op.size % 5, temperature=float(op.keeps))
            case "merge":
                merged = await self.llm.merge_blocks(self.blocks[first], self.blocks[second])
                self.add(merged, self.twins[first] + self.twins[second])
            case "append" if first != second:
                await self.llm.append_block(self.blocks[first], self.blocks[second])
                self.twins[first] += self.twins[second]
            case "fork":
                self.add(await self.llm.fork(self.blocks[first]), self.twins[first])
            case "replace":
                await self.llm.replace(self.blocks[view[-1]], new, [self.blocks[i] for i in view])
                self.twins[view[-1]] = LiteralBlock()
                self.write_twin(view, new)
            case "clear":
                await self.llm.clear(self.blocks[first])
                self.twins[first] = LiteralBlock()
            case "free" if len(self.blocks) > 1:
                await self.llm.free_block(self.blocks.pop(first))
                self.twins.pop(first)

    async def create(self) -> None:
        self.add(await self.llm.create_block(), LiteralBlock())

    async def forward(self, view: list[int], new: list[int]) -> None:
        output = await self.llm.forward(new, [self.blocks[i] for i in view], logits="all")
        assert output.logits is not None
        assert_close_logits(output.logits.cpu(), self.write_twin(view, new), self.dtype)

    async def stream(self, view: list[int], new: list[int], max_tokens: int, temperature: float) -> None:
        stream = self.llm.generate(
            new, [self.blocks[i] for i in view], max_tokens=max_tokens, temperature=temperature
        )
        made = [token async for token in stream]
        logits = self.write_twin(view, [*new, *(token.id for token in made)])
        said = logits[len(new) - 1 : -1].log_softmax(-1)
        allowed = 2 * TOLERANCE[self.dtype] * logits.abs().max().item()  # of its logit, and of the sum's
        for token, row in zip(made, said, strict=True):
            assert token.logprob == pytest.approx(float(row[token.id]), abs=allowed)

    async def transaction(self, op: Op) -> None:
        """Three writes in a transaction over all blocks; then kept, or undone by an exception."""
        before = list(self.twins)
        try:
            async with self.llm.transaction(*self.blocks):
                view = list(dict.fromkeys(i % len(self.blocks) for i in (op.first, op.second)))
                await self.forward(view, tokens(op.size, seed=-self.num_done))
                await self.apply(Op("append", op.second, op.third, 0, 1))
                await self.apply(Op("replace", op.third, op.first, op.second, 3))
                if not op.keeps:
                    raise Undo
        except Undo:
            self.twins = before

    def write_twin(self, view: list[int], new: list[int]) -> Tensor:
        """Encode `new` into the twin of the last block; returns the literal logits."""
        block, logits = self.model.encode(new, [self.twins[i] for i in view])
        self.twins[view[-1]] = block
        return logits

    def add(self, block: CacheBlock, twin: LiteralBlock) -> None:
        self.blocks.append(block)
        self.twins.append(twin)

    def num_tokens(self, *indices: int) -> int:
        return sum(len(self.twins[i].tokens) for i in indices)

    def check_tokens(self) -> None:
        for block, twin in zip(self.blocks, self.twins, strict=True):
            assert block.token_ids == list(twin.tokens)
            assert block.num_tokens == block.span == len(twin.tokens)

    async def check_whole_view(self) -> None:
        """All blocks backwards, and a new one at the end."""
        self.blocks.reverse()
        self.twins.reverse()
        await self.llm.free_block(self.blocks.pop())
        self.twins.pop()
        await self.create()
        await self.forward(list(range(len(self.blocks))), tokens(5, seed=99))


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    """The engines that all programs share."""
    with Bench() as bench:
        yield bench


@pytest.mark.exact
@pytest.mark.parametrize("family", BOTH_KINDS)
@settings(max_examples=60, deadline=None)
@given(ops=st.lists(OP, min_size=2, max_size=14), budget=st.sampled_from([48, 256]))
def test_random_program_agrees_with_the_literal_model(
    bench: Bench, family: str, ops: list[Op], budget: int
) -> None:
    llm = bench.engine(family, cache_tokens=8192, max_blocks=64, max_batch_tokens=budget)
    bench.run(llm, Program(llm, literal(checkpoint(family))).run(ops))


@pytest.mark.parametrize("family", FAMILIES)
def test_literal_model_agrees_with_transformers(family: str) -> None:
    """The oracle is one: whole sequences, cut into blocks, get transformers' logits."""
    model, sequence = literal(checkpoint(family)), tokens(60)
    view: list[LiteralBlock] = []
    logits, done = [], 0
    for size in (1, 2, 3, 4, 17, 33):
        block, said = model.encode(sequence[done : done + size], [*view, LiteralBlock()])
        view.append(block)
        logits.append(said)
        done += size
    assert_close(cat(logits), transformers_logits(checkpoint(family), sequence))


async def test_many_merges_read_like_one_block() -> None:
    """More pieces than the engine keeps apart are put together anew, and read the same."""
    model, pieces = literal(checkpoint()), [tokens(3 + i, seed=i) for i in range(12)]
    async with engine() as llm:
        whole = await llm.create_block("whole")
        twin = LiteralBlock()
        for piece in pieces:
            output = await llm.forward(piece)
            whole = await llm.merge_blocks(whole, output.block)
            twin += read(model, piece)[0]
        assert whole.token_ids == flatten(pieces)
        output = await llm.forward(tokens(4), [whole], logits="all")
        assert_close(output.logits, model.encode(tokens(4), [twin])[1])


@pytest.mark.parametrize("family", BOTH_KINDS)
async def test_same_blocks_in_another_order(family: str) -> None:
    """What was written under one view is read under others, where it stands elsewhere."""
    model, parts = literal(checkpoint(family)), [tokens(n, seed=n) for n in (19, 2, 33)]
    async with engine(family) as llm:
        blocks = await llm.create_blocks(3)
        for i, part in enumerate(parts):
            await llm.forward(part, blocks[: i + 1])
        twins = read(model, *parts)
        for order in itertools.permutations(range(3)):
            view = [*(blocks[i] for i in order), await llm.create_block()]
            output = await llm.forward(tokens(3), view, logits="all")
            expected = model.encode(tokens(3), [*(twins[i] for i in order), LiteralBlock()])[1]
            assert_close(output.logits, expected)


@pytest.mark.parametrize("family", BOTH_KINDS)
async def test_fork_and_original_part_ways(family: str) -> None:
    """Both grow behind a partly filled page that they shared; neither sees the other."""
    model, start = literal(checkpoint(family)), tokens(21)
    async with engine(family) as llm:
        block = (await llm.forward(start)).block
        twin = read(model, start)[0]
        fork = await llm.fork(block, name="copy")
        ways = [(block, tokens(5, seed=1)), (fork, tokens(6, seed=2)), (block, tokens(20, seed=3))]
        twins = {id(block): twin, id(fork): twin}
        for target, new in ways:
            output = await llm.forward(new, [target], logits="all")
            twins[id(target)], expected = model.encode(new, [twins[id(target)]])
            assert_close(output.logits, expected)
