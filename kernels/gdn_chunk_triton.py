"""The gated delta rule for requests of many rows: chunks prepared side by side, then one pass.

Knows rows, chunks and slots as integers. The meaning is that of `gdn.gated_delta_chunk`.

X is the written block's pair, Â above B̂. Per chunk, with G the running sum of log decays, the written
rows D solve a triangular system whose inverse T does not depend on X, and with X as before the chunk
and M = tril(Q Kᵀ exp(G_t − G_s)) rows read

    D = T diag(β) W − T diag(β exp G) K Xᵀ,     diag(exp G) Q Xᵀ + M D,
    X ← exp(G_end) X + Dᵀ diag(exp(G_end − G)) K

So whatever is not a product with X is formed for all chunks at once, and three such products are left
to do one chunk after another. They give [Â q; B̂ q], and a row reads o = S Â q + B̂ q, where S is the
state before the written block: if there is one, that product is added for all chunks at once, too.
All products are float32 (three TF32 passes on a GPU count as that).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gdn_triton import LayerSizes

CHUNK = 32
"""Tokens that are taken at once."""

ROWS = 64
"""Rows of X that a program carries."""

PREPARE_WARPS, PASS_WARPS = 2, 4

PASS_STAGES = 1
"""Loads are not begun ahead of their use: beside X and its split factors no registers are left for that."""


class ManyRows(NamedTuple):
    """R requests of several rows, n rows in all, request after request; int32 on the device.

    Padding: rows of the step that are -1 give nothing, chunks and requests may be empty, and what is
    to be written to slot 0 is not.
    """

    row: Tensor  # [n] row of the step
    windows: Tensor  # [n, 4] rows under each row's convolution, oldest first: a row of the step, or
    #                  -1 - (slot * 3 + j) of the pool
    request_start: Tensor  # [R + 1] rows, counted here
    chunk_start: Tensor  # [chunks + 1] rows, counted here
    request_chunk: Tensor  # [R + 1] chunks
    write_slot: Tensor  # [R]
    kept: Tensor  # [R, 3] raw rows to keep, oldest first, given like `windows`


class Before(NamedTuple):
    """What lies before the written blocks of R requests."""

    state: Tensor  # [R, H, d_v, d_k] float32
    blocks: Tensor  # [R] int32, how many; where 0, nothing is read of the state


class Prepared(NamedTuple):
    """What the pass over chunks needs, float32. n rows, H value heads."""

    query: Tensor  # [n, H_k, d_k] unit length, scaled
    key: Tensor  # [n, H_k, d_k] unit length
    value: Tensor  # [n, H, d_v]
    log_decay: Tensor  # [n, H]
    beta: Tensor  # [n, H]


def convolve_many_rows(
    projected: Tensor,
    conv: Tensor,
    decay_rate: Tensor,
    dt_bias: Tensor,
    conv_rows: Tensor,
    requests: ManyRows,
    sizes: LayerSizes,
) -> Prepared:
    """Convolution and gates of the requests' rows; keeps their newest raw rows. Arguments as in
    `gdn_triton.gated_delta_single_rows`."""
    key_heads, heads, key_dim, value_dim = sizes
    count = requests.row.shape[0]
    made = Prepared(
        *(
            projected.new_empty(shape, dtype=torch.float32)
            for shape in (
                (count, key_heads, key_dim),
                (count, key_heads, key_dim),
                (count, heads, value_dim),
                (count, heads),
                (count, heads),
            )
        )
    )
    _convolve_rows[(count, 2 * key_heads + heads)](
        projected, conv, decay_rate, dt_bias, conv_rows, requests.row, requests.windows, *made,
        projected.stride(0),
        KEY_HEADS=key_heads, HEADS=heads, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        BLOCK=triton.next_power_of_2(max(key_dim, value_dim)), num_warps=1,
    )  # fmt: skip
    channels = conv.shape[1]
    _keep_rows[(requests.kept.shape[0] * 3, triton.cdiv(channels, 1024))](
        projected, conv_rows, requests.kept, requests.write_slot, projected.stride(0),
        CHANNELS=channels, BLOCK=1024,
    )  # fmt: skip
    return made


@triton.jit
def _tap(
    projected: tl.tensor, conv_rows: tl.tensor, source: tl.tensor, width: tl.tensor,
    channel: tl.tensor, inside: tl.tensor,
    CHANNELS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """One raw row under a window: of the step, or of the pool."""
    number = tl.load(source).to(tl.int64)
    if number >= 0:
        x = tl.load(projected + number * width + channel, mask=inside, other=0.0)
    else:
        x = tl.load(conv_rows + (-1 - number) * CHANNELS + channel, mask=inside, other=0.0)
    return x


@triton.jit
def _convolve_rows(
    projected: tl.tensor, conv: tl.tensor, decay_rate: tl.tensor, dt_bias: tl.tensor,
    conv_rows: tl.tensor, row: tl.tensor, windows: tl.tensor, query: tl.tensor, key: tl.tensor,
    value: tl.tensor, log_decay: tl.tensor, beta: tl.tensor, width: tl.tensor,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    index, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_value = part >= 2 * KEY_HEADS
    element = tl.arange(0, BLOCK)
    inside = element < tl.where(is_value, VALUE_DIM, KEY_DIM)
    start = tl.where(is_value, 2 * KEY_HEADS * KEY_DIM + (part - 2 * KEY_HEADS) * VALUE_DIM, part * KEY_DIM)
    channel = start + element
    y = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(4):
        source = windows + index * 4 + tap
        x = _tap(projected, conv_rows, source, width, channel, inside, CHANNELS)
        weight = tl.load(conv + tap * CHANNELS + channel, mask=inside, other=0.0)
        y += x.to(tl.float32) * weight
    y = tl.where(inside, y * tl.sigmoid(y), 0.0)
    unit = tl.rsqrt(tl.sum(y * y) + 1e-6)
    if part < KEY_HEADS:
        target = query + (index * KEY_HEADS + part) * KEY_DIM
        tl.store(target + element, y * (unit / tl.sqrt(KEY_DIM * 1.0)), mask=inside)
    elif part < 2 * KEY_HEADS:
        target = key + (index * KEY_HEADS + part - KEY_HEADS) * KEY_DIM
        tl.store(target + element, y * unit, mask=inside)
    else:
        head = part - 2 * KEY_HEADS
        tl.store(value + (index * HEADS + head) * VALUE_DIM + element, y, mask=inside)
        number = tl.maximum(tl.load(row + index), 0).to(tl.int64)
        gates = projected + number * width + CHANNELS + HEADS * VALUE_DIM + head
        b, a = tl.load(gates).to(tl.float32), tl.load(gates + HEADS).to(tl.float32)
        step = a + tl.load(dt_bias + head)
        softplus = tl.maximum(step, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(step)))
        tl.store(log_decay + index * HEADS + head, tl.load(decay_rate + head) * softplus)
        tl.store(beta + index * HEADS + head, tl.sigmoid(b))


@triton.jit
def _keep_rows(
    projected: tl.tensor, conv_rows: tl.tensor, kept: tl.tensor, write_slot: tl.tensor,
    width: tl.tensor,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    place, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    x = _tap(projected, conv_rows, kept + place, width, channel, inside, CHANNELS)
    slot = tl.load(write_slot + place // 3).to(tl.int64)
    tl.store(conv_rows + (slot * 3 + place % 3) * CHANNELS + channel, x, mask=inside & (slot > 0))


def gated_delta_many_rows(
    made: Prepared, pairs: Tensor, read_slot: Tensor, before: Before | None, requests: ManyRows
) -> Tensor:
    """What n rows read through their views: float32 [n, H, d_v]. Writes the blocks' new pairs.

    `pairs` [slots, H, d_k + d_v, d_k] float32, read at `read_slot` [R] int32, written at the
    requests' write slots. `before` is None if all requests have nothing before their written blocks.
    """
    count, heads, value_dim = made.value.shape
    key_heads, key_dim = made.key.shape[1:]
    chunks = requests.chunk_start.shape[0] - 1
    new = made.value.new_empty
    solved_keys, read_keys = new((count, heads, key_dim)), new((count, heads, key_dim))
    solved_values, out = new((count, heads, value_dim)), new((count, heads, value_dim))
    decays = new((count, heads))
    sizes = {
        "HEADS": heads, "KEY_HEADS": key_heads, "KEY_DIM": key_dim, "VALUE_DIM": value_dim, "CHUNK": CHUNK,
    }  # fmt: skip
    on_cpu = pairs.device.type == "cpu"
    precision, of_a_pass = ("ieee", "ieee") if on_cpu else ("tf32x3", "tf32")
    _prepare[(chunks, heads)](
        *made, requests.chunk_start, solved_keys, solved_values, read_keys, out, decays,
        SLICE=32, PRECISION=precision, num_warps=PREPARE_WARPS, **sizes,
    )  # fmt: skip
    upper = out if before is None else new((count, heads, key_dim))
    blocks = read_slot if before is None else before.blocks
    a_blocks, b_blocks = triton.cdiv(key_dim, ROWS), triton.cdiv(value_dim, ROWS)
    _pass[(a_blocks + b_blocks, heads, read_slot.shape[0])](
        made.key, solved_keys, solved_values, read_keys, decays, requests.request_start, pairs,
        read_slot, requests.write_slot, blocks, upper, out,
        HALF=max(16, triton.next_power_of_2(key_dim) // 2), A_BLOCKS=a_blocks, ROWS=ROWS,
        HAS_BEFORE=before is not None, PRECISION=of_a_pass, num_warps=PASS_WARPS, num_stages=PASS_STAGES,
        **sizes,
    )  # fmt: skip
    if before is not None:
        _add_before[(chunks, heads)](
            upper, before.state, before.blocks, requests.chunk_start, requests.request_chunk, out,
            read_slot.shape[0], SLICE=32, BLOCK=triton.next_power_of_2(value_dim), PRECISION=precision,
            num_warps=4, **sizes,
        )  # fmt: skip
    return out


@triton.jit
def _prepare(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, log_decay: tl.tensor, beta: tl.tensor,
    chunk_start: tl.tensor, solved_keys: tl.tensor, solved_values: tl.tensor, read_keys: tl.tensor,
    out: tl.tensor, decays: tl.tensor,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, CHUNK: tl.constexpr, SLICE: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Of a chunk, T diag(β exp G) K and T diag(β) W, decayed to its end; the rows that X is read with,
    diag(exp G) Q − M T diag(β exp G) K; and, in `out`, M T diag(β) W, which is read beside."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(chunk_start + chunk), tl.load(chunk_start + chunk + 1)
    token, element = tl.arange(0, CHUNK), tl.arange(0, SLICE)
    row = (begin + token).to(tl.int64)
    real = begin + token < end
    k_row = (row * KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEY_DIM
    place = row * HEADS + head
    g = tl.load(log_decay + place, mask=real, other=0.0)
    b = tl.load(beta + place, mask=real, other=0.0)
    system = tl.zeros((CHUNK, CHUNK), tl.float32)
    mixed = tl.zeros((CHUNK, CHUNK), tl.float32)
    for start in range(0, KEY_DIM, SLICE):
        used = real[:, None] & (start + element < KEY_DIM)[None, :]
        at = k_row[:, None] + start + element[None, :]
        k = tl.load(key + at, mask=used, other=0.0)
        q = tl.load(query + at, mask=used, other=0.0)
        system = tl.dot(k, tl.trans(k), system, input_precision=PRECISION)
        mixed = tl.dot(q, tl.trans(k), mixed, input_precision=PRECISION)

    # Sums and their differences in float64: behind a strong decay float32 would lose weak ones.
    total = tl.cumsum(g.to(tl.float64), 0)
    last = tl.sum(g.to(tl.float64))
    between = (total[:, None] - total[None, :]).to(tl.float32)
    upto = token[:, None] >= token[None, :]
    between = tl.where(upto, tl.exp(tl.where(upto, between, 0.0)), 0.0)
    since_start = tl.exp(total.to(tl.float32))
    until_end = tl.exp((last - total).to(tl.float32))
    mixed *= between
    tl.store(decays + place, since_start, mask=real)

    # Rows of the inverse of (I + system), one after the other.
    system = tl.where(token[:, None] > token[None, :], system * between * b[:, None], 0.0)
    inverse = tl.where(token[:, None] == token[None, :], 1.0, 0.0)
    for i in range(1, CHUNK):
        here = (token == i)[:, None]
        line = tl.sum(tl.where(here, system, 0.0), 0)
        change = tl.sum(line[:, None] * inverse, 0)
        inverse -= tl.where(here, change[None, :], 0.0)
    inverse *= b[None, :]
    for start in range(0, KEY_DIM, SLICE):
        used = real[:, None] & (start + element < KEY_DIM)[None, :]
        shared = k_row[:, None] + start + element[None, :]
        k = tl.load(key + shared, mask=used, other=0.0)
        solved = tl.dot(inverse, k * since_start[:, None], input_precision=PRECISION)
        q = tl.load(query + shared, mask=used, other=0.0) * since_start[:, None]
        q -= tl.dot(mixed, solved, input_precision=PRECISION)
        at = place[:, None] * KEY_DIM + start + element[None, :]
        tl.store(read_keys + at, q, mask=used)
        tl.store(solved_keys + at, solved * until_end[:, None], mask=used)
    for start in range(0, VALUE_DIM, SLICE):
        used = real[:, None] & (start + element < VALUE_DIM)[None, :]
        at = place[:, None] * VALUE_DIM + start + element[None, :]
        v = tl.load(value + at, mask=used, other=0.0)
        solved = tl.dot(inverse, v, input_precision=PRECISION)
        tl.store(out + at, tl.dot(mixed, solved, input_precision=PRECISION), mask=used)
        tl.store(solved_values + at, solved * until_end[:, None], mask=used)


@triton.jit
def _rows_of(
    x: tl.tensor, row: tl.tensor, element: tl.tensor, width: tl.constexpr, real: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Load rows of a matrix with `width` columns; 0 where `real` or the columns end."""
    inside = real[:, None] & (element < width)[None, :]
    return tl.load(x + row[:, None] * width + element[None, :], mask=inside, other=0.0)


@triton.jit
def _split(x: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """What TF32 keeps of `x`, 10 bits behind the first one, and the rest."""
    kept = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return kept, x - kept


@triton.jit
def _product(
    a: tl.tensor, a_rest: tl.tensor, b: tl.tensor, b_rest: tl.tensor, PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """(a + a_rest) (b + b_rest) in float32: three TF32 passes, small numbers first."""
    total = tl.dot(a_rest, b, input_precision=PRECISION)
    total = tl.dot(a, b_rest, total, input_precision=PRECISION)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def _pass(
    key: tl.tensor, solved_keys: tl.tensor, solved_values: tl.tensor, read_keys: tl.tensor,
    decays: tl.tensor, request_start: tl.tensor, pairs: tl.tensor, read_slot: tl.tensor,
    write_slot: tl.tensor, blocks_before: tl.tensor, upper: tl.tensor, out: tl.tensor,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, HALF: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
    A_BLOCKS: tl.constexpr, ROWS: tl.constexpr, HAS_BEFORE: tl.constexpr,
) -> None:  # fmt: skip
    """`upper` [n, H, d_k] gets Â q of requests that have something before them; to `out`, what is read
    beside X, B̂ q of X is added. PRECISION is that of one pass: factors are split once for all products."""
    block, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    is_upper = block < A_BLOCKS  # rows of Â: they get no values
    line = tl.where(is_upper, block, block - A_BLOCKS) * ROWS + tl.arange(0, ROWS)  # in Â or in B̂
    exists = line < tl.where(is_upper, KEY_DIM, VALUE_DIM)
    token = tl.arange(0, CHUNK)
    left, right = tl.arange(0, HALF), HALF + tl.arange(0, HALF)  # X in two halves: fewer registers
    PAIR: tl.constexpr = KEY_DIM + VALUE_DIM
    offset = line + tl.where(is_upper, 0, KEY_DIM)
    slot = tl.load(read_slot + request).to(tl.int64)
    source = pairs + (slot * HEADS + head) * (PAIR * KEY_DIM)
    x_left = _rows_of(source, offset, left, KEY_DIM, exists)
    x_right = _rows_of(source, offset, right, KEY_DIM, exists)
    reads = block >= A_BLOCKS
    target, width = out, tl.where(is_upper, KEY_DIM, VALUE_DIM)
    if HAS_BEFORE:
        if is_upper:
            reads = tl.load(blocks_before + request) != 0
            target = upper
    start, stop = tl.load(request_start + request), tl.load(request_start + request + 1)
    for begin in range(start, stop, CHUNK):
        real = begin + token < stop
        row = (begin + token).to(tl.int64)
        place = row * HEADS + head
        k_row = row * KEY_HEADS + head // (HEADS // KEY_HEADS)
        # What is written and what is read [ROWS, CHUNK].
        at, used = place[None, :] * width + line[:, None], real[None, :] & exists[:, None]
        written = tl.load(solved_values + at, mask=used & (block >= A_BLOCKS), other=0.0)
        read = tl.load(out + at, mask=used & (block >= A_BLOCKS), other=0.0)
        x, rest = _split(x_left)
        k, k_rest = _split(_rows_of(solved_keys, place, left, KEY_DIM, real))
        written -= _product(x, rest, tl.trans(k), tl.trans(k_rest), PRECISION)
        q, q_rest = _split(_rows_of(read_keys, place, left, KEY_DIM, real))
        if reads:
            read += _product(x, rest, tl.trans(q), tl.trans(q_rest), PRECISION)
        x, rest = _split(x_right)
        k, k_rest = _split(_rows_of(solved_keys, place, right, KEY_DIM, real))
        written -= _product(x, rest, tl.trans(k), tl.trans(k_rest), PRECISION)
        q, q_rest = _split(_rows_of(read_keys, place, right, KEY_DIM, real))
        if reads:
            read += _product(x, rest, tl.trans(q), tl.trans(q_rest), PRECISION)
            tl.store(target + at, read, mask=used)
        w, rest = _split(written)
        last = (tl.minimum(begin + CHUNK, stop) - 1).to(tl.int64)
        until_now = tl.load(decays + last * HEADS + head)
        k, k_rest = _split(_rows_of(key, k_row, left, KEY_DIM, real))
        x_left = x_left * until_now + _product(w, rest, k, k_rest, PRECISION)
        k, k_rest = _split(_rows_of(key, k_row, right, KEY_DIM, real))
        x_right = x_right * until_now + _product(w, rest, k, k_rest, PRECISION)
    slot = tl.load(write_slot + request).to(tl.int64)
    exists = exists & (slot > 0)
    target = pairs + (slot * HEADS + head) * (PAIR * KEY_DIM) + offset[:, None] * KEY_DIM
    inside = exists[:, None] & (left < KEY_DIM)[None, :]
    tl.store(target + left[None, :], x_left, mask=inside)
    inside = exists[:, None] & (right < KEY_DIM)[None, :]
    tl.store(target + right[None, :], x_right, mask=inside)


@triton.jit(do_not_specialize=["requests"])
def _add_before(
    upper: tl.tensor, state: tl.tensor, blocks_before: tl.tensor, chunk_start: tl.tensor,
    request_chunk: tl.tensor, out: tl.tensor, requests: tl.tensor,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
    SLICE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """out += S Â q, a chunk's rows at once."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(chunk_start + chunk), tl.load(chunk_start + chunk + 1)
    request = chunk * 0  # the last one that begins with this chunk or before it
    for number in range(1, requests):
        request += (tl.load(request_chunk + number) <= chunk).to(tl.int32)
    exists = tl.load(blocks_before + request) != 0
    if exists & (begin < end):
        token, element, line = tl.arange(0, CHUNK), tl.arange(0, SLICE), tl.arange(0, BLOCK)
        real, place = begin + token < end, (begin + token).to(tl.int64) * HEADS + head
        source = state + (request.to(tl.int64) * HEADS + head) * (VALUE_DIM * KEY_DIM)
        at = place[:, None] * VALUE_DIM + line[None, :]
        used = real[:, None] & (line < VALUE_DIM)[None, :]
        read = tl.load(out + at, mask=used, other=0.0)
        for start in range(0, KEY_DIM, SLICE):
            y = _rows_of(upper, place, start + element, KEY_DIM, real)
            s = _rows_of(source, line, start + element, KEY_DIM, line < VALUE_DIM)
            read = tl.dot(y, tl.trans(s), read, input_precision=PRECISION)
        tl.store(out + at, read, mask=used)


def gated_norm_rows(
    read: Tensor, projected: Tensor, norm: Tensor, rows: Tensor, out: Tensor, z_start: int, eps: float
) -> None:
    """out[rows[i]] = gated_rms_norm(read[i], z): `read` [n, H, d_v] float32, `rows` [n] int32, z in
    `projected` [N, ...] from column `z_start` on, `out` [N, H * d_v]."""
    count, heads, dim = read.shape
    _gated_norm_rows[(count, heads)](
        read, projected, norm, rows, out, projected.stride(0), z_start, eps,
        HEADS=heads, DIM=dim, BLOCK=triton.next_power_of_2(dim), num_warps=1,
    )  # fmt: skip


@triton.jit
def _gated_norm_rows(
    read: tl.tensor, projected: tl.tensor, norm: tl.tensor, rows: tl.tensor, out: tl.tensor,
    width: tl.tensor, z_start: tl.tensor, eps: tl.tensor,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    index, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    element = tl.arange(0, BLOCK)
    inside = element < DIM
    row = tl.load(rows + index).to(tl.int64)
    inside = inside & (row >= 0)
    x = tl.load(read + (index * HEADS + head) * DIM + element, mask=inside, other=0.0)
    z = tl.load(projected + row * width + z_start + head * DIM + element, mask=inside, other=0.0)
    z = z.to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x) / DIM + eps) * tl.load(norm + element, mask=inside, other=0.0)
    target = out + (row * HEADS + head) * DIM + element
    tl.store(target, (x * z * tl.sigmoid(z)).to(out.dtype.element_ty), mask=inside)
