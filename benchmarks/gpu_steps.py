"""Decode steps as the GPU sees them: time of a step recorded and not, its bytes, its heaviest kernels.

Knows the engine's parts, layouts and recordings, and CUDA events. Knows no event loop: what a user gets
is measured in `agents`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from asyncllm_nb.engine.batch import PAGE_TOKENS
from asyncllm_nb.engine.blocks import CacheBlock
from asyncllm_nb.engine.engine import Engine
from asyncllm_nb.engine.fused import FusedDecoder
from asyncllm_nb.engine.graphs import DecodeGraphs, greedy
from asyncllm_nb.engine.layout import Part, make_batch
from asyncllm_nb.engine.packed import describe, pack

CPU = torch.device("cpu")


def times(run: Callable[[], Any], repeats: int = 64, warm_up: int = 5) -> dict[str, float]:
    """Milliseconds of `run` on the GPU, by events: median and 95th percentile."""
    for _ in range(warm_up):
        run()
    pairs = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    spans = [begin.elapsed_time(end) for begin, end in pairs]
    return {"p50": float(np.median(spans)), "p95": float(np.percentile(spans, 95))}


def ceilings() -> dict[str, float]:
    """What this GPU does: bytes per second of a copy (read and written), FLOP/s of a bf16 product."""
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copy = times(lambda: target.copy_(source), 20)["p50"]
    size = 8192
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product = times(lambda: a @ b, 20)["p50"]
    return {"copy_tb_s": 2 * 2**32 / copy / 1e9, "matrix_tflop_s": 2 * size**3 / product / 1e9}


@torch.inference_mode()
def measure(engine: Engine, views: Sequence[Sequence[CacheBlock]], bandwidth: float) -> dict[str, Any]:
    """One decode step of all `views`, again and again from the same state; nothing is committed.

    `bandwidth` in TB/s gives the floor: the bytes of this very step, each moved once.
    """
    memory, runner = engine.memory, engine.runner
    states = [[block._record.state for block in view] for view in views]
    drafts = [memory.draft(view[-1], 1) for view in states]
    try:
        parts = [
            runner._places.part(Part(tuple(view[:-1]), draft, 0, [7], 0))
            for view, draft in zip(states, drafts, strict=True)
        ]
        batch = make_batch(parts, True, CPU)
        fused = FusedDecoder(runner.decoder, runner.device)
        graphs = DecodeGraphs(fused, runner.cache, runner.device)
        assert graphs.run(batch) is not None
        (recording,) = graphs._recordings.values()
        grouping = fused.grouping(len(parts))
        fields = pack(describe(batch, grouping), runner.device)

        def unrecorded() -> None:
            greedy(fused.forward(fields, runner.cache, grouping.group))

        moved = step_bytes(engine, parts)
        recorded = times(recording._graph.replay)
        floor = moved["all"] / bandwidth / 1e9
        return {
            "recorded_ms": recorded,
            "unrecorded_ms": times(unrecorded, 20),
            "bytes": moved,
            "floor_ms": floor,
            "share_of_floor": floor / recorded["p50"],
            "kernels": kernels(unrecorded),
        }
    finally:
        for draft in drafts:
            draft.abandon()


def step_bytes(engine: Engine, parts: Sequence[Part]) -> dict[str, int]:
    """Bytes that a decode step has to move, each once: what several rows read is counted once."""
    runner = engine.runner
    weights, cache = runner.decoder.weights, runner.cache
    tables = 0 if runner.decoder.config.tie else weights.embedding.nbytes
    token = (cache.page_bytes(runner.decoder.config, cache.keys.dtype)) // PAGE_TOKENS
    tokens: dict[int, int] = {}
    lower: set[int] = set()  # slots whose B̂ is read
    upper: set[int] = set()  # ... and whose Â
    for part in parts:
        segments = [s for state in part.view for s in state.segments] + list(part.draft.segments)
        for segment in segments:
            for index, page in enumerate(segment.pages):
                filled = min(PAGE_TOKENS, segment.length - index * PAGE_TOKENS)
                tokens[page] = max(tokens.get(page, 0), filled)
        chain = [state.slot for state in part.view]
        lower |= {*chain, part.draft.base.slot}
        upper |= {*chain[1:], part.draft.base.slot}
    half = cache.pairs.nbytes // cache.pairs.shape[1] // 2
    moved = {
        "weights": weights.nbytes - tables,
        "keys_values": sum(tokens.values()) * token,
        "pairs": (len(lower) + len(upper) + 2 * len(parts)) * half,
    }
    return {**moved, "all": sum(moved.values())}


def kernels(run: Callable[[], Any], most: int = 8) -> list[dict[str, Any]]:
    """The heaviest kernels of one run: name, calls, microseconds of one call, share of the time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as record:
        run()
        torch.cuda.synchronize()
    found = [event for event in record.key_averages() if event.self_device_time_total > 0]
    total = sum(event.self_device_time_total for event in found)
    found.sort(key=lambda event: -event.self_device_time_total)
    return [
        {
            "name": event.key[:70],
            "calls": event.count,
            "us": event.self_device_time_total / event.count,
            "share": event.self_device_time_total / total,
        }
        for event in found[:most]
    ]
