"""Whole agents on the way that steps take on a GPU, kernels in the interpreter: sampling, instruments."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from fused_engine import emulate_cuda, launch
from helpers import engine, scratch, tokens
from launched_cases import CountingLauncher, assert_same_readings, measured, sampled

from asyncllm_nb import AsyncLLM
from asyncllm_nb.engine import graphs
from asyncllm_nb.kernels import sampling
from asyncllm_nb.testing import make_checkpoint

Work = Callable[[AsyncLLM], Awaitable[Any]]


@functools.cache
def folder(family: str) -> Path:
    """As few layers as have one of each kind: the interpreter is slow."""
    layers: dict[str, Any] = {"num_hidden_layers": 1}
    if family == "qwen3_5":
        layers = {"num_hidden_layers": 2, "full_attention_interval": 2}
    return make_checkpoint(
        scratch() / f"launched-{family}", family, seed=3, tokenizer=True, eos_token_id=None, **layers
    )


async def on_cpu(family: str, work: Work) -> Any:
    async with engine(folder(family)) as llm:
        return await work(llm)


async def launched(family: str, work: Work) -> tuple[Any, CountingLauncher]:
    with pytest.MonkeyPatch.context() as patch:
        emulate_cuda(patch)
        async with engine(folder(family), seconds=120.0) as llm:
            launcher = launch(llm)
            return await work(llm), launcher


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
async def test_sampled_streams_run_ahead(family: str) -> None:
    """They get the tokens of the plain path. What ran ahead in vain is each stream's last step, and,
    where a stream ends, nothing of the others."""
    found, launcher = await launched(family, sampled)
    assert found == await on_cpu(family, sampled)
    assert launcher.num_taken >= sum(map(len, found)) - 2 * len(found)
    assert launcher.num_ahead - launcher.num_taken <= len(found)


async def test_tokens_that_the_beginning_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are found in the step all the same, and nothing that ran ahead is dropped for them."""
    expected = await on_cpu("qwen3", sampled)
    monkeypatch.setattr(sampling, "BEGINNING", 2)
    found, launcher = await launched("qwen3", sampled)
    assert found == expected
    assert launcher.num_ahead - launcher.num_taken <= len(found)


@pytest.mark.parametrize("beginning", [2, 30])
async def test_tokens_that_a_step_does_not_decide(beginning: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are drawn anew from the step's logits, and what ran ahead with another token is dropped."""
    expected = await on_cpu("qwen3", sampled)
    monkeypatch.setattr(graphs, "sample_all", sampling.sample_beginning)
    monkeypatch.setattr(sampling, "BEGINNING", beginning)
    found, launcher = await launched("qwen3", sampled)
    assert found == expected
    assert launcher.num_taken < launcher.num_ahead


async def test_a_stream_that_goes_on_with_the_token_of_another() -> None:
    """A step that ran ahead encoded the right token, but drew the next one for another stream."""

    async def work(llm: AsyncLLM, second: int = 0) -> list[int]:
        (block,) = await llm.create_blocks("a")
        await llm.forward(tokens(7), [block])
        seen: list[int] = []
        has_four = asyncio.Event()
        first = llm.generate([9], [block], temperature=1.0, seed=1)

        async def read() -> None:
            async for token in first:
                seen.append(token.id)
                if len(seen) == 4:
                    has_four.set()

        task = asyncio.create_task(read())
        await has_four.wait()
        while not llm._engine.server.stepper.in_step:  # the step that draws the fifth
            await asyncio.sleep(0)
        await first.cancel()
        await task
        assert len(seen) == 4
        async for token in llm.generate([second], [block], temperature=3.0, seed=2, max_tokens=4):
            seen.append(token.id)
        return seen

    async def next_of_first(llm: AsyncLLM) -> int:
        (block,) = await llm.create_blocks("a")
        await llm.forward(tokens(7), [block])
        await (stream := llm.generate([9], [block], temperature=1.0, seed=1, max_tokens=5))
        return stream.token_ids[-1]

    same = functools.partial(work, second=await on_cpu("qwen3", next_of_first))
    found, launcher = await launched("qwen3", same)
    assert found == await on_cpu("qwen3", same)
    assert launcher.num_taken >= 5


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
async def test_measured_steps(family: str) -> None:
    """The readings of the plain path, at recorded steps, at such that ran ahead, and at a forward."""
    found, _ = await launched(family, measured)
    assert_same_readings(found, await on_cpu(family, measured))
