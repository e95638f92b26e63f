"""Who runs when: fair batches, pausing, stepping and draining, and waiting for memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from helpers import (
    BOTH_KINDS,
    answer_of,
    checkpoint,
    contents,
    engine,
    free_memory,
    tokens,
    turns,
    until,
)

from asyncllm_nb import AsyncLLM, CacheFullError, TokenStream

PAGE = 16


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
        await asyncio.gather(
            *(read_ids(llm.generate(tokens(3, seed=i), max_tokens=20)) for i in range(8))
        )
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


# ---- memory -----------------------------------------------------------------------------------


async def test_request_that_can_never_fit_fails_at_once() -> None:
    """It says what it needs, what is free and who holds most; what runs is not disturbed."""
    async with engine(cache_tokens=8 * PAGE) as llm:
        big, new = await llm.create_blocks("big holder", "new")
        await llm.forward(tokens(70), big)
        before, memory = contents(llm), free_memory(llm)
        llm.pause()  # nothing could ever be freed
        with pytest.raises(CacheFullError, match="big holder") as caught:
            await llm.forward(tokens(9 * PAGE), new)
        assert str(memory[0]) in str(caught.value)
        llm.resume()
        assert (contents(llm), free_memory(llm)) == (before, memory)


async def test_request_that_could_fit_waits_for_memory() -> None:
    async with engine(cache_tokens=8 * PAGE) as llm:
        holder = (await llm.forward(tokens(6 * PAGE))).block
        stream = aiter(llm.generate([5], await llm.create_block()))
        await anext(stream)  # in its body: it may free something yet
        waiting = asyncio.create_task(answer_of(llm.forward(tokens(4 * PAGE))))
        await turns(200)
        assert not waiting.done()
        await llm.free_block(holder)
        assert not isinstance(await waiting, BaseException)


async def test_waiting_stream_shows_as_waiting() -> None:
    async with engine(cache_tokens=8 * PAGE) as llm:
        holder = (await llm.forward(tokens(7 * PAGE))).block
        idle = aiter(llm.generate([5]))
        await anext(idle)
        stream = llm.generate(tokens(PAGE))
        reading = asyncio.create_task(answer_of(anext(aiter(stream))))
        await until(lambda: stream.state == "waiting")
        assert "waiting" in {shown["state"] for shown in llm.snapshot()["streams"]}
        await llm.free_block(holder)
        assert not isinstance(await reading, BaseException)


async def test_one_of_two_waiters_fails_when_nothing_can_run() -> None:
    """Two streams grow until both want the last page; what the one held lets the other go on."""
    async with engine(cache_tokens=8 * PAGE) as llm:

        async def grow(seed: int) -> list[int]:
            return await read_ids(llm.generate(tokens(3 * PAGE, seed), max_tokens=3 * PAGE + 5))

        answers = await asyncio.gather(*(answer_of(grow(seed)) for seed in range(2)))
        failed = [answer for answer in answers if isinstance(answer, CacheFullError)]
        (other,) = (answer for answer in answers if isinstance(answer, list))
        assert len(failed) == 1
        assert len(other) == 3 * PAGE + 5


async def test_youngest_waiter_fails_first() -> None:
    async with engine(cache_tokens=8 * PAGE) as llm:
        holder = (await llm.forward(tokens(6 * PAGE))).block
        failed: list[str] = []

        async def ask(name: str, size: int) -> None:
            answer = await answer_of(llm.forward(tokens(size)))
            assert isinstance(answer, CacheFullError)
            failed.append(name)

        async with asyncio.TaskGroup() as group:
            for name, size in (("oldest", 3), ("middle", 8), ("youngest", 4)):
                group.create_task(ask(name, size * PAGE))
        assert failed == ["youngest", "middle", "oldest"]
        assert holder.num_tokens == 6 * PAGE


async def test_slots_run_out_too() -> None:
    """Only a hybrid model has them."""
    async with engine("qwen3_5", max_blocks=4) as llm:
        kept = []
        with pytest.raises(CacheFullError, match="slot"):
            for _ in range(9):
                kept.append((await llm.forward(tokens(2))).block)
        assert 2 <= len(kept) <= 4
        await llm.free_block(kept.pop())
        await llm.forward(tokens(2))


async def test_block_whose_last_reference_is_gone_gives_its_memory_back() -> None:
    async with engine() as llm:
        memory = free_memory(llm)
        block = (await llm.forward(tokens(100))).block
        assert free_memory(llm) < memory
        del block
        await llm.drain()
        assert free_memory(llm) == memory
        assert not llm.blocks


async def test_fork_and_merge_share_pages() -> None:
    async with engine("llama") as llm:
        left, right = (await llm.forward(tokens(10 * PAGE + 5))).block, await llm.create_block()
        await llm.forward(tokens(6 * PAGE), right)
        pages, _ = free_memory(llm)
        forks = [await llm.fork(left) for _ in range(5)]
        merged = await llm.merge_blocks(left, right)
        assert pages - free_memory(llm)[0] <= 1
        assert merged.num_tokens == 16 * PAGE + 5
        assert {fork.num_tokens for fork in forks} == {10 * PAGE + 5}


async def test_stream_ends_at_the_models_last_position() -> None:
    async with engine(checkpoint("qwen3_5", positions=64)) as llm:
        prompt, block = await llm.create_blocks("prompt", "block")
        await llm.forward(tokens(40), prompt)
        stream = llm.generate(tokens(4), [prompt, block])
        assert len(await read_ids(stream)) in (20, 21)
        assert stream.stop_reason == "length"
        assert block.span + prompt.span <= 64
        assert free_memory(llm)
