"""Moving stored tokens between pages: whole pages as they are, single tokens to other positions.

Knows keys and values as pages, and rotations. Knows nothing of who owns a page.
"""

from __future__ import annotations

from torch import Tensor

from .rotary import Rotary, rotate


def copy_pages(keys: Tensor, values: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy pages `source` [n] to pages `target` [n] in all layers.

    `keys` and `values` are [layers, H_kv, pages, page_tokens, D]; no page is both source and
    target.
    """
    for pool in (keys, values):
        pool.index_copy_(2, target, pool.index_select(2, source))


def move_tokens(
    keys: Tensor, values: Tensor, source: Tensor, target: Tensor, shift: Tensor, rotary: Rotary
) -> None:
    """Copy tokens to other places in all layers, their keys turned on by `shift` positions.

    `source`, `target`, `shift` are [n] int64; a place is page * page_tokens + offset in the page.
    Keys are turned in float32 and rounded once. No place is both source and target.
    """
    rotation = rotary.by_shift(shift)
    for layer_keys, layer_values in zip(keys.flatten(2, 3), values.flatten(2, 3), strict=True):
        moved = rotate(layer_keys.index_select(1, source).transpose(0, 1), rotation)
        layer_keys.index_copy_(1, target, moved.transpose(0, 1).to(keys.dtype))
        layer_values.index_copy_(1, target, layer_values.index_select(1, source))
