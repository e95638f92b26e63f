"""The decoder's forward pass in fused kernels, for a GPU: the same steps as `model`, fewer launches.

Knows weights, cache tensors, the fields of a packed step and the Triton kernels. Nothing in it asks
the GPU for a number, and sizes depend on the fields' capacities only, so it can be recorded.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.attention_triton import DeviceItems, attend, merge, padded_heads
from ..kernels.gdn import state_after_chain
from ..kernels.gdn_chunk_triton import (
    Before,
    ManyRows,
    convolve_many_rows,
    gated_delta_many_rows,
    gated_norm_rows,
)
from ..kernels.gdn_triton import LayerSizes, SingleRows, gated_delta_single_rows
from ..kernels.pointwise_triton import add_and_norm, silu_and_multiply
from ..kernels.rotary_triton import Angles, angles, norm_turn_store
from .config import ModelConfig
from .looks import Looks
from .memory import CacheTensors
from .model import Decoder
from .packed import Grouping
from .weights import AttentionWeights, DeltaNetWeights, LayerWeights

Fields = Mapping[str, Tensor]

DECODE_ROWS = 64
"""Steps of at most this many rows cut attention for few readers, larger ones for many."""

FEW_QUERIES, MANY_QUERIES = 16, 64
"""Query heads that a program attends with, in such steps."""


class FusedDecoder:
    """A model's forward pass over shared memory on one GPU. Holds no state between steps."""

    def __init__(self, decoder: Decoder, device: torch.device) -> None:
        self.config: ModelConfig = decoder.config
        self.weights = decoder.weights
        self.rotary = decoder.rotary
        self.processors = (
            torch.cuda.get_device_properties(device).multi_processor_count
            if device.type == "cuda"
            else 4  # of the interpreter
        )
        config = decoder.config
        self._sizes = LayerSizes(
            config.linear_key_heads,
            config.linear_value_heads,
            config.linear_key_dim,
            config.linear_value_dim,
        )

    def grouping(self, num_rows: int) -> Grouping:
        """How a step of `num_rows` rows cuts attention into items."""
        columns = padded_heads(self.config.num_heads, self.config.num_kv_heads)
        queries = FEW_QUERIES if num_rows <= DECODE_ROWS else MANY_QUERIES
        return Grouping(self.config.num_kv_heads, max(1, queries // columns), self.processors)

    def forward(self, fields: Fields, cache: CacheTensors, group: int, looks: Looks | None = None) -> Tensor:
        """Run a step. -> float32 [M, vocab]: the logits of the field `logit_rows`.

        `group`: as the step's items were made. Padding rows give garbage and write nothing. `looks`, if
        given, keeps what attention's kernels make on the way.
        """
        eps, weights = self.config.norm_eps, self.weights
        step = _Step(self, fields, group, looks)
        attention_memory = zip(cache.keys, cache.values, strict=True)
        linear_memory = zip(cache.pairs, cache.conv_rows, strict=True)
        hidden = F.embedding(fields["token_ids"], weights.embedding)
        for layer in weights.layers:
            x = add_and_norm(hidden, None, layer.input_norm, eps)
            if isinstance(layer.mixer, AttentionWeights):
                mixed = self._attention(layer.mixer, x, *next(attention_memory), step)
                _add_product(hidden, mixed, layer.mixer.out, layer.mixer.out_bias)
            else:
                mixed = self._delta_net(layer.mixer, x, *next(linear_memory), step)
                _add_product(hidden, mixed, layer.mixer.out, None)
            self._add_mlp(hidden, layer)
        wanted = hidden.index_select(0, fields["logit_rows"])
        return F.linear(add_and_norm(wanted, None, weights.final_norm, eps), weights.head).float()

    def _attention(
        self, weights: AttentionWeights, x: Tensor, keys: Tensor, values: Tensor, step: _Step
    ) -> Tensor:
        """Full attention without its output projection: [N, H * D]."""
        config = self.config
        has_gate = config.traits.output_gate
        qkv = F.linear(x, weights.qkv, weights.qkv_bias)
        queries = norm_turn_store(
            qkv,
            weights.q_norm,
            weights.k_norm,
            step.key_angles,
            keys,
            values,
            step.fields["store_index"],
            num_heads=config.num_heads,
            has_gate=has_gate,
            eps=config.norm_eps,
        )
        sums, stats = attend(
            queries,
            keys,
            values,
            step.items,
            step.entry_angles,
            config.head_dim**-0.5,
            group=step.group,
            programs=2 * self.processors,
        )
        if step.looks is not None:
            step.looks.queries.append(queries)
            step.looks.stats.append(stats)
        gate = qkv[:, config.query_size : 2 * config.query_size] if has_gate else None
        return merge(sums, stats, step.items, gate, x.shape[0], x.dtype)

    def _delta_net(
        self, weights: DeltaNetWeights, x: Tensor, pairs: Tensor, conv_rows: Tensor, step: _Step
    ) -> Tensor:
        """Gated DeltaNet without its output projection: [N, H_v * d_v]."""
        config, eps = self.config, self.config.norm_eps
        projected = F.linear(x, weights.projections)
        out = x.new_empty((x.shape[0], config.linear_value_size))
        if step.singles is not None:
            gated_delta_single_rows(
                projected,
                weights.conv,
                weights.decay_rate,
                weights.dt_bias,
                weights.norm,
                pairs,
                conv_rows,
                step.singles,
                out,
                self._sizes,
                eps,
            )
        if step.many is not None:
            before, chain = None, step.fields["many_chain"]
            if chain.shape[1]:
                before = Before(state_after_chain(pairs, chain), step.fields["many_length"])
            made = convolve_many_rows(
                projected,
                weights.conv,
                weights.decay_rate,
                weights.dt_bias,
                conv_rows,
                step.many,
                self._sizes,
            )
            read = gated_delta_many_rows(made, pairs, step.fields["many_read"], before, step.many)
            gated_norm_rows(read, projected, weights.norm, step.many.row, out, config.conv_channels, eps)
        return out

    def _add_mlp(self, hidden: Tensor, layer: LayerWeights) -> None:
        x = add_and_norm(hidden, None, layer.post_norm, self.config.norm_eps)
        inner = silu_and_multiply(F.linear(x, layer.gate_up, layer.gate_up_bias))
        _add_product(hidden, inner, layer.down, layer.down_bias)


class _Step:
    """What all layers share in one forward pass."""

    def __init__(self, decoder: FusedDecoder, fields: Fields, group: int, looks: Looks | None = None) -> None:
        self.fields = fields
        self.group = group
        self.looks = looks
        rotary = decoder.rotary
        self.key_angles: Angles = angles(fields["store_positions"], rotary)
        self.entry_angles: Angles = angles(
            fields["positions"], rotary, fields["entry_row"], fields["entry_shift"]
        )
        counts = fields["counts"]
        self.items = DeviceItems(
            counts,
            fields["items"],
            fields["pages"],
            fields["entry_row"],
            fields["entry_seen"],
            fields["row_start"],
            fields["row_entry"],
        )
        self.singles = self.many = None
        if "single_row" in fields and fields["single_row"].shape[0]:
            names = ("row", "read", "write", "chain", "length", "history", "kept")
            self.singles = SingleRows(counts[1:], *(fields[f"single_{name}"] for name in names))
        if "many_row" in fields:
            names = ("row", "windows", "start", "chunk", "request_chunk", "write", "kept")
            self.many = ManyRows(*(fields[f"many_{name}"] for name in names))


def _add_product(hidden: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """hidden += x @ weight.T + bias, in place."""
    if bias is None:
        hidden.addmm_(x, weight.t())
    else:
        hidden += F.linear(x, weight, bias)
