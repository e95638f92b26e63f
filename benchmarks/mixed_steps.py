"""Steps that encode a few tokens beside decodes: recorded against launched, in turns, by the wall clock.

Knows the engine's runner and parts, and how to keep it from using its recordings of such steps. What a
user waits for is measured too: a probe's answer, and the next token of a stream beside probes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from asyncllm_nb import AsyncLLM
from asyncllm_nb.engine import mixed_graphs
from asyncllm_nb.engine.batch import Batch
from asyncllm_nb.engine.blocks import EMPTY, CacheBlock
from asyncllm_nb.engine.engine import Engine
from asyncllm_nb.engine.layout import Part
from asyncllm_nb.engine.probing import probe
from asyncllm_nb.engine.runner import Draw, Runner
from asyncllm_nb.engine.sampling import MOST_PROBABLE

from . import agents, gpu_steps

WAYS = ("recorded", "launched")

WARM_UP, REPEATS = 5, 40
"""Steps of each kind before the clock runs (kernels are compiled, a step is recorded), and measured ones."""

ROUNDS = (7, 15)
"""Rounds of turns beside streams, of which the first is not counted, and probes in a turn."""

Spread = dict[str, float]
View = Sequence[CacheBlock]


class _NoRecordings:
    """In the place of a launcher's recordings: no step fits one."""

    def run(self, batch: Batch, options: object) -> None:
        return None


@contextmanager
def running(runner: Runner, way: str) -> Iterator[None]:
    """Mixed steps run in this `way` meanwhile."""
    launcher: Any = runner._launcher
    assert launcher is not None, "steps run in fused kernels on a GPU only"
    recordings = launcher._mixed_graphs
    if way == "launched":
        launcher._mixed_graphs = _NoRecordings()
    try:
        yield
    finally:
        launcher._mixed_graphs = recordings


def spread(spans: Sequence[float]) -> Spread:
    """Median and 95th percentile."""
    return {"p50": float(np.median(spans)), "p95": float(np.percentile(spans, 95))}


def measure(engine: Engine, prompt: CacheBlock, views: Sequence[View], asked: int) -> dict[str, Any]:
    """Milliseconds of one step, from its plan to its tokens: a decode of each of `views`, and `asked` tokens
    that read the prompt. Again and again from the same state; nothing is committed."""
    states = [[block._record.state for block in view] for view in views]
    memory = engine.memory
    drafts = [memory.draft(view[-1], 1) for view in states]
    thrown_away = memory.draft(EMPTY, asked)
    parts = [Part(tuple(view[:-1]), draft, 0, [7], 0) for view, draft in zip(states, drafts, strict=True)]
    parts.append(Part((prompt._record.state,), thrown_away, 0, agents.tokens(asked, 99), asked - 1))
    draws = [*(Draw(MOST_PROBABLE) for _ in views), None]
    spans: dict[str, list[float]] = {way: [] for way in WAYS}
    rows = len(views) + asked

    def step(way: str) -> float:
        with running(engine.runner, way):
            begin = time.perf_counter()
            result = engine.runner.step(parts, draws)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - begin
        assert result.ran == ("graph" if way == "recorded" else "eager"), (way, result.ran)
        return seconds * 1e3

    @torch.inference_mode()
    def all_steps() -> Spread:
        for _ in range(WARM_UP):
            for way in WAYS:
                step(way)
        for number in range(REPEATS):
            for way in WAYS if number % 2 else reversed(WAYS):
                spans[way].append(step(way))
        return gpu_steps.times(_replay(engine.runner, rows))

    try:
        gpu_alone = engine.executor.submit(all_steps).result()  # the engine's own thread
    finally:
        for draft in (*drafts, thrown_away):
            draft.abandon()
    found: dict[str, Any] = {f"{way}_ms": spread(spans[way]) for way in WAYS}
    ratio = found["launched_ms"]["p50"] / found["recorded_ms"]["p50"]
    return found | {"gpu_ms": gpu_alone, "launched_by_recorded": ratio}


def _replay(runner: Runner, rows: int) -> Any:
    """What runs the recording of a step of so many rows, of one input of several tokens, once more."""
    launcher: Any = runner._launcher
    room = next(room for room in mixed_graphs.ROWS if room >= rows)
    return launcher._mixed_graphs._recordings[room, mixed_graphs.REQUESTS[0], False]._graph.replay


async def beside_streams(
    llm: AsyncLLM, prompt: CacheBlock, views: Sequence[View], asked: int
) -> dict[str, Any]:
    """Milliseconds of a probe of `asked` tokens, and between two tokens of a stream, while streams of all
    `views` decode and probes follow one another; without the first round."""
    question = agents.tokens(asked, 99)
    waits: dict[str, list[float]] = {way: [] for way in WAYS}
    gaps: dict[str, list[float]] = {way: [] for way in WAYS}
    now: tuple[str, int] = ("", 0)  # way and round
    over = asyncio.Event()
    rounds, probes = ROUNDS

    async def stream(index: int) -> None:
        last = (0.0, now)
        async for _ in llm.generate([index + 7], views[index]):
            moment = time.perf_counter()
            if last[1] == now and now[1]:
                gaps[now[0]].append((moment - last[0]) * 1e3)
            last = (moment, now)
            if over.is_set():
                break

    async def ask() -> None:
        nonlocal now
        try:
            for number in range(rounds):
                for way in WAYS if number % 2 else reversed(WAYS):
                    now = (way, number)
                    with running(llm._engine.runner, way):
                        for _ in range(probes):
                            begin = time.perf_counter()
                            await probe(llm._engine, question, (prompt,), [[5], [6]])
                            if number:
                                waits[way].append((time.perf_counter() - begin) * 1e3)
        finally:
            over.set()

    await asyncio.gather(ask(), *(stream(index) for index in range(len(views))))
    return {way: {"probe_ms": spread(waits[way]), "gap_ms": spread(gaps[way])} for way in WAYS}


async def measure_all(llm: AsyncLLM, streams: Sequence[int], asked: Sequence[int]) -> dict[str, Any]:
    """`measure` for each number of streams and of tokens, then `beside_streams` with the middle one."""
    found: dict[str, Any] = {"steps": {}, "beside_streams": {}}
    views = await agents.views_of(llm, max(streams))
    prompt = views[0][0]
    for count in streams:
        found["steps"][str(count)] = {}
        for tokens in asked:
            one = measure(llm._engine, prompt, views[:count], tokens)
            found["steps"][str(count)][str(tokens)] = one
            print(f"mixed {count} decodes + {tokens} tokens: {one}", flush=True)
    tokens = sorted(asked)[len(asked) // 2]
    for count in filter(None, streams):
        waited = await beside_streams(llm, prompt, views[:count], tokens)
        found["beside_streams"][str(count)] = {"tokens": tokens, **waited}
        print(f"mixed {count} streams beside probes of {tokens}: {waited}", flush=True)
    return found


def table(found: dict[str, Any]) -> str:
    """What `measure_all` found, in Markdown."""
    lines = ["| ms, p50 (p95) | recorded | launched | recorded, GPU alone |", "|---|---|---|---|"]

    def row(name: str, *spreads: Spread) -> None:
        cells = ["{p50:.2f} ({p95:.2f})".format(**spread) for spread in spreads]
        lines.append(f"| {name} | " + " | ".join([*cells, ""][:3]) + " |")

    for count, steps in found["steps"].items():
        for tokens, one in steps.items():
            row(f"{count} decodes + {tokens} tokens", *(one[f"{name}_ms"] for name in (*WAYS, "gpu")))
    for count, waited in found["beside_streams"].items():
        beside = f"{count} streams and probes of {waited['tokens']}"
        row(f"{beside}: a probe", *(waited[way]["probe_ms"] for way in WAYS))
        row(f"{beside}: between two tokens", *(waited[way]["gap_ms"] for way in WAYS))
    return "\n".join(lines)
