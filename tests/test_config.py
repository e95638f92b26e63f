"""`ModelConfig` and rotary frequencies: what files say, in old and new forms; refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm_nb.engine.config import ModelConfig
from asyncllm_nb.engine.errors import ModelError
from asyncllm_nb.engine.rope import RopeConfig
from asyncllm_nb.testing import FAMILIES, make_checkpoint

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "eos_token_id": [128001, 128008, 128009],
    "torch_dtype": "bfloat16",
}
QWEN3_5_9B: dict[str, Any] = {
    "model_type": "qwen3_5",
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "tie_word_embeddings": False,
    "vision_config": {"depth": 27},
    "text_config": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 262144,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "eos_token_id": 248044,
        "dtype": "bfloat16",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
    },
}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {"type": "yarn", "factor": 4.0},
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 20,
        "beta_slow": 2,
        "mscale": 0.8,
        "mscale_all_dim": 1.2,
        "truncate": False,
    },
    {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.25},
]


def test_from_dict_of_llama() -> None:
    config = ModelConfig.from_dict(LLAMA, extra_eos=[128001, 7])
    assert (config.family, config.num_layers, config.head_dim) == ("llama", 16, 64)
    assert (config.num_attention_layers, config.num_linear_layers) == (16, 0)
    assert not config.is_hybrid and config.conv_channels == 0 and config.linear_value_heads == 0
    assert config.eos_token_ids == (7, 128001, 128008, 128009)
    assert config.dtype == torch.bfloat16 and config.tie
    assert config.rope == RopeConfig("default", 500000.0, 64)


def test_from_dict_of_a_conditional_generation_checkpoint() -> None:
    config = ModelConfig.from_dict(QWEN3_5_9B)
    assert (config.family, config.num_attention_layers, config.num_linear_layers) == (
        "qwen3_5_text",
        8,
        24,
    )
    assert config.layer_types[:4] == ("linear_attention",) * 3 + ("full_attention",)
    assert (config.linear_key_heads, config.linear_value_heads) == (16, 32)
    assert (config.linear_key_dim, config.linear_value_dim, config.conv_channels) == (
        128,
        128,
        8192,
    )
    assert config.rope == RopeConfig("default", 1e7, 64, (11, 11, 10))
    assert config.dtype == torch.bfloat16 and not config.tie and config.is_hybrid
    assert config.eos_token_ids == (248044,)


@pytest.mark.parametrize("family", FAMILIES)
def test_from_folder(family: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 258]}))
    config = ModelConfig.from_folder(tmp_path)
    assert config.eos_token_ids == (3, 258)
    assert config.dtype == torch.float32
    assert config == ModelConfig.from_dict(json.loads((tmp_path / "config.json").read_text()), extra_eos=3)


def test_from_dict_where_a_sliding_window_is_set_but_not_used() -> None:
    qwen2 = {**LLAMA, "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4096}
    config = ModelConfig.from_dict(qwen2)
    assert config.attention_bias and not config.output_bias


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba2"}, r"'mamba2' is not supported; supported: llama, qwen2, qwen3"),
        ({"model_type": None}, "None is not supported"),
        ({"model_type": "qwen3_5_moe"}, "mixture-of-experts"),
        ({"num_experts": 8}, "mixture-of-experts"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"use_sliding_window": True, "sliding_window": 512}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 8}, "'sliding_attention'"),
        ({"layer_types": ["linear_attention"] * 16}, "'linear_attention'"),
        ({"layer_types": ["full_attention"] * 15}, "15 layers"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"type": "longrope"}}, "'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'factor'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "'low_freq_factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"head_dim": 63}, "63"),
        ({"num_key_value_heads": 5}, "num_key_value_heads 5"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"torch_dtype": "float8_e4m3fn"}, "'float8_e4m3fn'"),
    ],
    ids=str,
)
def test_from_dict_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_dict({**LLAMA, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim 3"),
        ({"linear_num_value_heads": 17}, "linear_num_value_heads 17"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"num_experts": 256}, "mixture-of-experts"),
    ],
    ids=str,
)
def test_from_dict_refuses_in_the_text_part(change: dict[str, Any], message: str) -> None:
    text = {**QWEN3_5_9B["text_config"], **change}
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_dict({**QWEN3_5_9B, "text_config": text})


@pytest.mark.parametrize(
    ("content", "message"), [(None, "a model folder needs it"), ("{", "JSON"), ("[]", "object")]
)
def test_from_folder_refuses(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_frequencies_are_those_of_transformers(scaling: dict[str, Any], key: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    data = {**LLAMA, "max_position_embeddings": 40000}
    if key == "rope_parameters":
        scaling = {**scaling, "rope_theta": data.pop("rope_theta")}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**{**data, key: dict(scaling)}))
    frequencies, factor = ModelConfig.from_dict({**data, key: scaling}).rope.frequencies()
    torch.testing.assert_close(frequencies, theirs.inv_freq, rtol=2e-7, atol=0)
    assert factor == pytest.approx(theirs.attention_scaling)


@pytest.mark.parametrize("section", [(11, 11, 10), (16, 8, 8), (4, 20, 8)], ids=str)
def test_axes_are_those_of_transformers(section: tuple[int, ...]) -> None:
    from transformers import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

    rope = {**QWEN3_5_9B["text_config"]["rope_parameters"], "mrope_section": list(section)}
    text = {**QWEN3_5_9B["text_config"], "rope_parameters": dict(rope)}
    theirs = Qwen3_5TextRotaryEmbedding(Qwen3_5TextConfig(**text))
    ours = ModelConfig.from_dict({**QWEN3_5_9B, "text_config": text}).rope
    axes = ours.axes()
    marked = theirs.recomposition_frequencies(torch.arange(3.0)[:, None, None].repeat(1, 1, 32))
    assert axes.tolist() == marked[0, :32].int().tolist()
    torch.testing.assert_close(ours.frequencies()[0], theirs.inv_freq, rtol=2e-7, atol=0)
