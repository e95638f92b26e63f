"""The short causal convolution of a Gated DeltaNet, reading on through the view into older blocks.

Knows raw projection rows of a step and rows kept in slots, by index. Knows no blocks and no model.

All rows that a layer needs stand in one *source*: the rows before each request's first (3 a
request), kept rows that stay kept (3 a request), then the step's own N rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

WIDTH = 4
"""Rows that a convolution looks at: the row itself and three before it."""


@dataclass(frozen=True)
class ConvolutionPlan:
    """Indices for a step of R requests and N rows, the same for every layer."""

    pool_rows: Tensor  # [6 * R] rows of the pool that begin the source
    windows: Tensor  # [N * 4] index in the source of the rows under each window, oldest first
    kept: Tensor  # [R * 3] index in the source of what each request keeps, oldest first


def plan_convolution(
    row_start: Tensor, num_rows: int, history_rows: Tensor, kept_new: Tensor, kept_old: Tensor
) -> ConvolutionPlan:
    """Plan a step. `row_start` [R + 1]: request r has rows row_start[r] : row_start[r + 1] of N.

    `history_rows` [R, 3]: the pool's rows before a request's first, oldest first. `kept_new` [R,
    3]: rows of the step to keep, or -1 where `kept_old` [R, 3] names a row of the pool.
    """
    lookback = WIDTH - 1
    requests, device = history_rows.shape[0], row_start.device
    rows = torch.arange(num_rows, device=device)
    request = torch.searchsorted(row_start, rows, right=True) - 1
    offset = rows - row_start[request]  # of a row in its request
    tap = torch.arange(-lookback, 1, device=device)
    position = offset[:, None] + tap  # negative: before the request's first row
    own = 2 * lookback * requests + rows[:, None] + tap
    history = (request * lookback)[:, None] + position + lookback
    old = lookback * requests + torch.arange(lookback * requests, device=device).view(-1, lookback)
    return ConvolutionPlan(
        pool_rows=torch.cat((history_rows, kept_old.clamp(min=0))).flatten(),
        windows=torch.where(position < 0, history, own).flatten(),
        kept=torch.where(kept_new < 0, old, 2 * lookback * requests + kept_new).flatten(),
    )


def convolve_through_view(
    rows: Tensor, weight: Tensor, pool: Tensor, write_slot: Tensor, plan: ConvolutionPlan
) -> Tensor:
    """silu of the depthwise convolution of `rows` [N, C] and what came before them. float32 [N, C].

    `weight` [4, C] float32; `pool` [slots, 3, C] in rows' dtype. Writes what is kept to
    pool[write_slot].
    """
    source = torch.cat((pool.flatten(0, 1).index_select(0, plan.pool_rows), rows))
    kept = source.index_select(0, plan.kept).view(-1, WIDTH - 1, rows.shape[1])
    pool.index_copy_(0, write_slot, kept)
    windows = source.index_select(0, plan.windows).view(-1, WIDTH, rows.shape[1])
    return F.silu((windows.float() * weight).sum(1))
