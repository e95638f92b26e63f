"""Rotary frequencies of a checkpoint: the rope types default, linear, llama3 and yarn.

Knows the fields of ``rope_parameters`` (and of the older ``rope_scaling``) with the meaning that
transformers gives them. Knows no model; the rotation itself is in `kernels/rotary.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from .errors import ModelError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DEFAULT_THETA = 10_000.0
DEFAULT_MROPE_SECTION = (11, 11, 10)


@dataclass(frozen=True)
class RopeConfig:
    """How positions turn queries and keys. Frequencies and lengths are those of the checkpoint."""

    type: str
    theta: float
    rotary_dim: int  # the first rotary_dim elements of a head are rotated, an even number
    mrope_section: tuple[int, ...] | None = None  # frequencies per axis, interleaved; None: one axis
    factor: float = 1.0  # linear, llama3, yarn
    original_max_positions: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn; None: derived from factor and mscale
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float = 0.0  # yarn
    mscale_all_dim: float = 0.0  # yarn
    truncate: bool = True  # yarn

    @classmethod
    def from_dict(
        cls,
        text: Mapping[str, Any],
        *,
        head_dim: int,
        max_positions: int,
        default_partial: float | None,
    ) -> RopeConfig:
        """Read a decoder's ``config.json``. `default_partial` None: the family rotates whole heads.

        Raises ModelError for a type or a field that is not supported, naming it.
        """
        given = dict(text.get("rope_scaling") or text.get("rope_parameters") or {})
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in ROPE_TYPES:
            raise ModelError(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
        partial = given.get("partial_rotary_factor", text.get("partial_rotary_factor"))
        if default_partial is None and partial not in (None, 1.0):
            raise ModelError(f"partial_rotary_factor {partial} is not supported in this family")
        if partial is None:
            partial = default_partial or 1.0
        rotary_dim = int(head_dim * partial)
        if rotary_dim % 2 or rotary_dim == 0:
            raise ModelError(
                f"rotary positions turn pairs of elements: {rotary_dim} of a head's {head_dim}"
                " is no even number above 0"
            )
        theta = given.get("rope_theta", text.get("rope_theta", DEFAULT_THETA))
        section = tuple(given.get("mrope_section") or DEFAULT_MROPE_SECTION)
        return cls(
            type=kind,
            theta=float(theta),
            rotary_dim=rotary_dim,
            mrope_section=None if default_partial is None else section,
            **_scaling(kind, given, text, max_positions),
        )

    def frequencies(self) -> tuple[Tensor, float]:
        """Radians per position, float32 [rotary_dim / 2], and the factor on cosines and sines.

        Float32 because that is what the model was trained and is published with: rounding it is
        part of the model, unlike the rounding of angles.
        """
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.int64).float() / self.rotary_dim
        powers = self.theta**exponents
        plain = 1.0 / powers
        if self.type == "linear":
            return plain / self.factor, 1.0
        if self.type == "llama3":
            return self._llama3(plain), 1.0
        if self.type == "yarn":
            return self._yarn(powers), self._yarn_attention_factor()
        return plain, 1.0

    def axes(self) -> Tensor:
        """Which axis of a position drives each frequency, int64 [rotary_dim / 2]: 0, 1 or 2.

        Interleaved sections: frequencies 1, 4, 7 … belong to axis 1 and 2, 5, 8 … to axis 2, as
        many as the section says; the rest belong to axis 0.
        """
        axes = torch.zeros(self.rotary_dim // 2, dtype=torch.int64)
        if self.mrope_section is not None:
            for axis in (1, 2):
                axes[axis : 3 * self.mrope_section[axis] : 3] = axis
        return axes

    def _llama3(self, plain: Tensor) -> Tensor:
        """Long waves slowed down by the factor, short ones kept, a linear blend between them."""
        low_wave = self.original_max_positions / self.low_freq_factor
        high_wave = self.original_max_positions / self.high_freq_factor
        wave = 2 * math.pi / plain
        slowed = torch.where(wave > low_wave, plain / self.factor, plain)
        blend = (self.original_max_positions / wave - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        blended = (1 - blend) * slowed / self.factor + blend * slowed
        between = (wave >= high_wave) & (wave <= low_wave)
        return torch.where(between, blended, slowed)

    def _yarn(self, powers: Tensor) -> Tensor:
        """Fast frequencies kept, slow ones divided by the factor, a ramp between them."""
        low, high = self._yarn_dim(self.beta_fast), self._yarn_dim(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.rotary_dim - 1)
        if low == high:
            high += 0.001  # the ramp needs a width
        steps = torch.arange(self.rotary_dim // 2, dtype=torch.float32)
        kept = 1 - torch.clamp((steps - low) / (high - low), 0, 1)
        return 1.0 / (self.factor * powers) * (1 - kept) + 1.0 / powers * kept

    def _yarn_dim(self, rotations: float) -> float:
        """The element of a head that turns `rotations` times over the original length."""
        turns = self.original_max_positions / (rotations * 2 * math.pi)
        return self.rotary_dim * math.log(turns) / (2 * math.log(self.theta))

    def _yarn_attention_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        log = math.log(self.factor)
        if self.mscale and self.mscale_all_dim:
            return (0.1 * self.mscale * log + 1.0) / (0.1 * self.mscale_all_dim * log + 1.0)
        return 0.1 * log + 1.0


def _scaling(
    kind: str, given: Mapping[str, Any], text: Mapping[str, Any], max_positions: int
) -> dict[str, Any]:
    """The fields of `given` that scaling of this kind needs, None left to the defaults."""
    if kind == "default":
        return {}
    original = text.get("original_max_position_embeddings") or given.get(
        "original_max_position_embeddings", max_positions
    )
    values: dict[str, Any] = {"original_max_positions": original}
    required = {"llama3": ("low_freq_factor", "high_freq_factor")}.get(kind, ())
    names = {field.name for field in fields(RopeConfig)} & set(given)
    values.update({name: given[name] for name in names if given[name] is not None and name != "type"})
    values.pop("mrope_section", None)
    if kind == "yarn" and "factor" not in values:
        values["factor"] = max_positions / original
    for name in ("factor", *required):
        if name not in values:
            raise ModelError(f"rope type {kind!r} needs the field {name!r}")
    return values
