"""Shares with their confidence intervals. Knows counts; no model, no runs."""

from __future__ import annotations

import math
from dataclasses import dataclass

Z95 = 1.959963984540054
"""How many standard deviations of a normal distribution hold 95 % of it, to both sides."""


def wilson(hits: int, of: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a share: where the true share lies with 95 % confidence.

    Unlike the interval of the normal distribution it stays within [0, 1] and is right for shares of 0 and
    1. Raises ValueError unless 0 <= hits <= of and of > 0.
    """
    if not 0 <= hits <= of or of == 0:
        raise ValueError(f"a share needs 0 <= hits <= of and of > 0, not {hits} of {of}")
    share = hits / of
    spread = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    middle = share + z * z / (2 * of)
    scale = 1 + z * z / of
    # Rounding must not leave a share outside of its own interval.
    low, high = (middle - spread) / scale, (middle + spread) / scale
    return max(0.0, min(low, share)), min(1.0, max(high, share))


@dataclass(frozen=True)
class Share:
    """`hits` of `of`."""

    hits: int
    of: int

    @property
    def value(self) -> float:
        """Between 0 and 1; NaN of nothing."""
        return self.hits / self.of if self.of else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of Wilson; (0, 1) of nothing."""
        return wilson(self.hits, self.of) if self.of else (0.0, 1.0)

    def __str__(self) -> str:
        if not self.of:
            return "–"
        low, high = self.interval
        return f"{100 * self.value:.1f} % ({100 * low:.1f}–{100 * high:.1f})"


def mean(values: list[float]) -> float:
    """The mean; NaN of nothing."""
    return math.fsum(values) / len(values) if values else math.nan
