"""Joining what blocks do to a Gated DeltaNet state. Knows stacked pairs only (see `gdn`)."""

from __future__ import annotations

import torch
from torch import Tensor


def compose(left: Tensor, right: Tensor) -> Tensor:
    """The pair of left, then right: [Â_L Â_R; B̂_L Â_R + B̂_R], all [..., d_k + d_v, d_k]."""
    key_dim = left.shape[-1]
    joined = torch.matmul(left, right[..., :key_dim, :])
    joined[..., key_dim:, :] += right[..., key_dim:, :]
    return joined
