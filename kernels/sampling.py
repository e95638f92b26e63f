"""Drawing tokens from logits: temperature, top-k, top-p, min-p, forbidden ids; one number decides.

Knows rows of logits and numbers. Knows no tokens' meaning and no random generator: the numbers come
in, so a row's token does not depend on what other rows are drawn beside it.

All three filters keep the most probable tokens, so what is kept is the beginning of the sorted
order. Sorting a whole vocabulary costs more than a step of a small model, so the beginning is
looked at first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BEGINNING = 1024
"""Tokens that are sorted at first; rows that they do not decide are sorted whole."""


def sample(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    forbidden: Sequence[Sequence[int]],
    uniform: Tensor,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row of `logits` [n, vocab]. -> ids [n] int64, float32 logprobs [n].

    Per row [n]: `temperature` (0: the most probable token, the lowest id of equals), `top_k` (0:
    off), `top_p` (1: off), `min_p` (0: off), applied in this order; `forbidden` ids that are never
    drawn; and `uniform`, in [0, 1), that picks from the cumulated probabilities of what is left,
    most probable first. The log-probability is that of the model's own distribution, before any of
    this.
    """
    logits = logits.float()
    allowed = _without(logits, forbidden)
    ids = allowed.argmax(-1)
    warm = torch.nonzero(temperature > 0)[:, 0]
    if warm.numel():
        allowed = allowed[warm]
        # The largest becomes 0 first: a tiny temperature must not make infinities of finite logits.
        scaled = (allowed - allowed.amax(-1, keepdim=True)) / temperature[warm, None]
        filters = (top_k[warm], top_p[warm], min_p[warm], uniform[warm])
        ids[warm] = _draw(scaled.softmax(-1), *filters)
    return ids, logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]


def _without(logits: Tensor, forbidden: Sequence[Sequence[int]]) -> Tensor:
    """The logits, with -inf at each row's forbidden ids."""
    places = [(row, token) for row, tokens in enumerate(forbidden) for token in tokens]
    if not places:
        return logits
    rows, tokens = torch.tensor(places, device=logits.device).t()
    return logits.index_put((rows, tokens), logits.new_tensor(-torch.inf))


def _draw(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """Ids drawn from `probs` [n, vocab]: from the beginning of the order where that decides."""
    vocab = probs.shape[1]
    limit = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab)
    per_row = (probs.sum(-1, dtype=torch.float64), limit, top_p, min_p, uniform)
    begin, tokens = probs.topk(min(BEGINNING, vocab), sorted=False)
    tokens, by_id = tokens.sort()
    begin, order = begin.gather(1, by_id).sort(descending=True, stable=True)
    rank, decided = _pick(begin, *per_row)
    ids = tokens.gather(1, order).gather(1, rank[:, None])[:, 0]
    rest = torch.nonzero(~decided)[:, 0]
    if rest.numel() and vocab > BEGINNING:
        whole, order = probs[rest].sort(descending=True, stable=True)
        rank, _ = _pick(whole, *(values[rest] for values in per_row))
        ids[rest] = order.gather(1, rank[:, None])[:, 0]
    return ids


def _pick(
    probs: Tensor, total: Tensor, limit: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """The rank drawn from the beginning of each row's sorted order, and whether it is certain.

    `probs` [n, c], descending; `total` [n] float64 is the sum of the whole row, `limit` [n] its
    top-k.
    """
    count = probs.shape[1]
    reached = probs.cumsum(-1, dtype=torch.float64)
    by_top_k = reached.gather(1, (limit - 1).clamp(max=count - 1)[:, None])[:, 0]
    by_top_k = torch.where(limit <= count, by_top_k, total)
    keep = (
        (torch.arange(count, device=probs.device) < limit[:, None])
        & (reached - probs < (top_p * by_top_k)[:, None])
        & (probs >= min_p[:, None] * probs[:, :1])
    )
    whole_row = (limit > count) & (top_p >= 1) & (min_p <= 0)
    mass = torch.where(whole_row, total, (probs * keep).sum(-1, dtype=torch.float64))
    target = uniform * mass
    rank = (reached <= target[:, None]).sum(-1)
    decided = ~keep[:, -1] | (whole_row & (reached[:, -1] > target))
    return torch.minimum(rank, keep.sum(-1) - 1), decided
