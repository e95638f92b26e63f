"""One decoder for all families, configured: a step's batch and the cache tensors in, logits out.

Knows weights, cache tensors and kernels. Knows nothing about blocks, requests, sampling or where
the weights came from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.activation import sigmoid_gate, silu_and_multiply
from ..kernels.attention import attention_over_view
from ..kernels.boundary import (
    FirstTokens,
    gated_delta_over_boundaries,
    keep_first_tokens,
    state_before_rows,
)
from ..kernels.convolution import ConvolutionPlan, convolve_through_view, plan_convolution
from ..kernels.gdn import split_heads
from ..kernels.gdn_step import DeltaPlan, gated_delta_over_view, plan_delta
from ..kernels.norm import gated_rms_norm, rms_norm
from ..kernels.rotary import Rotary, Rotation, rotate
from ..kernels.tiles import AttentionPlan, plan_attention
from .batch import Batch
from .boundary import first_inputs
from .config import ModelConfig
from .memory import CacheTensors
from .weights import AttentionWeights, DeltaNetWeights, LayerWeights, Weights


@dataclass(frozen=True)
class Step:
    """What all layers share in one forward pass, made once."""

    batch: Batch
    attention: AttentionPlan
    query_rotation: Rotation  # of each query, for the segment that it reads
    key_rotation: Rotation  # of each row, for where it is stored
    convolution: ConvolutionPlan | None  # None without Gated DeltaNet layers
    delta: DeltaPlan | None
    shares: list[Tensor] | None
    queries: list[Tensor] | None


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
        self,
        batch: Batch,
        cache: CacheTensors,
        *,
        shares: list[Tensor] | None = None,
        queries: list[Tensor] | None = None,
    ) -> Tensor:
        """Run a step. -> float32 [M, vocab]: the logits of batch.logit_rows.

        Writes the rows' keys, values, pairs and convolution rows to the places that the batch
        names. Into `shares` goes, if given, each full-attention layer's share of attention per
        block of a row's view: float32 [N, blocks of the longest view, heads]. Into `queries` go
        its rows' queries, normalised and not turned: [N, heads, D] in the model's dtype.
        """
        eps, weights = self.config.norm_eps, self.weights
        step = self._plan(batch, cache, shares, queries)
        attention_memory = zip(cache.keys, cache.values, strict=True)
        linear_memory = zip(cache.pairs, cache.conv_rows, strict=True)
        first_tokens = cache.first_tokens()
        hidden = F.embedding(batch.token_ids, weights.embedding)
        for layer in weights.layers:
            x = rms_norm(hidden, layer.input_norm, eps)
            if isinstance(layer.mixer, AttentionWeights):
                mixed = self._attention(layer.mixer, x, *next(attention_memory), step)
            else:
                mixed = self._delta_net(layer.mixer, x, *next(linear_memory), step, next(first_tokens))
            hidden = hidden + mixed
            hidden = hidden + _mlp(layer, rms_norm(hidden, layer.post_norm, eps))
        wanted = rms_norm(hidden.index_select(0, batch.logit_rows), weights.final_norm, eps)
        return F.linear(wanted, weights.head).float()

    def _plan(
        self,
        batch: Batch,
        cache: CacheTensors,
        shares: list[Tensor] | None,
        queries: list[Tensor] | None,
    ) -> Step:
        _, kv_heads, pages, page_tokens, _ = cache.keys.shape
        attention = plan_attention(
            positions=batch.positions,
            row_start=batch.row_start,
            segment_start=batch.segment_start,
            segment_page_start=batch.segment_page_start,
            pages=batch.pages,
            segment_length=batch.segment_length,
            segment_shift=batch.segment_shift,
            segment_block=batch.segment_block,
            pool=(kv_heads, pages, page_tokens),
        )
        convolution = delta = None
        if self.config.is_hybrid:
            start = batch.row_start
            convolution = plan_convolution(
                start, batch.num_rows, batch.history_rows, batch.kept_new, batch.kept_old
            )
            delta = plan_delta(start, batch.read_slot, batch.write_slot, batch.chain_slots)
        return Step(
            batch=batch,
            attention=attention,
            query_rotation=self.rotary.to_positions(attention.query_positions),
            key_rotation=self.rotary.to_positions(batch.store_positions),
            convolution=convolution,
            delta=delta,
            shares=shares,
            queries=queries,
        )

    def _attention(
        self, weights: AttentionWeights, x: Tensor, keys: Tensor, values: Tensor, step: Step
    ) -> Tensor:
        """Full attention: store the rows' keys and values, then read the views. [N, hidden]

        `keys` and `values` are one layer's pools [H_kv, pages, page_tokens, D].
        """
        config = self.config
        rows, dim, plan = x.shape[0], config.head_dim, step.attention
        gate_size = config.query_size if config.traits.output_gate else 0
        sizes = (config.query_size, gate_size, config.kv_size, config.kv_size)
        query, gate, key, value = F.linear(x, weights.qkv, weights.qkv_bias).split(sizes, -1)
        query, key, value = (part.view(rows, -1, dim) for part in (query, key, value))
        if weights.q_norm is not None and weights.k_norm is not None:
            query = rms_norm(query, weights.q_norm, config.norm_eps)
            key = rms_norm(key, weights.k_norm, config.norm_eps)
        if step.queries is not None:
            step.queries.append(query)
        key = rotate(key, step.key_rotation).to(keys.dtype)
        for pool, stored in ((keys, key), (values, value)):
            pool.flatten(1, 2).index_copy_(1, step.batch.store_index, stored.transpose(0, 1))
        query = rotate(query.index_select(0, plan.query_rows), step.query_rotation)
        out = attention_over_view(query, keys, values, plan, dim**-0.5, step.shares).flatten(1)
        out = sigmoid_gate(out, gate) if gate_size else out.to(x.dtype)
        return F.linear(out, weights.out, weights.out_bias)

    def _delta_net(
        self,
        weights: DeltaNetWeights,
        x: Tensor,
        pairs: Tensor,
        conv_rows: Tensor,
        step: Step,
        first: FirstTokens | None = None,
    ) -> Tensor:
        """Gated DeltaNet: convolve and read through the view, write the new pairs. [N, hidden]

        `pairs` [slots, H_v, d_k + d_v, d_k] and `conv_rows` [slots, 3, C] are one layer's pools, `first`
        what it keeps of blocks' first tokens if their convolution is recomputed.
        """
        config, rows = self.config, x.shape[0]
        key_heads, heads = config.linear_key_heads, config.linear_value_heads
        key_dim = config.linear_key_dim
        value_size = config.linear_value_size
        assert step.convolution is not None and step.delta is not None
        sizes = (config.conv_channels, value_size, heads, heads)
        qkv, z, b, a = F.linear(x, weights.projections).split(sizes, -1)
        convolved = convolve_through_view(
            qkv, weights.conv, conv_rows, step.batch.write_slot, step.convolution
        )
        query, key, value = split_heads(convolved, key_heads, heads, key_dim)
        log_decay = weights.decay_rate * F.softplus(a.float() + weights.dt_bias)
        inputs = (query * key_dim**-0.5, key, value, log_decay, torch.sigmoid(b.float()))
        if first is None:
            read = gated_delta_over_view(*inputs, pairs, step.delta)
        else:
            read = self._over_boundaries(weights, qkv, inputs, pairs, conv_rows, step, first)
        out = gated_rms_norm(read, z.reshape(rows, heads, -1), weights.norm, config.norm_eps)
        return F.linear(out.flatten(1).to(x.dtype), weights.out)

    def _over_boundaries(
        self,
        weights: DeltaNetWeights,
        rows: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        pairs: Tensor,
        conv_rows: Tensor,
        step: Step,
        first: FirstTokens,
    ) -> Tensor:
        """What rows read when the convolution of blocks' first tokens is recomputed. [N, H_v, d_v]

        `rows` [N, C] before the convolution; `inputs`: query, key, value, g and β of the rows.
        """
        batch, plan = step.batch, step.batch.boundary
        assert plan is not None and step.delta is not None
        tokens = first_inputs(self.config, weights, first, conv_rows, plan.slots, plan.history)
        state = state_before_rows(pairs, plan.slots, *tokens)
        log_decay, beta = inputs[3:]
        keep_first_tokens(first, rows, log_decay, beta, batch.read_slot, batch.write_slot, plan.new_rows)
        return gated_delta_over_boundaries(*inputs, pairs, step.delta, plan, state)


def _mlp(layer: LayerWeights, x: Tensor) -> Tensor:
    inner = silu_and_multiply(F.linear(x, layer.gate_up, layer.gate_up_bias))
    return F.linear(inner, layer.down, layer.down_bias)
