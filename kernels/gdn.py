"""The gated delta rule on pairs: how tokens change a block's pair, and how a view is read.

Knows tensors per head. Knows no slots, no batches of requests (`gdn_step`) and no model.

A block's pair (Â, B̂) says how it changes a state: S_out = S_in Â + B̂. It is kept stacked, X = [Â;
B̂], because both halves follow the same rule, token by token, with α = exp(g):

    X ← α X (I − β k kᵀ) + β [0; v] kᵀ,    y = X q = [Â q; B̂ q]

What a token reads is y's second half plus the state before the block applied to the first half. All
is float32: rounding it would be carried from token to token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .norm import unit_length

CHUNK = 64
"""Tokens that `gated_delta_chunk` takes at once, at most; its work grows with the square of it."""


def split_heads(
    convolved: Tensor, key_heads: int, value_heads: int, key_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys [..., H_v, d_k] of unit length, values [..., H_v, d_v], of convolved rows [..., C].

    Each key head serves several value heads that follow one another.
    """
    key_size = key_heads * key_dim
    query, key, value = convolved.split((key_size, key_size, convolved.shape[-1] - 2 * key_size), -1)
    query, key = (
        unit_length(part.unflatten(-1, (key_heads, key_dim))).repeat_interleave(value_heads // key_heads, -2)
        for part in (query, key)
    )
    return query, key, value.unflatten(-1, (value_heads, -1))


def gated_delta_token(
    pair: Tensor, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Append one token to each of B pairs. -> what it reads, y [B, d_k + d_v], and the new pairs.

    `pair` [B, d_k + d_v, d_k]; `query` and `key` [B, d_k], unit length, the query scaled; `value`
    [B, d_v]; `log_decay` g and `beta` [B]. All float32. `pair` is overwritten.
    """
    decay = log_decay.exp()[:, None, None]
    # Vectors as rows from the left: a CPU multiplies them twice as fast as columns from the right.
    seen_by_key, seen_by_query = torch.bmm(torch.stack((key, query), 1), pair.mT).mul_(decay).unbind(1)
    written = (_stacked(value, pair.shape[1]) - seen_by_key).mul_(beta[:, None])
    read = seen_by_query + written * (key * query).sum(1, keepdim=True)
    return read, pair.mul_(decay).baddbmm_(written[:, :, None], key[:, None, :])


def gated_delta_chunk(
    pair: Tensor, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Append T tokens at once to each of B pairs. -> reads Y [B, T, d_k + d_v] and the new pairs.

    Shapes and meaning as in `gated_delta_token`, with T tokens in dimension 1. A token with g = 0
    and β = 0 changes nothing, so shorter requests are padded with such.

    With G the running sum of g and W_t = [0; v_t], the written rows D solve the triangular system

        (I + tril(β_t exp(G_t − G_i) k_t·k_i, −1)) D = β_t (W_t − exp(G_t) X k_t)
    """
    # Sums and their differences in float64: behind a strong decay float32 would lose weak ones.
    total = log_decay.cumsum(1, dtype=torch.float64)
    later = torch.ones(key.shape[1], key.shape[1], dtype=torch.bool, device=key.device).triu(1)
    between = (total[:, :, None] - total[:, None, :]).float()
    between = between.masked_fill_(later, -torch.inf).exp_()  # masked first: exp could overflow
    since_start = total.float().exp()[:, :, None]
    wanted = _stacked(value, pair.shape[1]) - since_start * torch.bmm(key, pair.mT)
    system = torch.bmm(key, key.mT) * between * beta[:, :, None]
    # Only what lies below the diagonal is read: the diagonal counts as ones.
    written = torch.linalg.solve_triangular(
        system, wanted * beta[:, :, None], upper=False, unitriangular=True
    )
    read = since_start * torch.bmm(query, pair.mT)
    read.baddbmm_(torch.bmm(query, key.mT) * between, written)
    until_end = between[:, -1, :, None]
    new_pair = torch.baddbmm(pair * since_start[:, -1:], (written * until_end).mT, key)
    return read, new_pair


def read_through_chain(pairs: Tensor, chain: Tensor, read: Tensor) -> Tensor:
    """What one token per request reads through its view: o [R, H, d_v].

    `pairs` [slots, H, d_k + d_v, d_k]; `chain` [R, depth]: slots of the blocks before the written
    one, nearest first, padded with slots that hold (I, 0); `read` [R, H, d_k + d_v] from the
    written block. From right to left: o += B̂ u; u ← Â u. No matrix is multiplied by a matrix.
    """
    key_dim = pairs.shape[-1]
    carried, out = read[..., :key_dim], read[..., key_dim:]
    for slots in chain.unbind(1):
        step = torch.matmul(carried[..., None, :], pairs.index_select(0, slots).mT)[..., 0, :]
        carried, out = step[..., :key_dim], out + step[..., key_dim:]
    return out


def state_after_chain(pairs: Tensor, chain: Tensor) -> Tensor:
    """The state before the written block, S [R, H, d_v, d_k]: the chain applied to zero.

    Arguments as in `read_through_chain`. For requests of many rows: o = S y_first + y_second.
    """
    key_dim = pairs.shape[-1]
    state = pairs.new_zeros((chain.shape[0], pairs.shape[1], pairs.shape[2] - key_dim, key_dim))
    for slots in chain.flip(1).unbind(1):
        pair = pairs.index_select(0, slots)
        state = torch.matmul(state, pair[:, :, :key_dim]) + pair[:, :, key_dim:]
    return state


def _stacked(value: Tensor, size: int) -> Tensor:
    """[0; v] in the last dimension, `size` elements long."""
    return torch.nn.functional.pad(value, (size - value.shape[-1], 0))
