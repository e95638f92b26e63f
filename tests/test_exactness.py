"""Any cut of a sequence into blocks and chunks gives transformers' logits of the whole sequence.

A causal model's logits over a prefix are the prefix of its logits, so transformers reads a few
fixed sequences once, and every cut is a cut of a prefix of one of them.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import FAMILIES, Bench, assert_close, checkpoint, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncllm_nb import AsyncLLM

LENGTH = 200
SEQUENCES = [tokens(LENGTH, seed) for seed in range(3)]
BUDGETS = (48, 256)

Cut = list[list[int]]
"""For each block of the view the sizes of the forwards that fill it."""

SIZE = st.one_of(st.integers(1, 4), st.integers(1, 90))
CUT = st.lists(st.lists(SIZE, max_size=4), min_size=1, max_size=8)


def transformers_logits(folder: Path, sequence: list[int]) -> Tensor:
    """Float64 logits [len(sequence), vocab] of the plain model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([sequence]), use_cache=False).logits[0]
    return torch.as_tensor(logits).double()


@functools.cache
def expected_logits(family: str) -> list[Tensor]:
    """What transformers says about each of the sequences."""
    return [transformers_logits(checkpoint(family), sequence) for sequence in SEQUENCES]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    """The engines that all tests here share."""
    with Bench() as bench:
        yield bench


def engine_of(bench: Bench, family: str, budget: int) -> AsyncLLM:
    return bench.engine(family, cache_tokens=4096, max_blocks=64, max_batch_tokens=budget)


async def encode_cut(llm: AsyncLLM, sequence: list[int], cut: Cut) -> Tensor:
    """Feed a sequence into blocks as `cut` says, until it is through; returns all logits."""
    view, logits, done = [], [], 0
    for sizes in cut:
        view.append(await llm.create_block())
        for size in sizes:
            if chunk := sequence[done : done + size]:
                output = await llm.forward(chunk, view, logits="all")
                assert output.logits is not None
                logits.append(output.logits)
                done += len(chunk)
    return torch.cat(logits) if logits else torch.zeros(0)


@pytest.mark.exact
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=200, deadline=None)
@given(cuts=st.lists(CUT, min_size=1, max_size=3), budget=st.sampled_from(BUDGETS))
def test_any_cut_gives_the_logits_of_transformers(
    bench: Bench, family: str, cuts: list[Cut], budget: int
) -> None:
    """Several cuts at once, so that rows of all kinds meet in one batch."""
    llm = engine_of(bench, family, budget)

    async def encode_side_by_side() -> None:
        work = [encode_cut(llm, SEQUENCES[i], cut) for i, cut in enumerate(cuts)]
        for logits, whole in zip(await asyncio.gather(*work), expected_logits(family), strict=False):
            if len(logits):
                assert_close(logits, whole[: len(logits)])

    bench.run(llm, encode_side_by_side())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("length", [65, 130, 200])
def test_long_single_forward(bench: Bench, family: str, budget: int, length: int) -> None:
    llm = engine_of(bench, family, budget)

    async def encode_whole() -> None:
        logits = await encode_cut(llm, SEQUENCES[0], [[length]])
        assert_close(logits, expected_logits(family)[0][:length])

    bench.run(llm, encode_whole())


@pytest.mark.parametrize("family", FAMILIES)
def test_many_tiny_blocks(bench: Bench, family: str) -> None:
    """Convolutions that look back through three blocks, and a view of forty."""
    llm = engine_of(bench, family, 256)

    async def encode_in_crumbs() -> None:
        logits = await encode_cut(llm, SEQUENCES[1], [[1 + i % 3] for i in range(40)])
        assert_close(logits, expected_logits(family)[1][: len(logits)])

    bench.run(llm, encode_in_crumbs())


@pytest.mark.parametrize("family", FAMILIES)
def test_stream_equals_transformers(bench: Bench, family: str) -> None:
    """Greedy tokens and their log-probabilities are those of one forward over the whole text."""
    llm, start = engine_of(bench, family, 48), SEQUENCES[2][:70]

    async def generate() -> None:
        prompt, answer = await llm.create_blocks("prompt", "answer")
        await llm.forward(start, [prompt])
        made = [t async for t in llm.generate(None, [prompt, answer], max_tokens=24)]
        logits = transformers_logits(checkpoint(family), start + [t.id for t in made])
        said = logits[len(start) - 1 : -1].log_softmax(-1)
        assert [token.id for token in made] == said.argmax(-1).tolist()
        assert [token.logprob for token in made] == pytest.approx(said.max(-1).values.tolist(), abs=1e-4)

    bench.run(llm, generate())
