"""Tokens per second of `AsyncLLM.generate` and `forward`, beside transformers' own generate.

Knows both libraries. Both sides do the same work on one machine: the same prompt, greedy, float32, and
the clock runs from the first token to the last, so that neither side's prompt is counted.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncllm_nb import AsyncLLM
from asyncllm_nb.engine.blocks import CacheBlock

from .rounds import Compared, in_turns


class Transformers:
    """What a user would pick instead: the same checkpoint, loaded by transformers."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None  # runs are of one length

    def generate(self, prompt: list[int], streams: int, tokens: int) -> tuple[float, list[int]]:
        """Tokens per second of a batch of `streams` equal prompts, and what the first one got."""
        from transformers import StoppingCriteria, StoppingCriteriaList

        times: list[float] = []

        class Clock(StoppingCriteria):
            """Is called after each token of the batch; stops nothing."""

            def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
                times.append(time.perf_counter())
                return torch.zeros(input_ids.shape[0], dtype=torch.bool)

        ids = torch.tensor([prompt] * streams)
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([Clock()]),
            )
        assert len(times) == tokens
        return streams * (tokens - 1) / (times[-1] - times[0]), out[0, len(prompt) :].tolist()

    def encode(self, prompt: list[int]) -> float:
        """Tokens per second of encoding `prompt` into a new cache."""
        ids = torch.tensor([prompt])
        began = time.perf_counter()
        with torch.inference_mode():
            self.model(ids, use_cache=True, logits_to_keep=1)
        return len(prompt) / (time.perf_counter() - began)


async def generate(
    llm: AsyncLLM, prompt: list[int], streams: int, tokens: int, *, shared: bool = False
) -> tuple[float, list[int]]:
    """Tokens per second of `streams` coroutines, and what the first one got.

    Each has its own block with the whole prompt in it, as the rows of a batch have; `shared`: the
    prompt is one block that all read, in front of a block of their own.
    """
    views: list[list[CacheBlock]] = []
    first = (await llm.forward(prompt)).block
    for index in range(streams):
        if shared:
            views.append([first, await llm.create_block()])
        else:
            views.append([first if index == 0 else (await llm.forward(prompt)).block])

    async def read(view: list[CacheBlock]) -> tuple[list[float], list[int]]:
        times, ids = [], []
        async for token in llm.generate(None, view, max_tokens=tokens):
            times.append(time.perf_counter())
            ids.append(token.id)
        if len(ids) < tokens:
            raise RuntimeError(f"the model ended after {len(ids)} of {tokens} tokens: ask for fewer")
        return times, ids

    results = await asyncio.gather(*map(read, views))
    await llm.drain()
    for block in {block for view in views for block in view}:
        await llm.free_block(block)
    began, ended = (max(times[i] for times, _ in results) for i in (0, -1))
    return streams * (tokens - 1) / (ended - began), results[0][1]


async def compare_decoding(
    llm: AsyncLLM,
    other: Transformers,
    prompt: list[int],
    streams: int,
    *,
    tokens: int,
    rounds: int,
) -> tuple[Compared, bool]:
    """Tokens per second of both, and whether both drew the same tokens in all rounds."""
    drawn: set[tuple[int, ...]] = set()

    async def ours() -> float:
        speed, ids = await generate(llm, prompt, streams, tokens)
        drawn.add(tuple(ids))
        return speed

    async def theirs() -> float:
        speed, ids = other.generate(prompt, streams, tokens)
        drawn.add(tuple(ids))
        return speed

    compared = await in_turns(ours, theirs, rounds)
    return compared, len(drawn) == 1


async def compare_views(
    llm: AsyncLLM, prompt: list[int], streams: int, *, tokens: int, rounds: int
) -> Compared:
    """Tokens per second of streams that share the prompt's block, by those that each have their own."""

    async def shared() -> float:
        return (await generate(llm, prompt, streams, tokens, shared=True))[0]

    async def own() -> float:
        return (await generate(llm, prompt, streams, tokens))[0]

    return await in_turns(shared, own, rounds)


async def compare_prefill(llm: AsyncLLM, other: Transformers, prompt: list[int], *, rounds: int) -> Compared:
    """Tokens per second of encoding a prompt into a new block."""

    async def ours() -> float:
        began = time.perf_counter()
        block = (await llm.forward(prompt)).block
        seconds = time.perf_counter() - began
        await llm.free_block(block)
        return len(prompt) / seconds

    async def theirs() -> float:
        return other.encode(prompt)

    return await in_turns(ours, theirs, rounds)
