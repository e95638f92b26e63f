"""What a checkpoint says about its model: sizes, layer types, normalisation, rotary positions.

Knows the fields of a ``config.json`` and which of them the decoder can honour; refuses the rest by
name. Knows no weights, no tokenizer and no transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .errors import ModelError
from .rope import RopeConfig

FULL_ATTENTION = "full_attention"
LINEAR_ATTENTION = "linear_attention"
CONV_WIDTH = 4
"""The only width of a Gated DeltaNet convolution that the cache has rows for."""

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Family:
    """What sets one family of models apart from the others, beyond its sizes."""

    qkv_bias: bool = False  # the family always has biases on q, k and v (others: "attention_bias")
    qk_norm: bool = False  # RMS norms on the heads of q and k
    output_gate: bool = False  # q_proj also makes a gate for the attention's output
    zero_centred: bool = False  # norm weights are stored as w - 1
    partial_rotary: float | None = None  # default share of a head that is rotated; None: always all
    head_dim: int | None = None  # where the file gives none; None: hidden_size / num_heads


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True, head_dim=128),
    "qwen3_5_text": Family(
        qk_norm=True, output_gate=True, zero_centred=True, partial_rotary=0.25, head_dim=256
    ),
}


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape, sizes in elements. linear_* are 0 without Gated DeltaNet layers."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]  # FULL_ATTENTION or LINEAR_ATTENTION, first layer first
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope: RopeConfig
    tie: bool  # the output head is the embedding
    attention_bias: bool  # biases on q, k and v
    output_bias: bool  # a bias on the attention's output projection
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype  # of the checkpoint
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_key_dim: int = 0
    linear_value_dim: int = 0
    conv_width: int = CONV_WIDTH

    @property
    def traits(self) -> Family:
        return FAMILIES[self.family]

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def num_attention_layers(self) -> int:
        return self.layer_types.count(FULL_ATTENTION)

    @property
    def num_linear_layers(self) -> int:
        return self.layer_types.count(LINEAR_ATTENTION)

    @property
    def is_hybrid(self) -> bool:
        return self.num_linear_layers > 0

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def linear_value_size(self) -> int:
        return self.linear_value_heads * self.linear_value_dim

    @property
    def conv_channels(self) -> int:
        """Channels of a Gated DeltaNet convolution: queries, keys and values."""
        return 2 * self.linear_key_heads * self.linear_key_dim + self.linear_value_size

    @classmethod
    def from_folder(cls, path: str | Path) -> ModelConfig:
        """Read ``config.json`` (and the end tokens of ``generation_config.json``, if there is one).

        Raises ModelError for a folder without it, an unknown family, or a feature that the decoder
        lacks.
        """
        folder = Path(path)
        data = _read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        extra_eos = _read_json(generation).get("eos_token_id") if generation.exists() else None
        return cls.from_dict(data, extra_eos=extra_eos)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, extra_eos: int | list[int] | None = None) -> ModelConfig:
        """The same from a parsed ``config.json``; `extra_eos` are further end tokens."""
        family, text = _text_part(data)
        _refuse_unsupported(family, data, text)
        traits = FAMILIES[family]
        hidden, heads = _integer(text, "hidden_size"), _integer(text, "num_attention_heads")
        kv_heads = text.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise ModelError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
        layer_types = _layer_types(family, text)
        head_dim = text.get("head_dim") or traits.head_dim or hidden // heads
        max_positions = _integer(text, "max_position_embeddings")
        bias = bool(text.get("attention_bias", False))
        linear = _linear_sizes(text) if LINEAR_ATTENTION in layer_types else {}
        return cls(
            family=family,
            vocab_size=_integer(text, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_integer(text, "intermediate_size"),
            layer_types=layer_types,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_positions=max_positions,
            norm_eps=float(text.get("rms_norm_eps", 1e-6)),
            rope=RopeConfig.from_dict(
                text,
                head_dim=head_dim,
                max_positions=max_positions,
                default_partial=traits.partial_rotary,
            ),
            tie=bool(_first(data, text, "tie_word_embeddings", default=False)),
            attention_bias=traits.qkv_bias or bias,
            output_bias=bias and not traits.qkv_bias,
            mlp_bias=family == "llama" and bool(text.get("mlp_bias", False)),
            eos_token_ids=_token_ids(extra_eos, data.get("eos_token_id"), text.get("eos_token_id")),
            dtype=_dtype(_first(data, text, "dtype") or _first(data, text, "torch_dtype")),
            **linear,
        )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}; a model folder needs it") from error
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ModelError(f"{file} does not hold a JSON object")
    return data


def _text_part(data: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The family, and the part of the file that describes its decoder."""
    name = data.get("model_type")
    text: Mapping[str, Any] = data
    if name == "qwen3_5":  # a conditional-generation checkpoint: the text tower is nested
        text = data.get("text_config") or data
        name = "qwen3_5_text"
    if name in FAMILIES:
        return name, text
    if "moe" in str(name):
        raise ModelError(f"mixture-of-experts models are not supported: model_type {name!r}")
    known = ", ".join([*FAMILIES, "qwen3_5"])
    raise ModelError(f"model_type {name!r} is not supported; supported: {known}")


def _refuse_unsupported(family: str, data: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    if "quantization_config" in data or "quantization_config" in text:
        raise ModelError(
            "quantised checkpoints (quantization_config) are not supported; use the unquantised one"
        )
    if text.get("num_experts") or text.get("num_local_experts"):
        raise ModelError("mixture-of-experts models are not supported (num_experts is set)")
    if text.get("use_sliding_window") and text.get("sliding_window"):
        raise ModelError("sliding-window attention (use_sliding_window) is not supported")
    activation = text.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"hidden_act {activation!r} is not supported; only 'silu' is")
    if family == "qwen3_5_text" and text.get("attn_output_gate") is False:
        raise ModelError("qwen3_5 without an output gate (attn_output_gate false) is not supported")


def _layer_types(family: str, text: Mapping[str, Any]) -> tuple[str, ...]:
    """The type of every layer, given or derived from the interval of full-attention layers."""
    count = _integer(text, "num_hidden_layers")
    given = text.get("layer_types")
    if given is None:
        interval = text.get("full_attention_interval", 4) if family == "qwen3_5_text" else 1
        given = [LINEAR_ATTENTION if (i + 1) % interval else FULL_ATTENTION for i in range(count)]
    hybrid = family == "qwen3_5_text"
    for name in given:
        if name != FULL_ATTENTION and not (hybrid and name == LINEAR_ATTENTION):
            raise ModelError(f"layers of type {name!r} are not supported in family {family}")
    if len(given) != count:
        raise ModelError(f"layer_types names {len(given)} layers, num_hidden_layers says {count}")
    return tuple(given)


def _linear_sizes(text: Mapping[str, Any]) -> dict[str, int]:
    """Sizes of the Gated DeltaNet layers."""
    width = text.get("linear_conv_kernel_dim", CONV_WIDTH)
    if width != CONV_WIDTH:
        raise ModelError(f"linear_conv_kernel_dim {width} is not supported; only {CONV_WIDTH} is")
    key_heads = _integer(text, "linear_num_key_heads")
    value_heads = _integer(text, "linear_num_value_heads")
    if value_heads % key_heads:
        raise ModelError(
            f"linear_num_value_heads {value_heads} is no multiple of linear_num_key_heads {key_heads}"
        )
    return {
        "linear_key_heads": key_heads,
        "linear_value_heads": value_heads,
        "linear_key_dim": _integer(text, "linear_key_head_dim"),
        "linear_value_dim": _integer(text, "linear_value_head_dim"),
    }


def _integer(data: Mapping[str, Any], key: str) -> int:
    value = data.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ModelError(f"config.json: {key} must be a positive integer, not {value!r}")
    return value


def _first(data: Mapping[str, Any], text: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """`key` from the whole file or else from its text part."""
    return data.get(key, text.get(key, default))


def _token_ids(*groups: int | list[int] | None) -> tuple[int, ...]:
    """All ids of all groups, ascending, once each."""
    ids: set[int] = set()
    for group in groups:
        ids.update([group] if isinstance(group, int) else group or [])
    return tuple(sorted(ids))


def _dtype(name: Any) -> torch.dtype:
    """The checkpoint's dtype; float32 where the file does not say."""
    if name is None:
        return torch.float32
    dtype = DTYPES.get(str(name).removeprefix("torch."))
    if dtype is None:
        raise ModelError(f"dtype {name!r} is not supported; supported: {', '.join(DTYPES)}")
    return dtype
