"""Any cut and any program on a GPU: against transformers, and against the literal model.

The same checks as in `test_exactness` and `test_programs`, in float32 and in bf16.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch
from helpers import BOTH_KINDS, FAMILIES, Bench, checkpoint, literal
from hypothesis import given, settings
from hypothesis import strategies as st
from test_exactness import CUT, SEQUENCES, Cut, encode_cut, expected_logits
from test_programs import OP, Op, Program

from asyncllm_nb import AsyncLLM
from asyncllm_nb.testing import assert_close_logits

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
BUDGET = st.sampled_from([48, 256])
SECONDS = 240.0
"""An example may be the first one that needs some kernels, which are compiled then."""


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    """The engines that all examples share."""
    with Bench() as bench:
        yield bench


def engine_of(bench: Bench, family: str, dtype: torch.dtype, budget: int) -> AsyncLLM:
    name = str(dtype).removeprefix("torch.")
    return bench.engine(
        family, device="cuda", dtype=name, cache_tokens=8192, max_blocks=64, max_batch_tokens=budget
    )


@DTYPES
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(CUT, min_size=1, max_size=3), budget=BUDGET)
def test_any_cut_gives_the_logits_of_transformers(
    bench: Bench, family: str, dtype: torch.dtype, cuts: list[Cut], budget: int
) -> None:
    """Several cuts at once, so that rows of all kinds meet in one batch."""
    llm = engine_of(bench, family, dtype, budget)

    async def encode_side_by_side() -> None:
        work = [encode_cut(llm, SEQUENCES[i], cut) for i, cut in enumerate(cuts)]
        for logits, whole in zip(await asyncio.gather(*work), expected_logits(family), strict=False):
            if len(logits):
                assert_close_logits(logits.cpu(), whole[: len(logits)], dtype)

    bench.run(llm, encode_side_by_side(), SECONDS)


@DTYPES
@pytest.mark.parametrize("family", BOTH_KINDS)
@settings(max_examples=20, deadline=None)
@given(ops=st.lists(OP, min_size=2, max_size=14), budget=BUDGET)
def test_random_program_agrees_with_the_literal_model(
    bench: Bench, family: str, dtype: torch.dtype, ops: list[Op], budget: int
) -> None:
    llm = engine_of(bench, family, dtype, budget)
    bench.run(llm, Program(llm, literal(checkpoint(family)), dtype).run(ops), SECONDS)
