"""How a step runs on a GPU: recorded if it is a decode step that fits, else kernel by kernel.

Knows batches on the CPU, the fused decoder and its recordings. Knows no requests; of sampling, the
most probable token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .batch import Batch
from .fused import FusedDecoder
from .graphs import DecodeGraphs, greedy
from .memory import CacheTensors
from .model import Decoder
from .packed import describe, pack


@dataclass(frozen=True)
class Launched:
    """A step that was started. Nothing here has waited for the GPU yet."""

    logits: list[Tensor]  # [vocab] or [n, vocab] float32 of each count asked for, on the device
    tokens: Tensor  # [2, rows of `greedy_rows`] float64: most probable ids, their log-probabilities
    recorded: bool


class Launcher:
    """Runs steps on one GPU. Used by one thread, under inference mode."""

    def __init__(self, decoder: Decoder, cache: CacheTensors, device: torch.device) -> None:
        self._fused = FusedDecoder(decoder, device)
        self._graphs = DecodeGraphs(self._fused, cache, device)
        self._cache = cache
        self._device = device

    def launch(self, batch: Batch, counts: Sequence[int], greedy_rows: Sequence[int]) -> Launched:
        """Start a step. `batch` on the CPU; its logits are cut into pieces of `counts` rows;
        `greedy_rows`: the rows of logits whose most probable token is wanted."""
        is_decode = batch.num_rows == batch.num_requests == batch.logit_rows.shape[0]
        step = self._graphs.run(batch) if is_decode else None
        if step is not None:
            # The next step overwrites these: each row gets memory of its own, all in one launch.
            rows = [torch.empty_like(row) for row in step.logits]
            torch._foreach_copy_(rows, list(step.logits.unbind()))
            tokens = torch.stack((step.ids.double(), step.logprobs.double()))
            return Launched([row[None] for row in rows], tokens[:, list(greedy_rows)], True)
        grouping = self._fused.grouping(batch.num_rows)
        fields = pack(describe(batch, grouping), self._device)
        logits = self._fused.forward(fields, self._cache, grouping.group)
        chosen = greedy(logits[list(greedy_rows)])
        tokens = torch.stack((chosen.ids.double(), chosen.logprobs.double()))
        return Launched(list(logits.split(list(counts))), tokens, False)

    def release(self) -> None:
        """Give the recordings' memory back."""
        self._graphs.release()
