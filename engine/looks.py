"""What fused steps leave behind for instruments: shares of attention, and the queries that were asked.

Knows partial results of attention as tensors, and which row and block each is of. Knows no requests and
nobody who looks; a step that nobody looks at computes nothing of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.attention import block_shares
from .packed import Integers


@dataclass
class Looks:
    """Of each full-attention layer what its kernels made anyway, on the device. A recorded step's tensors
    are overwritten when it runs again."""

    stats: list[Tensor] = field(default_factory=list)  # [2, E, H]: peaks and totals of entries
    queries: list[Tensor] = field(default_factory=list)  # [N, H, D], normalised and not turned


class Seen(NamedTuple):
    """What the last rows of R parts saw, in memory of its own."""

    shares: Tensor  # [L_a, R, B, H] float32; B: blocks of the longest view
    queries: Tensor  # [L_a, R, H, D]

    def part(self, index: int) -> Seen:
        return Seen(self.shares[:, index : index + 1], self.queries[:, index : index + 1])


def see(looks: Looks, last: Integers, entry_row: Integers, entry_block: Integers) -> Seen:
    """What rows `last` [R], ascending, saw. `entry_row`, `entry_block` [E] are fields of the step."""
    entries = np.flatnonzero(np.isin(entry_row, last))
    device = looks.queries[0].device
    entry, row, block, rows = (
        torch.from_numpy(numbers).to(device)
        for numbers in (entries, np.searchsorted(last, entry_row[entries]), entry_block[entries], last)
    )
    stats = torch.stack([layer.index_select(1, entry) for layer in looks.stats])  # [L_a, 2, E, H]
    shares = block_shares(stats, row, block, len(last), int(entry_block[entries].max()) + 1)
    return Seen(shares, torch.stack([layer.index_select(0, rows) for layer in looks.queries]))


def joined(parts: Sequence[Seen]) -> Seen:
    """All of them as one, in order; blocks that a view has not got have no share."""
    blocks = max(part.shares.shape[2] for part in parts)
    shares = [F.pad(part.shares, (0, 0, 0, blocks - part.shares.shape[2])) for part in parts]
    return Seen(torch.cat(shares, dim=1), torch.cat([part.queries for part in parts], dim=1))
