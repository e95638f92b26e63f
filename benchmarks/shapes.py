"""Models of a published shape with random weights, made on the device: for measuring speed only.

Knows configurations and the decoder's weights. Scales are those of well-conditioned checkpoints, so
that logits are finite and differ from each other.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from asyncllm_nb.engine.config import FULL_ATTENTION, ModelConfig
from asyncllm_nb.engine.weights import AttentionWeights, DeltaNetWeights, LayerWeights, Weights

QWEN35_9B: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}
"""The text model of Qwen3.5-9B: 24 Gated DeltaNet layers and 8 of full attention."""


def random_weights(config: ModelConfig, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Weights:
    """Weights of `config` drawn on `device`: embeddings of unit scale, matrices of 0.5 / √fan-in."""
    generator = torch.Generator(device).manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float | None = None) -> Tensor:
        drawn = torch.empty((rows, columns), dtype=dtype, device=device)
        return drawn.normal_(0.0, scale or 0.5 / math.sqrt(columns), generator=generator)

    def ones(size: int) -> Tensor:
        return torch.ones(size, dtype=torch.float32, device=device)

    def attention() -> AttentionWeights:
        gate = config.query_size if config.traits.output_gate else 0
        normed = config.traits.qk_norm
        return AttentionWeights(
            qkv=matrix(config.query_size + gate + 2 * config.kv_size, config.hidden_size),
            qkv_bias=None,
            out=matrix(config.hidden_size, config.query_size),
            out_bias=None,
            q_norm=ones(config.head_dim) if normed else None,
            k_norm=ones(config.head_dim) if normed else None,
        )

    def delta_net() -> DeltaNetWeights:
        heads = config.linear_value_heads
        slow = torch.rand(heads, device=device, generator=generator) * 0.099 + 0.001
        return DeltaNetWeights(
            projections=matrix(
                config.conv_channels + config.linear_value_size + 2 * heads, config.hidden_size
            ),
            conv=matrix(4, config.conv_channels, 0.5).float(),
            decay_rate=-slow,
            dt_bias=ones(heads),
            norm=ones(config.linear_value_dim),
            out=matrix(config.hidden_size, config.linear_value_size),
        )

    def layer(kind: str) -> LayerWeights:
        return LayerWeights(
            input_norm=ones(config.hidden_size),
            mixer=attention() if kind == FULL_ATTENTION else delta_net(),
            post_norm=ones(config.hidden_size),
            gate_up=matrix(2 * config.intermediate_size, config.hidden_size),
            gate_up_bias=None,
            down=matrix(config.hidden_size, config.intermediate_size),
            down_bias=None,
        )

    embedding = matrix(config.vocab_size, config.hidden_size, 1.0)
    head = embedding if config.tie else matrix(config.vocab_size, config.hidden_size)
    layers = tuple(layer(kind) for kind in config.layer_types)
    return Weights(embedding, layers, ones(config.hidden_size), head)
