"""The first three tokens of each block in factored form: their convolution is computed anew under every view.

Knows raw rows, gates and pairs in slots, by index. Knows no blocks by name and no model.

The convolution of a block's first three tokens reaches into what stands before the block. Here a pair (Â, B̂)
begins at a block's fourth token, and of the first three the raw rows, g and β are kept. Whoever reads the
block convolves them with the rows that stand before it in *that* view, and applies them one by one: a state
becomes S ← α S (I − β k kᵀ) + β v kᵀ. A token that a block has not has g = 0 and β = 0, and changes nothing.

Plain PyTorch, the only implementation. It makes the state before each request as a matrix, which costs more
than reading through pairs (`gdn.read_through_chain`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .convolution import WIDTH
from .gdn import gated_delta_chunk
from .gdn_step import DeltaPlan, gated_delta_over_view
from .transitions import compose

FIRST = WIDTH - 1
"""How many tokens of a block have a convolution that reaches into what stands before the block."""


@dataclass(frozen=True)
class BoundaryPlan:
    """Indices for a step of R requests and N rows over at most D blocks before a written one. All int64."""

    slots: Tensor  # [R, D + 1] of the view's blocks in order, 0s before them; last the slot read of the
    #                written block
    history: Tensor  # [R, D + 1, 3] rows of the pool of newest rows before each of these, oldest first
    new_rows: Tensor  # [R, 3] rows of the step that are their block's first three tokens; -1: none is
    first: Tensor  # [F] those rows, ascending
    first_place: Tensor  # [F] index in new_rows.flatten() of each


@dataclass(frozen=True)
class FirstTokens:
    """What one Gated DeltaNet layer keeps of the first three tokens of each block."""

    rows: Tensor  # [slots, 3, C] raw rows in the model's dtype
    gates: Tensor  # [slots, 3, 2, H] float32: g = log α, and β


def convolve_first_tokens(
    first_rows: Tensor, newest_rows: Tensor, weight: Tensor, slots: Tensor, history: Tensor
) -> Tensor:
    """silu of the convolution of blocks' first three rows and what stands before them: float32 [..., 3, C].

    `first_rows`, `newest_rows` [slots, 3, C]; `weight` [4, C] float32; `slots` [...] of the blocks; `history`
    [..., 3] rows of the pool of newest rows before each block, oldest first.
    """
    channels = first_rows.shape[-1]
    before = newest_rows.flatten(0, 1).index_select(0, history.flatten()).view(*history.shape, channels)
    own = first_rows.index_select(0, slots.flatten()).view(*slots.shape, FIRST, channels)
    windows = torch.cat((before, own), -2).unfold(-2, WIDTH, 1)  # [..., 3, C, 4]
    return F.silu((windows.float() * weight.mT).sum(-1))


def append_to_state(state: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """S α (I − β k kᵀ) + β v kᵀ. `state` [..., d_v, d_k], `key` [..., d_k], `value` [..., d_v], the rest
    [...]; all float32."""
    decayed = state * log_decay.exp()[..., None, None]
    seen = torch.matmul(decayed, key[..., :, None])[..., 0]
    written = beta[..., None] * (value - seen)
    return decayed + written[..., :, None] * key[..., None, :]


def state_before_rows(
    pairs: Tensor, slots: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor
) -> Tensor:
    """The state before the step's rows, first tokens of the written block that it has already included.

    `pairs` [slots, H, d_k + d_v, d_k]; `slots` [R, D + 1] as in the plan; the first tokens of these blocks:
    `key` [R, D + 1, 3, H, d_k], `value` [R, D + 1, 3, H, d_v], `log_decay` and `beta` [R, D + 1, 3, H]. The
    pair of the written block is left out. -> [R, H, d_v, d_k] float32.
    """
    requests, blocks = slots.shape
    key_dim = key.shape[-1]
    state = value.new_zeros((requests, *value.shape[-2:], key_dim))
    for block in range(blocks):
        for token in range(FIRST):
            at = (slice(None), block, token)
            state = append_to_state(state, key[at], value[at], log_decay[at], beta[at])
        if block < blocks - 1:
            pair = pairs.index_select(0, slots[:, block])
            state = torch.matmul(state, pair[..., :key_dim, :]) + pair[..., key_dim:, :]
    return state


def gated_delta_over_boundaries(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    pairs: Tensor,
    delta: DeltaPlan,
    boundary: BoundaryPlan,
    state: Tensor,
) -> Tensor:
    """`gated_delta_over_view` for pairs that begin at the fourth token: what N rows read, [N, H, d_v].

    Arguments as there; `state` [R, H, d_v, d_k] from `state_before_rows`. Rows that are first tokens of their
    block change the state and no pair; the others change the pair and read through it.
    """
    reads = []
    for rows in boundary.new_rows.unbind(1):
        absent = (rows < 0)[:, None]
        q, k, v, g, b = (x.index_select(0, rows.clamp(min=0)) for x in (query, key, value, log_decay, beta))
        state = append_to_state(state, k, v, g.masked_fill(absent, 0), b.masked_fill(absent, 0))
        reads.append(torch.matmul(state, q[..., None])[..., 0])
    log_decay, beta = (x.index_fill(0, boundary.first, 0) for x in (log_decay, beta))  # change no pair
    out = gated_delta_over_view(query, key, value, log_decay, beta, pairs, delta, before=state)
    read = torch.stack(reads, 1).flatten(0, 1).index_select(0, boundary.first_place)
    return out.index_copy_(0, boundary.first, read)


def keep_first_tokens(
    kept: FirstTokens,
    rows: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    read_slot: Tensor,
    write_slot: Tensor,
    new_rows: Tensor,
) -> None:
    """Write to `write_slot` [R] what each request's block keeps of its first tokens after the step.

    `rows` [N, C], `log_decay` and `beta` [N, H] of the step; `new_rows` [R, 3] as in the plan: where it is
    -1, what lies at `read_slot` [R] stays.
    """
    index = new_rows.clamp(min=0)
    is_old = (new_rows < 0)[..., None]
    gates = torch.stack((log_decay, beta), 1)
    new = torch.where(is_old, kept.rows.index_select(0, read_slot), rows[index])
    new_gates = torch.where(is_old[..., None], kept.gates.index_select(0, read_slot), gates[index])
    kept.rows.index_copy_(0, write_slot, new)
    kept.gates.index_copy_(0, write_slot, new_gates)


def append_first_tokens(
    pair: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor
) -> Tensor:
    """Pairs after a block's first tokens. `pair` [B, H, d_k + d_v, d_k], `key` [B, 3, H, d_k], `value`
    [B, 3, H, d_v], `log_decay` and `beta` [B, 3, H]; all float32."""
    inputs = (key, key, value, log_decay, beta)
    _, new = gated_delta_chunk(pair.flatten(0, 1), *(x.transpose(1, 2).flatten(0, 1) for x in inputs))
    return new.view(pair.shape)


def join_over_boundary(
    left: Tensor, right: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor
) -> Tensor:
    """The pair of left, then right's first tokens, then right's pair. Shapes as in `append_first_tokens`."""
    return compose(append_first_tokens(left, key, value, log_decay, beta), right)
