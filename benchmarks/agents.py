"""The agents that are measured: coroutines that read a prompt, a peer's block and their own.

Knows the public API, and how to put random weights in the place of a checkpoint.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import asyncllm_nb.engine.build as build
from asyncllm_nb import AsyncLLM
from asyncllm_nb.engine.config import ModelConfig
from asyncllm_nb.engine.probing import probe
from asyncllm_nb.engine.weights import Weights

from .shapes import QWEN35_9B, random_weights

PROMPT, PEER, OWN = 2048, 1024, 1024
"""Tokens of the prompt that all read, of a peer's block, and of a coroutine's own block."""


@contextmanager
def random_engine(**options: Any) -> Iterator[AsyncLLM]:
    """An engine of the Qwen3.5-9B shape with random weights on the GPU."""

    def drawn(folder: Any, config: ModelConfig, device: Any, dtype: torch.dtype) -> Weights:
        return random_weights(config, torch.device(device), dtype)

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(QWEN35_9B))
        with patch.object(build, "load_weights", drawn):
            yield AsyncLLM(folder, device="cuda", **options)


def tokens(count: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    ids: list[int] = np.random.default_rng(seed).integers(0, 200_000, count).tolist()
    return ids


async def views_of(llm: AsyncLLM, coroutines: int) -> list[list[Any]]:
    """A view for each coroutine: [prompt, a peer's block, its own], with PROMPT, PEER, OWN tokens."""
    prompt = await llm.create_block()
    await llm.forward(tokens(PROMPT), [prompt], logits="none")
    own = await llm.create_blocks(max(2, coroutines))
    for index, block in enumerate(own):
        await llm.forward(tokens(OWN, index + 1), [prompt, block], logits="none")
    return [[prompt, own[(i + 1) % len(own)], own[i]] for i in range(coroutines)]


async def decode(
    llm: AsyncLLM, coroutines: int, steps: int, warm_up: int = 8, **sampling: Any
) -> dict[str, float]:
    """Tokens per second of `coroutines` streams, counted while all of them run. `sampling`: options of
    `generate`; without them streams are greedy."""
    views = await views_of(llm, coroutines)
    times: list[list[float]] = [[] for _ in views]

    async def stream(index: int) -> None:
        async for _ in llm.generate([index + 7], views[index], max_tokens=warm_up + steps, **sampling):
            times[index].append(time.perf_counter())

    await asyncio.gather(*(stream(i) for i in range(coroutines)))
    begin = max(t[warm_up - 1] for t in times)
    end = min(t[-1] for t in times)
    inside = sum(sum(begin < moment <= end for moment in t) for t in times)
    gaps = np.concatenate([np.diff(t[warm_up - 1 :]) for t in times]) * 1e3
    for view in views:
        await llm.free_block(view[-1])
    return {
        "tokens_per_s": inside / (end - begin),
        "gap_ms_p50": float(np.median(gaps)),
        "gap_ms_p95": float(np.percentile(gaps, 95)),
    }


async def prefill(llm: AsyncLLM, lengths: Sequence[int], matrix_tflop_s: float) -> dict[str, Any]:
    """Tokens per second of one forward into an empty block, and its share of the GPU's matrix rate.

    Operations are those of the products with weights; attention's own come on top and are not counted.
    """
    weights = llm._engine.runner.decoder.weights
    multiplied = weights.nbytes // 2 - weights.embedding.numel() - weights.head.numel()
    found = {}
    for length in lengths:
        spans = []
        for seed in range(4):
            block = await llm.create_block()
            begin = time.perf_counter()
            await llm.forward(tokens(length, seed), [block])
            torch.cuda.synchronize()
            spans.append(time.perf_counter() - begin)
            await llm.free_block(block)
        seconds = sorted(spans[1:])[1]
        rate = length / seconds
        found[str(length)] = {
            "tokens_per_s": rate,
            "ms": seconds * 1e3,
            "share_of_matrix_rate": 2 * multiplied * rate / matrix_tflop_s / 1e12,
        }
        print(f"prefill {length}: {found[str(length)]}", flush=True)
    return found


async def mixed(llm: AsyncLLM, streams: int = 8, long: int = 8192) -> dict[str, Any]:
    """Latencies while forwards of `long` tokens follow one another and `streams` coroutines decode."""
    views = await views_of(llm, streams)
    prompt = views[0][0]
    gaps: list[float] = []
    probes: list[float] = []
    forwards: list[float] = []
    over = asyncio.Event()

    async def stream(index: int) -> None:
        last = 0.0
        async for _ in llm.generate([index + 7], views[index]):
            now = time.perf_counter()
            gaps.extend([now - last] if last else [])
            last = now
            if over.is_set():
                break

    async def encode() -> None:
        for seed in range(5):
            block = await llm.create_block()
            begin = time.perf_counter()
            await llm.forward(tokens(long, seed), [block])
            forwards.append(time.perf_counter() - begin)
            await llm.free_block(block)
        over.set()

    async def ask() -> None:
        question = tokens(32, 99)
        while not over.is_set():
            begin = time.perf_counter()
            await probe(llm._engine, question, (prompt,), [[5], [6]])  # there is no tokenizer
            probes.append(time.perf_counter() - begin)

    await asyncio.gather(encode(), ask(), *(stream(i) for i in range(streams)))

    def spread(spans: list[float]) -> dict[str, float]:
        p50, p95 = np.percentile(np.array(spans) * 1e3, [50, 95]).tolist()
        return {"p50_ms": p50, "p95_ms": p95, "count": len(spans)}

    return {
        "decode_gap": spread(gaps),
        "probe_of_32": spread(probes),
        f"forward_of_{long}": spread(forwards),
    }


def memory(llm: AsyncLLM) -> dict[str, float]:
    """What a block costs: bytes of a token's keys and values, of a slot (pair and rows)."""
    runner = llm._engine.runner
    config, dtype = runner.decoder.config, runner.cache.keys.dtype
    return {
        "page_bytes": runner.cache.page_bytes(config, dtype),
        "slot_mib": runner.cache.slot_bytes(config, dtype) / 2**20,
        "weights_gb": runner.decoder.weights.nbytes / 1e9,
    }
