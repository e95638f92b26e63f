"""Rows of logits with all kinds of options, and whether a drawn token is the one that `sample` draws.

Knows `kernels.sampling`. Who draws is the caller's.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncllm_nb.kernels.sampling import look_at_beginning, option_row, sample

ROUNDING = 1e-12
"""Where a border of float64 sums of probabilities is nearer than this, either neighbour is right."""


@dataclass(frozen=True)
class Options:
    """How a row is drawn."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = 0.5
    forbidden: tuple[int, ...] = ()


def combinations(top_k: int, uniform: tuple[float, ...]) -> list[Options]:
    """Each filter alone, all of them together, none; each with all numbers."""
    return [
        Options(1.0 + 0.1 * index, k, p, m, u, forbidden=(0, 5) if index % 2 else ())
        for index, (k, p, m, u) in enumerate(
            itertools.product((0, top_k), (1.0, 0.9), (0.0, 0.02), uniform),
        )
    ]


def table(rows: list[Options], device: torch.device) -> Tensor:
    """Their rows of options."""
    return torch.tensor([option_row(**vars(row)) for row in rows], dtype=torch.float64, device=device)


def reference(logits: Tensor, rows: list[Options]) -> tuple[Tensor, Tensor]:
    """What `sample` draws from `logits`: ids and log-probabilities."""

    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(row, name) for row in rows], dtype=dtype, device=logits.device)

    filters: dict[str, Any] = {name: column(name, torch.float32) for name in ("top_p", "min_p", "uniform")}
    return sample(
        logits,
        temperature=column("temperature", torch.float32),
        top_k=column("top_k", torch.int64),
        forbidden=[row.forbidden for row in rows],
        **filters,
    )


def assert_drawn(ids: Tensor, logits: Tensor, rows: list[Options]) -> int:
    """Assert that `ids` are what `sample` draws, except where rounding decides. -> how many those are."""
    expected, _ = reference(logits, rows)
    differing = torch.nonzero(ids != expected)[:, 0].tolist()
    for row in differing:
        one = slice(row, row + 1)
        probs = look_at_beginning(logits[one], table(rows[one], logits.device)).probs[0]
        assert probs[ids[row]] > 0, rows[row]
        found = f"{int(ids[row])} instead of {int(expected[row])}"
        assert distance_to_border(probs, rows[row]) < ROUNDING, f"{found} with {rows[row]}"
    return len(differing)


def distance_to_border(probs: Tensor, row: Options) -> float:
    """How near the drawn number, or the end of top-p, is to a border between two tokens of one row."""
    ordered = probs.double().sort(descending=True).values
    reached = ordered.cumsum(0)
    near = torch.inf
    top_k = min(row.top_k or len(ordered), len(ordered))
    top_p, min_p, uniform = torch.tensor([row.top_p, row.min_p, row.uniform], device=probs.device)
    keep = ordered >= (min_p * probs.max()).double()
    keep[top_k:] = False
    if row.top_p < 1:
        nucleus = top_p.double() * reached[top_k - 1]
        near = float((reached - nucleus).abs().min())
        keep &= reached - ordered < nucleus
    target = uniform.double() * (ordered * keep).sum()
    return min(near, float((reached - target).abs().min()))
