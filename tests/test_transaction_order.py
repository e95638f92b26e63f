"""Who waits for whom around a transaction: writers outside for its end, nobody inside for them."""

from __future__ import annotations

import asyncio

from helpers import answer_of, engine, filled_block, tokens, turns, until

from asyncllm_nb import AsyncLLM, CacheBlock

START = tokens(20)
MORE = tokens(7, seed=1)


async def look(llm: AsyncLLM, block: CacheBlock) -> None:
    """Read the block, and change nothing."""
    await llm.forward([5], [block, await llm.create_block()])


async def test_cancelled_while_waiting_to_begin() -> None:
    async with engine() as llm:
        block = await filled_block(llm, START, "block")
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
        block = await filled_block(llm, START, "block")

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
        block, extra = await filled_block(llm, START, "block"), await filled_block(llm, [8, 9], "extra")
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


async def test_crossed_transactions_do_not_deadlock() -> None:
    """Each takes all of its blocks at once, whatever the order they are named in."""
    async with engine() as llm:
        a, b, c = [await filled_block(llm, START, name) for name in "abc"]

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
        a, b = await filled_block(llm, START, "a"), await filled_block(llm, MORE, "b")
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
        a, b, c, d = [await filled_block(llm, START, name) for name in "abcd"]
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
        a, b = await filled_block(llm, START, "a"), await filled_block(llm, MORE, "b")
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
        block = await filled_block(llm, START, "block")
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
