"""The tensors that hold what blocks remember. Knows shapes and dtypes, not who owns which page or slot.

Page `ZERO_PAGE` and slot `IDENTITY_SLOT` are constants: zeros, and the pair (I, 0). Everything else
is uninitialised until written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor

from ..kernels.boundary import FirstTokens
from .batch import CONV_ROWS, IDENTITY_SLOT, PAGE_TOKENS, ZERO_PAGE
from .config import ModelConfig


@dataclass(frozen=True)
class CacheTensors:
    """All layers' memory.

    Shapes: L_a full-attention layers, L_g Gated DeltaNet layers, H_kv key/value heads, D head_dim,
    H_v value heads, d_k, d_v, C convolution channels. `pairs` stacks the transition's rows as
    [Â ; B̂]: rows 0 … d_k-1 are Â, the rest B̂; it is float32 whatever the model's dtype.
    """

    keys: Tensor  # [L_a, H_kv, pages, PAGE_TOKENS, D] model dtype, rotated at the position in the segment
    values: Tensor  # [L_a, H_kv, pages, PAGE_TOKENS, D] model dtype
    pairs: Tensor  # [L_g, slots, H_v, d_k + d_v, d_k] float32
    conv_rows: Tensor  # [L_g, slots, CONV_ROWS, C] model dtype, raw projection rows, newest last

    @staticmethod
    def allocate(
        config: ModelConfig,
        num_pages: int,
        num_slots: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> CacheTensors:
        """Reserve memory for `num_pages` pages and `num_slots` slots, constants included."""
        attention, linear = config.num_attention_layers, config.num_linear_layers
        slots = num_slots if linear else 1
        shape = (attention, config.num_kv_heads, num_pages, PAGE_TOKENS, config.head_dim)
        keys = torch.empty(shape, dtype=dtype, device=device)
        values = torch.empty(shape, dtype=dtype, device=device)
        d_k, d_v = config.linear_key_dim, config.linear_value_dim
        pairs = torch.empty(
            (linear, slots, config.linear_value_heads, d_k + d_v, d_k),
            dtype=torch.float32,
            device=device,
        )
        conv_rows = torch.empty(
            (linear, slots, CONV_ROWS, config.conv_channels), dtype=dtype, device=device
        )
        keys[:, :, ZERO_PAGE] = 0
        values[:, :, ZERO_PAGE] = 0
        if linear:
            pairs[:, IDENTITY_SLOT] = 0
            pairs[:, IDENTITY_SLOT, :, :d_k] = torch.eye(d_k, device=device)
            conv_rows[:, IDENTITY_SLOT] = 0
        return CacheTensors(keys, values, pairs, conv_rows)

    @staticmethod
    def page_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
        """Bytes of one page, all layers, keys and values."""
        row = config.num_kv_heads * config.head_dim * dtype.itemsize
        return 2 * config.num_attention_layers * PAGE_TOKENS * row

    @staticmethod
    def slot_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
        """Bytes of one slot, all layers, pair and convolution rows (0 without linear layers)."""
        d_k, d_v = config.linear_key_dim, config.linear_value_dim
        pair = config.linear_value_heads * (d_k + d_v) * d_k * 4
        return config.num_linear_layers * (pair + CONV_ROWS * config.conv_channels * dtype.itemsize)

    def first_tokens(self) -> Iterator[FirstTokens | None]:
        """What each Gated DeltaNet layer keeps of blocks' first tokens: nothing (see `boundary`)."""
        return repeat(None)

    def release(self) -> None:
        """Give the storage back at once, whoever still holds these tensors (a traceback, `Out`)."""
        for tensor in (self.keys, self.values, self.pairs, self.conv_rows):
            tensor.untyped_storage().resize_(0)
