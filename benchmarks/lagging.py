"""How late the event loop is while steps of 100 ms run: what a person's click waits for.

Knows the engine's insides, and reaches into them to make steps slow and to move them onto the loop.
A slow step is the real forward pass, made over and over until 100 ms are through (it writes the same
numbers to the same places each time). So it takes and releases Python's lock as real steps do, which
a `time.sleep` would not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar
from unittest.mock import patch

from asyncllm_nb import AsyncLLM

from .rounds import percentile

T = TypeVar("T")

TICK = 0.005  # s between two looks at the clock


@dataclass(frozen=True)
class Lag:
    """Milliseconds that the loop was late, and the median step meanwhile (0: nothing ran)."""

    p50: float
    p95: float
    largest: float
    step: float
    looks: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


async def loop_lag(
    llm: AsyncLLM, prompt: list[int], *, streams: int, seconds: float, on_loop: bool = False
) -> Lag:
    """Lag while `streams` coroutines decode for `seconds` (0 streams: nothing runs).

    `on_loop`: steps run on the event loop itself, as in an engine without a worker thread.
    """
    never = list(llm.config.eos_token_ids)
    blocks = [(await llm.forward(prompt)).block for _ in range(streams)]

    async def read(index: int) -> None:
        async for _ in llm.generate(None, blocks[index], forbid=never):
            pass

    with _slow_steps(llm) as steps, _on_loop(llm, on_loop):
        tasks = [asyncio.create_task(read(index)) for index in range(streams)]
        late = await _lateness(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await llm.drain()
    for block in blocks:
        await llm.free_block(block)
    step = percentile(steps, 0.5) if steps else 0.0
    return Lag(percentile(late, 0.5), percentile(late, 0.95), max(late), step, len(late))


async def _lateness(seconds: float) -> list[float]:
    """How many milliseconds after its time a timer of TICK fired, until `seconds` are through."""
    late, end = [], time.perf_counter() + seconds
    while (before := time.perf_counter()) < end:
        await asyncio.sleep(TICK)
        late.append(1e3 * (time.perf_counter() - before - TICK))
    return late


@contextmanager
def _slow_steps(llm: AsyncLLM, at_least: float = 0.1) -> Iterator[list[float]]:
    """Forward passes take `at_least` seconds; gives the milliseconds that each took."""
    decoder = llm._engine.runner.decoder
    forward, took = decoder.forward, list[float]()

    def slow(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        while True:
            logits = forward(*args, **kwargs)
            if (seconds := time.perf_counter() - began) >= at_least:
                took.append(1e3 * seconds)
                return logits

    with patch.object(decoder, "forward", slow):
        yield took


@contextmanager
def _on_loop(llm: AsyncLLM, really: bool) -> Iterator[None]:
    """Work for the worker thread is done on the event loop instead."""

    async def run(function: Callable[[], T]) -> T:
        return function()

    if really:
        with patch.object(llm._engine.server.stepper, "run", run):
            yield
    else:
        yield
