"""Steps that encode a few more tokens beside decodes, as recorded CUDA graphs: a stream's input, a probe.

Knows recordings and what room such a step needs. Knows no requests: a step that fits no recording is
told so, and the caller runs it unrecorded. Long chunks are not recorded: they keep a GPU busy for longer
than it takes to launch their kernels.
"""

from __future__ import annotations

import numpy as np
import torch

from .batch import Batch
from .config import ModelConfig
from .fused import FusedDecoder
from .graphs import Options, Recording, StepTokens, capacities, max_entries
from .memory import CacheTensors
from .packed import CHUNK, Capacities, describe

ROWS = (16, 48, 128)
"""Numbers of rows that are recorded."""

REQUESTS = (1, 4)
"""Numbers of requests of several rows that are recorded, for models with Gated DeltaNet layers."""

MAX_PARTS = 40
"""Requests, of one row or of several, that a recorded step can have."""

MAX_DEPTH = 6
"""Blocks before the written one that it can walk along: requests of padding do all of it, too."""


def mixed_capacities(config: ModelConfig, rows: int, requests: int) -> Capacities:
    """Room for a step of `rows` rows, of which `requests` requests have several."""
    parts = min(rows, MAX_PARTS)
    shapes = dict(capacities(config, rows).shapes)
    pages = shapes.popitem()
    shapes["logit_rows"] = (parts,)
    if config.is_hybrid:
        singles = [name for name in shapes if name.startswith("single_")]
        shapes |= {name: (parts, *shapes[name][1:]) for name in singles}
        shapes["single_chain"] = (parts, MAX_DEPTH)
        shapes |= {
            "many_row": (rows,),
            "many_windows": (rows, 4),
            "many_start": (requests + 1,),
            "many_chunk": (rows // CHUNK + requests + 1,),
            "many_request_chunk": (requests + 1,),
            "many_read": (requests,),
            "many_write": (requests,),
            "many_kept": (requests, 3),
            "many_chain": (requests, MAX_DEPTH),
            "many_length": (requests,),
        }
    return Capacities(shapes | dict([pages]))


class MixedGraphs:
    """Recorded steps of one decoder over one cache. Used by one thread."""

    def __init__(
        self, decoder: FusedDecoder, cache: CacheTensors, device: torch.device, pool: object
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._device = device
        self._pool = pool
        self._recordings: dict[tuple[int, int, bool], Recording] = {}

    def run(self, batch: Batch, options: Options | None) -> StepTokens | None:
        """Run a step, recording it first if need be, and give what follows each request's last row. None
        if it fits no recording."""
        start = batch.row_start.numpy()
        several = int((np.diff(start) > 1).sum()) if self._decoder.config.is_hybrid else 1
        rows = next((rows for rows in ROWS if rows >= batch.num_rows), None)
        requests = next((count for count in REQUESTS if count >= several), None)
        if rows is None or requests is None or not several or len(start) - 1 > MAX_PARTS:
            return None
        grouping = self._decoder.grouping(rows)
        fields = describe(batch, grouping, max_entries(rows)) | {"logit_rows": start[1:] - 1}
        room = mixed_capacities(self._decoder.config, rows, requests)
        if not room.fit(fields):  # then nothing is recorded either
            return None
        key = (rows, requests, options is not None)
        if key not in self._recordings:
            self._recordings[key] = Recording(
                room, key[2], grouping, self._decoder, self._cache, self._device, self._pool
            )
        return self._recordings[key].replay(fields, None, options)

    def release(self) -> None:
        """Give the recordings' memory back."""
        self._recordings.clear()
