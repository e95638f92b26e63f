"""Fused layers in Triton's interpreter, float32: attention over views and Gated DeltaNet."""

from __future__ import annotations

import pytest
import torch
from layer_cases import ATTENTION_CASES, DELTA_CASES, check_layer

from asyncllm_nb.engine.weights import AttentionWeights, DeltaNetWeights


@pytest.mark.parametrize("case", ATTENTION_CASES)
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_attention(family: str, case: str) -> None:
    check_layer(family, ATTENTION_CASES[case], AttentionWeights, "cpu", torch.float32)


@pytest.mark.parametrize("case", DELTA_CASES)
def test_delta_net(case: str) -> None:
    check_layer("qwen3_5", DELTA_CASES[case], DeltaNetWeights, "cpu", torch.float32)
