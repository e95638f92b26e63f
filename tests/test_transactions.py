"""Transactions: others read the start and wait to write; an exception puts everything back."""

from __future__ import annotations

import asyncio

import pytest
from helpers import (
    BOTH_KINDS,
    answer_of,
    assert_close,
    checkpoint,
    engine,
    filled_block,
    free_memory,
    literal,
    read,
    tokens,
)
from literal import LiteralBlock
from torch import Tensor

from asyncllm_nb import AsyncLLM, CacheBlock

START = tokens(20)
MORE = tokens(7, seed=1)
QUESTION = tokens(3, seed=2)


class Undo(Exception):
    """Raised inside to have the transaction undone."""


async def look(llm: AsyncLLM, block: CacheBlock) -> Tensor | None:
    """The logits of a question asked behind the block; changes nothing."""
    answer = await llm.forward(QUESTION, [block, await llm.create_block()], logits="all")
    return answer.logits


def look_of(family: str, ids: list[int]) -> Tensor:
    """What `look` must see in a block of these tokens."""
    model = literal(checkpoint(family))
    return model.encode(QUESTION, [*read(model, ids), LiteralBlock()])[1]


@pytest.mark.parametrize("family", BOTH_KINDS)
async def test_others_read_the_start_until_the_end(family: str) -> None:
    async with engine(family) as llm:
        block = await filled_block(llm, START, "block")
        inside, leave = asyncio.Event(), asyncio.Event()

        async def change() -> None:
            async with llm.transaction(block):
                await llm.forward(MORE, block)
                assert_close(await look(llm, block), look_of(family, START + MORE))
                inside.set()
                await leave.wait()

        changing = asyncio.create_task(change())
        await inside.wait()
        assert_close(await look(llm, block), look_of(family, START))
        leave.set()
        await changing
        assert_close(await look(llm, block), look_of(family, START + MORE))


@pytest.mark.parametrize("family", BOTH_KINDS)
async def test_exception_restores(family: str) -> None:
    async with engine(family) as llm:
        block, other = await filled_block(llm, START, "a"), await filled_block(llm, MORE, "b")
        memory, versions = free_memory(llm), (block.version, other.version)
        with pytest.raises(Undo):
            async with llm.transaction(block, other):
                await llm.append_block(block, other)
                await llm.replace(other, tokens(40))
                async for _ in llm.generate(None, other, max_tokens=3):
                    pass
                await llm.clear(block)
                raise Undo
        assert (block.token_ids, other.token_ids) == (START, MORE)
        assert (block.version, other.version) >= versions
        assert_close(await look(llm, block), look_of(family, START))
        assert_close(await look(llm, other), look_of(family, MORE))
        await llm.drain()
        assert free_memory(llm) == memory


async def test_cancellation_restores() -> None:
    """In the body, and in the middle of a write."""
    async with engine(max_batch_tokens=16) as llm:
        block = await filled_block(llm, START, "block")
        inside = asyncio.Event()

        async def change(wait: bool) -> None:
            async with llm.transaction(block):
                await llm.forward(MORE, block)
                inside.set()
                if wait:
                    await asyncio.Event().wait()
                await llm.forward(tokens(200), block)

        for wait in (True, False):
            inside.clear()
            changing = asyncio.create_task(change(wait))
            await inside.wait()
            changing.cancel()
            assert isinstance(await answer_of(changing), asyncio.CancelledError)
            assert block.token_ids == START
            await llm.drain()
            llm.check_integrity()


async def test_inner_one_is_undone_alone() -> None:
    async with engine() as llm:
        block = await filled_block(llm, START, "block")
        async with llm.transaction(block):
            await llm.forward([5], block)
            with pytest.raises(Undo):
                async with llm.transaction(block):
                    await llm.forward([6], block)
                    raise Undo
            assert block.token_ids == [*START, 5]
            async with llm.transaction(block):
                await llm.forward([7], block)
            assert block.token_ids == [*START, 5, 7]
        assert block.token_ids == [*START, 5, 7]


async def test_outer_one_undoes_the_inner_one() -> None:
    async with engine() as llm:
        block = await filled_block(llm, START, "block")
        with pytest.raises(Undo):
            async with llm.transaction(block):
                async with llm.transaction(block):
                    await llm.forward(MORE, block)
                raise Undo
        assert block.token_ids == START
        assert_close(await look(llm, block), look_of("qwen3_5", START))


async def test_only_its_blocks_and_those_made_inside_may_be_written() -> None:
    async with engine() as llm:
        block = await filled_block(llm, START, "mine")
        foreign = await filled_block(llm, MORE, "foreign")
        async with llm.transaction(block):
            made = await llm.create_block("made")
            await llm.forward(MORE, [block, made])
            fork = await llm.fork(block)
            await llm.append_block(fork, foreign)
            for write in (
                lambda: llm.forward([5], foreign),
                lambda: llm.append_block(foreign, block),
                lambda: llm.replace(foreign, [5]),
                lambda: llm.clear(foreign),
            ):
                with pytest.raises(ValueError, match="foreign"):
                    await write()
            with pytest.raises(ValueError, match="foreign"):
                async for _ in llm.generate([5], foreign, max_tokens=1):
                    pass
            with pytest.raises(ValueError, match="foreign"):
                async with llm.transaction(foreign):
                    pass
        assert foreign.token_ids == MORE
        assert made.token_ids == MORE


async def test_its_blocks_may_not_be_freed_inside() -> None:
    async with engine() as llm:
        block = await filled_block(llm, START, "mine")
        async with llm.transaction(block):
            with pytest.raises(ValueError, match="mine"):
                await llm.free_block(block)
            made = await llm.create_block("made")
            await llm.free_block(made)
        assert block.token_ids == START


async def test_tasks_started_inside_belong_to_it() -> None:
    async with engine() as llm:
        block = await filled_block(llm, START, "block")
        async with llm.transaction(block):
            await asyncio.create_task(answer_of(llm.forward(MORE, block)))
            assert block.token_ids == START + MORE


async def test_streams_opened_inside_end_with_it() -> None:
    async with engine() as llm:
        block = await filled_block(llm, START, "block")
        async with llm.transaction(block):
            stream = llm.generate([5], block)
            iterator = aiter(stream)
            await anext(iterator)
            assert stream.stop_reason is None
        assert stream.stop_reason == "cancelled"
        assert block.token_ids == [*START, 5, *stream.token_ids]
        with pytest.raises(StopAsyncIteration):
            await anext(iterator)


async def test_freed_and_foreign_blocks_are_refused() -> None:
    async with engine() as llm, engine() as other:
        gone = await filled_block(llm, START, "gone")
        await llm.free_block(gone)
        for block in (gone, await filled_block(other, START, "elsewhere")):
            with pytest.raises(ValueError, match=block.name):
                async with llm.transaction(block):
                    pass
