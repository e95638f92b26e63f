"""From blocks to flat integers: lays the parts of one step out as a `Batch`.

Knows where a block's tokens lie (segments, pages, slots) and what a view means for positions. Knows no
requests, no order and no arithmetic on keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .batch import CONV_ROWS, IDENTITY_SLOT, PAGE_TOKENS, Batch
from .blocks import BlockState, Draft, Segment

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Part:
    """Some tokens of one write in this step."""

    view: tuple[BlockState, ...]  # blocks before the written one
    draft: Draft  # the memory that they go to
    num_done: int  # tokens of the draft that earlier steps wrote
    token_ids: Sequence[int]
    wanted_from: int  # index, in token_ids, of the first row whose logits are wanted

    @property
    def num_before(self) -> int:
        """Tokens that the written block has before this part."""
        return self.draft.base.num_tokens + self.num_done

    @property
    def read_slot(self) -> int:
        """Where the written block's pair and rows are before this part."""
        return self.draft.slot if self.num_done else self.draft.base.slot


class _Columns:
    """Growing lists, one per tensor of a batch."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.store: list[int] = []
        self.store_positions: list[int] = []
        self.row_start = [0]
        self.logit_rows: list[int] = []
        self.segment_start = [0]
        self.page_start = [0]
        self.pages: list[Integers] = []
        self.lengths: list[int] = []
        self.shifts: list[int] = []
        self.blocks: list[int] = []

    def add_segment(self, segment: Segment, length: int, shift: int, block: int) -> None:
        used = _page_numbers(segment.pages)[: -(-length // PAGE_TOKENS)]
        self.pages.append(used)
        self.page_start.append(self.page_start[-1] + len(used))
        self.lengths.append(length)
        self.shifts.append(shift)
        self.blocks.append(block)

    def add(self, part: Part) -> None:
        start, count = self.row_start[-1], len(part.token_ids)
        origin = sum(state.span for state in part.view)  # where, in the view, the block begins
        self.tokens.extend(part.token_ids)
        self.row_start.append(start + count)
        self.logit_rows.extend(range(start + part.wanted_from, start + count))
        at = 0
        for index, state in enumerate(part.view):
            for segment in state.segments:
                self.add_segment(segment, segment.length, origin - at - segment.offset, index)
            at += state.span
        *earlier, own = part.draft.segments
        for segment in earlier:
            self.add_segment(segment, segment.length, -segment.offset, len(part.view))
        # Index, in the segment, of the first row of this part.
        start_in_own = own.length - part.draft.num_tokens + part.num_done
        self.add_segment(own, start_in_own + count, -own.offset, len(part.view))
        self.segment_start.append(len(self.lengths))
        self.store.extend(
            own.pages[place // PAGE_TOKENS] * PAGE_TOKENS + place % PAGE_TOKENS
            for place in range(start_in_own, start_in_own + count)
        )
        position = part.draft.base.span + part.num_done
        self.positions.extend(range(position, position + count))
        position -= own.offset
        self.store_positions.extend(range(position, position + count))


@lru_cache(maxsize=4096)
def _page_numbers(pages: tuple[int, ...]) -> Integers:
    """A segment's pages as an array; most segments are the same from step to step."""
    return np.array(pages, dtype=np.int64)


def make_batch(parts: Sequence[Part], is_hybrid: bool, device: torch.device) -> Batch:
    """Lay out `parts`, one request each, in order."""
    columns = _Columns()
    for part in parts:
        columns.add(part)
    linear = _linear_columns(parts, columns.row_start) if is_hybrid else [[[]]] * 6
    chain, read, write, history, kept_new, kept_old = linear

    def tensor(values: object) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(device, non_blocking=True)

    def axes(values: list[int]) -> Tensor:
        """Text has one position for all three axes."""
        return tensor(np.tile(np.asarray(values, dtype=np.int64), (3, 1)))

    return Batch(
        token_ids=tensor(columns.tokens),
        positions=axes(columns.positions),
        row_start=tensor(columns.row_start),
        logit_rows=tensor(columns.logit_rows),
        store_index=tensor(columns.store),
        store_positions=axes(columns.store_positions),
        segment_start=tensor(columns.segment_start),
        segment_page_start=tensor(columns.page_start),
        pages=tensor(np.concatenate(columns.pages)),
        segment_length=tensor(columns.lengths),
        segment_shift=tensor(columns.shifts),
        segment_block=tensor(columns.blocks),
        chain_slots=tensor(chain),
        read_slot=tensor(read),
        write_slot=tensor(write),
        history_rows=tensor(history),
        kept_new=tensor(kept_new),
        kept_old=tensor(kept_old),
    )


def newest_rows(sources: Sequence[tuple[int, int]]) -> list[int]:
    """Indices, oldest first, of the last three raw rows of a run of blocks.

    `sources` are (slot, number of rows it has), nearest block first. Rows that do not exist are the
    zeros of the identity slot.
    """
    nearest, has = sources[0]
    if has >= CONV_ROWS:
        return list(range(nearest * CONV_ROWS, nearest * CONV_ROWS + CONV_ROWS))
    rows: list[int] = []
    for slot, count in sources:
        for back in range(count):
            if len(rows) == CONV_ROWS:
                break
            rows.append(slot * CONV_ROWS + CONV_ROWS - 1 - back)
    missing = range(CONV_ROWS - len(rows))
    return [IDENTITY_SLOT * CONV_ROWS + i for i in missing] + rows[::-1]


def _linear_columns(parts: Sequence[Part], row_start: Sequence[int]) -> list[object]:
    """chain_slots, read_slot, write_slot, history_rows, kept_new and kept_old of a batch."""
    depth = max(len(part.view) for part in parts)
    chain, history, kept_new, kept_old = [], [], [], []
    for part, start in zip(parts, row_start, strict=False):
        slots = [state.slot for state in reversed(part.view) if state.slot != IDENTITY_SLOT]
        chain.append(slots + [IDENTITY_SLOT] * (depth - len(slots)))
        own = (part.read_slot, min(CONV_ROWS, part.num_before))
        history.append(newest_rows([own, *((s.slot, s.num_rows) for s in reversed(part.view))]))
        count = len(part.token_ids)
        old = newest_rows([own])
        new = [start + count - back if back <= count else -1 for back in (3, 2, 1)]
        kept_new.append(new)
        kept_old.append([old[min(CONV_ROWS - 1, i + count)] for i in range(CONV_ROWS)])
    read = [part.read_slot for part in parts]
    write = [part.draft.slot for part in parts]
    return [chain, read, write, history, kept_new, kept_old]
