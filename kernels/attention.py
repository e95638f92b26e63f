"""Attention over views: rows look at tiles of their views, partial results merge by log-sum-exp.

Knows keys and values as pages of tokens and a plan made of integers (`tiles`). Knows no blocks, no
positions (queries come turned) and no model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .tiles import HIDDEN, AttentionPlan, Bucket


def attention_over_view(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    scale: float,
    shares: list[Tensor] | None = None,
) -> Tensor:
    """Softmax attention of N rows over their views. float32 [N, H, D].

    `queries` [Q, H, D] float32: row plan.query_rows[i], turned for the segment that query i reads.
    `keys`, `values` [H_kv, pages, page_tokens, D] of any float dtype; page 0 holds zeros. Query
    head h reads key/value head h // (H / H_kv). Into `shares` goes, if given, the share of
    attention per block of the view: float32 [N, blocks, H], summing to 1 over blocks.
    """
    kv_heads, dim = keys.shape[0], keys.shape[-1]
    queries = queries.view(queries.shape[0], kv_heads, -1, dim).transpose(0, 1)
    keys, values = keys.flatten(0, 2), values.flatten(0, 2)
    if plan.num_rows == 1:
        out, share = _one_row(queries, keys, values, plan, scale, shares is not None)
    else:
        parts = [_attend(queries, keys, values, bucket, scale) for bucket in plan.buckets]
        peak, total, mean = parts[0] if len(parts) == 1 else map(_joined, zip(*parts, strict=True))
        out, share = _merge(peak, total, mean, plan, shares is not None)
    if shares is not None and share is not None:
        shares.append(share)
    return out


def _scores(queries: Tensor, keys: Tensor, bucket: Bucket, scale: float) -> Tensor:
    """What the bucket's queries score, float32 [H_kv * I, G * H / H_kv, W]."""
    kv_heads, _, shared, dim = queries.shape
    items, group, _, width = bucket.hidden.shape
    query = queries.index_select(1, bucket.queries).view(kv_heads * items, group * shared, dim)
    # Heads and tokens in one dimension: gathering along the first one is what a CPU does fastest.
    key = keys.index_select(0, bucket.tokens).view(kv_heads * items, width, dim).float()
    scores = torch.baddbmm(query.new_zeros(()), query, key.mT, beta=0, alpha=scale)
    scores.view(kv_heads, items, group, shared, width).add_(bucket.hidden)
    return scores


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, bucket: Bucket, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The bucket's partial results: peaks and totals [H_kv, I * G, H / H_kv], mean values [..., D].

    Softmax is one fast operation, where `exp` of hidden scores is a slow one. The largest weight is
    exp(0) by the total, which gives the total.
    """
    scores = _scores(queries, keys, bucket, scale)
    peak, weights = scores.amax(-1), scores.softmax(-1)
    value = values.index_select(0, bucket.tokens).view(scores.shape[0], -1, values.shape[1]).float()
    mean = torch.bmm(weights, value)
    shape = (queries.shape[0], -1, queries.shape[2])
    total = weights.amax(-1).reciprocal_()
    return peak.view(shape), total.view(shape), mean.view(*shape, values.shape[1])


def _one_row(
    queries: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, scale: float, share: bool
) -> tuple[Tensor, Tensor | None]:
    """A single row reads all tiles alone: one softmax over them, nothing to merge."""
    (bucket,) = plan.buckets
    kv_heads, shared, items = queries.shape[0], queries.shape[2], bucket.hidden.shape[0]
    scores = _scores(queries, keys, bucket, scale).view(kv_heads, items, shared, -1)
    weights = scores.transpose(1, 2).reshape(kv_heads, shared, -1).softmax(-1)
    value = values.index_select(0, bucket.tokens).view(kv_heads, -1, values.shape[1]).float()
    out = torch.bmm(weights, value).view(1, kv_heads * shared, -1)
    if not share:
        return out, None
    per_tile = weights.view(kv_heads * shared, items, -1).sum(-1)
    table = weights.new_zeros((plan.num_blocks, kv_heads * shared))
    return out, table.index_add_(0, plan.partial_blocks, per_tile.t())[None]


def _merge(
    peak: Tensor, total: Tensor, mean: Tensor, plan: AttentionPlan, share: bool
) -> tuple[Tensor, Tensor | None]:
    """Bring partial results to each row's peak, and take the mean of their means by their totals.

    Row N of all that has N + 1 rows here collects the padding.
    """
    kv_heads, _, shared = peak.shape
    rows, shape = plan.partial_rows, (kv_heads, plan.num_rows + 1, shared)
    index = rows[None, :, None].expand_as(peak)
    top = peak.new_full(shape, HIDDEN).scatter_reduce_(1, index, peak, "amax")
    total = total * (peak - top.index_select(1, rows)).exp_()
    row_total = total.new_zeros(shape).index_add_(1, rows, total)
    weight = total.div_(row_total.index_select(1, rows))
    out = mean.new_zeros((*shape, mean.shape[-1]))
    out.index_add_(1, rows, mean.mul_(weight[..., None]))
    table = _shares(weight, plan) if share else None
    out = out[:, : plan.num_rows].transpose(0, 1)
    return out.reshape(plan.num_rows, kv_heads * shared, -1), table


def _shares(share: Tensor, plan: AttentionPlan) -> Tensor:
    """Shares of partial results [H_kv, P, H / H_kv] added up per block: float32 [N, blocks, H]."""
    kv_heads, _, shared = share.shape
    cell = plan.partial_rows * plan.num_blocks + plan.partial_blocks
    cells = share.new_zeros((kv_heads, (plan.num_rows + 1) * plan.num_blocks, shared))
    cells.index_add_(1, cell, share)
    table = cells.view(kv_heads, -1, plan.num_blocks, shared)[:, : plan.num_rows]
    return table.permute(1, 2, 0, 3).flatten(2)


def block_shares(stats: Tensor, row: Tensor, block: Tensor, rows: int, blocks: int) -> Tensor:
    """Shares of attention per block, from partial results: float32 [L, rows, blocks, H].

    `stats` [L, 2, E, H]: peaks (in powers of 2) and totals of E partial results, as the fused kernels
    leave them; `row`, `block` [E] int64: whose each is. Sums to 1 over blocks; each row has a result.
    """
    peak, total = stats.unbind(1)
    layers, entries, heads = peak.shape
    index = row[None, :, None].expand(layers, entries, heads)
    top = peak.new_full((layers, rows, heads), -torch.inf).scatter_reduce_(1, index, peak, "amax")
    weight = total * (peak - top.index_select(1, row)).exp2_()
    cells = peak.new_zeros((layers, rows * blocks, heads)).index_add_(1, row * blocks + block, weight)
    table = cells.view(layers, rows, blocks, heads)
    return table / table.sum(2, keepdim=True)


def _joined(parts: tuple[Tensor, ...]) -> Tensor:
    """The partial results of all buckets, bucket after bucket."""
    return torch.cat(parts, dim=1)


def attention_over_view_reference(
    queries: list[Tensor], keys: list[Tensor], values: list[Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    """One row's attention as it is defined: join what its segments hold, then softmax.

    Per segment: the row's query turned for it [H, D], and the keys and values that the row sees
    [H_kv, tokens, D]. -> float32 [H, D], and the segments' shares of attention [segments, H].
    """
    heads, kv_heads = queries[0].shape[0], keys[0].shape[0]
    lengths = [key.shape[1] for key in keys]
    outs, shares = [], []
    for head in range(heads):
        kv_head = head * kv_heads // heads
        scores = [
            key[kv_head].float() @ query[head].float() * scale
            for query, key in zip(queries, keys, strict=True)
        ]
        weights = torch.softmax(torch.cat(scores), dim=0)
        outs.append(weights @ torch.cat([value[kv_head].float() for value in values]))
        shares.append(torch.stack([part.sum() for part in weights.split(lengths)]))
    return torch.stack(outs), torch.stack(shares, dim=1)
