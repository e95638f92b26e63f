"""The fused forward pass in the place of the plain one, for the hand-made memory of `laid_out`.

Knows `FusedDecoder` and packed steps. On a CPU it needs Triton's interpreter (``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

import dataclasses

import torch
from laid_out import Memory
from torch import Tensor

from asyncllm_nb.engine.batch import Batch
from asyncllm_nb.engine.config import ModelConfig
from asyncllm_nb.engine.fused import FusedDecoder
from asyncllm_nb.engine.memory import CacheTensors
from asyncllm_nb.engine.model import Decoder
from asyncllm_nb.engine.packed import describe, pack


class FusedForward:
    """A decoder whose `forward` packs a batch and runs it in fused kernels."""

    def __init__(self, decoder: Decoder) -> None:
        self.config: ModelConfig = decoder.config
        self.device = decoder.weights.embedding.device
        self._fused = FusedDecoder(decoder, self.device)

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: CacheTensors, shares: None = None) -> Tensor:
        grouping = self._fused.grouping(batch.num_rows)
        fields = pack(describe(batch, grouping), self.device)
        return self._fused.forward(fields, cache, grouping.group).cpu()


def fused_memory(decoder: Decoder, dtype: torch.dtype = torch.float32, **options: int) -> Memory:
    """Poisoned pools on the decoder's device, whose steps run in fused kernels."""
    memory = Memory(decoder, dtype=dtype, **options)
    device = decoder.weights.embedding.device
    memory.cache = CacheTensors(
        *(getattr(memory.cache, field.name).to(device) for field in dataclasses.fields(CacheTensors))
    )
    memory.decoder = FusedForward(decoder)  # type: ignore[assignment]
    return memory
