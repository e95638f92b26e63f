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
        ids[warm] = _draw(scaled, *filters)
    return ids, logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]


def _without(logits: Tensor, forbidden: Sequence[Sequence[int]]) -> Tensor:
    """The logits, with -inf at each row's forbidden ids."""
    places = [(row, token) for row, tokens in enumerate(forbidden) for token in tokens]
    if not places:
        return logits
    rows, tokens = torch.tensor(places, device=logits.device).t()
    return logits.index_put((rows, tokens), logits.new_tensor(-torch.inf))


def _draw(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """Ids drawn from `logits` [n, vocab]: from the beginning of the order where that decides."""
    vocab = logits.shape[1]
    probs = logits.softmax(-1)
    top_k = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab)
    per_row = (probs.sum(-1, dtype=torch.float64), top_k, top_p, min_p, uniform)
    # Equal logits stand in the order of their ids: sorted by id first, then by logit, stably.
    tokens = logits.topk(min(BEGINNING, vocab), sorted=False).indices.sort().values
    order = logits.gather(1, tokens).argsort(descending=True, stable=True)
    tokens = tokens.gather(1, order)
    rank, decided = _pick(probs.gather(1, tokens), vocab, *per_row)
    ids = tokens.gather(1, rank[:, None])[:, 0]
    rest = torch.nonzero(~decided)[:, 0]
    if rest.numel():
        tokens = logits[rest].argsort(descending=True, stable=True)
        rank, _ = _pick(probs[rest].gather(1, tokens), vocab, *(x[rest] for x in per_row))
        ids[rest] = tokens.gather(1, rank[:, None])[:, 0]
    return ids


def _pick(
    probs: Tensor,
    vocab: int,
    total: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
) -> tuple[Tensor, Tensor]:
    """The rank drawn from the beginning of each row's sorted order, and whether it is certain.

    `probs` [n, c], descending, are the beginning of `vocab` probabilities that sum to `total` [n],
    float64. It decides unless a filter or the drawn number reaches beyond it.
    """
    count = probs.shape[1]
    rank = torch.arange(count, device=probs.device)
    reached = probs.cumsum(-1, dtype=torch.float64)
    by_top_k = reached.gather(1, (top_k - 1).clamp(max=count - 1)[:, None])[:, 0]
    by_top_k = torch.where(top_k == vocab, total, by_top_k)
    keep = (
        (rank < top_k[:, None])
        & (reached - probs < (top_p * by_top_k)[:, None])
        & (probs >= min_p[:, None] * probs[:, :1])
    )
    unfiltered = (top_k == vocab) & (top_p >= 1) & (min_p <= 0)
    mass = torch.where(unfiltered, total, (probs * keep).sum(-1, dtype=torch.float64))
    target = uniform * mass
    chosen = torch.minimum((reached <= target[:, None]).sum(-1), keep.sum(-1) - 1)
    ends_here = ~keep[:, -1] | (unfiltered & (reached[:, -1] > target))
    known_top_k = (top_k <= count) | (top_k == vocab)
    return chosen, (known_top_k & ends_here) | (count == vocab)
