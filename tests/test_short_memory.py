"""When memory is short: who fails at once, who waits, who fails when nothing can run, who shares."""

from __future__ import annotations

import asyncio

import pytest
from helpers import answer_of, checkpoint, contents, engine, free_memory, tokens, turns, until

from asyncllm_nb import CacheFullError, TokenStream

PAGE = 16


async def read_ids(stream: TokenStream) -> list[int]:
    return [token.id async for token in stream]


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
