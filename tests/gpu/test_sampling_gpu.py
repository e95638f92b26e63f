"""Sampling on a GPU without the CPU in between, and steps that are measured there, against a CPU."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest
import torch
from launched_cases import assert_same_readings, measured, on, sampled
from sampling_cases import Options, assert_drawn, combinations, table

from asyncllm_nb import AsyncLLM
from asyncllm_nb.engine import graphs
from asyncllm_nb.engine.sampling import Choice, SamplingParams
from asyncllm_nb.kernels import sampling
from asyncllm_nb.kernels.sampling_triton import sample_all

pytestmark = pytest.mark.gpu


PARAMS = [
    SamplingParams(),
    SamplingParams(0.7),
    SamplingParams(1.3, forbidden=(0, 5, 77)),
    SamplingParams(0.7, top_k=20, top_p=0.8),
    SamplingParams(0.2, top_p=0.95),
    SamplingParams(1.0, min_p=0.3),
    SamplingParams(forbidden=(1, 2, 3)),
    SamplingParams(1.0, top_k=500),
]


@pytest.mark.parametrize("vocab", [263, 151_937])
@torch.inference_mode()
def test_sample_beginning_in_a_graph(vocab: int) -> None:
    """Recorded once, replayed with other logits and other options: each decided row is the token that
    `sample` draws from the same logits, and all rows that filters cut short are decided."""
    rows = len(PARAMS) + 3  # of padding
    generator = torch.Generator("cuda").manual_seed(5)
    logits = torch.zeros(rows, vocab, device="cuda")
    options = torch.zeros(rows, sampling.OPTIONS_WIDTH, dtype=torch.float64, device="cuda")
    sampling.sample_beginning(logits, options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, logprobs, decided = sampling.sample_beginning(logits, options)
    num_decided = 0
    for turn in range(40):
        params = PARAMS[turn % len(PARAMS) :] + PARAMS[: turn % len(PARAMS)]
        choices = [Choice(each, turn) for each in params]
        drawn = 3 * torch.randn(logits.shape, generator=generator, device="cuda")
        drawn[len(params) :] = torch.nan  # what padding holds
        logits.copy_(drawn.bfloat16() if turn % 2 else drawn)
        options[: len(params)] = torch.tensor([choice.options for choice in choices]).cuda()
        graph.replay()

        def column(name: str, dtype: torch.dtype, chosen: list[SamplingParams] = params) -> torch.Tensor:
            return torch.tensor([getattr(each, name) for each in chosen], dtype=dtype, device="cuda")

        expected, own = sampling.sample(
            logits[: len(params)].clone(),
            temperature=column("temperature", torch.float32),
            top_k=column("top_k", torch.int64),
            top_p=column("top_p", torch.float32),
            min_p=column("min_p", torch.float32),
            forbidden=[each.forbidden for each in params],
            uniform=torch.tensor([choice.uniform for choice in choices], device="cuda"),
        )
        certain = decided[: len(params)]
        assert torch.equal(ids[: len(params)][certain], expected[certain])
        torch.testing.assert_close(logprobs[: len(params)][certain], own[certain])
        assert ((ids >= 0) & (ids < vocab)).all()
        for each, flag in zip(params, certain.tolist(), strict=True):
            assert flag or each in (PARAMS[1], PARAMS[2], PARAMS[4]), each
        num_decided += int(certain.sum())
    assert num_decided >= 40 * len(PARAMS) * (1 if vocab == 263 else 0.7)


@pytest.mark.parametrize("rows", [1, 2, 7, 33])
@pytest.mark.parametrize("vocab", [263, 100_003, 248_320])
@torch.inference_mode()
def test_sample_all_in_a_graph(vocab: int, rows: int) -> None:
    """Recorded once, replayed with flat and peaked distributions, with ties and without, and all filters:
    each row is the token that `sample` draws, but for some that the rounding of sums decides."""
    generator = torch.Generator("cuda").manual_seed(vocab + rows)
    logits = torch.zeros(rows + 1, vocab, device="cuda")
    logits[rows] = torch.nan  # what padding may hold
    options = table([Options()] * (rows + 1), logits.device)
    sample_all(logits, options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, _, decided = sample_all(logits, options)
    cases = combinations(vocab // 3, (0.0, 1e-7, 0.2, 0.61, 0.95, 1 - 1e-9)) + [Options(0.0), Options(30.0)]
    num_rounded = 0
    for turn in range(20):
        chosen = [cases[(turn + 7 * row) % len(cases)] for row in range(rows)]
        drawn = (0.3, 1.0, 3.0)[turn % 3] * torch.randn((rows, vocab), generator=generator, device="cuda")
        logits[:rows] = drawn.bfloat16() if turn % 2 else drawn
        options[:rows] = table(chosen, logits.device)
        graph.replay()
        # A vocabulary that is no longer than the beginning is sorted whole: nothing is left to say of NaN.
        assert decided.tolist() == [True] * rows + [vocab <= sampling.BEGINNING]
        num_rounded += assert_drawn(ids[:rows], logits[:rows].clone(), chosen)
    print(f"{num_rounded} of {20 * rows} draws at a border")
    assert num_rounded <= 2 + rows // 4


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
async def test_sampled_streams_run_ahead(family: str) -> None:
    """The tokens of a CPU, in recorded steps, of which only the last of a stream ran ahead in vain."""

    async def work(llm: AsyncLLM) -> tuple[Any, set[str]]:
        found = await sampled(llm, scale=5)
        await llm.drain()
        decodes = [step for step in llm.trace.steps if all(row.kind == "decode" for row in step.rows)]
        return found, {step.ran for step in decodes}

    (found, ran), launcher = await on("cuda", family, work)
    (expected, _), _ = await on("cpu", family, work)
    assert found == expected
    assert ran == {"graph"}
    assert launcher.num_taken >= sum(map(len, found)) - 2 * len(found)
    assert launcher.num_ahead - launcher.num_taken <= len(found)


async def test_flat_distributions_run_ahead() -> None:
    """Nothing is cut off, and the most probable tokens decide little of a large vocabulary: all the same
    no token is drawn outside the recorded step, and nothing but the end of each stream ran ahead in vain."""

    async def work(llm: AsyncLLM) -> list[list[int]]:
        prompt, *own = await llm.create_blocks("prompt", "a", "b", "c")
        await llm.forward(list(range(20, 57)), [prompt])

        async def stream(i: int) -> list[int]:
            view = [prompt, own[i]]
            return [t.id async for t in llm.generate([i], view, temperature=0.7, seed=i, max_tokens=40)]

        found = list(await asyncio.gather(*map(stream, range(3))))
        await llm.drain()
        return found

    found, launcher = await on("cuda", "qwen3_5", work, vocab=40_007)
    assert len(set(sum(found, []))) > 60
    assert launcher.num_taken >= 3 * 38
    assert launcher.num_ahead - launcher.num_taken <= 3


async def test_tokens_that_the_beginning_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are found in the step all the same, and nothing that ran ahead is dropped for them."""
    work = functools.partial(sampled, scale=3)
    expected, _ = await on("cpu", "qwen3_5", work)
    monkeypatch.setattr(sampling, "BEGINNING", 9)
    found, launcher = await on("cuda", "qwen3_5", work)
    assert found == expected
    assert launcher.num_ahead - launcher.num_taken <= len(found)


async def test_tokens_that_a_step_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are drawn anew from the step's logits, and what ran ahead with another token is dropped."""
    work = functools.partial(sampled, scale=3)
    expected, _ = await on("cpu", "qwen3_5", work)
    monkeypatch.setattr(graphs, "sample_all", sampling.sample_beginning)
    monkeypatch.setattr(sampling, "BEGINNING", 9)
    found, launcher = await on("cuda", "qwen3_5", work)
    assert found == expected
    assert launcher.num_taken < launcher.num_ahead


async def test_same_seed_whatever_else_runs() -> None:
    """A stream gets the same tokens alone, beside others, and when it was stopped and others came."""

    async def stream(llm: AsyncLLM, seed: int, count: int = 30) -> list[int]:
        block = await llm.create_block()
        view = [llm.blocks["prompt"], block]
        return [t.id async for t in llm.generate([7], view, temperature=0.9, seed=seed, max_tokens=count)]

    async def work(llm: AsyncLLM) -> list[list[int]]:
        prompt = await llm.create_block("prompt")
        await llm.forward(list(range(20, 57)), [prompt])
        alone = await stream(llm, 1)
        beside = await asyncio.gather(stream(llm, 1), *(stream(llm, seed, 3 * seed) for seed in range(2, 9)))
        again = await asyncio.gather(stream(llm, 4, 11), stream(llm, 1))
        return [alone, beside[0], again[1]]

    (alone, *others), _ = await on("cuda", "qwen3_5", work)
    assert others == [alone, alone]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
async def test_measured_steps(family: str) -> None:
    """The readings of a CPU, at recorded steps, at such that ran ahead, and at a forward."""
    found, _ = await on("cuda", family, measured)
    expected, _ = await on("cpu", family, measured)
    assert_same_readings(found, expected)


async def test_measured_steps_stay_recorded() -> None:
    async def work(llm: AsyncLLM) -> set[str]:
        llm.instruments.watch(shares=True, norms=True, tokens=True)
        a, b = await llm.create_blocks("a", "b")
        await llm.forward([5, 6, 7], [a])
        await llm.generate([8], [a, b], max_tokens=9, temperature=0.7)
        await llm.drain()
        return {step.ran for step in llm.trace.steps if all(row.kind == "decode" for row in step.rows)}

    assert (await on("cuda", "qwen3_5", work))[0] == {"graph"}
