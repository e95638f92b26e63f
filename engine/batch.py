"""One step as flat integer tensors: all that the model and its kernels get to see of blocks and views.

Knows torch. Knows nothing about requests, coroutines or who owns a page; `layout` fills it in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from ..kernels.boundary import BoundaryPlan

PAGE_TOKENS = 16
"""Tokens in a page of keys and values."""

CONV_ROWS = 3
"""Raw projection rows that a Gated DeltaNet convolution of width 4 looks back on."""

ZERO_PAGE = 0
"""A page of zeros that nobody owns: pads page lists."""

IDENTITY_SLOT = 0
"""The slot of an empty block, which nobody owns: the pair (I, 0) and convolution rows of zeros."""


@dataclass(frozen=True)
class Batch:
    """N rows (tokens) of R requests, request after request; every request has at least one row.

    A request's view is a list of S_r segments (runs of pages). The last segment of each request is the
    one that its own rows are stored to: it is read causally, the others whole. All tensors are int64,
    on the engine's device.
    """

    token_ids: Tensor  # [N]
    positions: Tensor  # [3, N] position of a row in the block that it is written to, per axis
    row_start: Tensor  # [R + 1] request r owns rows row_start[r] : row_start[r + 1]
    logit_rows: Tensor  # [M] rows whose logits are wanted, ascending

    # Full attention
    store_index: (
        Tensor  # [N] where a row's key and value go: page * PAGE_TOKENS + offset in the page
    )
    store_positions: (
        Tensor  # [3, N] position of a row in its segment: what its stored key is rotated by
    )
    segment_start: (
        Tensor  # [R + 1] request r reads segments segment_start[r] : segment_start[r + 1]
    )
    segment_page_start: (
        Tensor  # [S + 1] segment s has pages pages[segment_page_start[s] : ... [s + 1]]
    )
    pages: Tensor  # [P] page numbers of all segments (a segment's list may be longer than it needs)
    segment_length: (
        Tensor  # [S] tokens to read; for a request's last segment including its own rows
    )
    segment_shift: (
        Tensor  # [S] what is added to a row's position to rotate its query for this segment
    )
    segment_block: (
        Tensor  # [S] index, in the request's view, of the block that the segment belongs to
    )

    # Gated DeltaNet (hybrid models; empty otherwise)
    chain_slots: (
        Tensor  # [R, depth] slots of the blocks before the written one, nearest first, then 0s
    )
    read_slot: Tensor  # [R] slot of the written block before this step (IDENTITY_SLOT when empty)
    write_slot: Tensor  # [R] slot to write the written block's new pair and rows to
    history_rows: Tensor  # [R, 3] the three raw rows before a request's first row, oldest first:
    #                       slot * CONV_ROWS + j in the pool of rows (rows of IDENTITY_SLOT are zeros)
    kept_new: (
        Tensor  # [R, 3] the written block's last three raw rows afterwards, oldest first, as rows
    )
    #                   of this batch, or -1 where kept_old says which row of the pool to copy
    kept_old: Tensor  # [R, 3] slot * CONV_ROWS + j; read only where kept_new is -1
    boundary: BoundaryPlan | None = None  # where the convolution of blocks' first tokens is recomputed

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]
