"""What the instruments look at: attention over single tokens, and what blocks do to a state.

Knows keys as pages and pairs as slots, by index. Knows no blocks by name, no steps and no model.
Nothing here takes part in a forward pass; all of it is float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .rotary import Rotary, rotate


class SeenSegment(NamedTuple):
    """A run of tokens that one row reads."""

    places: Tensor  # [tokens] int64: page * page_tokens + offset in the page
    shift: int  # what is added to the row's position to turn its query for them


def attention_weights(
    query: Tensor,
    keys: Tensor,
    position: Tensor,
    segments: Sequence[SeenSegment],
    rotary: Rotary,
    scale: float,
) -> Tensor:
    """One row's attention over every token that it sees, in all layers: float32 [L, H, tokens].

    `query` [L, H, D] raw (not turned); `keys` [L, H_kv, pages, page_tokens, D]; `position` [3]
    int64 of the row in the block that it is written to. Tokens stand in the order of `segments`.
    Sums to 1 over tokens.
    """
    layers, heads, dim = query.shape
    keys = keys.flatten(2, 3)
    grouped = (layers, keys.shape[1], heads // keys.shape[1], dim)
    scores = []
    for places, shift in segments:
        turned = rotate(query, rotary.to_positions((position + shift)[:, None]))
        seen = keys.index_select(2, places).float()  # [L, H_kv, tokens, D]
        scores.append(torch.matmul(turned.view(grouped), seen.mT).flatten(1, 2))
    return (torch.cat(scores, dim=-1) * scale).softmax(-1)


def carried_parts(pairs: Tensor, slots: Tensor) -> Tensor:
    """Each block's own part of a view's state, carried through what follows: [B, ..., d_v, d_k].

    `pairs` [..., slots, H, d_k + d_v, d_k] float32; `slots` [B] of the view's blocks in order.
    Block b's part is B̂_b Â_{b+1} … Â_B; the parts add up to the state after the view. An empty
    block (the slot of (I, 0)) has a part of zeros.
    """
    key_dim = pairs.shape[-1]
    chosen = pairs.index_select(-4, slots)
    kept, written = chosen[..., :key_dim, :], chosen[..., key_dim:, :]
    after = torch.eye(key_dim, device=pairs.device)
    parts: list[Tensor] = []
    for block in reversed(range(slots.shape[0])):
        parts.append(torch.matmul(written.select(-4, block), after))
        after = torch.matmul(kept.select(-4, block), after)
    return torch.stack(parts[::-1])


def transition_norms(pairs: Tensor) -> Tensor:
    """How much of the past pairs [..., d_k + d_v, d_k] let through: ‖Â‖ / √d_k, float32 [...].

    The Frobenius norm, so: the factor by which a state's size shrinks if it points anywhere alike.
    1 for an empty block, 0 if nothing of the past is left.
    """
    key_dim = pairs.shape[-1]
    return pairs[..., :key_dim, :].square().sum((-2, -1)).div(key_dim).sqrt()
