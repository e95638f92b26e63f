"""Decode steps as recorded CUDA graphs: one launch for a whole forward pass and its greedy tokens.

Knows the fused decoder, packed fields and CUDA graphs. Knows no requests: a step that fits no
recording is told so, and the caller runs it unrecorded.

A graph is recorded for a number of rows, the first time that a step needs it. Which blocks a row
reads, their lengths, pages and slots are data in the plan's buffer, not part of the recording. Rows
that a step does not need store nothing and read nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .batch import Batch
from .config import ModelConfig
from .fused import FusedDecoder
from .memory import CacheTensors
from .packed import COUNTS, LAST_FIELD, Capacities, Grouping, Integers, describe

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Numbers of rows that are recorded. Other numbers run with padding."""

ENTRIES_PER_ROW, MIN_ENTRIES = 64, 256
"""Partial results of attention that a row of a recorded step may have, on average; in all, at least."""

MAX_DEPTH = 32
"""Blocks before the written one that a recorded step can walk along."""

MAX_PAGES = 1 << 16


@dataclass(frozen=True)
class GreedyStep:
    """What a step gives, on the device; a recorded one's tensors are overwritten by the next."""

    logits: Tensor  # [R, vocab] float32
    ids: Tensor  # [R] the most probable tokens
    logprobs: Tensor  # [R] float32, theirs


def greedy(logits: Tensor) -> GreedyStep:
    """The most probable token of each row (the lowest id of equals) and its log-probability."""
    ids = logits.argmax(-1)
    logprobs = logits.gather(1, ids[:, None])[:, 0] - logits.logsumexp(-1)
    return GreedyStep(logits, ids, logprobs)


def max_entries(rows: int) -> int:
    """Partial results of attention that a recorded step of `rows` rows has room for."""
    return max(MIN_ENTRIES, ENTRIES_PER_ROW * rows)


def capacities(config: ModelConfig, rows: int) -> Capacities:
    """Room for a decode step of `rows` rows, each of a request of its own."""
    entries = max_entries(rows)
    shapes: dict[str, tuple[int, ...]] = {
        "token_ids": (rows,),
        "positions": (3, rows),
        "store_positions": (3, rows),
        "store_index": (rows,),
        "logit_rows": (rows,),
        "entry_row": (entries,),
        "entry_seen": (entries,),
        "entry_shift": (entries,),
        "entry_block": (entries,),
        "row_entry": (entries,),
        "row_start": (rows + 1,),
        "items": (entries, 5),
    }
    if config.is_hybrid:
        shapes |= {
            "single_row": (rows,),
            "single_read": (rows,),
            "single_write": (rows,),
            "single_chain": (rows, MAX_DEPTH),
            "single_length": (rows,),
            "single_history": (rows, 3),
            "single_kept": (rows, 3),
        }
    shapes["counts"] = (len(COUNTS),)
    shapes[LAST_FIELD] = (MAX_PAGES,)
    return Capacities(shapes)


class DecodeGraphs:
    """Recorded decode steps of one decoder over one cache. Used by one thread."""

    def __init__(self, decoder: FusedDecoder, cache: CacheTensors, device: torch.device) -> None:
        self._decoder = decoder
        self._cache = cache
        self._device = device
        self._recordings: dict[int, _Recording] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, batch: Batch, ids: Tensor | None = None) -> GreedyStep | None:
        """Run a decode step, one row a request, recording it first if need be. None if it fits no
        recording: too many rows, blocks or pages. `ids` [N] on the device replace the batch's."""
        rows = next((rows for rows in BUCKETS if rows >= batch.num_rows), None)
        if rows is None:
            return None
        recording = self._recordings.get(rows)
        grouping = self._decoder.grouping(rows)
        fields = describe(batch, grouping, max_entries(rows))
        if recording is None:
            recording = _Recording(rows, grouping, self._decoder, self._cache, self._device, self._pool)
            self._recordings[rows] = recording
        return recording.replay(fields, batch.num_rows, ids)

    def release(self) -> None:
        """Give the recordings' memory back."""
        self._recordings.clear()


class _Recording:
    """One recorded step: a buffer for its plan, and its results."""

    def __init__(
        self,
        rows: int,
        grouping: Grouping,
        decoder: FusedDecoder,
        cache: CacheTensors,
        device: torch.device,
        pool: Any,
    ) -> None:
        self.capacities = capacities(decoder.config, rows)
        size = self.capacities.size
        # Two, taken in turns: a step may be laid out while the one before it is still being copied.
        self._hosts = [torch.zeros(size, dtype=torch.int32, pin_memory=True) for _ in range(2)]
        self._plan = torch.zeros(size, dtype=torch.int32, device=device)
        fields = self.capacities.views(self._plan)
        self._token_ids = fields["token_ids"]
        fields["store_index"].fill_(-1)  # while it is recorded, all rows are padding
        fields["logit_rows"].copy_(torch.arange(rows))

        def step() -> GreedyStep:
            return greedy(decoder.forward(fields, cache, grouping.group))

        step()  # compiles kernels and makes workspaces, which must not happen while recording
        torch.cuda.synchronize(device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._result = step()

    def replay(self, fields: dict[str, Integers], num_rows: int, ids: Tensor | None) -> GreedyStep | None:
        """Run a step of `num_rows` real rows; None if its fields do not fit. Waits for nothing; the
        caller runs at most one step ahead of the last one whose result it has."""
        if not self.capacities.fit(fields):
            return None
        rows = self.capacities.shapes["logit_rows"][0]
        fields = {**fields, "logit_rows": np.arange(rows)}
        self._hosts.reverse()
        host = self._hosts[0]
        end = self.capacities.fill(host.numpy(), fields)
        self._plan[:end].copy_(host[:end], non_blocking=True)
        if ids is not None:
            self._token_ids[:num_rows].copy_(ids)
        self._graph.replay()
        result = self._result
        return GreedyStep(result.logits[:num_rows], result.ids[:num_rows], result.logprobs[:num_rows])
