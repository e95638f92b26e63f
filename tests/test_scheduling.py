"""Who runs when: fair batches; pausing, stepping and draining; the loop that the engine belongs to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from helpers import BOTH_KINDS, answer_of, contents, engine, tokens, turns, until

from asyncllm_nb import AsyncLLM, TokenStream


async def read_ids(stream: TokenStream) -> list[int]:
    return [token.id async for token in stream]


def steps_of(llm: AsyncLLM, name: str | None) -> list[int]:
    """Numbers of the steps with a row of this stream."""
    return [step.number for step in llm.trace.steps if any(r.name == name for r in step.rows)]


def prefill_steps(llm: AsyncLLM, block: str) -> list[int]:
    """Numbers of the steps with a chunk for this block."""
    return [
        step.number
        for step in llm.trace.steps
        if any(row.block == block and row.kind == "prefill" for row in step.rows)
    ]


# ---- fairness ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", BOTH_KINDS)
async def test_long_prefill_delays_no_decode_by_more_than_one_step(family: str) -> None:
    async with engine(family, cache_tokens=8192, max_batch_tokens=256) as llm:
        streams = [llm.generate(tokens(5 + i, seed=i), name=f"s{i}") for i in range(4)]
        reading = [asyncio.create_task(read_ids(stream)) for stream in streams]
        await until(lambda: all(stream.token_ids for stream in streams))
        large = await llm.create_block("large")
        await llm.forward(tokens(4000), large, logits="none")
        for stream in streams:
            await stream.cancel()
        await asyncio.gather(*reading)
        during = prefill_steps(llm, "large")
        assert len(during) >= 4000 // 256
        for stream in streams:
            rows = [n for n in steps_of(llm, stream.name) if during[0] - 2 <= n <= during[-1] + 2]
            gaps = [later - earlier - 1 for earlier, later in zip(rows, rows[1:], strict=False)]
            assert len(rows) >= len(during) // 2
            assert max(gaps) <= 1


async def test_long_prefill_does_not_starve_a_short_one() -> None:
    async with engine(cache_tokens=4096) as llm:
        large, small = await llm.create_blocks("large", "small")
        first = asyncio.create_task(answer_of(llm.forward(tokens(1500), large)))
        await until(lambda: len(prefill_steps(llm, "large")) >= 2)
        await llm.forward(tokens(40), small)
        assert not first.done()
        assert len(prefill_steps(llm, "small")) <= 3
        await first


async def test_streams_share_their_steps() -> None:
    """Eight streams take about as many steps as one."""
    async with engine() as llm:
        await asyncio.gather(*(read_ids(llm.generate(tokens(3, seed=i), max_tokens=20)) for i in range(8)))
        assert len(llm.trace.steps) <= 20 + 6
        assert max(len(step.rows) for step in llm.trace.steps) == 8


async def test_idle_listener_delays_nobody() -> None:
    """A consumer that stays in its body, and one whose task yields to the loop over and over."""
    async with engine() as llm:
        idle = aiter(llm.generate(tokens(3), max_tokens=9))
        await anext(idle)
        done = asyncio.Event()

        async def fidget() -> None:
            async for _ in llm.generate(tokens(4), max_tokens=9):
                await done.wait()

        fidgeting = asyncio.create_task(fidget())
        before = len(llm.trace.steps)
        assert len(await read_ids(llm.generate(tokens(5), max_tokens=30))) == 30
        assert len(llm.trace.steps) - before <= 30 + 4
        done.set()
        await fidgeting


async def test_batch_is_never_larger_than_asked() -> None:
    async with engine(max_batch_tokens=24) as llm:
        work = [read_ids(llm.generate(tokens(31, seed=i), max_tokens=5)) for i in range(9)]
        await asyncio.gather(*work)
        assert max(sum(row.num_tokens for row in s.rows) for s in llm.trace.steps) <= 24


# ---- control ----------------------------------------------------------------------------------


async def test_paused_engine_makes_no_step() -> None:
    async with engine() as llm:
        llm.pause()
        assert llm.snapshot()["paused"]
        waiting = asyncio.create_task(answer_of(llm.forward(tokens(5))))
        await turns(200)
        assert not waiting.done()
        assert not llm.trace.steps
        llm.resume()
        assert not llm.snapshot()["paused"]
        await waiting


async def test_step_makes_as_many_steps_as_asked() -> None:
    async with engine() as llm:
        block = await llm.create_block()
        reading = asyncio.create_task(read_ids(llm.generate(tokens(5), block, max_tokens=7)))
        assert await llm.step() == 1
        assert llm.snapshot()["paused"]
        await turns()
        assert block.num_tokens == 5 + 1
        assert await llm.step(3) == 3
        await turns()
        assert block.num_tokens == 5 + 4
        assert len(llm.trace.steps) == 4
        assert await llm.step(50) < 50
        assert len(await reading) == 7


async def test_step_counts_its_own_steps_only() -> None:
    """Not the one before it, whose result has just been delivered."""
    async with engine() as llm:
        block = (await llm.forward(tokens(3))).block
        writing = asyncio.create_task(answer_of(llm.forward(tokens(200), block)))
        assert await llm.step() == 1
        assert len(llm.trace.steps) == 2
        assert await llm.step(2) == 2
        assert len(llm.trace.steps) == 4
        llm.resume()
        await writing


async def test_step_with_nothing_to_do_makes_none() -> None:
    async with engine() as llm:
        assert await llm.step(3) == 0


async def test_step_while_running_pauses_first() -> None:
    async with engine() as llm:
        reading = asyncio.create_task(read_ids(llm.generate(tokens(5), max_tokens=40)))
        await until(lambda: len(llm.trace.steps) >= 3)
        assert await llm.step(2) == 2
        made = len(llm.trace.steps)
        await turns(200)
        assert len(llm.trace.steps) == made
        llm.resume()
        assert len(await reading) == 40


async def test_drain_encodes_what_was_yielded() -> None:
    async with engine() as llm:
        block = await llm.create_block()
        before = block.version
        async for _ in llm.generate(tokens(5), block):
            if block.num_tokens == 9:
                break
        await llm.drain()
        assert block.version == before + 1 + 4
        made = len(llm.trace.steps)
        await turns(200)
        assert len(llm.trace.steps) == made


async def test_drain_does_not_wait_for_a_stream_that_nobody_asks() -> None:
    async with engine() as llm:
        iterator = aiter(llm.generate(tokens(5)))
        await anext(iterator)
        await llm.drain()
        await anext(iterator)


async def test_drain_waits_for_what_is_queued() -> None:
    async with engine(max_batch_tokens=16) as llm:
        block = await llm.create_block()
        asked = asyncio.create_task(answer_of(llm.forward(tokens(100), block)))
        await turns(2)
        await llm.drain()
        assert block.num_tokens == 100
        await asked


async def test_drain_while_paused_raises() -> None:
    async with engine() as llm:
        llm.pause()
        with pytest.raises(RuntimeError, match="resume"):
            await llm.drain()


async def test_another_loop_or_thread_gets_an_error_that_names_the_fix() -> None:
    async with engine() as llm:
        block = (await llm.forward(tokens(3))).block
        before = contents(llm)
        errors: list[BaseException] = []

        def elsewhere() -> None:
            for request in (
                lambda: llm.forward([5], block),
                lambda: llm.create_block(),
                lambda: llm.drain(),
            ):

                async def call(request: Callable[[], Awaitable[Any]] = request) -> None:
                    await request()

                try:
                    asyncio.run(call())
                except Exception as error:
                    errors.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        await until(lambda: not thread.is_alive())
        assert len(errors) == 3
        assert all(isinstance(error, RuntimeError) for error in errors)
        assert all("loop" in str(error) for error in errors)
        assert contents(llm) == before
