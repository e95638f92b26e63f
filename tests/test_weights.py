"""Loading checkpoints: the forms that they come in, what is wrong with others, release."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from laid_out import Memory, encode
from safetensors.torch import load_file, save_file

from asyncllm_nb.engine.config import ModelConfig
from asyncllm_nb.engine.errors import ModelError
from asyncllm_nb.engine.model import Decoder
from asyncllm_nb.engine.weights import AttentionWeights, DeltaNetWeights, Weights, load_weights
from asyncllm_nb.testing import FAMILIES, assert_close_logits, make_checkpoint

Tensors = dict[str, torch.Tensor]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Weights:
    return load_weights(folder, ModelConfig.from_folder(folder), "cpu", dtype)


def logits_of(folder: Path) -> torch.Tensor:
    decoder = Decoder(ModelConfig.from_folder(folder), load(folder))
    return encode(Memory(decoder), range(40, 80), [40], [33, 7])


def edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    """Change the tensors of a checkpoint that is one file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {"tie_word_embeddings": False}),
        ("qwen3", {"attention_bias": True}),
        ("qwen3_5", {"tie_word_embeddings": True, "num_hidden_layers": 8}),
        ("qwen3_5", {"linear_num_value_heads": 3, "linear_value_head_dim": 16}),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),
    ],
    ids=str,
)
def test_load_weights_of_variants(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    """Biases, tied and untied heads, other numbers of heads, scaled positions: as transformers."""
    from transformers import AutoModelForCausalLM

    make_checkpoint(tmp_path, family, 3, **overrides)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model(torch.arange(40, 80)[None]).logits[0]
    assert_close_logits(logits_of(tmp_path), expected)


@pytest.mark.parametrize(("family", "nested"), [("llama", False), ("qwen3_5", True)])
def test_load_weights_of_shards_and_prefixes(family: str, nested: bool, tmp_path: Path) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    make_checkpoint(one, family, 4)
    make_checkpoint(many, family, 4, shards=3, nested=nested)
    assert len(list(many.glob("*.safetensors"))) == 3
    torch.testing.assert_close(logits_of(many), logits_of(one), rtol=0, atol=0)


def test_load_weights_takes_only_the_text_part(tmp_path: Path) -> None:
    """An image tower, draft layers, buffers of old files and a copy of a tied head are left out."""
    make_checkpoint(tmp_path, "qwen3_5", nested=True, tie_word_embeddings=True)
    expected = load(tmp_path).nbytes
    head = load_file(tmp_path / "model.safetensors")["model.language_model.embed_tokens.weight"]
    others = {
        "model.visual.blocks.0.norm1.weight": torch.ones(3),
        "mtp.fc.weight": torch.ones(2, 4),
        "model.language_model.layers.3.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "lm_head.weight": head.clone(),
    }
    edit(tmp_path, lambda tensors: tensors.update(others))
    weights = load(tmp_path)
    assert weights.nbytes == expected
    assert weights.head is weights.embedding


@pytest.mark.parametrize("family", FAMILIES)
def test_load_weights_in_another_dtype(family: str, tmp_path: Path) -> None:
    """Matrices take the dtype that is asked for; what is small and sensitive stays float32."""
    make_checkpoint(tmp_path, family, dtype=torch.float16)
    assert ModelConfig.from_folder(tmp_path).dtype == torch.float16
    weights = load(tmp_path, torch.bfloat16)
    assert weights.embedding.dtype == weights.head.dtype == torch.bfloat16
    for layer in weights.layers:
        assert layer.input_norm.dtype == torch.float32 and layer.down.dtype == torch.bfloat16
        if isinstance(layer.mixer, DeltaNetWeights):
            assert layer.mixer.decay_rate.dtype == layer.mixer.conv.dtype == torch.float32
            assert layer.mixer.projections.dtype == torch.bfloat16
        else:
            assert layer.mixer.qkv.dtype == torch.bfloat16


def test_load_weights_orders_the_fused_rows(tmp_path: Path) -> None:
    """q, gate, k, v; files hold a query and a gate head by head."""
    make_checkpoint(tmp_path, "qwen3_5")
    config, files = ModelConfig.from_folder(tmp_path), load_file(tmp_path / "model.safetensors")
    mixer = load(tmp_path).layers[3].mixer
    assert isinstance(mixer, AttentionWeights)
    name, dim = "model.layers.3.self_attn.", config.head_dim
    query = files[f"{name}q_proj.weight"].view(config.num_heads, 2 * dim, -1)
    parts = mixer.qkv.split((config.query_size, config.query_size, config.kv_size, config.kv_size))
    assert torch.equal(parts[0], query[:, :dim].flatten(0, 1))
    assert torch.equal(parts[1], query[:, dim:].flatten(0, 1))
    assert torch.equal(parts[2], files[f"{name}k_proj.weight"])
    assert torch.equal(parts[3], files[f"{name}v_proj.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            r"missing model\.layers\.1\.mlp\.up",
        ),
        (lambda t: t.pop("lm_head.weight"), "missing lm_head.weight"),
        (lambda t: t.clear(), "missing model.embed_tokens.weight.* and 25 more tensors"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(71)}),
            r"model\.norm\.weight has shape \[71\], but config\.json asks for \[72\]",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(144)}),
            r"model\.layers\.0\.self_attn\.q_proj\.bias not known to family llama",
        ),
        (lambda t: t.update({"model.layers.3.mlp.up_proj.weight": torch.ones(1)}), r"layers\.3"),
    ],
    ids=range(6),
)
def test_load_weights_names_the_tensor(
    change: Callable[[Tensors], object], message: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, "llama")
    edit(tmp_path, change)
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_load_weights_names_the_file(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", shards=2)
    config = ModelConfig.from_folder(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="names model-00002-of-00002.safetensors, which is not there"):
        load_weights(tmp_path, config, "cpu", torch.float32)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}}))
    with pytest.raises(ModelError, match="is not a safetensors index"):
        load_weights(tmp_path, config, "cpu", torch.float32)
    index.unlink()
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"half a file")
    with pytest.raises(ModelError, match="not a readable safetensors file"):
        load_weights(tmp_path, config, "cpu", torch.float32)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \*\.safetensors file"):
        load_weights(tmp_path, config, "cpu", torch.float32)


def test_release_gives_the_storage_back(tmp_path: Path) -> None:
    """Even while somebody holds a tensor; and the file is not needed once it is loaded."""
    make_checkpoint(tmp_path, "qwen3_5")
    weights = load(tmp_path)
    size = sum(t.nbytes for t in load_file(tmp_path / "model.safetensors").values())
    (tmp_path / "model.safetensors").unlink()
    assert weights.nbytes == size
    held = weights.layers[0].gate_up
    weights.release()
    assert held.untyped_storage().nbytes() == 0
    assert weights.nbytes == 0
    weights.release()  # again: nothing happens


def test_load_weights_lays_matrices_out_column_by_column_on_a_cpu(tmp_path: Path) -> None:
    """What a product with few rows is fastest with there; biases and norms have no columns."""
    make_checkpoint(tmp_path, "llama", attention_bias=True, tie_word_embeddings=True)
    weights = load(tmp_path)
    mixer = weights.layers[0].mixer
    assert isinstance(mixer, AttentionWeights)
    matrices = (weights.head, mixer.qkv, mixer.out, weights.layers[0].gate_up)
    assert all(matrix.t().is_contiguous() for matrix in matrices)
    assert mixer.qkv_bias is not None and mixer.qkv_bias.is_contiguous()
    assert weights.head is weights.embedding
