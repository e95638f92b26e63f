"""A step's plan for the fused kernels: all its integers in one buffer, so that one copy moves them.

Knows `Batch` and what the fused kernels ask for. Knows no blocks, no requests and no weights.

Each field has a capacity. A recorded launch keeps its capacities and reads the real counts from the
buffer; a step that is not recorded has capacities that just fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kernels.items import plan_items, runs
from .batch import PAGE_TOKENS, Batch

Integers = npt.NDArray[np.int64]
Shape = tuple[int, ...]

COUNTS = ("items", "singles")
"""What the field `counts` holds, in this order."""

LAST_FIELD = "pages"
"""The field that varies most in length; behind the others, so that only its beginning is copied."""

PADDING = {
    "store_index": -1,
    "many_row": -1,
    "many_kept": -1,
    "many_read": 0,
    "many_write": 0,
    "many_chain": 0,
    "many_length": 0,
}
"""What stands behind the contents of fields that say where to write, or what a request reads: nowhere,
nothing. Starts (of rows, of chunks) stay at their last number. Other fields keep what they had."""

STARTS = ("row_start", "many_start", "many_chunk", "many_request_chunk")

ALIGNMENT = 4
"""Integers; kernels are compiled for addresses that are multiples of 16 bytes."""

CHUNK = 32
"""Rows of a chunk of the gated delta rule; the kernels say why."""


class Grouping(NamedTuple):
    """How attention is cut into items; see `kernels.items`."""

    kv_heads: int
    group: int  # rows that read a stretch together, at most
    processors: int


def describe(batch: Batch, grouping: Grouping, max_entries: int | None = None) -> dict[str, Integers]:
    """The fields of a step, from a batch on the CPU. Shapes are those of `capacities`."""
    items = plan_items(
        row_start=_host(batch.row_start),
        segment_start=_host(batch.segment_start),
        segment_page_start=_host(batch.segment_page_start),
        pages=_host(batch.pages),
        segment_length=_host(batch.segment_length),
        segment_shift=_host(batch.segment_shift),
        segment_block=_host(batch.segment_block),
        page_tokens=PAGE_TOKENS,
        kv_heads=grouping.kv_heads,
        group=grouping.group,
        processors=grouping.processors,
        max_entries=max_entries,
    )
    fields = {
        "token_ids": _host(batch.token_ids),
        "positions": _host(batch.positions),
        "store_positions": _host(batch.store_positions),
        "store_index": _host(batch.store_index),
        "logit_rows": _host(batch.logit_rows),
        "entry_row": items.entry_row,
        "entry_seen": items.entry_seen,
        "entry_shift": items.entry_shift,
        "entry_block": items.entry_block,
        "row_entry": items.row_entry,
        "row_start": items.row_start,
        "items": items.items,
    }
    singles = 0
    if batch.read_slot.numel():
        linear = _describe_linear(batch)
        singles = len(linear["single_row"])
        fields.update(linear)
    fields["counts"] = np.array([len(items.items), singles])
    fields[LAST_FIELD] = items.pages
    return fields


def _describe_linear(batch: Batch) -> dict[str, Integers]:
    """The fields of Gated DeltaNet layers: requests of one row, and of many rows."""
    start = _host(batch.row_start)
    count = np.diff(start)
    single, many = np.flatnonzero(count == 1), np.flatnonzero(count > 1)
    chain = _host(batch.chain_slots)
    # Slot 0 changes nothing and may be left out: it pads the lists.
    chain = np.take_along_axis(chain, np.argsort(chain == 0, axis=1, kind="stable"), axis=1)
    history, kept_old = _host(batch.history_rows), _host(batch.kept_old)
    fields = {
        "single_row": start[single],
        "single_read": _host(batch.read_slot)[single],
        "single_write": _host(batch.write_slot)[single],
        "single_chain": chain[single],
        "single_length": (chain[single] != 0).sum(1),
        "single_history": history[single],
        "single_kept": kept_old[single],
    }
    if not len(many):
        return fields
    rows, offset = np.repeat(start[many], count[many]), runs(0 * many, count[many])
    rows = rows + offset
    request = np.repeat(many, count[many])
    tap = np.arange(-3, 1)
    before = offset[:, None] + tap
    pool = -1 - history[request[:, None], np.minimum(before + 3, 2)]
    kept_new = _host(batch.kept_new)[many]
    chunks = -(-count[many] // CHUNK)
    first = np.cumsum(count[many]) - count[many]
    length = (chain[many] != 0).sum(1)
    return fields | {
        "many_row": rows,
        "many_windows": np.where(before < 0, pool, rows[:, None] + tap),
        "many_start": np.append(first, count[many].sum()),
        "many_chunk": np.append(
            np.repeat(first, chunks) + CHUNK * runs(0 * chunks, chunks), count[many].sum()
        ),
        "many_request_chunk": np.append(0, np.cumsum(chunks)),
        "many_read": _host(batch.read_slot)[many],
        "many_write": _host(batch.write_slot)[many],
        "many_kept": np.where(kept_new < 0, -1 - kept_old[many], kept_new),
        "many_chain": chain[many][:, : length.max()],  # no columns: nothing stands before them
        "many_length": length,
    }


@dataclass(frozen=True)
class Capacities:
    """Where each field lies in the buffer: one after the other, each on a border of ALIGNMENT."""

    shapes: Mapping[str, Shape]

    @staticmethod
    def of(fields: Mapping[str, Integers]) -> Capacities:
        """Capacities that just fit."""
        return Capacities({name: field.shape for name, field in fields.items()})

    def places(self) -> Iterator[tuple[str, Shape, int]]:
        """Each field's name, shape and start in the buffer."""
        start = 0
        for name, shape in self.shapes.items():
            yield name, shape, start
            start += -(-prod(shape) // ALIGNMENT) * ALIGNMENT

    @property
    def size(self) -> int:
        *_, (_, shape, start) = self.places()
        return start + prod(shape)

    def fit(self, fields: Mapping[str, Integers]) -> bool:
        """Have all fields room?"""
        return fields.keys() == self.shapes.keys() and all(
            all(have >= need for have, need in zip(self.shapes[name], field.shape, strict=True))
            for name, field in fields.items()
        )

    def fill(self, buffer: npt.NDArray[np.int32], fields: Mapping[str, Integers]) -> int:
        """Write fields to `buffer`; -> how much of it, from the start, has to be copied.

        Padding stores nothing, and merges nothing.
        """
        end = 0
        for name, shape, start in self.places():
            field, size = fields[name], prod(shape)
            room = buffer[start : start + size].reshape(shape)
            if name in PADDING:
                room[...] = PADDING[name]
            elif name in STARTS:
                room[field.shape[0] :] = field[-1]
            room[tuple(slice(length) for length in field.shape)] = field
            end = start + (len(field) if name == LAST_FIELD else size)
        return end

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The fields in a buffer on the device."""
        return {name: buffer[start : start + prod(shape)].view(shape) for name, shape, start in self.places()}


def pack(fields: Mapping[str, Integers], device: torch.device) -> dict[str, Tensor]:
    """A step's fields on `device`, int32, with nothing to spare."""
    capacities = Capacities.of(fields)
    buffer = torch.empty(capacities.size, dtype=torch.int32)
    capacities.fill(buffer.numpy(), fields)
    return capacities.views(buffer.to(device))


def _host(tensor: Tensor) -> Integers:
    numbers: Integers = tensor.numpy()
    return numbers
