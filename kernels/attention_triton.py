"""Attention over views in fused kernels: programs work on items, partial results merge by row.

Knows keys and values as pages of tokens and a plan made of integers (`items`), on the device. The
meaning is that of `attention.attention_over_view`, with the turning of queries and the output's gate.

The number of items is data, not the size of the launch: programs take items until there are none
left, so a recorded launch serves any plan.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rotary_triton import Angles

HIDDEN = tl.constexpr(-1.0e30)
LOG2_E = 1.4426950408889634

TOKENS = {16: 64, 64: 32}
"""Keys that a program loads at a time, by its query heads. Measured on an H200."""


class DeviceItems(NamedTuple):
    """`items.AttentionItems` on the device, int32. Tensors may be longer than their contents."""

    counts: Tensor  # [>= 1] the number of items comes first
    items: Tensor  # [>= I, 5]
    pages: Tensor
    entry_row: Tensor
    entry_seen: Tensor
    row_start: Tensor
    row_entry: Tensor


def padded_heads(num_heads: int, kv_heads: int) -> int:
    """Query heads of a key/value head, rounded up to a power of 2: columns of an entry in a tile."""
    return int(triton.next_power_of_2(num_heads // kv_heads))


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: DeviceItems,
    entry_angles: Angles,
    scale: float,
    *,
    group: int,
    programs: int,
) -> tuple[Tensor, Tensor]:
    """All partial results. -> sums float32 [E, H, D], and peaks and totals float32 [2, E, H].

    `queries` [N, H, D] not turned; `keys`, `values` [H_kv, pages, page_tokens, D]; `entry_angles` of
    E entries; `group`: most entries of an item, as the plan was made; `programs`: how many run.
    """
    _, heads, dim = queries.shape
    kv_heads, num_pages, page_tokens, _ = keys.shape
    entries = entry_angles.cos.shape[0]
    sums = torch.empty((entries, heads, dim), dtype=torch.float32, device=queries.device)
    stats = torch.empty((2, entries, heads), dtype=torch.float32, device=queries.device)
    shared = padded_heads(heads, kv_heads)
    many = group * shared >= 64
    exact = queries.dtype == torch.float32
    _attend[(programs,)](
        queries, keys, values, plan.counts, plan.items, plan.pages, plan.entry_row, plan.entry_seen,
        entry_angles.cos, entry_angles.sin, sums, stats,
        num_pages, entries, scale * LOG2_E,
        PROGRAMS=programs, KV_HEADS=kv_heads, SHARED=heads // kv_heads, COLUMNS=shared,
        QUERIES=max(16, group * shared), DIM=dim, BLOCK_DIM=max(16, triton.next_power_of_2(dim)),
        HALF=entry_angles.cos.shape[1], PAGE=page_tokens, TOKENS=TOKENS.get(group * shared, 32),
        PRECISE=exact, num_warps=8 if many else 4, num_stages=3 if many and not exact else 2,
    )  # fmt: skip
    return sums, stats


@triton.jit(do_not_specialize=["entries"])
def _attend(
    queries: tl.tensor, keys: tl.tensor, values: tl.tensor, counts: tl.tensor, items: tl.tensor,
    pages: tl.tensor, entry_row: tl.tensor, entry_seen: tl.tensor, cos: tl.tensor,
    sin: tl.tensor, sums: tl.tensor, stats: tl.tensor, num_pages: tl.tensor, entries: tl.tensor,
    scale: tl.tensor,
    PROGRAMS: tl.constexpr, KV_HEADS: tl.constexpr, SHARED: tl.constexpr, COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, HALF: tl.constexpr,
    PAGE: tl.constexpr, TOKENS: tl.constexpr, PRECISE: tl.constexpr,
) -> None:  # fmt: skip
    PRECISION: tl.constexpr = "ieee" if PRECISE else "tf32"  # of float32 products only
    column = tl.arange(0, QUERIES)
    element = tl.arange(0, BLOCK_DIM)
    used = element < DIM
    turns = element < 2 * HALF
    low = element < HALF
    partner = tl.where(low, element + HALF, element - HALF)
    angle = tl.where(low, element, element - HALF)
    slot = column // COLUMNS  # entry within the item
    shared = column % COLUMNS  # head within those of the key/value head
    work = tl.load(counts) * KV_HEADS
    for number in range(tl.program_id(0), work, PROGRAMS):
        item = items + (number // KV_HEADS) * 5
        kv_head = number % KV_HEADS
        first_page, begin, end = tl.load(item), tl.load(item + 1), tl.load(item + 2)
        first_entry, count = tl.load(item + 3), tl.load(item + 4)
        real = (slot < count) & (shared < SHARED)
        entry = first_entry + slot
        row = tl.load(entry_row + entry, mask=real, other=0)
        seen = tl.load(entry_seen + entry, mask=real, other=0)
        head = kv_head * SHARED + shared
        # The queries, turned for the segment that this entry reads.
        source = queries + (row.to(tl.int64) * (KV_HEADS * SHARED) + head)[:, None] * DIM
        inside = real[:, None] & used[None, :]
        turned = real[:, None] & turns[None, :]
        x = tl.load(source + element[None, :], mask=inside, other=0.0).to(tl.float32)
        other = tl.load(source + partner[None, :], mask=turned, other=0.0).to(tl.float32)
        place = entry[:, None] * HALF + angle[None, :]
        c = tl.load(cos + place, mask=turned, other=1.0)
        s = tl.load(sin + place, mask=turned, other=0.0)
        query = (x * c + other * tl.where(low[None, :], -s, s)).to(keys.dtype.element_ty)

        peak = tl.full((QUERIES,), HIDDEN, tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        weighted = tl.zeros((QUERIES, BLOCK_DIM), tl.float32)
        head_start = kv_head.to(tl.int64) * num_pages
        for start in range(begin, end, TOKENS):
            token = start + tl.arange(0, TOKENS)
            there = token < end
            page = tl.load(pages + first_page + token // PAGE, mask=there, other=0)
            at = ((head_start + page) * PAGE + token % PAGE) * DIM
            loaded = there[:, None] & used[None, :]
            key = tl.load(keys + at[:, None] + element[None, :], mask=loaded, other=0.0)
            value = tl.load(values + at[:, None] + element[None, :], mask=loaded, other=0.0)
            scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
            visible = token[None, :] < tl.minimum(seen, end)[:, None]
            scores = tl.where(visible, scores, HIDDEN)
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            weights = tl.where(visible, tl.exp2(scores - new_peak[:, None]), 0.0)
            fade = tl.exp2(peak - new_peak)
            total = total * fade + tl.sum(weights, 1)
            weighted = weighted * fade[:, None]
            weighted = tl.dot(weights.to(value.dtype), value, weighted, input_precision=PRECISION)
            peak = new_peak
        out = entry * (KV_HEADS * SHARED) + head
        tl.store(stats + out, peak, mask=real)
        tl.store(stats + entries * (KV_HEADS * SHARED) + out, total, mask=real)
        target = sums + out.to(tl.int64)[:, None] * DIM + element[None, :]
        tl.store(target, weighted, mask=inside)


def merge(
    sums: Tensor, stats: Tensor, plan: DeviceItems, gate: Tensor | None, rows: int, dtype: torch.dtype
) -> Tensor:
    """Merge each row's partial results, times sigmoid(gate) if there is one. -> [N, H * D], `dtype`.

    `gate` [N, H * D], a view of any row stride. A row without entries stays uninitialised.
    """
    entries, heads, dim = sums.shape
    out = torch.empty((rows, heads * dim), dtype=dtype, device=sums.device)
    _merge[(rows, heads)](
        sums, stats, plan.row_start, plan.row_entry, sums if gate is None else gate, out,
        entries, 0 if gate is None else gate.stride(0),
        HEADS=heads, DIM=dim, BLOCK_DIM=triton.next_power_of_2(dim), ENTRIES=16,
        HAS_GATE=gate is not None,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["entries"])
def _merge(
    sums: tl.tensor, stats: tl.tensor, row_start: tl.tensor, row_entry: tl.tensor,
    gate: tl.tensor, out: tl.tensor, entries: tl.tensor, gate_stride: tl.tensor,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ENTRIES: tl.constexpr,
    HAS_GATE: tl.constexpr,
) -> None:  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    element = tl.arange(0, BLOCK_DIM)
    used = element < DIM
    begin, end = tl.load(row_start + row), tl.load(row_start + row + 1)
    if begin == end:  # a row of padding
        return
    peak = tl.full((), HIDDEN, tl.float32)
    total = tl.zeros((), tl.float32)
    weighted = tl.zeros((BLOCK_DIM,), tl.float32)
    for start in range(begin, end, ENTRIES):
        number = start + tl.arange(0, ENTRIES)
        real = number < end
        entry = tl.load(row_entry + number, mask=real, other=0)
        place = entry * HEADS + head
        part_peak = tl.load(stats + place, mask=real, other=HIDDEN)
        part_total = tl.load(stats + entries * HEADS + place, mask=real, other=0.0)
        new_peak = tl.maximum(peak, tl.max(part_peak))
        factor = tl.where(part_total > 0, tl.exp2(part_peak - new_peak), 0.0)
        fade = tl.exp2(peak - new_peak)
        at = place.to(tl.int64)[:, None] * DIM + element[None, :]
        part = tl.load(sums + at, mask=real[:, None] & used[None, :], other=0.0)
        total = total * fade + tl.sum(part_total * factor)
        weighted = weighted * fade + tl.sum(part * factor[:, None], 0)
        peak = new_peak
    x = weighted / total
    if HAS_GATE:
        g = tl.load(gate + row * gate_stride + head * DIM + element, mask=used, other=0.0)
        x = x * tl.sigmoid(g.to(tl.float32))
    target = out + (row * HEADS + head) * DIM + element
    tl.store(target, x.to(out.dtype.element_ty), mask=used)
