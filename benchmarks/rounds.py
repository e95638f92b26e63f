"""Two ways of doing the same work, measured in turns: what a ratio of speeds is made of.

Knows numbers and callables. Knows nothing about models. Speeds taken on a shared machine drift by
tens of per cent within minutes, so A and B take turns, each round begins with the other one, and what
is compared are the two numbers of one round.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

Measure = Callable[[], Awaitable[float]]


@dataclass(frozen=True)
class Compared:
    """The numbers of all rounds, ours and theirs, in the same unit."""

    ours: tuple[float, ...]
    theirs: tuple[float, ...]

    @property
    def median_ours(self) -> float:
        return median(self.ours)

    @property
    def median_theirs(self) -> float:
        return median(self.theirs)

    @property
    def ratios(self) -> list[float]:
        """Ours by theirs, round by round."""
        return [a / b for a, b in zip(self.ours, self.theirs, strict=True)]

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios, which is not the ratio of the medians."""
        return median(self.ratios)

    def as_json(self) -> dict[str, Any]:
        """All that is written to a file."""
        return asdict(self) | {
            "median_ours": self.median_ours,
            "median_theirs": self.median_theirs,
            "ratio": self.ratio,
            "ratio_range": [min(self.ratios), max(self.ratios)],
        }


async def in_turns(ours: Measure, theirs: Measure, rounds: int, *, warm_up: bool = True) -> Compared:
    """Call both `rounds` times, in turns; `warm_up`: once before, whose numbers are thrown away."""
    if warm_up:
        await ours()
        await theirs()
    pairs = []
    for number in range(rounds):
        if number % 2 == 0:
            a = await ours()
            b = await theirs()
        else:
            b = await theirs()
            a = await ours()
        pairs.append((a, b))
    return Compared(*map(tuple, zip(*pairs, strict=True)))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of `values` that at least `share` (0 to 1) of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]
