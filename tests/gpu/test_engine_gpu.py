"""The engine on a GPU against the engine on a CPU: the same agents get the same tokens and logits."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from asyncllm_nb import AsyncLLM
from asyncllm_nb.engine.graphs import MAX_DEPTH
from asyncllm_nb.testing import FAMILIES, assert_close_logits, make_checkpoint

pytestmark = pytest.mark.gpu


@functools.cache
def folder(family: str) -> Path:
    return make_checkpoint(mkdtemp(), family, seed=3, tokenizer=True, eos_token_id=None)


async def on(device: str, family: str, work: Callable[[AsyncLLM], Awaitable[Any]], **options: Any) -> Any:
    """What `work` returns with a float32 engine on `device`; no page or slot is lost."""
    if family == "qwen3_5":
        options.setdefault("max_blocks", 40)
    llm = AsyncLLM(
        folder(family), name=device, device=device, dtype="float32", cache_tokens=4096, max_batch_tokens=64,
        **options,
    )  # fmt: skip
    try:
        result = await work(llm)
        await llm.drain()
        llm.check_integrity()
        return result
    finally:
        await llm.close()


async def agents(llm: AsyncLLM) -> list[list[int]]:
    """Streams of different lengths that read each other, one of them left early, one sampled."""
    prompt, *own = await llm.create_blocks("prompt", *(f"own{i}" for i in range(5)))
    await llm.forward(list(range(10, 47)), [prompt])
    seen: list[list[int]] = [[] for _ in own]

    async def write(i: int, count: int, **sampling: Any) -> None:
        view = [prompt, own[(i + 1) % 5], own[(i + 3) % 5], own[i]]
        async for token in llm.generate([i + 60], view, max_tokens=40, seed=i, **sampling):
            seen[i].append(token.id)
            if len(seen[i]) == count:
                break
        if i == 1:
            await llm.clear(own[1])

    await asyncio.gather(
        write(0, 40), write(1, 17), write(2, 25), write(3, 33, temperature=0.8, top_k=20), write(4, 40)
    )
    await llm.forward([5, 6, 7] * 30, [prompt, own[1]])
    async for token in llm.generate(None, [prompt, own[1]], max_tokens=20):
        seen[1].append(token.id)
    return seen


@pytest.mark.parametrize("family", FAMILIES)
async def test_streams_get_the_same_tokens(family: str) -> None:
    """Streams decode in lockstep, so what they see of each other is the same on both devices."""
    assert await on("cuda", family, agents) == await on("cpu", family, agents)


@pytest.mark.parametrize("family", FAMILIES)
async def test_logits_after_streams(family: str) -> None:
    """Blocks that were written ahead of the loop, then forked, merged and read, hold what they should."""

    async def work(llm: AsyncLLM) -> torch.Tensor:
        a, b, c = await llm.create_blocks("a", "b", "c")
        await llm.forward(list(range(20, 53)), [a])
        await asyncio.gather(
            llm.generate([1], [a, b], max_tokens=21), llm.generate([2], [a, c], max_tokens=30)
        )
        fork = await llm.fork(b)
        await llm.generate([3, 4], [a, c, fork], max_tokens=19)
        merged = await llm.merge_blocks(fork, c)
        out = await llm.forward([9, 8, 7, 6], [b, merged], logits="all")
        assert out.logits is not None
        return out.logits.cpu()

    assert_close_logits(await on("cuda", family, work), await on("cpu", family, work))


async def test_closing_gives_the_memory_back() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    await on("cuda", "qwen3_5", agents)
    assert torch.cuda.memory_allocated() <= before + 2**24  # what cuBLAS keeps


async def test_trace_says_how_steps_ran() -> None:
    """Tokens behind a view that is deeper than recorded steps walk run kernel by kernel."""

    async def work(llm: AsyncLLM) -> list[tuple[bool, str]]:
        *deep, own, short = await llm.create_blocks(MAX_DEPTH + 3)
        for block in deep:
            await llm.forward([5], [block])
        await llm.generate([1], [deep[0], short], max_tokens=9)
        await llm.generate([1], [*deep, own], max_tokens=9)
        await llm.drain()
        steps = [step for step in llm.trace.steps if all(row.kind == "decode" for row in step.rows)]
        return [(len(step.rows[0].view) > MAX_DEPTH + 1, step.ran) for step in steps]

    found = await on("cuda", "qwen3_5", work, max_blocks=60)
    assert set(found) == {(False, "graph"), (True, "eager")}
