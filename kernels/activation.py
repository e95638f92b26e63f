"""The gates of the MLP and of an attention's output. Knows tensors only."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where `gate_up` [N, 2 * I] holds the gate in its first half. -> [N, I]"""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), element by element, float32 in between, in `gate`'s dtype."""
    return (x * torch.sigmoid(gate.float())).to(gate.dtype)
