"""Drawing tokens from logits: temperature, top-k, top-p, min-p, forbidden ids; one number decides.

Knows rows of logits and numbers. Knows no tokens' meaning and no random generator: the numbers come
in, so a row's token does not depend on what other rows are drawn beside it.

Tokens stand in the order of their probabilities, as float32, equals in that of their ids. All three
filters keep the most probable ones, so what is kept is the beginning of the order. Sorting a whole
vocabulary costs more than a step of a small model, so the beginning is looked at first.
`sample_beginning` looks at no more than that and asks a GPU for no number, so it can be part of a
recorded step; it says which rows it could not decide. `sampling_triton` decides these, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BEGINNING = 1024
"""Tokens that are sorted at first; rows that they do not decide are sorted whole."""

OPTIONS = ("temperature", "top_k", "top_p", "min_p", "uniform")
"""What stands in a row of options, in this order; behind that the forbidden ids."""

MOST_FORBIDDEN = 16
"""Forbidden ids that a row of options has room for."""

OPTIONS_WIDTH = len(OPTIONS) + MOST_FORBIDDEN


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


def option_row(
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    uniform: float,
    forbidden: Sequence[int],
) -> list[float]:
    """A row of options for `sample_beginning`: OPTIONS_WIDTH numbers, -1 where no id is forbidden.

    At most MOST_FORBIDDEN ids.
    """
    assert len(forbidden) <= MOST_FORBIDDEN
    padding = [-1.0] * (MOST_FORBIDDEN - len(forbidden))
    return [temperature, float(top_k), top_p, min_p, uniform, *map(float, forbidden), *padding]


class Beginning(NamedTuple):
    """What the most probable BEGINNING tokens say about rows of logits, and what was found on the way."""

    ids: Tensor  # [n] int64: what is drawn, if decided
    decided: Tensor  # [n] bool
    probs: Tensor  # [n, vocab] float32 that rows with a temperature draw from: 0 where forbidden
    total: Tensor  # [n] float64, their sums
    peak: Tensor  # [n] float32, the largest of them


def sample_beginning(logits: Tensor, options: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `sample` draws, as far as the most probable BEGINNING tokens decide it.

    `logits` [n, vocab], `options` float64 [n, OPTIONS_WIDTH], rows as `option_row` makes them. -> ids
    [n] int64, their float32 logprobs [n], and bool [n]: is it the token that `sample` draws? If not, the
    id is one of the vocabulary and nothing more. Logits that are not finite change no other row.
    """
    beginning = look_at_beginning(logits, options)
    return beginning.ids, logprobs_of(logits, beginning.ids), beginning.decided


def look_at_beginning(logits: Tensor, options: Tensor) -> Beginning:
    """`sample_beginning` without log-probabilities, and with what draws the rows that it leaves open."""
    logits = logits.float()
    temperature, top_k, top_p, min_p, uniform = options[:, : len(OPTIONS)].unbind(1)
    forbidden = options[:, len(OPTIONS) :].long()
    added = logits.new_zeros(forbidden.shape).masked_fill_(forbidden >= 0, -torch.inf)
    allowed = logits.scatter_add(1, forbidden.clamp(min=0), added)
    is_cold = temperature <= 0
    divisor = temperature.float().masked_fill(is_cold, 1.0)
    scaled = (allowed - allowed.amax(-1, keepdim=True)) / divisor[:, None]
    scaled.masked_fill_(is_cold[:, None], 0.0)
    filters = (top_k.long(), top_p.float(), min_p.float(), uniform.float())
    warm = _draw_beginning(scaled.softmax(-1), *filters)
    return warm._replace(
        ids=torch.where(is_cold, allowed.argmax(-1), warm.ids), decided=warm.decided | is_cold
    )


def logprobs_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities [n] float32 of one id of each row, in the model's own distribution."""
    logits = logits.float()
    return logits.gather(1, ids[:, None])[:, 0] - logits.logsumexp(-1)


def _without(logits: Tensor, forbidden: Sequence[Sequence[int]]) -> Tensor:
    """The logits, with -inf at each row's forbidden ids."""
    places = [(row, token) for row, tokens in enumerate(forbidden) for token in tokens]
    if not places:
        return logits
    rows, tokens = torch.tensor(places, device=logits.device).t()
    return logits.index_put((rows, tokens), logits.new_tensor(-torch.inf))


def _draw(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """Ids drawn by `probs` [n, vocab]: from the beginning of the order where that decides."""
    ids, decided, _, total, _ = _draw_beginning(probs, top_k, top_p, min_p, uniform)
    rest = torch.nonzero(~decided)[:, 0]
    if rest.numel():
        ordered = probs[rest].sort(descending=True, stable=True)
        filters = (x[rest] for x in (top_k, top_p, min_p, uniform))
        rank, _ = _pick(ordered.values, total[rest], probs.shape[1], *filters)
        ids[rest] = ordered.indices.gather(1, rank[:, None])[:, 0]
    return ids


def _draw_beginning(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Beginning:
    """Ids drawn from the beginning of the order, and whether each is certain."""
    vocab = probs.shape[1]
    total = probs.sum(-1, dtype=torch.float64)
    # Equals stand in the order of their ids: sorted by id first, then by probability, stably.
    tokens = probs.topk(min(BEGINNING, vocab), sorted=False).indices.sort().values
    first, order = probs.gather(1, tokens).sort(descending=True, stable=True)
    rank, decided = _pick(first, total, vocab, top_k, top_p, min_p, uniform)
    ids = tokens.gather(1, order.gather(1, rank[:, None]))[:, 0]
    return Beginning(ids, decided, probs, total, first[:, 0])


def _pick(
    probs: Tensor,
    total: Tensor,
    vocab: int,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
) -> tuple[Tensor, Tensor]:
    """The rank drawn from the beginning of each row's sorted order, and whether it is certain.

    `probs` [n, c], descending, are the beginning of `vocab` probabilities whose float64 sums are `total`
    [n]. It decides unless a filter or the drawn number reaches beyond it, or the token drawn has equals
    beyond it.
    """
    count = probs.shape[1]
    top_k = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab)
    rank = torch.arange(count, device=probs.device)
    reached = probs.cumsum(-1, dtype=torch.float64)
    by_top_k = reached.gather(1, (top_k - 1).clamp(max=count - 1)[:, None])[:, 0]
    by_top_k = torch.where(top_k == vocab, total, by_top_k)
    keep = (
        (probs > 0)  # the sums' rounding must not make a forbidden token the last one
        & (rank < top_k[:, None])
        & (reached - probs < (top_p * by_top_k)[:, None])
        & (probs >= min_p[:, None] * probs[:, :1])
    )
    unfiltered = (top_k == vocab) & (top_p >= 1) & (min_p <= 0)
    mass = torch.where(unfiltered, total, (probs * keep).sum(-1, dtype=torch.float64))
    target = uniform * mass
    chosen = torch.minimum((reached <= target[:, None]).sum(-1), keep.sum(-1) - 1).clamp(min=0)
    ends_here = ~keep[:, -1] | (unfiltered & (reached[:, -1] > target))
    known_top_k = (top_k <= count) | (top_k == vocab)
    no_equals_beyond = probs.gather(1, chosen[:, None])[:, 0] > probs[:, -1]
    return chosen, (known_top_k & ends_here & no_equals_beyond) | (count == vocab)
