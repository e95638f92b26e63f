"""How a stream chooses its tokens: checked parameters, and the random number of each token.

Knows numbers only, no logits; the arithmetic on those is `kernels.sampling`. A token's random number
depends on the stream's seed and on how many tokens it has yielded, never on what else ran or was drawn
in vain.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from ..kernels.sampling import MOST_FORBIDDEN, option_row
from .text import Codec


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 filter nothing."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: tuple[int, ...] = (0,)
    forbidden: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} is a number, not {value!r}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be 0 (greedy) or more, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p must be above 0 and at most 1 (1: no filter), not {self.top_p}"
            )
        if not (isinstance(self.top_k, int) and self.top_k >= 0):
            raise ValueError(
                f"top_k must be a whole number, 0 (no filter) or more, not {self.top_k}"
            )
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p must be at least 0 (no filter) and below 1, not {self.min_p}")

    @property
    def takes_best(self) -> bool:
        """Is the most probable token of all always the one that is drawn?"""
        return self.temperature == 0 and not self.forbidden

    def uniform(self, num_yielded: int) -> float:
        """The number in [0, 1) that chooses the token after `num_yielded` ones."""
        if self.temperature == 0:
            return 0.0
        return float(np.random.default_rng([*self.seed, num_yielded]).random())


@dataclass(frozen=True, slots=True)
class Choice:
    """How a stream chooses the token after `num_yielded` ones."""

    params: SamplingParams
    num_yielded: int

    @property
    def uniform(self) -> float:
        """The number in [0, 1) that chooses it."""
        return self.params.uniform(self.num_yielded)

    @property
    def fits_in_step(self) -> bool:
        """Can a step on a GPU draw it, without the CPU in between?"""
        return len(self.params.forbidden) <= MOST_FORBIDDEN

    @property
    def following(self) -> Choice:
        """How the token behind this one is chosen."""
        return Choice(self.params, self.num_yielded + 1)

    @property
    def options(self) -> list[float]:
        """The row of options that `kernels.sampling` takes."""
        params = self.params
        return option_row(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            uniform=self.uniform,
            forbidden=params.forbidden,
        )


MOST_PROBABLE = Choice(SamplingParams(), 0)


def stream_seed(seed: int | None, engine_seed: int, num_streams: int) -> tuple[int, ...]:
    """What a stream's random numbers derive from: its own seed, or the engine's and a running count."""
    if seed is None:
        return (0, _whole(engine_seed), num_streams)
    return (1, _whole(seed))


def _whole(seed: int) -> int:
    """A seed as the random generator takes it: not negative. Raises TypeError."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be a whole number or None, not {seed!r}")
    return seed % (1 << 64)


def parse_forbidden(
    forbid: str | int | Collection[str | int], codec: Codec, vocab_size: int
) -> tuple[int, ...]:
    """Token ids of the `forbid` argument: ids, or strings that are one token each.

    Raises ValueError for a string of several tokens and for an id outside the vocabulary.
    """
    ids = set()
    if not isinstance(forbid, str | int | Collection):
        raise TypeError(f"forbid takes token ids or single-token strings, not {forbid!r}")
    for item in (forbid,) if isinstance(forbid, str | int) else forbid:
        if isinstance(item, str):
            tokens = codec.encode(item)
            if len(tokens) != 1:
                raise ValueError(
                    f"forbid takes single tokens, and {item!r} is {len(tokens)} of them: {tokens}; "
                    "give the ids that must not be drawn"
                )
            ids.add(tokens[0])
        elif not isinstance(item, int):
            raise TypeError(f"forbid takes token ids or single-token strings, not {item!r}")
        elif 0 <= item < vocab_size:
            ids.add(int(item))
        else:
            raise ValueError(f"forbid: {item} is no token id (the vocabulary has {vocab_size})")
    if len(ids) >= vocab_size:
        raise ValueError("forbid leaves no token to draw")
    return tuple(sorted(ids))
