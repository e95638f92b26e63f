"""One decoder for all families, configured: a step's batch and the cache tensors in, logits out.

Knows weights, cache tensors and kernels. Knows nothing about blocks, requests, sampling or where
the weights came from.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.activation import sigmoid_gate, silu_and_multiply
from ..kernels.attention import attention_over_view
from ..kernels.convolution import ConvolutionPlan, convolve_through_view, plan_convolution
from ..kernels.gdn_step import DeltaPlan, gated_delta_over_view, plan_delta
from ..kernels.norm import gated_rms_norm, rms_norm, unit_length
from ..kernels.rotary import Rotary, Rotation, rotate
from ..kernels.tiles import AttentionPlan, plan_attention
from .batch import Batch
from .config import ModelConfig
from .memory import CacheTensors
from .weights import AttentionWeights, DeltaNetWeights, LayerWeights, Weights


class StepPlan(NamedTuple):
    """What all layers of one kind share in a step."""

    attention: AttentionPlan
    query_rotation: Rotation  # of each query, for the segment that it reads
    key_rotation: Rotation  # of each row, where it is stored
    convolution: ConvolutionPlan | None  # None without Gated DeltaNet layers
    delta: DeltaPlan | None


class Decoder:
    """A model's forward pass over shared memory. Holds no state between steps."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        device = weights.embedding.device
        frequencies, scaling = config.rope.frequencies()
        axes = config.rope.axes()
        self.rotary = Rotary(frequencies.to(device), axes.to(device), config.head_dim, scaling)

    def release(self) -> None:
        """Give the weights' storage back at once, whoever still holds a tensor of it."""
        self.weights.release()

    @torch.inference_mode()
    def forward(
        self, batch: Batch, cache: CacheTensors, *, shares: list[Tensor] | None = None
    ) -> Tensor:
        """Run a step. -> float32 [M, vocab]: the logits of batch.logit_rows.

        Writes the rows' keys, values, pairs and convolution rows to the places that the batch
        names. Into `shares` goes, if given, each full-attention layer's share of attention per
        block of a row's view: float32 [N, blocks of the longest view, heads].
        """
        config, weights = self.config, self.weights
        plan = self.plan(batch, cache)
        hidden = F.embedding(batch.token_ids, weights.embedding)
        attention_index = linear_index = 0
        for layer in weights.layers:
            x = rms_norm(hidden, layer.input_norm, config.norm_eps)
            if isinstance(layer.mixer, AttentionWeights):
                keys, values = cache.keys[attention_index], cache.values[attention_index]
                mixed = self._attention(layer.mixer, x, keys, values, batch, plan, shares)
                attention_index += 1
            else:
                pairs, rows = cache.pairs[linear_index], cache.conv_rows[linear_index]
                mixed = self._delta_net(layer.mixer, x, pairs, rows, batch, plan)
                linear_index += 1
            hidden = hidden + mixed
            hidden = hidden + self._mlp(layer, rms_norm(hidden, layer.post_norm, config.norm_eps))
        wanted = hidden.index_select(0, batch.logit_rows)
        wanted = rms_norm(wanted, weights.final_norm, config.norm_eps)
        return F.linear(wanted, weights.head).float()

    def plan(self, batch: Batch, cache: CacheTensors) -> StepPlan:
        """What every layer needs to know of the batch, made once per step."""
        config = self.config
        _, heads, pages, page_tokens, _ = cache.keys.shape
        attention = plan_attention(
            positions=batch.positions,
            row_start=batch.row_start,
            segment_start=batch.segment_start,
            segment_page_start=batch.segment_page_start,
            pages=batch.pages,
            segment_length=batch.segment_length,
            segment_shift=batch.segment_shift,
            segment_block=batch.segment_block,
            pool=(heads, pages, page_tokens),
        )
        return StepPlan(
            attention=attention,
            query_rotation=self.rotary.to_positions(attention.query_positions),
            key_rotation=self.rotary.to_positions(batch.store_positions),
            convolution=plan_convolution(
                batch.row_start, batch.num_rows, batch.history_rows, batch.kept_new, batch.kept_old
            )
            if config.is_hybrid
            else None,
            delta=plan_delta(batch.row_start, batch.read_slot, batch.write_slot, batch.chain_slots)
            if config.is_hybrid
            else None,
        )

    def _attention(
        self,
        weights: AttentionWeights,
        x: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: Batch,
        plan: StepPlan,
        shares: list[Tensor] | None,
    ) -> Tensor:
        """Full attention: store the rows' keys and values, then read the views. [N, hidden]"""
        config = self.config
        query_size, kv_size, dim = config.query_size, config.kv_size, config.head_dim
        gate_size = query_size if config.traits.output_gate else 0
        projected = F.linear(x, weights.qkv, weights.qkv_bias)
        query, gate, key, value = projected.split((query_size, gate_size, kv_size, kv_size), -1)
        query, key, value = (t.view(x.shape[0], -1, dim) for t in (query, key, value))
        if weights.q_norm is not None and weights.k_norm is not None:
            query = rms_norm(query, weights.q_norm, config.norm_eps)
            key = rms_norm(key, weights.k_norm, config.norm_eps)
        key = rotate(key, plan.key_rotation).to(keys.dtype)
        keys.flatten(1, 2).index_copy_(1, batch.store_index, key.transpose(0, 1))
        values.flatten(1, 2).index_copy_(1, batch.store_index, value.transpose(0, 1))
        query = query.index_select(0, plan.attention.query_rows)
        query = rotate(query, plan.query_rotation)
        out = attention_over_view(query, keys, values, plan.attention, dim**-0.5, shares).flatten(1)
        out = sigmoid_gate(out, gate) if gate_size else out.to(x.dtype)
        return F.linear(out, weights.out, weights.out_bias)

    def _delta_net(
        self,
        weights: DeltaNetWeights,
        x: Tensor,
        pairs: Tensor,
        conv_rows: Tensor,
        batch: Batch,
        plan: StepPlan,
    ) -> Tensor:
        """Gated DeltaNet: convolve through the view, update the block's pair, read the view. [N,
        hidden]"""
        config = self.config
        assert plan.convolution is not None and plan.delta is not None
        heads, key_dim, value_dim = (
            config.linear_value_heads,
            config.linear_key_dim,
            config.linear_value_dim,
        )
        key_size, value_size = config.linear_key_heads * key_dim, config.linear_value_size
        projected = F.linear(x, weights.projections)
        qkv, z, b, a = projected.split((config.conv_channels, value_size, heads, heads), -1)
        qkv = convolve_through_view(
            qkv, weights.conv, conv_rows, batch.write_slot, plan.convolution
        )
        query, key, value = qkv.split((key_size, key_size, value_size), -1)
        query, key = (
            unit_length(t.unflatten(-1, (-1, key_dim))).repeat_interleave(
                heads // config.linear_key_heads, dim=1
            )
            for t in (query, key)
        )
        read = gated_delta_over_view(
            query * key_dim**-0.5,
            key,
            value.unflatten(-1, (heads, value_dim)),
            weights.decay_rate * F.softplus(a.float() + weights.dt_bias),
            torch.sigmoid(b.float()),
            pairs,
            plan.delta,
        )
        z = z.unflatten(-1, (heads, value_dim))
        out = gated_rms_norm(read, z, weights.norm, config.norm_eps).to(x.dtype)
        return F.linear(out.flatten(1), weights.out)

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        inner = silu_and_multiply(F.linear(x, layer.gate_up, layer.gate_up_bias))
        return F.linear(inner, layer.down, layer.down_bias)
