"""The identity of a model: the same however it lies on disk and in memory, another for any other model."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm_nb.engine.config import ModelConfig
from asyncllm_nb.engine.identity import CHUNK_ELEMENTS, UNCOMPARED, _sums, model_identity
from asyncllm_nb.engine.model import Decoder
from asyncllm_nb.engine.weights import load_weights
from asyncllm_nb.testing import FAMILIES, make_checkpoint


def decoder(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    config = ModelConfig.from_folder(folder)
    return Decoder(config, load_weights(folder, config, "cpu", dtype))


def test_the_same_model_in_other_files_is_the_same(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "qwen3_5", seed=3)
    others = [
        make_checkpoint(tmp_path / "again", "qwen3_5", seed=3, tokenizer=True),
        make_checkpoint(tmp_path / "shards", "qwen3_5", seed=3, shards=3),
        make_checkpoint(tmp_path / "nested", "qwen3_5", seed=3, nested=True),
        make_checkpoint(tmp_path / "ends", "qwen3_5", seed=3, eos_token_id=[5, 6]),
    ]
    expected = model_identity(decoder(plain))
    assert len(expected) == 64
    assert [model_identity(decoder(folder)) for folder in others] == [expected] * 4


def test_other_models_are_others(tmp_path: Path) -> None:
    folders = [make_checkpoint(tmp_path / family, family, seed=3) for family in FAMILIES]
    folders.append(make_checkpoint(tmp_path / "seed", "llama", seed=4))
    rope = {"rope_type": "default", "rope_theta": 20_000.0}
    folders.append(make_checkpoint(tmp_path / "rope", "llama", seed=3, rope_parameters=rope))
    found = [model_identity(decoder(folder)) for folder in folders]
    found.append(model_identity(decoder(folders[0], torch.bfloat16)))
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_5"])
def test_any_one_bit_of_any_weight_counts(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path, family, seed=3)
    whole = decoder(folder)
    expected = model_identity(whole)
    random = torch.Generator().manual_seed(0)
    for path, tensor in tensors(whole.weights):
        bits = tensor.view(torch.int32)
        place = tuple(int(torch.randint(size, (), generator=random)) for size in tensor.shape)
        bits[place] ^= 1
        same = path.endswith(tuple(UNCOMPARED))
        assert (model_identity(Decoder(whole.config, whole.weights)) == expected) is same, path
        bits[place] ^= 1
    assert model_identity(Decoder(whole.config, whole.weights)) == expected


def test_order_in_memory_makes_no_difference() -> None:
    matrix = torch.randn(37, 53)
    rows, columns = _sums(matrix)
    bits = matrix.view(torch.int32).long()
    assert torch.equal(rows, bits.sum(1)) and torch.equal(columns, bits.sum(0))
    turned = matrix.t().contiguous().t()
    assert all(map(torch.equal, _sums(turned), (rows, columns)))


def test_large_matrices_are_summed_in_parts() -> None:
    matrix = torch.randn(3, CHUNK_ELEMENTS // 2 + 7).bfloat16()
    bits = matrix.view(torch.int16).long()
    assert all(map(torch.equal, _sums(matrix), (bits.sum(1), bits.sum(0))))


def test_a_closed_model_gives_its_memory_back(tmp_path: Path) -> None:
    whole = decoder(make_checkpoint(tmp_path, "qwen3_5"))
    model_identity(whole)
    whole.release()
    assert whole.weights.nbytes == 0


def tensors(part: Any, path: str = "") -> list[tuple[str, Tensor]]:
    """All tensors of the weights, a tied head once."""
    if isinstance(part, Tensor):
        return [(path, part)]
    if isinstance(part, tuple):
        return [found for i, item in enumerate(part) for found in tensors(item, f"{path}.{i}")]
    if is_dataclass(part):
        return [
            found for f in fields(part) for found in tensors(getattr(part, f.name), f"{path}.{f.name}")
        ]
    return []


