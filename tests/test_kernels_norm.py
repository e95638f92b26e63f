"""Normalisations and gates against transformers' modules and against their definitions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from asyncllm_nb.kernels.activation import sigmoid_gate, silu_and_multiply
from asyncllm_nb.kernels.norm import gated_rms_norm, rms_norm, unit_length


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm(dtype: torch.dtype) -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

    module = Qwen3_5RMSNorm(37, eps=1e-3)  # the weight is around 0 there
    torch.nn.init.normal_(module.weight)
    x = torch.randn(5, 3, 37, dtype=dtype)
    with torch.no_grad():
        actual = rms_norm(x, 1 + module.weight, 1e-3)
        assert actual.dtype == dtype
        torch.testing.assert_close(actual, module(x))


def test_gated_rms_norm() -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

    module = Qwen3_5RMSNormGated(37, eps=1e-3)
    torch.nn.init.normal_(module.weight)
    x, gate = torch.randn(5, 3, 37), torch.randn(5, 3, 37)
    with torch.no_grad():
        torch.testing.assert_close(gated_rms_norm(x, gate, module.weight, 1e-3), module(x, gate))


def test_unit_length() -> None:
    x = torch.randn(4, 9)
    torch.testing.assert_close(unit_length(x).norm(dim=-1), torch.ones(4))
    assert torch.equal(unit_length(torch.zeros(1, 9)), torch.zeros(1, 9))
    assert unit_length(x.bfloat16()).dtype == torch.float32


def test_silu_and_multiply() -> None:
    gate, up = torch.randn(3, 11), torch.randn(3, 11)
    torch.testing.assert_close(silu_and_multiply(torch.cat((gate, up), 1)), F.silu(gate) * up)


def test_sigmoid_gate() -> None:
    x, gate = torch.randn(3, 11), torch.randn(3, 11).bfloat16()
    expected = (x * torch.sigmoid(gate.float())).bfloat16()
    assert torch.equal(sigmoid_gate(x, gate), expected)
