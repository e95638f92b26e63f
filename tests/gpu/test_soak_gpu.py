"""Three minutes of random agents on a GPU, with cancellations: nothing hangs, nothing leaks."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import suppress

import pytest
import torch
from layer_cases import folder

from asyncllm_nb import AsyncLLM, CacheFullError

pytestmark = pytest.mark.gpu

SECONDS = 180.0


async def agent(llm: AsyncLLM, seed: int, end: float) -> int:
    """Does random things with blocks of its own and of a shared prompt until `end`. -> how many."""
    rng = random.Random(seed)
    prompt = llm.blocks["prompt"]
    blocks = list(await llm.create_blocks(3))
    done = 0
    while time.monotonic() < end:
        done += 1
        own = rng.choice(blocks)
        others = rng.sample([block for block in blocks if block is not own], rng.randint(0, 2))
        view = [prompt, *others, own]
        with suppress(CacheFullError, asyncio.CancelledError, TimeoutError):
            choice = rng.random()
            if choice < 0.5:
                count = rng.randint(1, 40)
                stream = llm.generate(
                    rng.choices(range(90), k=rng.randint(1, 60)), view, max_tokens=40,
                    temperature=rng.choice([0.0, 0.0, 1.0]),
                )  # fmt: skip
                async for _ in stream:
                    count -= 1
                    if count == 0:
                        break
            elif choice < 0.7:
                task = asyncio.ensure_future(llm.forward(rng.choices(range(90), k=300), view))
                for _ in range(rng.randint(0, 30)):
                    await asyncio.sleep(0)
                if rng.random() < 0.5:
                    task.cancel()
                await task
            elif choice < 0.8:
                blocks[blocks.index(own)] = await llm.fork(own)
            elif choice < 0.9:
                blocks[blocks.index(own)] = await llm.merge_blocks(*rng.sample(blocks, 2))
            else:
                await llm.clear(own)
        if own.num_tokens > 400:
            await llm.clear(own)
    for block in blocks:
        await llm.free_block(block)
    return done


async def test_soak() -> None:
    llm = AsyncLLM(folder("qwen3_5"), device="cuda", cache_tokens=40_000, max_blocks=60, max_batch_tokens=256)
    prompt = await llm.create_block("prompt")
    await llm.forward(list(range(80)), [prompt])
    allocated: list[int] = []
    end = time.monotonic() + SECONDS

    async def watch() -> None:
        while time.monotonic() < end:
            await asyncio.sleep(SECONDS / 12)
            allocated.append(torch.cuda.memory_allocated())

    counts, _ = await asyncio.wait_for(
        asyncio.gather(asyncio.gather(*(agent(llm, seed, end) for seed in range(8))), watch()), SECONDS + 60
    )
    await llm.drain()
    llm.check_integrity()
    await llm.free_block(prompt)
    pools = llm.snapshot()["pools"]
    assert pools["pages_free"] == pools["pages_total"] and pools["slots_free"] == pools["slots_total"]
    await llm.close()
    print(f"{sum(counts)} actions; allocated {allocated}")
    assert min(counts) > 10
    assert max(allocated[6:]) <= max(allocated[:6]) + 2**26, allocated  # once all recordings are made
