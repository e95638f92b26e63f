"""Spoken questions that arrive word by word, and what changes them in the middle of the answer.

Knows words and answers. Does not know what has been heard so far, or who listens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from random import Random

from .pieces import between, drawn, held_out, pick, weighted
from .words import number_word

MOST = 40
_ADD, _TAKE, _TIMES = "plus", "minus", "times"
_OPENINGS = ("what is", "how much is", "tell me, what is")
_THINGS = ("apples", "coins", "books", "pages", "beans")
_GAINS, _LOSSES = ("buy", "find", "get"), ("lose", "give away", "sell")
_FILLERS = ("um", "well", "so")


@dataclass(frozen=True)
class Utterance:
    """A spoken question. `spoken` are its words with fillers; the last one ends in a question mark.

    `things` is empty for a bare sum, else what the story counts; `verb` is then what happens to them.
    """

    opening: str
    left: int
    operation: str
    right: int
    things: str
    verb: str
    spoken: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return " ".join(_sentence(self))

    @property
    def words(self) -> tuple[str, ...]:
        return self.spoken

    @property
    def text(self) -> str:
        return " ".join(self.spoken)

    @cached_property
    def complete(self) -> tuple[bool, ...]:
        """For each prefix of one word or more, whether the question is complete."""
        return tuple(word.endswith("?") for word in self.spoken)

    @property
    def result(self) -> int:
        return _compute(self.left, self.operation, self.right)

    @property
    def answer(self) -> str:
        return f"It is {number_word(self.result)}."

    def changed(self, rng: Random) -> tuple[str, Utterance]:
        """What the speaker says to change the question, and the question that it then is."""
        while True:
            operation, right = _operation(rng, self.left)
            verb = pick(rng, _GAINS if operation == _ADD else _LOSSES) if self.things else ""
            if (self.things and operation == _TIMES) or (operation, right) == (self.operation, self.right):
                continue
            other = Utterance(self.opening, self.left, operation, right, self.things, verb)
            if held_out(other) and not held_out(self):
                continue
            said = f"no wait, i {verb} {number_word(right)}?" if self.things else ""
            return said or f"no wait, {operation} {number_word(right)}?", other


def make_utterance(rng: Random, held_out: bool | None = None) -> Utterance:
    """A sum, or a story of two sentences; three in ten have fillers. Results are 0 to 40."""
    utterance = drawn(lambda: _draft(rng), held_out)
    spoken = _sentence(utterance)
    if rng.random() < 0.3:
        spoken.insert(between(rng, 0, len(spoken) - 1), pick(rng, _FILLERS))
    return Utterance(
        utterance.opening,
        utterance.left,
        utterance.operation,
        utterance.right,
        utterance.things,
        utterance.verb,
        tuple(spoken),
    )


def _draft(rng: Random) -> Utterance:
    left = between(rng, 0, 20)
    operation, right = _operation(rng, left)
    if operation == _TIMES or rng.random() < 0.6:
        return Utterance(pick(rng, _OPENINGS), left, operation, right, "", "")
    verb = pick(rng, _GAINS if operation == _ADD else _LOSSES)
    return Utterance("", left, operation, right, pick(rng, _THINGS), verb)


def _operation(rng: Random, left: int) -> tuple[str, int]:
    operation = weighted(rng, ((_ADD, 0.45), (_TAKE, 0.35), (_TIMES, 0.2)))
    most = 20
    if operation == _TAKE:
        most = left
    elif operation == _TIMES and left:
        most = min(20, MOST // left)
    return operation, between(rng, 0, most)


def _compute(left: int, operation: str, right: int) -> int:
    if operation == _TIMES:
        return left * right
    return left + right if operation == _ADD else left - right


def _sentence(utterance: Utterance) -> list[str]:
    left, right = number_word(utterance.left), number_word(utterance.right)
    if utterance.things:
        said = f"i have {left} {utterance.things} and {utterance.verb} {right}. how many now?"
    else:
        said = f"{utterance.opening} {left} {utterance.operation} {right}?"
    return said.split(" ")
