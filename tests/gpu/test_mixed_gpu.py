"""Recorded steps of inputs of several tokens beside decodes on a GPU, against a CPU."""

from __future__ import annotations

from typing import Any

import pytest
from launched_cases import assert_same_results, on, ragged

from asyncllm_nb import AsyncLLM
from asyncllm_nb.engine.mixed_graphs import MAX_DEPTH

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5"])
async def test_recorded_steps_of_ragged_inputs(family: str) -> None:
    """Every step is recorded but for the one whose logits are all wanted."""

    async def work(llm: AsyncLLM) -> tuple[list[Any], list[str]]:
        found = await ragged(llm)
        return found, [step.ran for step in llm.trace.steps]

    (found, ran), _ = await on("cuda", family, work)
    (expected, _), _ = await on("cpu", family, work)
    assert_same_results(found, expected)
    assert ran == ["graph"] * (len(ran) - 1) + ["eager"]


async def test_chunks_and_deep_views() -> None:
    """Chunks that fill a step are recorded, also before an input's last one; what is behind too many
    blocks is not. The same logits as on a CPU."""

    async def work(llm: AsyncLLM) -> tuple[list[Any], list[str]]:
        blocks = await llm.create_blocks(MAX_DEPTH + 2)
        found: list[Any] = []
        for index, (block, count) in enumerate(zip(blocks, (150, 3, 64, 1, 17, 40, 5, 2), strict=True)):
            out = await llm.forward([(7 * i + index) % 90 for i in range(count)], blocks[: index + 1])
            assert out.logits is not None
            assert block.num_tokens == count
            found.append(out.logits.cpu())
        return found, [step.ran for step in llm.trace.steps]

    (found, ran), _ = await on("cuda", "qwen3_5", work)
    (expected, _), _ = await on("cpu", "qwen3_5", work)
    assert_same_results(found, expected)
    assert ran == ["graph"] * (len(ran) - 1) + ["eager"]
