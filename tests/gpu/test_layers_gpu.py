"""Fused layers compiled for a GPU, and the whole fused model, against plain PyTorch and transformers."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from fused_harness import fused_memory
from laid_out import Laid, Request, encode
from layer_cases import ATTENTION_CASES, DELTA_CASES, check_layer, decoder, folder

from asyncllm_nb.engine.fused import FusedDecoder
from asyncllm_nb.engine.graphs import DecodeGraphs, greedy
from asyncllm_nb.engine.packed import describe, pack
from asyncllm_nb.engine.weights import AttentionWeights, DeltaNetWeights
from asyncllm_nb.testing import FAMILIES, assert_close_logits

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@DTYPES
@pytest.mark.parametrize("case", ATTENTION_CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_attention(family: str, case: str, dtype: torch.dtype) -> None:
    check_layer(family, ATTENTION_CASES[case], AttentionWeights, "cuda", dtype)


@DTYPES
@pytest.mark.parametrize("case", DELTA_CASES)
def test_delta_net(case: str, dtype: torch.dtype) -> None:
    check_layer("qwen3_5", DELTA_CASES[case], DeltaNetWeights, "cuda", dtype)


@DTYPES
@pytest.mark.parametrize("family", FAMILIES)
def test_random_cuts_against_transformers(family: str, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM

    rng = random.Random(family)
    model = AutoModelForCausalLM.from_pretrained(folder(family), dtype=torch.float32).eval()
    tokens = rng.choices(range(250), k=130)
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    for _ in range(6):
        blocks = rng.choices([1, 2, 3, 4, 17, 40, 65], k=4)
        chunks = rng.choices([1, 2, 5, 33, 64], k=3)
        memory = fused_memory(decoder(family, "cuda", dtype), dtype, num_pages=200, num_slots=140)
        assert_close_logits(encode(memory, tokens, blocks, chunks), expected, dtype)


@pytest.mark.parametrize("rows", [1, 3, 7, 11])
@torch.inference_mode()
def test_recorded_steps_are_bit_identical(rows: int) -> None:
    """The same padded batch, recorded and not; and again after other steps were replayed."""
    plain = decoder("qwen3_5", "cuda", torch.bfloat16)
    memory = fused_memory(plain, torch.bfloat16, num_slots=80)
    prompt, own = Laid(), [Laid() for _ in range(rows)]
    memory.step([Request([prompt], list(range(33)))])
    memory.step([Request([prompt, block], [i, i + 1]) for i, block in enumerate(own)])
    views = [[prompt, own[i - 1], block] if rows > 1 else [prompt, block] for i, block in enumerate(own)]
    batch, _ = memory.lay_out([Request(view, [i]) for i, view in enumerate(views)])
    device = torch.device("cuda")
    fused = FusedDecoder(plain, device)
    graphs = DecodeGraphs(fused, memory.cache, device)
    first = graphs.run(batch)
    assert first is not None
    recorded = first.logits.clone()
    bucket = next(size for size in (1, 2, 4, 8, 16) if size >= rows)
    padded = _padded(describe(batch, fused.grouping(bucket)), bucket)
    eager = fused.forward(pack(padded, device), memory.cache, fused.grouping(bucket).group)
    assert torch.equal(recorded, greedy(eager).logits[:rows])
    fewer = dataclasses.replace(batch)  # the same step once more
    again = graphs.run(fewer)
    assert again is not None and torch.equal(again.logits, recorded)


def _padded(fields: dict, rows: int) -> dict:  # type: ignore[type-arg]
    """The fields of a decode step with rows that store nothing and merge nothing."""
    import numpy as np

    extra = rows - len(fields["token_ids"])
    if not extra:
        return fields
    result = dict(fields)
    for name in ("token_ids", "single_row", "single_read", "single_write", "single_length"):
        result[name] = np.append(fields[name], np.zeros(extra, dtype=np.int64))
    result["store_index"] = np.append(fields["store_index"], np.full(extra, -1))
    result["row_start"] = np.append(fields["row_start"], np.full(extra, fields["row_start"][-1]))
    for name in ("positions", "store_positions"):
        result[name] = np.pad(fields[name], ((0, 0), (0, extra)))
    for name in ("single_chain", "single_history", "single_kept"):
        result[name] = np.pad(fields[name], ((0, extra), (0, 0)))
    result["logit_rows"] = np.arange(rows)
    return result
