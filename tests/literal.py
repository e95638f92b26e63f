"""A slow, literal model over blocks: what the engine must compute, as the definition reads.

Knows a checkpoint folder and torch. Shares no code with the engine or the kernels: float64, one
token after another, no pages, slots, chunks or batches. A block here is the list of its tokens and,
per token and layer, what that token left behind *when it was written*: an unrotated key and a
value, or a raw convolution row and the factors of a Gated DeltaNet update. Reading a view joins
these lists in the order of the view, rotates the keys at their joint positions and applies the
updates one by one. With ``boundary="recomputed"`` the keys and values of updates are convolved anew, from
the joined rows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor


class KeyValue(NamedTuple):
    """What a token leaves in a full-attention layer."""

    key: Tensor  # [kv_heads, head_dim], normalised but not rotated
    value: Tensor  # [kv_heads, head_dim]


class Update(NamedTuple):
    """What a token leaves in a Gated DeltaNet layer: its factors, and a row for convolutions."""

    row: Tensor  # [channels] before the convolution
    key: Tensor  # [value_heads, d_k] unit length
    value: Tensor  # [value_heads, d_v]
    alpha: Tensor  # [value_heads]
    beta: Tensor  # [value_heads]

    def apply(self, state: Tensor) -> Tensor:
        """S α (I − β k kᵀ) + β v kᵀ, per head; `state` is [value_heads, d_v, d_k]."""
        alpha, beta = self.alpha[:, None, None], self.beta[:, None, None]
        key, value = self.key[:, None, :], self.value[:, :, None]
        decayed = alpha * state
        return decayed - beta * (decayed * key).sum(2, keepdim=True) * key + beta * value * key


Remembered = KeyValue | Update


@dataclass(frozen=True)
class LiteralBlock:
    """An immutable block: every change makes a new one, so a fork is the block itself."""

    tokens: tuple[int, ...] = ()
    memory: tuple[tuple[Remembered, ...], ...] = ()  # [token][layer]

    def __add__(self, other: LiteralBlock) -> LiteralBlock:
        """Merge: reads as self, then other."""
        return LiteralBlock(self.tokens + other.tokens, self.memory + other.memory)


class LiteralModel:
    """A decoder of one of the supported families, read from a folder in Hugging Face format."""

    def __init__(self, folder: str | Path, boundary: str = "written") -> None:
        self.boundary = boundary
        folder = Path(folder)
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        config = config.get("text_config", config)
        self.config = config
        self.weights = _load(folder)
        self.num_layers: int = config["num_hidden_layers"]
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config["num_key_value_heads"]
        self.head_dim: int = config.get("head_dim") or config["hidden_size"] // self.heads
        self.eps: float = config["rms_norm_eps"]
        self.norm_offset = 1.0 if config["model_type"].startswith("qwen3_5") else 0.0
        self.frequencies = _frequencies(config, self.head_dim)

    def encode(self, tokens: Sequence[int], view: Sequence[LiteralBlock]) -> tuple[LiteralBlock, Tensor]:
        """Append `tokens` to the last block of `view`.

        Returns the block with them and float64 logits [len(tokens), vocab].
        """
        joined = sum(view[:-1], LiteralBlock())
        block, logits = view[-1], []
        states = self._states(joined + block)
        for token in tokens:
            past = joined.memory + block.memory
            hidden, left = self._step(token, past, states)
            block = block + LiteralBlock((token,), (left,))
            logits.append(hidden @ self._head().T)
        return block, torch.stack(logits)

    def _states(self, joined: LiteralBlock) -> list[Tensor]:
        """The Gated DeltaNet state of each layer after a joined view: its updates, one by one."""
        states = []
        for layer in range(self.num_layers):
            state = torch.zeros(self._state_shape(layer), dtype=torch.float64)
            rows: list[Tensor] = []
            for left in joined.memory:
                if isinstance(update := left[layer], Update):
                    rows.append(update.row)
                    if self.boundary == "recomputed":
                        _, key, value = self._convolved(layer, rows)
                        update = update._replace(key=key, value=value)
                    state = update.apply(state)
            states.append(state)
        return states

    def _step(
        self, token: int, past: tuple[tuple[Remembered, ...], ...], states: list[Tensor]
    ) -> tuple[Tensor, tuple[Remembered, ...]]:
        """One token after `past`: its final hidden vector and what it leaves in each layer."""
        hidden = self.weights["embed_tokens.weight"][token]
        left: list[Remembered] = []
        for layer in range(self.num_layers):
            x = self._norm(hidden, f"layers.{layer}.input_layernorm")
            seen = [memory[layer] for memory in past]
            if f"layers.{layer}.linear_attn.A_log" in self.weights:
                mixed, update = self._gated_delta(layer, x, seen, states)
                left.append(update)
            else:
                mixed, key_value = self._attention(layer, x, seen)
                left.append(key_value)
            hidden = hidden + mixed
            x = self._norm(hidden, f"layers.{layer}.post_attention_layernorm")
            hidden = hidden + self._mlp(layer, x)
        return self._norm(hidden, "norm"), tuple(left)

    def _attention(self, layer: int, x: Tensor, seen: Sequence[Remembered]) -> tuple[Tensor, KeyValue]:
        name = f"layers.{layer}.self_attn"
        query = self._linear(x, f"{name}.q_proj").view(self.heads, -1)
        query, gate = query[:, : self.head_dim], query[:, self.head_dim :]
        key = self._linear(x, f"{name}.k_proj").view(self.kv_heads, -1)
        value = self._linear(x, f"{name}.v_proj").view(self.kv_heads, -1)
        if f"{name}.q_norm.weight" in self.weights:
            query, key = self._norm(query, f"{name}.q_norm"), self._norm(key, f"{name}.k_norm")
        new = KeyValue(key, value)
        pairs = [pair for pair in (*seen, new) if isinstance(pair, KeyValue)]
        positions = torch.arange(len(pairs), dtype=torch.float64)
        keys = self._rotate(torch.stack([pair.key for pair in pairs]), positions)
        values = torch.stack([pair.value for pair in pairs])
        query = self._rotate(query[None], positions[-1:])[0]
        group = self.heads // self.kv_heads
        keys, values = (t.repeat_interleave(group, dim=1) for t in (keys, values))
        weights = (torch.einsum("hd,nhd->hn", query, keys) * self.head_dim**-0.5).softmax(-1)
        out = torch.einsum("hn,nhd->hd", weights, values)
        if gate.numel():
            out = out * torch.sigmoid(gate)
        return self._linear(out.flatten(), f"{name}.o_proj"), new

    def _gated_delta(
        self, layer: int, x: Tensor, seen: Sequence[Remembered], states: list[Tensor]
    ) -> tuple[Tensor, Update]:
        name, c = f"layers.{layer}.linear_attn", self.config
        value_heads, d_v = c["linear_num_value_heads"], c["linear_value_head_dim"]
        row = self._linear(x, f"{name}.in_proj_qkv")
        rows = [update.row for update in seen if isinstance(update, Update)] + [row]
        query, key, value = self._convolved(layer, rows)
        raw_gate = self._linear(x, f"{name}.in_proj_a") + self.weights[f"{name}.dt_bias"]
        decay = self.weights[f"{name}.A_log"].exp() * F.softplus(raw_gate)
        beta = torch.sigmoid(self._linear(x, f"{name}.in_proj_b"))
        update = Update(row, key, value, torch.exp(-decay), beta)
        states[layer] = update.apply(states[layer])
        out = (states[layer] * query[:, None, :]).sum(2) * key.shape[-1]**-0.5
        out = _rms(out, self.eps) * self.weights[f"{name}.norm.weight"]
        out = out * F.silu(self._linear(x, f"{name}.in_proj_z").view(value_heads, d_v))
        return self._linear(out.flatten(), f"{name}.out_proj"), update

    def _convolved(self, layer: int, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value [value_heads, dim] of the last of `rows`, behind the others."""
        c = self.config
        key_heads, value_heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
        d_k, d_v = c["linear_key_head_dim"], c["linear_value_head_dim"]
        kernel = self.weights[f"layers.{layer}.linear_attn.conv1d.weight"][:, 0]  # [channels, width]
        padded = [torch.zeros_like(rows[-1])] * kernel.shape[1] + list(rows[-kernel.shape[1] :])
        window = torch.stack(padded[-kernel.shape[1] :], dim=1)
        sizes = [key_heads * d_k, key_heads * d_k, value_heads * d_v]
        query, key, value = torch.functional.split(F.silu((window * kernel).sum(1)), sizes)
        repeats = value_heads // key_heads
        query, key = (_unit(t.view(key_heads, d_k)).repeat_interleave(repeats, dim=0) for t in (query, key))
        return query, key, value.view(value_heads, d_v)

    def _mlp(self, layer: int, x: Tensor) -> Tensor:
        name = f"layers.{layer}.mlp"
        inner = F.silu(self._linear(x, f"{name}.gate_proj")) * self._linear(x, f"{name}.up_proj")
        return self._linear(inner, f"{name}.down_proj")

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate the first dimensions of `x` [n, heads, head_dim] at `positions` [n]."""
        angles = positions[:, None, None] * self.frequencies
        half = self.frequencies.numel()
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return _rms(x, self.eps) * (self.weights[f"{name}.weight"] + self.norm_offset)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _head(self) -> Tensor:
        tied = self.weights["embed_tokens.weight"]
        return self.weights.get("lm_head.weight", tied)

    def _state_shape(self, layer: int) -> tuple[int, ...]:
        if f"layers.{layer}.linear_attn.A_log" not in self.weights:
            return (0,)
        c = self.config
        heads, d_v = c["linear_num_value_heads"], c["linear_value_head_dim"]
        return (heads, d_v, c["linear_key_head_dim"])


def _load(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint in float64, without the prefixes before `layers` and friends."""
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            short = name.removeprefix("model.").removeprefix("language_model.")
            weights[short] = tensor.double()
    return weights


def _frequencies(config: dict[str, Any], head_dim: int) -> Tensor:
    rope = config.get("rope_parameters") or {}
    assert rope.get("rope_type", "default") == "default", "the literal model knows plain rotary only"
    theta = rope.get("rope_theta") or config["rope_theta"]
    rotary_dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    return torch.as_tensor(float(theta) ** -exponents)


def _rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)
