"""Fused pieces between matrix products: residual sums with their norm, and the MLP's gate.

Knows rows of activations. The meaning is that of `norm.rms_norm` and `activation.silu_and_multiply`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def add_and_norm(hidden: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """hidden += added (if given), in place; -> rms_norm(hidden) in hidden's dtype.

    `hidden` and `added` [N, C], contiguous; `weight` [C] float32.
    """
    rows, width = hidden.shape
    out = torch.empty_like(hidden)
    block = triton.next_power_of_2(width)
    _add_and_norm[(rows,)](
        hidden, hidden if added is None else added, weight, out, width, eps,
        HAS_ADDED=added is not None, BLOCK=block, num_warps=min(16, max(4, block // 512)),
    )  # fmt: skip
    return out


@triton.jit
def _add_and_norm(
    hidden: tl.tensor, added: tl.tensor, weight: tl.tensor, out: tl.tensor, width: tl.tensor,
    eps: tl.tensor,
    HAS_ADDED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = row * width + column
    x = tl.load(hidden + place, mask=inside, other=0.0)
    if HAS_ADDED:
        # Rounded to the model's dtype before it is normalised, as the sum that is kept.
        x = (x.to(tl.float32) + tl.load(added + place, mask=inside, other=0.0)).to(x.dtype)
        tl.store(hidden + place, x, mask=inside)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x) / width + eps)
    factor = tl.load(weight + column, mask=inside, other=0.0)
    tl.store(out + place, (x * scale * factor).to(out.dtype.element_ty), mask=inside)


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where `gate_up` [N, 2 * I] holds the gate in its first half. -> [N, I]"""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, width))
    block = min(1024, triton.next_power_of_2(width))
    _silu_and_multiply[(rows, triton.cdiv(width, block))](gate_up, out, width, BLOCK=block)
    return out


@triton.jit
def _silu_and_multiply(gate_up: tl.tensor, out: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    start = gate_up + row * 2 * width
    gate = tl.load(start + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + width + column, mask=inside, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    tl.store(out + row * width + column, product.to(out.dtype.element_ty), mask=inside)
