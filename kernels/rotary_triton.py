"""Rotary positions in fused form: angles once per step, then norm, turn and store in one pass.

Knows rows, pages and positions as integers. The meaning is that of `rotary`, `norm.rms_norm` and
`index_copy_` into the pools of keys and values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rotary import Rotary


class Angles(NamedTuple):
    """Cosines and sines, float32 [n, R / 2] each, for n queries or rows."""

    cos: Tensor
    sin: Tensor


def angles(
    positions: Tensor, rotary: Rotary, rows: Tensor | None = None, shift: Tensor | None = None
) -> Angles:
    """The angles of `positions` [3, N] int32; or, for each of n queries, of row rows[i] of them with
    shift[i] added on all axes (both int32 [n]). Formed in float64: far positions lose nothing."""
    count = positions.shape[1] if rows is None else rows.shape[0]
    half = rotary.frequencies.shape[0]
    cos = torch.empty((count, half), dtype=torch.float32, device=positions.device)
    sin = torch.empty_like(cos)
    block = 16
    _angles[(triton.cdiv(count, block),)](
        positions, positions.shape[1], rows, shift, rotary.frequencies, rotary.axes, cos, sin, count,
        rotary.scaling,
        HALF=half, BLOCK_HALF=triton.next_power_of_2(half), BLOCK=block, MAPPED=rows is not None,
    )  # fmt: skip
    return Angles(cos, sin)


@triton.jit(do_not_specialize=["num_positions", "count"])
def _angles(
    positions: tl.tensor, num_positions: tl.tensor, rows: tl.tensor, shift: tl.tensor,
    frequencies: tl.tensor, axes: tl.tensor, cos: tl.tensor, sin: tl.tensor, count: tl.tensor,
    scaling: tl.tensor,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK: tl.constexpr, MAPPED: tl.constexpr,
) -> None:  # fmt: skip
    query = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    element = tl.arange(0, BLOCK_HALF)
    real, used = query < count, element < HALF
    inside = real[:, None] & used[None, :]
    axis = tl.load(axes + element, mask=used, other=0)
    row, added = query, tl.zeros_like(query)
    if MAPPED:
        row = tl.load(rows + query, mask=real, other=0)
        added = tl.load(shift + query, mask=real, other=0)
    place = axis[None, :] * num_positions + row[:, None]
    position = tl.load(positions + place, mask=inside, other=0) + added[:, None]
    frequency = tl.load(frequencies + element, mask=used, other=0.0).to(tl.float64)
    angle = position.to(tl.float64) * frequency[None, :]
    out = query[:, None] * HALF + element[None, :]
    tl.store(cos + out, (tl.cos(angle) * scaling).to(tl.float32), mask=inside)
    tl.store(sin + out, (tl.sin(angle) * scaling).to(tl.float32), mask=inside)


def norm_turn_store(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    key_angles: Angles,
    keys: Tensor,
    values: Tensor,
    store_index: Tensor,
    *,
    num_heads: int,
    has_gate: bool,
    eps: float,
) -> Tensor:
    """Normalise queries and keys, turn keys, store keys and values. -> queries [N, H, D], not turned.

    `qkv` [N, H * D (twice with a gate) + 2 * H_kv * D]: queries, gate if any, keys, values. `keys`,
    `values` [H_kv, pages, page_tokens, D]; row i goes to place store_index[i] (int32, page *
    page_tokens + offset), or nowhere if that is negative.
    """
    rows, width = qkv.shape
    kv_heads, _, _, dim = keys.shape
    queries = qkv.new_empty((rows, num_heads, dim))
    normed = q_norm is not None and k_norm is not None
    _norm_turn_store[(rows, num_heads + 2 * kv_heads)](
        qkv, q_norm if normed else qkv, k_norm if normed else qkv, key_angles.cos, key_angles.sin,
        queries, keys, values, store_index,
        width, keys.shape[1] * keys.shape[2], eps,
        HEADS=num_heads, KV_HEADS=kv_heads, GATE_HEADS=num_heads if has_gate else 0, DIM=dim,
        BLOCK=triton.next_power_of_2(dim), HALF=key_angles.cos.shape[1], NORMED=normed, num_warps=1,
    )  # fmt: skip
    return queries


@triton.jit
def _norm_turn_store(
    qkv: tl.tensor, q_norm: tl.tensor, k_norm: tl.tensor, cos: tl.tensor, sin: tl.tensor,
    queries: tl.tensor, keys: tl.tensor, values: tl.tensor, store_index: tl.tensor,
    width: tl.tensor, places: tl.tensor, eps: tl.tensor,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GATE_HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr,
) -> None:  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    element = tl.arange(0, BLOCK)
    inside = element < DIM
    is_query = head < HEADS
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    column = tl.where(is_query, head, head + GATE_HEADS) * DIM
    source = qkv + row * width + column
    raw = tl.load(source + element, mask=inside, other=0.0)
    if is_query or is_key:
        x = raw.to(tl.float32)
        # The element that each one is paired with: i and i + HALF of the first 2 * HALF.
        partner = tl.where(element < HALF, element + HALF, element - HALF)
        turns = element < 2 * HALF
        other = tl.load(source + partner, mask=turns, other=0.0).to(tl.float32)
        if NORMED:
            norm = q_norm
            if is_key:
                norm = k_norm
            scale = tl.rsqrt(tl.sum(x * x) / DIM + eps)
            x = x * scale * tl.load(norm + element, mask=inside, other=0.0)
            other = other * scale * tl.load(norm + partner, mask=turns, other=0.0)
            x = x.to(raw.dtype).to(tl.float32)  # the model's own rounding
            other = other.to(raw.dtype).to(tl.float32)
        if is_query:
            target = queries + (row * HEADS + head) * DIM
            tl.store(target + element, x.to(queries.dtype.element_ty), mask=inside)
        else:
            place = tl.load(store_index + row).to(tl.int64)
            angle = row * HALF + tl.where(element < HALF, element, element - HALF)
            c = tl.load(cos + angle, mask=turns, other=1.0)
            s = tl.load(sin + angle, mask=turns, other=0.0)
            turned = x * c + other * tl.where(element < HALF, -s, s)
            target = keys + ((head - HEADS) * places.to(tl.int64) + place) * DIM
            kept = inside & (place >= 0)
            tl.store(target + element, turned.to(keys.dtype.element_ty), mask=kept)
    else:
        place = tl.load(store_index + row).to(tl.int64)
        target = values + ((head - HEADS - KV_HEADS) * places.to(tl.int64) + place) * DIM
        tl.store(target + element, raw.to(values.dtype.element_ty), mask=inside & (place >= 0))
