"""Decode steps as recorded CUDA graphs: one launch for a whole forward pass and the tokens after it.

Knows the fused decoder, packed fields, rows of options and CUDA graphs. Knows no requests: a step that
fits no recording is told so, and the caller runs it unrecorded.

A graph is recorded for a number of rows, with or without sampling, the first time that a step needs
it. Which blocks a row reads, their lengths, pages and slots are data in the plan's buffer, not part of
the recording, and so is how a row is sampled. Rows that a step does not need store nothing and read
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..kernels.sampling import OPTIONS_WIDTH
from ..kernels.sampling_triton import sample_all
from .batch import Batch
from .config import ModelConfig
from .fused import FusedDecoder
from .looks import Looks
from .memory import CacheTensors
from .packed import COUNTS, LAST_FIELD, PADDING, Capacities, Grouping, Integers, describe

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Numbers of rows that are recorded. Other numbers run with padding."""

ENTRIES_PER_ROW, MIN_ENTRIES = 64, 256
"""Partial results of attention that a row of a recorded step may have, on average; in all, at least."""

MAX_DEPTH = 32
"""Blocks before the written one that a recorded step can walk along."""

MAX_PAGES = 1 << 16


Options = Sequence[Sequence[float]]
"""A row for each row of a step, as `kernels.sampling.option_row` makes them."""


@dataclass(frozen=True)
class StepTokens:
    """What a step gives, on the device; a recorded one's tensors are overwritten when it runs again."""

    logits: Tensor  # [R, vocab] float32
    ids: Tensor  # [R] the tokens chosen
    logprobs: Tensor  # [R] float32, theirs
    decided: Tensor | None = None  # [R] bool: where not, the token has to be drawn anew; None: all
    looks: Looks | None = None
    fields: Mapping[str, Integers] | None = None  # that `looks` is about


def greedy(logits: Tensor) -> StepTokens:
    """The most probable token of each row (the lowest id of equals) and its log-probability."""
    ids = logits.argmax(-1)
    logprobs = logits.gather(1, ids[:, None])[:, 0] - logits.logsumexp(-1)
    return StepTokens(logits, ids, logprobs)


def sampled(logits: Tensor, options: Tensor) -> StepTokens:
    """The token that each row's options choose; undecided where logits are not finite."""
    return StepTokens(logits, *sample_all(logits, options))


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
        self._recordings: dict[tuple[int, bool], Recording] = {}
        self.pool: Any = torch.cuda.graph_pool_handle()

    def run(
        self, batch: Batch, ids: Tensor | None = None, options: Options | None = None
    ) -> StepTokens | None:
        """Run a decode step, one row a request, recording it first if need be. None if it fits no
        recording: too many rows, blocks or pages. `ids` [N] on the device replace the batch's. Without
        `options` each row gets its most probable token."""
        rows = next((rows for rows in BUCKETS if rows >= batch.num_rows), None)
        if rows is None:
            return None
        key = (rows, options is not None)
        recording = self._recordings.get(key)
        grouping = self._decoder.grouping(rows)
        fields = describe(batch, grouping, max_entries(rows))
        if recording is None:
            room = capacities(self._decoder.config, rows)
            recording = Recording(room, key[1], grouping, self._decoder, self._cache, self._device, self.pool)
            self._recordings[key] = recording
        return recording.replay(fields, ids, options)

    def release(self) -> None:
        """Give the recordings' memory back."""
        self._recordings.clear()


class Recording:
    """One recorded step: a buffer for its plan, and its results, one for each of `logit_rows`."""

    def __init__(
        self,
        capacities: Capacities,
        samples: bool,
        grouping: Grouping,
        decoder: FusedDecoder,
        cache: CacheTensors,
        device: torch.device,
        pool: Any,
    ) -> None:
        self.capacities = capacities
        results = capacities.shapes["logit_rows"][0]
        size = capacities.size
        # Two, taken in turns: a step may be laid out while the one before it is still being copied.
        self._hosts = [torch.zeros(size, dtype=torch.int32, pin_memory=True) for _ in range(2)]
        self._plan = torch.zeros(size, dtype=torch.int32, device=device)
        fields = self.capacities.views(self._plan)
        self._token_ids = fields["token_ids"]
        for name in fields.keys() & PADDING.keys():  # while it is recorded, all rows are padding
            fields[name].fill_(PADDING[name])
        fields["logit_rows"].copy_(torch.arange(results))
        shape = (results, OPTIONS_WIDTH)
        self._host_options = [torch.zeros(shape, dtype=torch.float64, pin_memory=True) for _ in range(2)]
        self._options = torch.zeros(shape, dtype=torch.float64, device=device)  # temperature 0

        def step() -> StepTokens:
            looks = Looks()
            logits = decoder.forward(fields, cache, grouping.group, looks)
            tokens = sampled(logits, self._options) if samples else greedy(logits)
            return replace(tokens, looks=looks)

        step()  # compiles kernels and makes workspaces, which must not happen while recording
        torch.cuda.synchronize(device)
        self._graph, self._result = _record(step, pool)

    def replay(
        self, fields: dict[str, Integers], ids: Tensor | None, options: Options | None
    ) -> StepTokens | None:
        """Run a step; None if its fields do not fit. Waits for nothing; the caller runs at most one step
        ahead of the last one whose result it has. `ids` as many as there are results."""
        if not self.capacities.fit(fields):
            return None
        count = len(fields["logit_rows"])
        self._hosts.reverse()
        host = self._hosts[0]
        end = self.capacities.fill(host.numpy(), fields)
        self._plan[:end].copy_(host[:end], non_blocking=True)
        if ids is not None:
            self._token_ids[:count].copy_(ids)
        if options is not None:
            self._host_options.reverse()
            table = self._host_options[0]
            table.zero_()
            table[:count].copy_(torch.tensor(options, dtype=table.dtype))
            self._options.copy_(table, non_blocking=True)
        self._graph.replay()
        result = self._result
        return StepTokens(
            result.logits[:count],
            result.ids[:count],
            result.logprobs[:count],
            None if result.decided is None else result.decided[:count],
            result.looks,
            fields,
        )


def _record(step: Callable[[], StepTokens], pool: Any) -> tuple[torch.cuda.CUDAGraph, StepTokens]:
    """A graph of what `step` launches, and the results that each of its replays overwrites."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = step()
    return graph, result
