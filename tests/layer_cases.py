"""One layer in fused kernels against the same layer in plain PyTorch, over random memory.

Knows the two decoders' layers and hand-made blocks (`laid_out`). Where it runs is the caller's: on a
CPU in Triton's interpreter, or compiled on a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp

import torch
import torch.nn.functional as F
from laid_out import Laid, Memory, Request
from torch import Tensor

from asyncllm_nb.engine.batch import PAGE_TOKENS, Batch
from asyncllm_nb.engine.config import ModelConfig
from asyncllm_nb.engine.fused import FusedDecoder, _Step
from asyncllm_nb.engine.memory import CacheTensors
from asyncllm_nb.engine.model import Decoder
from asyncllm_nb.engine.packed import describe, pack
from asyncllm_nb.engine.weights import AttentionWeights, DeltaNetWeights, load_weights
from asyncllm_nb.testing import make_checkpoint

Case = tuple[Sequence[int], int]
"""A request: lengths of the blocks of its view, the written one last, and the rows that it appends."""

ATTENTION_CASES: dict[str, list[Case]] = {
    "a block of its own": [([0], 1)],
    "one row, 24 blocks": [([3, 1, 17, 2] * 6, 1)],
    "rows of one": [([40, 5, 0], 1), ([1], 1), ([16, 16, 15], 1)],
    "many rows": [([33, 0, 7], 21)],
    "ragged": [([20, 2, 3], 1), ([20, 4], 9), ([0], 5), ([1, 2, 3, 4, 5], 2), ([47], 1)],
}
DELTA_CASES = ATTENTION_CASES | {
    "chunks of many rows": [([9, 2], 70), ([0], 33), ([4, 4], 1), ([5, 0, 0], 2)],
    "nothing before many rows": [([0], 33), ([9, 2], 1), ([0, 5], 2)],
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@functools.cache
def folder(family: str) -> Path:
    return make_checkpoint(mkdtemp(), family, seed=11)


@functools.cache
def decoder(family: str, device: str, dtype: torch.dtype) -> Decoder:
    config = ModelConfig.from_folder(folder(family))
    return Decoder(config, load_weights(folder(family), config, device, dtype))


class Scene:
    """Blocks of random content in poisoned pools; a prompt that some requests share."""

    def __init__(self, family: str, cases: Sequence[Case], seed: int) -> None:
        self.plain = decoder(family, "cpu", torch.float32)
        self._random = random.Random(seed)
        self._memory = Memory(self.plain, seed=seed, num_pages=200, num_slots=90)
        generator = torch.Generator().manual_seed(seed)
        self.cache = self._memory.cache
        shared: dict[int, Laid] = {}
        requests = []
        for lengths, rows in cases:
            view = [self._block(length, generator) for length in lengths]
            if len(view) > 1:  # the first blocks of views are one block if they have one length
                view[0] = shared.setdefault(lengths[0], view[0])
            requests.append(Request(view, self._random.choices(range(90), k=rows)))
        self.batch: Batch = self._memory.lay_out(requests)[0]
        hidden = self.plain.config.hidden_size
        self.x = torch.randn(self.batch.num_rows, hidden, generator=generator)

    def _block(self, length: int, generator: torch.Generator) -> Laid:
        """A block of `length` tokens, as if they had been written; everything behind them is poison."""
        block, cache = Laid(span=length), self.cache
        if not length:
            return block
        self._memory._grow(block, length)
        run = block.runs[0]
        for pool in (cache.keys, cache.values):
            for index in range(length):
                place = pool[:, :, run.pages[index // PAGE_TOKENS], index % PAGE_TOKENS]
                place.copy_(torch.randn(place.shape, generator=generator))
        if self.plain.config.is_hybrid:
            block.slot = self._memory._slots.pop()
            pair = cache.pairs[:, block.slot]
            pair.copy_(0.2 * torch.randn(pair.shape, generator=generator))
            kept = cache.conv_rows[:, block.slot, -min(3, length) :]
            kept.copy_(torch.randn(kept.shape, generator=generator))
        return block


def copied(cache: CacheTensors, device: torch.device, dtype: torch.dtype) -> CacheTensors:
    """The same memory on `device`, in `dtype` except for the pairs."""
    tensors = (getattr(cache, field.name) for field in dataclasses.fields(cache))
    keys, values, pairs, rows = (tensor.to(device, copy=True) for tensor in tensors)
    return CacheTensors(keys.to(dtype), values.to(dtype), pairs, rows.to(dtype))


@torch.inference_mode()
def check_layer(
    family: str, cases: Sequence[Case], kind: type, device: str, dtype: torch.dtype, seed: int = 0
) -> None:
    """Assert that the first layer of `kind` gives the same output and leaves the same memory."""
    scene = Scene(family, cases, seed)
    place, fast = torch.device(device), decoder(family, device, dtype)
    index = next(i for i, layer in enumerate(fast.weights.layers) if isinstance(layer.mixer, kind))
    cache = copied(scene.cache, place, dtype)
    if dtype != torch.float32:  # both begin with the same rounded numbers
        rounded = copied(cache, torch.device("cpu"), torch.float32)
        scene.cache, scene.x = rounded, scene.x.to(dtype).float()
    expected = _plain_layer(scene, index)
    actual = _fused_layer(fast, scene, index, cache, scene.x.to(place, dtype))
    assert_near(actual, expected, dtype, "output")
    for field in dataclasses.fields(cache):
        fused, plain = getattr(cache, field.name), getattr(scene.cache, field.name)
        layer_fused, layer_plain = fused[:1].float().cpu(), plain[:1].float()
        assert torch.equal(layer_fused.isnan(), layer_plain.isnan()), f"{field.name}: written elsewhere"
        assert_near(layer_fused.nan_to_num(), layer_plain.nan_to_num(), dtype, field.name)


def _plain_layer(scene: Scene, index: int) -> Tensor:
    plain, cache = scene.plain, scene.cache
    mixer = plain.weights.layers[index].mixer
    step = plain._plan(scene.batch, cache, None, None)
    if isinstance(mixer, AttentionWeights):
        return plain._attention(mixer, scene.x, cache.keys[0], cache.values[0], step)
    return plain._delta_net(mixer, scene.x, cache.pairs[0], cache.conv_rows[0], step)


def _fused_layer(fast: Decoder, scene: Scene, index: int, cache: CacheTensors, x: Tensor) -> Tensor:
    fused = FusedDecoder(fast, x.device)
    grouping = fused.grouping(scene.batch.num_rows)
    step = _Step(fused, pack(describe(scene.batch, grouping), x.device), grouping.group)
    mixer = fast.weights.layers[index].mixer
    if isinstance(mixer, AttentionWeights):
        mixed = fused._attention(mixer, x, cache.keys[0], cache.values[0], step)
        return F.linear(mixed, mixer.out, mixer.out_bias)
    assert isinstance(mixer, DeltaNetWeights)
    return F.linear(fused._delta_net(mixer, x, cache.pairs[0], cache.conv_rows[0], step), mixer.out)


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype, what: str) -> None:
    """Within the tolerance of `dtype`, as a share of the largest number."""
    if not expected.numel():  # a pool that the model has not
        return
    error = (actual.float().cpu() - expected).abs().max().item()
    allowed = TOLERANCE[dtype] * expected.abs().max().item()
    assert error <= allowed, f"{what}: largest error {error:.3g}, allowed {allowed:.3g}"
