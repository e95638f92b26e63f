"""Pieces of a training text, the marks between turns, and the draws that the generators share.

Knows no task. All draws come from `Random.random`, the one method whose numbers Python promises to keep,
so that a seed gives the same text everywhere.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple, Protocol, TypeVar

T = TypeVar("T")

USER = "<|im_start|>user\n"
END = "<|im_end|>"
CLOSE = END + "\n"
THINK = "<|im_start|>assistant\n<think>\n"
NO_THINKING = THINK + "\n</think>\n\n"
ANSWER_NEXT = "\n</think>\n\n"
"""What stands between the last paragraph of the thinking and the answer."""
BREAK = "\n\n"
"""Between two paragraphs."""

HELD_OUT_ONE_IN = 50

_BEFORE = frozenset(" .,:?\n0123456789")


class Piece(NamedTuple):
    """A run of text. `learned`: a model should learn to say it; otherwise it is given."""

    text: str
    learned: bool


Example = tuple[Piece, ...]


class Keyed(Protocol):
    """Whatever can be held out: `key` spells the instance out, so that equal keys mean equal tasks."""

    @property
    def key(self) -> str: ...


K = TypeVar("K", bound=Keyed)


def held_out(item: Keyed) -> bool:
    """Whether a task is for evaluation only. One instance in 50 is, by a hash of its key."""
    return zlib.crc32(item.key.encode()) % HELD_OUT_ONE_IN == 0


def drawn(draw: Callable[[], K], wanted: bool | None) -> K:
    """Draw until the instance is held out, or is not, as wanted. None takes the first one."""
    while True:
        item = draw()
        if wanted is None or held_out(item) == wanted:
            return item


def pick(rng: Random, items: Sequence[T]) -> T:
    return items[int(rng.random() * len(items))]


def between(rng: Random, low: int, high: int) -> int:
    """A whole number from low to high, both included."""
    return low + int(rng.random() * (high - low + 1))


def several(rng: Random, items: Sequence[T], count: int) -> list[T]:
    """So many different items, in random order."""
    rest = list(items)
    return [rest.pop(int(rng.random() * len(rest))) for _ in range(count)]


def weighted(rng: Random, choices: Sequence[tuple[T, float]]) -> T:
    """One of the choices, each with its share; the shares sum to 1."""
    left = rng.random()
    for choice, share in choices:
        left -= share
        if left < 0:
            return choice
    return choices[-1][0]


def cut(rng: Random, text: str) -> int:
    """A random place between two tokens of a text: words, digits and signs are never cut in two."""
    place = int(rng.random() * (len(text) + 1))
    while 0 < place < len(text) and not _may_cut(text, place):
        place += 1
    return place


def _may_cut(text: str, place: int) -> bool:
    after, before = text[place], text[place - 1]
    if before == "\n":
        return after != "\n"
    return after in _BEFORE


def example(*pieces: tuple[str, bool]) -> Example:
    """Pieces without the empty ones; neighbours of one sort are joined."""
    joined: list[Piece] = []
    for text, learned in pieces:
        if not text:
            continue
        if joined and joined[-1].learned == learned:
            joined[-1] = Piece(joined[-1].text + text, learned)
        else:
            joined.append(Piece(text, learned))
    return tuple(joined)
