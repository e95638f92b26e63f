"""A checkpoint's tensors as the decoder multiplies them: what is read together is one matrix.

Knows how projections are fused, and which small tensors are kept in float32. Knows no file format
(`checkpoint`) and no forward pass (`model`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..kernels.dispatch import why_not_fused
from .checkpoint import Checkpoint
from .config import FULL_ATTENTION, ModelConfig


@dataclass(frozen=True)
class AttentionWeights:
    """Full attention with H query heads and H_kv key/value heads of D elements."""

    qkv: Tensor  # [H * D (twice with a gate) + 2 * H_kv * D, hidden]: q, gate if any, k, v
    qkv_bias: Tensor | None
    out: Tensor  # [hidden, H * D]
    out_bias: Tensor | None
    q_norm: Tensor | None  # [D] float32
    k_norm: Tensor | None  # [D] float32


@dataclass(frozen=True)
class DeltaNetWeights:
    """Gated DeltaNet with C convolution channels (queries, keys, values) and H_v value heads."""

    projections: Tensor  # [C + H_v * d_v + 2 * H_v, hidden]: qkv, z, b, a
    conv: Tensor  # [4, C] float32, weight of the oldest row first
    decay_rate: Tensor  # [H_v] float32, -exp(A_log)
    dt_bias: Tensor  # [H_v] float32
    norm: Tensor  # [d_v] float32
    out: Tensor  # [hidden, H_v * d_v]


@dataclass(frozen=True)
class LayerWeights:
    """One layer. All norms of all layers are float32 factors: zero-centred ones hold 1 + w."""

    input_norm: Tensor  # [hidden] float32
    mixer: AttentionWeights | DeltaNetWeights
    post_norm: Tensor  # [hidden] float32
    gate_up: Tensor  # [2 * intermediate, hidden]
    gate_up_bias: Tensor | None
    down: Tensor  # [hidden, intermediate]
    down_bias: Tensor | None


@dataclass(frozen=True)
class Weights:
    """A whole decoder."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden] float32
    head: Tensor  # [vocab, hidden]; the embedding itself where the model ties them

    @property
    def nbytes(self) -> int:
        """Bytes of all storages; a tied head is counted once."""
        storages = [tensor.untyped_storage() for tensor in _tensors(self)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def release(self) -> None:
        """Give the storage back at once, whoever still holds these tensors (a traceback, `Out`)."""
        for tensor in _tensors(self):
            tensor.untyped_storage().resize_(0)


def load_weights(
    folder: str | Path, config: ModelConfig, device: torch.device | str, dtype: torch.dtype
) -> Weights:
    """Read `folder`'s ``*.safetensors``, one file or shards with an index, as `dtype`.

    Files are mapped and copied tensor by tensor to where they stay, so memory peaks at the fused
    model. Raises ModelError, before anything is allocated, for a missing file and for a tensor that
    is missing, unexpected or of another shape than `config` says; it names them.
    """
    with Checkpoint(folder) as checkpoint:
        checkpoint.check(config)
        return _Loader(checkpoint, config, torch.device(device), dtype).weights()


class _Loader:
    """Builds the parts of `Weights` from an open, checked checkpoint."""

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._device = device
        self._dtype = dtype

    def weights(self) -> Weights:
        embedding = self._fused(["model.embed_tokens.weight"])
        head = embedding if self._config.tie else self._fused(["lm_head.weight"])
        layers = tuple(self._layer(index) for index in range(self._config.num_layers))
        return Weights(embedding, layers, self._norm("model.norm.weight"), head)

    def _layer(self, index: int) -> LayerWeights:
        prefix = f"model.layers.{index}."
        is_attention = self._config.layer_types[index] == FULL_ATTENTION
        gate_up = [f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj"]
        down, bias = f"{prefix}mlp.down_proj", self._config.mlp_bias
        return LayerWeights(
            input_norm=self._norm(f"{prefix}input_layernorm.weight"),
            mixer=self._attention(prefix) if is_attention else self._delta_net(prefix),
            post_norm=self._norm(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self._fused([f"{name}.weight" for name in gate_up]),
            gate_up_bias=self._fused([f"{name}.bias" for name in gate_up]) if bias else None,
            down=self._fused([f"{down}.weight"]),
            down_bias=self._fused([f"{down}.bias"]) if bias else None,
        )

    def _attention(self, prefix: str) -> AttentionWeights:
        config, name = self._config, f"{prefix}self_attn."
        has_norm = config.traits.qk_norm
        return AttentionWeights(
            qkv=self._concatenated(self._qkv(name, "weight")),
            qkv_bias=self._concatenated(self._qkv(name, "bias")) if config.attention_bias else None,
            out=self._fused([f"{name}o_proj.weight"]),
            out_bias=self._fused([f"{name}o_proj.bias"]) if config.output_bias else None,
            q_norm=self._norm(f"{name}q_norm.weight") if has_norm else None,
            k_norm=self._norm(f"{name}k_norm.weight") if has_norm else None,
        )

    def _qkv(self, name: str, kind: str) -> list[Tensor]:
        """The parts of the fused matrix (or bias). Files hold (q, gate) pairs head by head."""
        query, key, value = (self._checkpoint.read(f"{name}{p}_proj.{kind}") for p in "qkv")
        if not self._config.traits.output_gate:
            return [query, key, value]
        pairs = query.unflatten(0, (self._config.num_heads, 2, self._config.head_dim))
        return [pairs[:, 0].flatten(0, 1), pairs[:, 1].flatten(0, 1), key, value]

    def _delta_net(self, prefix: str) -> DeltaNetWeights:
        name = f"{prefix}linear_attn."
        return DeltaNetWeights(
            projections=self._fused([f"{name}in_proj_{p}.weight" for p in ("qkv", "z", "b", "a")]),
            conv=self._float32(f"{name}conv1d.weight").squeeze(1).t().contiguous(),
            decay_rate=-self._float32(f"{name}A_log").exp(),
            dt_bias=self._float32(f"{name}dt_bias"),
            norm=self._float32(f"{name}norm.weight"),  # not zero-centred, in any family
            out=self._fused([f"{name}out_proj.weight"]),
        )

    def _norm(self, name: str) -> Tensor:
        weight = self._float32(name)
        return weight.add_(1.0) if self._config.traits.zero_centred else weight

    def _float32(self, name: str) -> Tensor:
        return self._checkpoint.read(name).to(self._device, torch.float32, copy=True)

    def _fused(self, names: Sequence[str]) -> Tensor:
        return self._concatenated([self._checkpoint.read(name) for name in names])

    def _concatenated(self, parts: Sequence[Tensor]) -> Tensor:
        """The parts one below the other, in memory of their own: the file's mapping goes away."""
        rows = sum(part.shape[0] for part in parts)
        fused = self._empty((rows, *parts[0].shape[1:]))
        start = 0
        for part in parts:
            fused[start : start + part.shape[0]].copy_(part)
            start += part.shape[0]
        return fused

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        """Memory for a matrix or a bias. Where plain PyTorch multiplies on a CPU a matrix lies column by
        column: products with few rows take up to a third less time then, and none takes more."""
        if self._device.type == "cpu" and why_not_fused(self._device):
            return torch.empty(shape[::-1], dtype=self._dtype).t()
        return torch.empty(shape, dtype=self._dtype, device=self._device)


def _tensors(part: Any) -> Iterator[Tensor]:
    """All tensors of a (nested) part of the weights."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, tuple):
        for item in part:
            yield from _tensors(item)
    elif is_dataclass(part):
        for field in fields(part):
            yield from _tensors(getattr(part, field.name))
