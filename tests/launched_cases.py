"""Agents whose steps take the way of a GPU, sampled and measured: the same work on both sides.

Knows the public API, instruments and the launcher. Where the engines run is the caller's.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
from helpers import tokens

from asyncllm_nb import AsyncLLM
from asyncllm_nb.engine import launching
from asyncllm_nb.engine.launching import Launcher
from asyncllm_nb.engine.layout import Part
from asyncllm_nb.engine.readings import StepReading
from asyncllm_nb.testing import assert_close_logits, make_checkpoint


class CountingLauncher(Launcher):
    """Counts the rows of steps that ran ahead, and those of them that were asked for afterwards."""

    num_ahead = 0
    num_taken = 0

    def _run_ahead(self, parts: list[Part], before: Any) -> None:
        super()._run_ahead(parts, before)
        self.num_ahead += len(parts) if self._ahead else 0

    def _take_ahead(self, *args: Any) -> Any:
        found = super()._take_ahead(*args)
        self.num_taken += len(found)
        return found


@functools.cache
def folder(family: str, vocab: int) -> Path:
    return make_checkpoint(mkdtemp(), family, seed=3, tokenizer=True, eos_token_id=None, vocab_size=vocab)


async def on(
    device: str, family: str, work: Callable[[AsyncLLM], Awaitable[Any]], vocab: int = 263
) -> tuple[Any, Any]:
    """What `work` returns with a float32 engine on `device`, and the engine's launcher."""
    options: dict[str, Any] = {"max_blocks": 40} if family == "qwen3_5" else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launching, "Launcher", CountingLauncher)
        llm = AsyncLLM(
            folder(family, vocab), name=device, device=device, dtype="float32", cache_tokens=4096,
            max_batch_tokens=64, **options,
        )  # fmt: skip
    try:
        result = await work(llm)
        await llm.drain()
        llm.check_integrity()
        return result, llm._engine.runner._launcher
    finally:
        await llm.close()


async def sampled(llm: AsyncLLM, scale: int = 1) -> list[list[tuple[int, float]]]:
    """Greedy and sampled streams that read each other; ids and rounded log-probabilities."""
    prompt, *own = await llm.create_blocks("prompt", "a", "b", "c")
    await llm.forward(tokens(19), [prompt])
    seen: list[list[tuple[int, float]]] = [[] for _ in own]

    async def write(i: int, count: int, **options: Any) -> None:
        view = [prompt, own[(i + 1) % 3], own[i]]
        async for token in llm.generate([i + 60], view, max_tokens=count * scale, seed=i, **options):
            seen[i].append((token.id, round(token.logprob, 3)))

    await asyncio.gather(
        write(0, 5),
        write(1, 7, temperature=1.5, forbid=[3, 77]),
        write(2, 9, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01),
    )
    return seen


async def measured(llm: AsyncLLM) -> list[StepReading]:
    """Readings of some decode steps and of a forward; other steps are measured by nobody."""
    prompt, a, b, c = await llm.create_blocks("prompt", "a", "b", "c")
    await llm.forward(tokens(19), [prompt])
    readings: list[StepReading] = []
    llm.instruments.listeners.append(readings.append)
    layers = llm.instruments.linear_layers

    def watch(on: bool) -> None:
        if on:
            llm.instruments.watch(shares=True, norms=True, tokens=True, states=layers, every=0.0)
        else:
            llm.instruments.unwatch()

    async def write(view: list[Any], options: dict[str, Any]) -> None:
        count = 0
        async for _ in llm.generate([60], view, max_tokens=6, **options):
            count += 1
            if view[-1] is a:
                watch(count in (2, 4))

    await asyncio.gather(write([prompt, b, a], {}), write([prompt, b], {"temperature": 1.0, "seed": 1}))
    watch(True)
    await llm.forward(tokens(21), [prompt, a, c])
    watch(False)
    return readings


def assert_same_readings(found: list[StepReading], expected: list[StepReading]) -> None:
    """The same steps were measured, and what was measured agrees in float32."""
    assert [reading.step for reading in found] == [reading.step for reading in expected]
    assert len(found) >= 3
    for one, other in zip(found, expected, strict=True):
        for fast, plain in zip(one.parts, other.parts, strict=True):
            assert fast.lengths == plain.lengths
            assert fast.shares is not None and fast.weights is not None
            assert_near(fast.shares, plain.shares, 1e-5)
            assert_near(fast.weights, plain.weights, 2e-3)
            assert (fast.norms is None) == (plain.norms is None)
            if fast.norms is not None:
                assert_near(fast.norms, plain.norms, 1e-5)
            assert fast.states.keys() == plain.states.keys()
            for layer, state in fast.states.items():
                assert_near(state, plain.states[layer], 1e-4)


def assert_near(actual: Any, expected: Any, allowed: float) -> None:
    """Arrays agree within `allowed` everywhere."""
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=allowed)


async def ragged(llm: AsyncLLM) -> list[Any]:
    """Inputs of different lengths, with and without a stream behind them, beside streams that decode.
    -> tokens and logits, and in the end logits behind all that was written."""
    prompt, a, b, c, d = await llm.create_blocks("prompt", "a", "b", "c", "d")
    await llm.forward(tokens(35), [prompt])
    found: list[Any] = []

    async def decode(block: Any, **options: Any) -> None:
        stream = llm.generate([40], [prompt, block], max_tokens=9, **options)
        found.append([token.id async for token in stream])

    async def encode() -> None:
        for count, view in ((2, [b]), (3, [prompt, b, c]), (1, [prompt, c]), (9, [d]), (12, [prompt, c, d])):
            out = await llm.forward(tokens(count), view)
            assert out.logits is not None
            found.append(out.logits.cpu())

    async def ask() -> None:
        for count in (4, 7):
            stream = llm.generate(tokens(count), [prompt, b], max_tokens=2, temperature=1.0, seed=count)
            found.append([token.id async for token in stream])

    await asyncio.gather(decode(a), encode())
    await asyncio.gather(decode(a, temperature=0.9, seed=3), ask())
    await asyncio.gather(llm.forward(tokens(5), [c]), llm.forward(tokens(6), [d]), decode(a))
    out = await llm.forward(tokens(3), [prompt, a, b, c, d], logits="all")
    assert out.logits is not None
    return [*found, out.logits.cpu()]


def assert_same_results(found: list[Any], expected: list[Any]) -> None:
    """Equal tokens, and logits that agree in float32."""
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, list):
            assert one == other
        else:
            assert_close_logits(one, other)
