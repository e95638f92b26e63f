"""Rotary positions: cosines and sines of positions, and turning heads by them.

Knows positions with several axes and heads that are turned in part. Knows no model and no cache.

Element i of a head's first R elements is paired with element i + R/2. A rotation is applied as
``x * cos + swapped(x) * sin`` with the signs inside `sin`, and 1 and 0 for elements that stay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotation:
    """How far each of n rows is turned."""

    cos: Tensor  # [n, 1, D] float32
    sin: Tensor  # [n, 1, D] float32, negative for the first element of each pair
    half: int  # R / 2: pairs of elements that are turned


@dataclass(frozen=True)
class Rotary:
    """How positions turn heads, the same for all layers of a model."""

    frequencies: Tensor  # [R / 2] radians per position
    axes: Tensor  # [R / 2] int64, the axis of a position that drives each frequency
    head_dim: int
    scaling: float = 1.0  # on what is turned; not 1 for yarn only

    def to_positions(self, positions: Tensor) -> Rotation:
        """The rotation of a raw head to its position. `positions` [3, n] int64, per axis."""
        return self._turn(positions, self.scaling)

    def by_shift(self, shift: Tensor) -> Rotation:
        """The rotation that moves a turned head on by `shift` [n] int64, on all axes alike."""
        return self._turn(shift.expand(3, -1), 1.0)

    def _turn(self, positions: Tensor, scaling: float) -> Rotation:
        """Angles are formed in float64: far positions lose nothing."""
        angles = positions.index_select(0, self.axes).double() * self.frequencies[:, None].double()
        cos, sin = angles.cos().mul_(scaling).t(), angles.sin().mul_(scaling).t()  # [n, R / 2]
        rest = (cos.shape[0], self.head_dim - 2 * cos.shape[1])
        full_cos = torch.cat((cos, cos, cos.new_ones(rest)), dim=1)
        full_sin = torch.cat((-sin, sin, sin.new_zeros(rest)), dim=1)
        return Rotation(full_cos.float()[:, None], full_sin.float()[:, None], sin.shape[1])


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Turn heads `x` [n, heads, D] row by row; float32 [n, heads, D]."""
    x = x.float()
    first, second, rest = x.split((by.half, by.half, x.shape[-1] - 2 * by.half), dim=-1)
    return torch.addcmul(x * by.cos, torch.cat((second, first, rest), dim=-1), by.sin)
