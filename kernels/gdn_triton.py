"""A Gated DeltaNet layer for requests of one row, in one kernel: convolution, gates, the rank-1
update of the written block's pair, the walk along the view, and the gated norm.

Knows rows, slots and indices. The meaning is that of `convolution`, `gdn.gated_delta_token`,
`gdn.read_through_chain` and `norm.gated_rms_norm`. Pairs are read and written in float32.

A program has one head of one request. Requests of one head run side by side, so a pair that one of
them writes after and others read is loaded from memory about once.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

WARPS = 16
"""Of a program: a tile of a pair fills 32 registers of each thread. Measured on an H200."""


class SingleRows(NamedTuple):
    """Requests of one row, int32 on the device. Tensors may be longer than `number` says."""

    number: Tensor  # [1] how many there are
    row: Tensor  # [R]
    read_slot: Tensor  # [R]
    write_slot: Tensor  # [R]
    chain: Tensor  # [R, depth] slots of the blocks before the written one, nearest first
    chain_length: Tensor  # [R]
    history: Tensor  # [R, 3] slot * 3 + j: the raw rows before this one, oldest first
    kept_old: Tensor  # [R, 3] ... that stay kept before it; the first two are read


class LayerSizes(NamedTuple):
    """Heads and elements of a Gated DeltaNet layer."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


def gated_delta_single_rows(
    projected: Tensor,
    conv: Tensor,
    decay_rate: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    pairs: Tensor,
    conv_rows: Tensor,
    requests: SingleRows,
    out: Tensor,
    sizes: LayerSizes,
    eps: float,
) -> None:
    """Write to `out` [N, H_v * d_v] what the requests' rows read, and their new pairs and raw rows.

    `projected` [N, C + H_v * d_v + 2 * H_v]: what is convolved (queries, keys, values), then z, b
    and a. `conv` [4, C], `decay_rate`, `dt_bias` [H_v] and `norm` [d_v] float32. `pairs` [slots,
    H_v, d_k + d_v, d_k] float32; `conv_rows` [slots, 3, C].
    """
    key_heads, heads, key_dim, value_dim = sizes
    capacity = requests.row.shape[0]
    _single_rows[(capacity * heads,)](
        projected, conv, decay_rate, dt_bias, norm, pairs, conv_rows, out,
        *requests,
        capacity, requests.chain.shape[1], projected.stride(0), eps,
        KEY_HEADS=key_heads, HEADS=heads, KEY_DIM=key_dim,
        VALUE_DIM=value_dim, BLOCK_KEY=triton.next_power_of_2(key_dim),
        BLOCK_VALUE=triton.next_power_of_2(value_dim), num_warps=WARPS,
    )  # fmt: skip


@triton.jit
def _load(places: tl.tensor, used: tl.tensor, EXACT: tl.constexpr) -> tl.tensor:
    """A tile of a pair. `EXACT`: all of it is used, and no mask takes registers."""
    if EXACT:
        return tl.load(places)
    else:
        return tl.load(places, mask=used, other=0.0)


@triton.jit
def _store(places: tl.tensor, tile: tl.tensor, used: tl.tensor, EXACT: tl.constexpr) -> None:
    if EXACT:
        tl.store(places, tile)
    else:
        tl.store(places, tile, mask=used)


@triton.jit
def _convolved(
    projected: tl.tensor, conv: tl.tensor, conv_rows: tl.tensor, first: tl.tensor,
    second: tl.tensor, third: tl.tensor, kept_first: tl.tensor, kept_second: tl.tensor,
    write: tl.tensor, channel: tl.tensor, inside: tl.tensor, keeps: tl.tensor,
    CHANNELS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """silu of the convolution of `channel`s of one row; keeps the newest rows in its new slot."""
    new = tl.load(projected + channel, mask=inside, other=0.0)
    x0 = tl.load(conv_rows + first * CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
    x1 = tl.load(conv_rows + second * CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(conv_rows + third * CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
    w0 = tl.load(conv + channel, mask=inside, other=0.0)
    w1 = tl.load(conv + CHANNELS + channel, mask=inside, other=0.0)
    w2 = tl.load(conv + 2 * CHANNELS + channel, mask=inside, other=0.0)
    w3 = tl.load(conv + 3 * CHANNELS + channel, mask=inside, other=0.0)
    if keeps:
        old = tl.load(conv_rows + kept_first * CHANNELS + channel, mask=inside, other=0.0)
        tl.store(conv_rows + write * CHANNELS + channel, old, mask=inside)
        old = tl.load(conv_rows + kept_second * CHANNELS + channel, mask=inside, other=0.0)
        tl.store(conv_rows + (write + 1) * CHANNELS + channel, old, mask=inside)
        tl.store(conv_rows + (write + 2) * CHANNELS + channel, new, mask=inside)
    y = x0 * w0 + x1 * w1 + x2 * w2 + new.to(tl.float32) * w3
    return y * tl.sigmoid(y)


@triton.jit(do_not_specialize=["capacity", "depth"])
def _single_rows(
    projected: tl.tensor, conv: tl.tensor, decay_rate: tl.tensor, dt_bias: tl.tensor,
    norm: tl.tensor, pairs: tl.tensor, conv_rows: tl.tensor, out: tl.tensor, count: tl.tensor,
    row: tl.tensor, read_slot: tl.tensor, write_slot: tl.tensor, chain: tl.tensor,
    chain_length: tl.tensor, history: tl.tensor, kept_old: tl.tensor, capacity: tl.tensor,
    depth: tl.tensor, width: tl.tensor, eps: tl.tensor,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr,
) -> None:  # fmt: skip
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    SHARED: tl.constexpr = HEADS // KEY_HEADS
    PAIR: tl.constexpr = (KEY_DIM + VALUE_DIM) * KEY_DIM
    EXACT: tl.constexpr = KEY_DIM == BLOCK_KEY and VALUE_DIM == BLOCK_VALUE
    request, head = tl.program_id(0) % capacity, tl.program_id(0) // capacity
    if request >= tl.load(count):
        return
    number = tl.load(row + request).to(tl.int64)
    read, write = tl.load(read_slot + request), tl.load(write_slot + request)
    length = tl.load(chain_length + request)
    k_element, v_element = tl.arange(0, BLOCK_KEY), tl.arange(0, BLOCK_VALUE)
    k_used, v_used = k_element < KEY_DIM, v_element < VALUE_DIM

    # The written block's Â: asked for first, it takes longest to come.
    a_place = k_element[:, None] * KEY_DIM + k_element[None, :]
    a_used = k_used[:, None] & k_used[None, :]
    b_place = (v_element[:, None] + KEY_DIM) * KEY_DIM + k_element[None, :]
    b_used = v_used[:, None] & k_used[None, :]
    own = pairs + (read.to(tl.int64) * HEADS + head) * PAIR
    a = _load(own + a_place, a_used, EXACT)

    source = projected + number * width
    h0 = tl.load(history + request * 3)
    h1 = tl.load(history + request * 3 + 1)
    h2 = tl.load(history + request * 3 + 2)
    k0 = tl.load(kept_old + request * 3)
    k1 = tl.load(kept_old + request * 3 + 1)
    key_head = head // SHARED
    keeps = head % SHARED == 0
    channel = key_head * KEY_DIM + k_element
    query = _convolved(source, conv, conv_rows, h0, h1, h2, k0, k1, write * 3, channel, k_used, keeps,
                       CHANNELS)  # fmt: skip
    channel += KEY_HEADS * KEY_DIM
    key = _convolved(source, conv, conv_rows, h0, h1, h2, k0, k1, write * 3, channel, k_used, keeps,
                     CHANNELS)  # fmt: skip
    channel = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + v_element
    value = _convolved(source, conv, conv_rows, h0, h1, h2, k0, k1, write * 3, channel, v_used, True,
                       CHANNELS)  # fmt: skip
    query = query * (tl.rsqrt(tl.sum(query * query) + 1e-6) / tl.sqrt(KEY_DIM * 1.0))
    key = key * tl.rsqrt(tl.sum(key * key) + 1e-6)
    z = tl.load(source + CHANNELS + head * VALUE_DIM + v_element, mask=v_used, other=0.0)
    gates = source + CHANNELS + HEADS * VALUE_DIM + head
    beta = tl.sigmoid(tl.load(gates).to(tl.float32))
    step = tl.load(gates + HEADS).to(tl.float32) + tl.load(dt_bias + head)
    softplus = tl.maximum(step, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(step)))
    decay = tl.exp(tl.load(decay_rate + head) * softplus)

    # X <- decay X + written keyᵀ, read = X query, for both halves of X.
    overlap = tl.sum(key * query)
    target = pairs + (write.to(tl.int64) * HEADS + head) * PAIR
    written = -beta * decay * tl.sum(a * key[None, :], 1)
    carried = decay * tl.sum(a * query[None, :], 1) + written * overlap
    _store(target + a_place, a * decay + written[:, None] * key[None, :], a_used, EXACT)
    b = _load(own + b_place, b_used, EXACT)
    written = beta * (value - decay * tl.sum(b * key[None, :], 1))
    result = decay * tl.sum(b * query[None, :], 1) + written * overlap
    _store(target + b_place, b * decay + written[:, None] * key[None, :], b_used, EXACT)

    # Along the view from right to left: result += B̂ carried; carried <- Â carried.
    for index in range(0, length):
        slot = tl.load(chain + request * depth + index).to(tl.int64)
        start = pairs + (slot * HEADS + head) * PAIR
        b = _load(start + b_place, b_used, EXACT)
        if index + 1 < length:  # nothing reads what is carried beyond the first block
            a = _load(start + a_place, a_used, EXACT)
            result += tl.sum(b * carried[None, :], 1)
            carried = tl.sum(a * carried[None, :], 1)
        else:
            result += tl.sum(b * carried[None, :], 1)

    mean = tl.sum(tl.where(v_used, result * result, 0.0)) / VALUE_DIM
    normed = result * tl.rsqrt(mean + eps) * tl.load(norm + v_element, mask=v_used, other=0.0)
    z = z.to(tl.float32)
    place = out + number * (HEADS * VALUE_DIM) + head * VALUE_DIM + v_element
    tl.store(place, (normed * z * tl.sigmoid(z)).to(out.dtype.element_ty), mask=v_used)
