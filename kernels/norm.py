"""Normalisations: RMS over the last dimension, its gated form, and unit length.

Knows tensors only. All three compute in float32 whatever comes in.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, in x's dtype. `weight` [D] is float32."""
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight * silu(gate) over the last dimension, float32. `x` and `gate` [...,
    D]."""
    return F.rms_norm(x.float(), weight.shape, weight, eps).mul_(F.silu(gate.float()))


def unit_length(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x * rsqrt(Σ x² + eps) over the last dimension, float32."""
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)
