"""The engine's option ``boundary="recomputed"``: what it keeps in a slot, lays out in a step, and joins.

Knows states, slots and layers' weights. Knows no requests and no order; the arithmetic, and what it means, is
`kernels.boundary`'s. Nothing here runs when the option is off.

A merged or appended block reads as left, then right, also inside: joining convolves right's first tokens with
left's last rows and takes them into the pair. Behind the third token of a block nothing depends on the view.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..kernels.boundary import (
    FIRST,
    BoundaryPlan,
    FirstTokens,
    append_first_tokens,
    convolve_first_tokens,
    join_over_boundary,
)
from ..kernels.dispatch import why_not_fused
from ..kernels.gdn import split_heads
from ..kernels.transitions import compose
from .batch import IDENTITY_SLOT, Batch
from .blocks import BlockState
from .config import ModelConfig
from .layout import Part, newest_rows
from .memory import CacheTensors
from .weights import DeltaNetWeights, Weights

Boundary = Literal["written", "recomputed"]
"""Which rows stand before a block's first tokens in their convolution: those of the view under which they
were written, or those of the view that reads them."""

Source = tuple[int, int]
"""A block's slot, and how many of its newest raw rows it has."""


@dataclass(frozen=True)
class BoundaryCache(CacheTensors):
    """Memory whose pairs begin at a block's fourth token, and what is kept of the first three."""

    first_rows: Tensor  # [L_g, slots, 3, C] model dtype, raw projection rows, oldest first
    first_gates: Tensor  # [L_g, slots, 3, 2, H_v] float32: g and β; 0 where a block has no such token

    @staticmethod
    def beside(cache: CacheTensors) -> BoundaryCache:
        """`cache`, with memory for first tokens beside each of its slots."""
        first_rows = torch.empty_like(cache.conv_rows)
        layers, slots, heads = cache.pairs.shape[:3]
        first_gates = torch.empty((layers, slots, FIRST, 2, heads), device=cache.pairs.device)
        first_rows[:, IDENTITY_SLOT] = 0
        first_gates[:, IDENTITY_SLOT] = 0
        return BoundaryCache(
            cache.keys, cache.values, cache.pairs, cache.conv_rows, first_rows, first_gates
        )

    @staticmethod
    def first_tokens_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
        """Bytes that one slot takes more, all layers."""
        row = config.conv_channels * dtype.itemsize + 2 * config.linear_value_heads * 4
        return config.num_linear_layers * FIRST * row

    def first_tokens(self) -> Iterator[FirstTokens]:
        """Each Gated DeltaNet layer's."""
        return (FirstTokens(*layer) for layer in zip(self.first_rows, self.first_gates, strict=True))

    def release(self) -> None:
        """Give the storage back at once, whoever still holds these tensors."""
        super().release()
        for tensor in (self.first_rows, self.first_gates):
            tensor.untyped_storage().resize_(0)


def check_boundary(boundary: str, device: torch.device) -> None:
    """Raise ValueError for an unknown name, and where the option has no kernels."""
    if boundary not in ("written", "recomputed"):
        raise ValueError(f"boundary must be 'written' or 'recomputed', not {boundary!r}")
    if boundary == "recomputed" and device.type == "cuda" and not why_not_fused(device):
        raise ValueError("boundary='recomputed' has no fused kernels: make the engine with device='cpu'")


def with_boundary(batch: Batch, parts: Sequence[Part]) -> Batch:
    """`batch`, laid out from `parts`, with the indices that the first tokens of blocks need."""
    depth = batch.chain_slots.shape[1]
    slots, history, new_rows = [], [], []
    starts = batch.row_start.tolist()
    for part, start in zip(parts, starts, strict=False):
        sources = [(state.slot, state.num_rows) for state in part.view if state.slot != IDENTITY_SLOT]
        padding = depth - len(sources)
        slots.append([IDENTITY_SLOT] * padding + [slot for slot, _ in sources] + [part.read_slot])
        before = rows_before([*sources, (part.read_slot, 0)])
        history.append(before[:1] * padding + before)  # padded with the zeros before the first
        end = part.num_before + len(part.token_ids)
        new_rows.append(
            [start + i - part.num_before if part.num_before <= i < end else -1 for i in range(FIRST)]
        )
    places = np.array(new_rows).reshape(-1)
    present = np.flatnonzero(places >= 0)
    device = batch.token_ids.device

    def tensor(values: object) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(device)

    plan = BoundaryPlan(
        slots=tensor(slots),
        history=tensor(history),
        new_rows=tensor(new_rows),
        first=tensor(places[present]),
        first_place=tensor(present),
    )
    return replace(batch, boundary=plan)


def rows_before(sources: Sequence[Source]) -> list[list[int]]:
    """For each block of a view, indices of the three raw rows before it, oldest first."""
    nothing = (IDENTITY_SLOT, 0)
    return [newest_rows([nothing, *reversed(sources[:index])]) for index in range(len(sources))]


def first_inputs(
    config: ModelConfig,
    weights: DeltaNetWeights,
    kept: FirstTokens,
    newest: Tensor,
    slots: Tensor,
    history: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values, g and β of blocks' first three tokens, behind the rows that `history` names.

    One layer's `newest` [slots, 3, C]; `slots` [...]; `history` [..., 3]. -> [..., 3, H_v, d_k],
    [..., 3, H_v, d_v] and twice [..., 3, H_v], float32.
    """
    convolved = convolve_first_tokens(kept.rows, newest, weights.conv, slots, history)
    sizes = (config.linear_key_heads, config.linear_value_heads, config.linear_key_dim)
    _, key, value = split_heads(convolved, *sizes)
    gates = kept.gates.index_select(0, slots.flatten()).view(*slots.shape, *kept.gates.shape[1:])
    return key, value, gates[..., 0, :], gates[..., 1, :]


def whole_pairs(
    config: ModelConfig, weights: Weights, cache: BoundaryCache, layer: int, sources: Sequence[Source]
) -> Tensor:
    """The pairs of all tokens of a view's blocks, in order, as the view reads them: float32 [B, H_v,
    d_k + d_v, d_k]. `layer` counts Gated DeltaNet layers."""
    device = cache.pairs.device
    slots = torch.tensor([slot for slot, _ in sources], device=device)
    history = torch.tensor(rows_before(sources), device=device)
    kept = FirstTokens(cache.first_rows[layer], cache.first_gates[layer])
    mixer = _mixers(weights)[layer]
    first = first_inputs(config, mixer, kept, cache.conv_rows[layer], slots, history)
    empty = cache.pairs[layer, IDENTITY_SLOT].expand(len(sources), -1, -1, -1)
    return compose(append_first_tokens(empty, *first), cache.pairs[layer].index_select(0, slots))


def join_slots(
    config: ModelConfig,
    weights: Weights,
    cache: BoundaryCache,
    left: BlockState,
    right: BlockState,
    target: int,
) -> None:
    """Write to slot `target` the pair and the first tokens of `left` followed by `right`."""
    device = cache.pairs.device
    slots = torch.tensor([right.slot], device=device)
    history = torch.tensor([newest_rows([(left.slot, left.num_rows)])], device=device)
    # Of right's first tokens, these are among the first three of both together.
    from_left = left.num_rows
    still_first = FIRST - from_left
    for layer, (mixer, kept) in enumerate(zip(_mixers(weights), cache.first_tokens(), strict=True)):
        pairs = cache.pairs[layer]
        key, value, log_decay, beta = first_inputs(
            config, mixer, kept, cache.conv_rows[layer], slots, history
        )
        for gate in (log_decay, beta):
            gate[:, :still_first] = 0
        first = (key, value, log_decay, beta)
        pairs[target] = join_over_boundary(pairs[left.slot, None], pairs[right.slot, None], *first)[0]
        for kind in (kept.rows, kept.gates):
            kind[target] = torch.cat((kind[left.slot, :from_left], kind[right.slot, :still_first]))


def _mixers(weights: Weights) -> list[DeltaNetWeights]:
    """Weights of the Gated DeltaNet layers, in order."""
    return [layer.mixer for layer in weights.layers if isinstance(layer.mixer, DeltaNetWeights)]
