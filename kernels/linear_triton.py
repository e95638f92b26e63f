"""Products of few rows with a weight matrix, at the speed at which the matrix can be read.

Knows matrices. The meaning is that of ``torch.nn.functional.linear``, with what stands around it in
a decoder taken in: the norm of the input before, the gate of an MLP or the residual sum after. For a
handful of rows; for more, cuBLAS is faster.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def few_rows_linear(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    block: tuple[int, int] = (32, 256),
    stages: int = 4,
    warps: int = 4,
) -> Tensor:
    """x @ weight.T. -> [M, N], in x's dtype unless `out_dtype` says otherwise.

    `x` [M, K] with M <= 16, `weight` [N, K], contiguous. `norm` [K] float32: multiply rms_norm(x, norm,
    eps) instead. `residual` [M, N]: add the product to it in place, and return it. `gated`: weight
    [2 * N, K] holds a gate, then what silu(gate) multiplies. `block`: columns and depth of a tile.
    """
    rows, depth = x.shape
    width = weight.shape[0] // (2 if gated else 1)
    out = residual
    if out is None:
        out = torch.empty((rows, width), dtype=out_dtype or x.dtype, device=x.device)
    columns, deep = block
    _linear[(triton.cdiv(width, columns),)](
        x, weight, x if norm is None else norm, out, rows, width, depth, eps,
        ROWS=16, COLUMNS=columns, DEPTH=deep, HAS_NORM=norm is not None, ADDS=residual is not None,
        GATED=gated, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return out


@triton.jit
def _linear(
    x: tl.tensor, weight: tl.tensor, norm: tl.tensor, out: tl.tensor, rows: tl.tensor, width: tl.tensor, depth: tl.tensor, eps: tl.tensor,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, HAS_NORM: tl.constexpr,
    ADDS: tl.constexpr, GATED: tl.constexpr, STAGES: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    element = tl.arange(0, DEPTH)
    x_place = x + row[:, None] * depth + element[None, :]
    w_place = weight + column.to(tl.int64)[:, None] * depth + element[None, :]
    up_place = w_place + width.to(tl.int64) * depth
    row_real, column_real = row < rows, column < width
    product = tl.zeros((COLUMNS, ROWS), tl.float32)
    up_product = tl.zeros((COLUMNS, ROWS), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    for start in tl.range(0, depth, DEPTH, num_stages=STAGES):
        inside = start + element < depth
        w_mask = column_real[:, None] & inside[None, :]
        w = tl.load(w_place + start, mask=w_mask, other=0.0)
        part = tl.load(x_place + start, mask=row_real[:, None] & inside[None, :], other=0.0)
        if HAS_NORM:
            exact = part.to(tl.float32)
            squares += tl.sum(exact * exact, 1)
            factor = tl.load(norm + start + element, mask=inside, other=0.0)
            part = (exact * factor[None, :]).to(part.dtype)
        part_t = tl.trans(part)
        product = tl.dot(w, part_t, product, input_precision="ieee")
        if GATED:
            up = tl.load(up_place + start, mask=w_mask, other=0.0)
            up_product = tl.dot(up, part_t, up_product, input_precision="ieee")
    if HAS_NORM:
        scale = tl.rsqrt(squares / depth + eps)[None, :]
        product *= scale
        up_product *= scale
    if GATED:
        product = product * tl.sigmoid(product) * up_product
    place = out + row[None, :] * width.to(tl.int64) + column[:, None]
    mask = column_real[:, None] & row_real[None, :]
    if ADDS:
        product += tl.load(place, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, product.to(out.dtype.element_ty), mask=mask)
