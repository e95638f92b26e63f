"""Recorded steps of ragged inputs, kernels in the interpreter: padding changes nothing."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from fused_engine import emulate_cuda
from helpers import scratch
from laid_out import Laid, Memory, Request

from asyncllm_nb.engine import mixed_graphs
from asyncllm_nb.engine.config import ModelConfig
from asyncllm_nb.engine.fused import FusedDecoder
from asyncllm_nb.engine.memory import CacheTensors
from asyncllm_nb.engine.mixed_graphs import MAX_DEPTH, MixedGraphs
from asyncllm_nb.engine.model import Decoder
from asyncllm_nb.engine.weights import load_weights
from asyncllm_nb.testing import assert_close_logits, make_checkpoint

CPU = torch.device("cpu")


def decoder() -> Decoder:
    """A Gated DeltaNet and a full-attention layer."""
    folder = scratch() / "mixed"
    make_checkpoint(folder, "qwen3_5", seed=5, num_hidden_layers=2, full_attention_interval=2)
    config = ModelConfig.from_folder(folder)
    return Decoder(config, load_weights(folder, config, "cpu", torch.float32))


def copied(cache: CacheTensors) -> CacheTensors:
    return CacheTensors(*(getattr(cache, field.name).clone() for field in dataclasses.fields(cache)))


@torch.inference_mode()
def test_ragged_steps_leave_what_plain_ones_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording that was full once serves a step that is nearly empty: logits and all memory."""
    emulate_cuda(monkeypatch)
    monkeypatch.setattr(mixed_graphs, "ROWS", (8,))
    monkeypatch.setattr(mixed_graphs, "REQUESTS", (3,))
    plain = decoder()
    memory = Memory(plain, num_pages=40)
    prompt, a, b, c, d = (Laid() for _ in range(5))
    memory.step([Request([prompt], [7, 8, 9, 10, 11])])
    cache = copied(memory.cache)
    graphs = MixedGraphs(FusedDecoder(plain, CPU), cache, CPU, None)
    steps = [
        [Request([prompt, a], [1, 2, 3]), Request([b], [4, 5]), Request([prompt, c], [6, 7, 8])],
        [Request([prompt, b, a], [20]), Request([prompt, d], [21, 22])],
    ]
    for requests in steps:
        batch, slots = memory.lay_out(requests)
        expected = plain.forward(batch, memory.cache)[batch.row_start[1:] - 1]
        result = graphs.run(batch, None)
        assert result is not None
        assert_close_logits(result.logits, expected)
        assert result.ids.tolist() == expected.argmax(-1).tolist()
        for request, slot in zip(requests, slots, strict=True):
            request.view[-1].slot = slot
            request.view[-1].span += len(request.tokens)
        for field in dataclasses.fields(cache):
            torch.testing.assert_close(
                getattr(cache, field.name), getattr(memory.cache, field.name),
                rtol=1e-4, atol=1e-4, equal_nan=True,
            )  # fmt: skip
    assert len(graphs._recordings) == 1


@torch.inference_mode()
def test_steps_that_fit_no_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is recorded for them."""
    emulate_cuda(monkeypatch)
    plain = decoder()
    memory = Memory(plain, num_pages=80, num_slots=60)
    graphs = MixedGraphs(FusedDecoder(plain, CPU), memory.cache, CPU, None)
    deep = [Laid() for _ in range(MAX_DEPTH + 2)]
    memory.step([Request([block], [3]) for block in deep])
    for requests in (
        [Request([Laid()], list(range(22)))],
        [Request([Laid()], [1, 2]) for _ in range(4)],
        [Request(deep, [1, 2])],
        [Request([deep[0], deep[1]], [5])],  # a decode step, which has a recording of its own
    ):
        assert graphs.run(memory.lay_out(requests)[0], None) is None
    assert not graphs._recordings
