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
    free_memory,
    literal,
    read,
    tokens,
    turns,
    until,
)
from literal import LiteralBlock
from torch import Tensor

from asyncllm_nb import AsyncLLM, CacheBlock

START = tokens(20)
MORE = tokens(7, seed=1)
QUESTION = tokens(3, seed=2)


class Undo(Exception):
    """Raised inside to have the transaction undone."""


async def block_with(llm: AsyncLLM, ids: list[int], name: str) -> CacheBlock:
    block = await llm.create_block(name)
    await llm.forward(ids, block)
    return block


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
        block = await block_with(llm, START, "block")
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
        block, other = await block_with(llm, START, "a"), await block_with(llm, MORE, "b")
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
        block = await block_with(llm, START, "block")
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


async def test_cancelled_while_waiting_to_begin() -> None:
    async with engine() as llm:
        block = await block_with(llm, START, "block")
        inside = asyncio.Event()

        async def change() -> None:
            await inside.wait()
            async with llm.transaction(block):
                raise AssertionError("another task's transaction has the block")

        waiting = asyncio.create_task(change())
        async with llm.transaction(block):
            inside.set()
            await turns()
            waiting.cancel()
            assert isinstance(await answer_of(waiting), asyncio.CancelledError)
            await llm.forward(MORE, block)
        assert block.token_ids == START + MORE


async def test_cancelled_at_any_moment_of_its_beginning() -> None:
    """Also between the moment when it has its blocks and the one when its task goes on."""
    async with engine() as llm:
        block = await block_with(llm, START, "block")

        async def change() -> None:
            async with llm.transaction(block):
                await llm.forward(MORE, block)

        for count in range(12):
            changing = asyncio.create_task(change())
            await turns(count)
            changing.cancel()
            await answer_of(changing)
            await llm.replace(block, START)
        assert block.token_ids == START


async def test_writers_wait_until_it_ends() -> None:
    """A forward and an append that were asked for outside, in their order."""
    async with engine() as llm:
        block, extra = await block_with(llm, START, "block"), await block_with(llm, [8, 9], "extra")
        leave = asyncio.Event()

        async def outside() -> None:
            await leave.wait()
            await asyncio.gather(llm.forward(MORE, block), llm.append_block(block, extra))

        writing = asyncio.create_task(outside())
        async with llm.transaction(block):
            leave.set()
            await llm.forward([5], block)
            await turns()
            assert not writing.done()
            await llm.forward([6], block)
            assert block.token_ids == [*START, 5, 6]
        await writing
        assert block.token_ids == [*START, 5, 6, *MORE, 8, 9]


async def test_stream_outside_pauses_between_two_tokens() -> None:
    async with engine() as llm:
        block = await llm.create_block("block")
        got: list[int] = []

        async def write() -> None:
            async for token in llm.generate(START, block, max_tokens=30):
                got.append(token.id)

        writing = asyncio.create_task(write())
        await until(lambda: len(got) >= 4)
        async with llm.transaction(block):
            held, at = block.token_ids, len(got)
            assert held == START + got
            await llm.forward(MORE, block)
            await look(llm, block)
            assert (block.token_ids, len(got)) == (held + MORE, at)
        await writing
        assert block.token_ids == held + MORE + got[at:]
        assert len(got) == 30


async def test_inner_one_is_undone_alone() -> None:
    async with engine() as llm:
        block = await block_with(llm, START, "block")
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
        block = await block_with(llm, START, "block")
        with pytest.raises(Undo):
            async with llm.transaction(block):
                async with llm.transaction(block):
                    await llm.forward(MORE, block)
                raise Undo
        assert block.token_ids == START
        assert_close(await look(llm, block), look_of("qwen3_5", START))


async def test_only_its_blocks_and_those_made_inside_may_be_written() -> None:
    async with engine() as llm:
        block = await block_with(llm, START, "mine")
        foreign = await block_with(llm, MORE, "foreign")
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
        block = await block_with(llm, START, "mine")
        async with llm.transaction(block):
            with pytest.raises(ValueError, match="mine"):
                await llm.free_block(block)
            made = await llm.create_block("made")
            await llm.free_block(made)
        assert block.token_ids == START


async def test_tasks_started_inside_belong_to_it() -> None:
    async with engine() as llm:
        block = await block_with(llm, START, "block")
        async with llm.transaction(block):
            await asyncio.create_task(answer_of(llm.forward(MORE, block)))
            assert block.token_ids == START + MORE


async def test_streams_opened_inside_end_with_it() -> None:
    async with engine() as llm:
        block = await block_with(llm, START, "block")
        async with llm.transaction(block):
            stream = llm.generate([5], block)
            iterator = aiter(stream)
            await anext(iterator)
            assert stream.stop_reason is None
        assert stream.stop_reason == "cancelled"
        assert block.token_ids == [*START, 5, *stream.token_ids]
        with pytest.raises(StopAsyncIteration):
            await anext(iterator)


async def test_crossed_transactions_do_not_deadlock() -> None:
    """Each takes all of its blocks at once, whatever the order they are named in."""
    async with engine() as llm:
        a, b, c = [await block_with(llm, START, name) for name in "abc"]

        async def change(*blocks: CacheBlock) -> None:
            for _ in range(4):
                async with llm.transaction(*blocks):
                    for block in blocks:
                        await llm.forward([5], block)
                        await asyncio.sleep(0)

        await asyncio.gather(change(a, b), change(b, a), change(b, c), change(c, a, b))
        assert [block.num_tokens for block in (a, b, c)] == [32, 36, 28]


async def test_reads_inside_do_not_wait_for_those_who_wait_for_its_end() -> None:
    """An append and another transaction stand in line for a block that it reads, and, behind them,
    a forward that needs nothing of the transaction's."""
    async with engine() as llm:
        a, b = await block_with(llm, START, "a"), await block_with(llm, MORE, "b")
        started = asyncio.Event()

        async def wait_for_both() -> None:
            async with llm.transaction(b, a):
                pass

        async def ask() -> None:
            await started.wait()
            await asyncio.gather(llm.append_block(a, b), wait_for_both(), llm.forward([5], b))

        waiting = asyncio.create_task(ask())
        async with llm.transaction(a):
            started.set()
            await turns()
            assert (await llm.fork(b)).token_ids == MORE
            assert (await llm.merge_blocks(b, a)).token_ids == MORE + START
            assert not waiting.done()
        await waiting
        assert (a.token_ids, b.token_ids) == (START + MORE, [*MORE, 5])


async def test_two_transactions_pass_those_who_wait_for_the_other() -> None:
    """Each reads a block for which somebody stands in line who needs a block of the other one."""
    async with engine() as llm:
        a, b, c, d = [await block_with(llm, START, name) for name in "abcd"]
        inside, asked = asyncio.Barrier(3), asyncio.Event()

        async def change(mine: CacheBlock, other: CacheBlock) -> None:
            async with llm.transaction(mine):
                await inside.wait()
                await asked.wait()
                await llm.fork(other)

        changing = asyncio.gather(change(a, d), change(b, c))
        await inside.wait()
        outside = asyncio.gather(llm.append_block(a, c), llm.append_block(b, d))
        await turns()
        asked.set()
        await asyncio.gather(changing, outside)
        assert a.num_tokens == b.num_tokens == 2 * len(START)


async def test_two_transactions_read_each_others_blocks() -> None:
    """Each sees the other's as they were at the start."""
    async with engine() as llm:
        a, b = await block_with(llm, START, "a"), await block_with(llm, MORE, "b")
        inside = asyncio.Barrier(2)

        async def change(mine: CacheBlock, other: CacheBlock) -> list[int]:
            async with llm.transaction(mine):
                await llm.forward([5], mine)
                await inside.wait()
                await look(llm, other)
                return (await llm.fork(other)).token_ids

        seen_a, seen_b = await asyncio.gather(change(b, a), change(a, b))
        assert seen_a == START
        assert seen_b == MORE


async def test_drain_inside_does_not_wait_for_those_outside() -> None:
    async with engine() as llm:
        block = await block_with(llm, START, "block")
        started = asyncio.Event()

        async def write() -> None:
            await started.wait()
            await llm.forward(MORE, block)

        writing = asyncio.create_task(write())
        async with llm.transaction(block):
            started.set()
            await turns()
            await llm.drain()
            assert not writing.done()
        await writing


async def test_it_waits_for_its_turn() -> None:
    """What was asked for before it is written before it; what it reads at its start is that."""
    async with engine(max_batch_tokens=16) as llm:
        block = await llm.create_block()
        asked = asyncio.create_task(answer_of(llm.forward(tokens(90), block)))
        await turns(3)
        async with llm.transaction(block):
            assert block.token_ids == tokens(90)
        await asked


async def test_freed_and_foreign_blocks_are_refused() -> None:
    async with engine() as llm, engine() as other:
        gone = await block_with(llm, START, "gone")
        await llm.free_block(gone)
        for block in (gone, await block_with(other, START, "elsewhere")):
            with pytest.raises(ValueError, match=block.name):
                async with llm.transaction(block):
                    pass
