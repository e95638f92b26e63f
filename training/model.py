"""The network of tiny-hybrid as it is trained: Qwen3.5's text model over rows of one length.

Knows the layers and the names of their weights, which are those of the checkpoint. Knows no cache, no
padding and no text: rows begin at position 0 and are whole. Weights are float32; products run in the
dtype that the network is called with, what is carried along a row in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .delta import CHUNK, gated_delta_rule


@dataclass(frozen=True)
class Sizes:
    """Sizes of the network, in elements."""

    vocab: int = 1024
    hidden: int = 256
    layers: int = 8
    interval: int = 4  # every so many layers one has full attention
    intermediate: int = 512
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 16
    linear_heads: int = 4
    linear_dim: int = 64
    conv: int = 4
    positions: int = 8192
    theta: float = 10_000.0
    eps: float = 1e-6

    def has_full_attention(self, layer: int) -> bool:
        return (layer + 1) % self.interval == 0

    def config(self, *, end: int, pad: int) -> dict[str, Any]:
        """The checkpoint's `config.json`; `end` and `pad` are token ids."""
        kinds = ("linear_attention", "full_attention")
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "dtype": "bfloat16",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "layer_types": [kinds[self.has_full_attention(i)] for i in range(self.layers)],
            "full_attention_interval": self.interval,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "hidden_act": "silu",
            "linear_num_key_heads": self.linear_heads,
            "linear_num_value_heads": self.linear_heads,
            "linear_key_head_dim": self.linear_dim,
            "linear_value_head_dim": self.linear_dim,
            "linear_conv_kernel_dim": self.conv,
            "max_position_embeddings": self.positions,
            "rms_norm_eps": self.eps,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.theta,
                "partial_rotary_factor": self.rotary_dim / self.head_dim,
                "mrope_interleaved": True,
                "mrope_section": [3, 3, 2],
            },
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "use_cache": True,
            "eos_token_id": end,
            "pad_token_id": pad,
        }


class Linear(nn.Module):
    """A product with a weight of shape [out, in], in the dtype of what comes in."""

    def __init__(self, inputs: int, outputs: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * std)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def joined(x: Tensor, *layers: Linear) -> list[Tensor]:
    """The products of `x` with several weights, computed as one."""
    weights: list[Tensor] = [layer.weight for layer in layers]
    product = F.linear(x, torch.cat(weights).to(x.dtype))
    return list(product.split([len(weight) for weight in weights], -1))


class Norm(nn.Module):
    """An RMS norm in float32 whose weight is stored as w - `offset`."""

    def __init__(self, size: int, eps: float, offset: float = 1.0) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.full([size], 1.0 - offset))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight + self.offset, self.eps)


class _Convolution(torch.autograd.Function):
    """A causal convolution of each channel along a row, as a few shifted products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # [B, T, C], [C, W]
        length, width = x.shape[1], weight.shape[1]
        taps = weight.t().to(x.dtype).contiguous()  # [W, C]
        padded = F.pad(x, (0, 0, width - 1, 0))
        result = padded[:, :length] * taps[0]
        for j in range(1, width):
            result = torch.addcmul(result, padded[:, j : j + length], taps[j])
        ctx.save_for_backward(padded, taps)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        padded, taps = ctx.saved_tensors
        (gradient,) = gradients
        length, width = gradient.shape[1], taps.shape[0]
        ahead = F.pad(gradient, (0, 0, 0, width - 1))
        back = ahead[:, :length] * taps[-1]
        for j in range(1, width):
            back = torch.addcmul(back, ahead[:, j : j + length], taps[width - 1 - j])
        products = [gradient * padded[:, j : j + length] for j in range(width)]
        return back, torch.stack([product.sum((0, 1), dtype=torch.float32) for product in products], 1)


class _Conv1d(nn.Module):
    """The place of the convolution's weight, [channels, 1, width]."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        bound = width**-0.5
        self.weight = nn.Parameter(torch.empty(channels, 1, width).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Convolution.apply(x, self.weight[:, 0])  # type: ignore[no-untyped-call] # torch's
        return result


class GatedDeltaNet(nn.Module):
    """A layer whose memory is one matrix a head."""

    def __init__(self, sizes: Sizes, std: float, std_out: float) -> None:
        super().__init__()
        self.sizes = sizes
        width = sizes.linear_heads * sizes.linear_dim
        self.in_proj_qkv = Linear(sizes.hidden, 3 * width, std)
        self.in_proj_z = Linear(sizes.hidden, width, std)
        self.in_proj_b = Linear(sizes.hidden, sizes.linear_heads, std)
        self.in_proj_a = Linear(sizes.hidden, sizes.linear_heads, std)
        self.conv1d = _Conv1d(3 * width, sizes.conv)
        self.norm = Norm(sizes.linear_dim, sizes.eps, offset=0.0)
        self.out_proj = Linear(width, sizes.hidden, std_out)
        self.A_log = nn.Parameter(torch.empty(sizes.linear_heads).uniform_(1.0, 16.0).log())
        step = torch.empty(sizes.linear_heads).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # softplus gives `step` back

    def forward(self, x: Tensor) -> Tensor:
        heads, dim = self.sizes.linear_heads, self.sizes.linear_dim
        rows, length, _ = x.shape
        chunks = length // CHUNK
        mixed, z, b, a = joined(x, self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
        mixed = F.silu(self.conv1d(mixed))
        cut = mixed.view(rows, chunks, CHUNK, 3, heads, dim).permute(3, 1, 0, 4, 2, 5).float().contiguous()
        cut = cut.view(3, chunks, rows * heads, CHUNK, dim)
        # x·rsqrt(Σx² + ε) is an RMS norm over √dim; the query is scaled by 1/√dim once more.
        query = F.rms_norm(cut[0], (dim,), eps=1e-6 / dim) / dim
        key = F.rms_norm(cut[1], (dim,), eps=1e-6 / dim) * dim**-0.5
        decay = -self.A_log.exp() * F.softplus(a.float() + self.dt_bias)
        gates = torch.stack([decay, b.float().sigmoid()])  # [2, rows, length, heads]
        gates = gates.view(2, rows, chunks, CHUNK, heads).permute(0, 2, 1, 4, 3)
        gates = gates.reshape(2, chunks, rows * heads, CHUNK)
        out = gated_delta_rule(query, key, cut[2], gates[0], gates[1])
        out = self.norm(out).view(chunks, rows, heads, CHUNK, dim).permute(1, 0, 3, 2, 4)
        gated = out * F.silu(z.float()).view(rows, chunks, CHUNK, heads, dim)
        result: Tensor = self.out_proj(gated.to(x.dtype).reshape(rows, length, heads * dim))
        return result


class Attention(nn.Module):
    """Gated full attention with rotary positions on a part of each head."""

    def __init__(self, sizes: Sizes, std: float, std_out: float) -> None:
        super().__init__()
        self.sizes = sizes
        self.q_proj = Linear(sizes.hidden, 2 * sizes.heads * sizes.head_dim, std)
        self.k_proj = Linear(sizes.hidden, sizes.kv_heads * sizes.head_dim, std)
        self.v_proj = Linear(sizes.hidden, sizes.kv_heads * sizes.head_dim, std)
        self.o_proj = Linear(sizes.heads * sizes.head_dim, sizes.hidden, std_out)
        self.q_norm = Norm(sizes.head_dim, sizes.eps)
        self.k_norm = Norm(sizes.head_dim, sizes.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        sizes = self.sizes
        rows, length, _ = x.shape
        q, k, v = joined(x, self.q_proj, self.k_proj, self.v_proj)
        q, gate = q.view(rows, length, sizes.heads, 2 * sizes.head_dim).chunk(2, -1)
        k = k.view(rows, length, sizes.kv_heads, sizes.head_dim)
        v = v.view(rows, length, sizes.kv_heads, sizes.head_dim)
        query = _rotated(self.q_norm(q), cos, sin).to(x.dtype).transpose(1, 2)
        groups = sizes.heads // sizes.kv_heads
        key = _rotated(self.k_norm(k), cos, sin).to(x.dtype).repeat_interleave(groups, 2).transpose(1, 2)
        value = v.repeat_interleave(groups, 2).transpose(1, 2)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
        result: Tensor = self.o_proj((out * torch.sigmoid(gate)).reshape(rows, length, -1))
        return result


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [B, T, H, D], [T, 1, R / 2]
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


class MLP(nn.Module):
    """The gated feed-forward part of a layer."""

    def __init__(self, sizes: Sizes, std: float, std_out: float) -> None:
        super().__init__()
        self.gate_proj = Linear(sizes.hidden, sizes.intermediate, std)
        self.up_proj = Linear(sizes.hidden, sizes.intermediate, std)
        self.down_proj = Linear(sizes.intermediate, sizes.hidden, std_out)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = joined(x, self.gate_proj, self.up_proj)
        result: Tensor = self.down_proj(F.silu(gate) * up)
        return result


class Layer(nn.Module):
    """One decoder layer. The residual stream is float32."""

    def __init__(self, sizes: Sizes, index: int) -> None:
        super().__init__()
        std, std_out = 0.5 * sizes.hidden**-0.5, 0.5 * sizes.hidden**-0.5 / math.sqrt(2 * sizes.layers)
        self.input_layernorm = Norm(sizes.hidden, sizes.eps)
        self.full = sizes.has_full_attention(index)
        if self.full:
            self.self_attn = Attention(sizes, std, std_out)
        else:
            self.linear_attn = GatedDeltaNet(sizes, std, std_out)
        self.post_attention_layernorm = Norm(sizes.hidden, sizes.eps)
        self.mlp = MLP(sizes, std, std_out)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        inner = self.input_layernorm(x).to(dtype)
        x = x + (self.self_attn(inner, cos, sin) if self.full else self.linear_attn(inner))
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x).to(dtype))
        return result


class Decoder(nn.Module):
    """The layers; a module of its own so that names begin with "model." as in the checkpoint."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(sizes.vocab, sizes.hidden)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(sizes, i) for i in range(sizes.layers))
        self.norm = Norm(sizes.hidden, sizes.eps)


class Network(nn.Module):
    """From token ids to logits. The output head is the embedding."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.model = Decoder(sizes)

    def forward(self, tokens: Tensor, dtype: torch.dtype = torch.float32, *, plain: bool = False) -> Tensor:
        """Logits [B, T, vocab] in `dtype` for tokens [B, T]; T is a multiple of 64.

        `plain`: layers run as they are written, also where they have been compiled for other shapes.
        """
        length = tokens.shape[1]
        assert length % CHUNK == 0, f"rows of {length} tokens are no multiple of {CHUNK}"
        cos, sin = self._rotary(length, tokens.device)
        x = self.model.embed_tokens(tokens).float()
        for layer in self.model.layers:
            x = (layer.forward if plain else layer)(x, cos, sin, dtype)
        head = self.model.embed_tokens.weight.to(dtype)
        return F.linear(self.model.norm(x).to(dtype), head)

    def _rotary(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, 1, R / 2] of the positions of a row."""
        steps = torch.arange(0, self.sizes.rotary_dim, 2, device=device, dtype=torch.float32)
        frequencies = self.sizes.theta ** (-steps / self.sizes.rotary_dim)
        angles = torch.arange(length, device=device, dtype=torch.float32)[:, None, None] * frequencies
        return angles.cos(), angles.sin()
