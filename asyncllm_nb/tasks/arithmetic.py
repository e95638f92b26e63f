"""Word problems: named quantities, each given or derived from earlier ones, and a question.

Knows what is asked and what the answer is, also after a correction. Does not know how a solution is
written down: that is `working`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random

from .pieces import between, drawn, held_out, pick, several, weighted
from .words import DOMAINS, SENTENCES, Domain, capital

LARGEST = 199
SMALLEST = 2
BASE = (2, 60)
NUMBER = (2, 20)

RELATIONS = (
    ("more", 0.28),
    ("fewer", 0.24),
    ("twice", 0.14),
    ("three times", 0.10),
    ("half", 0.12),
    ("both", 0.12),
)
PREVIOUS = 0.4
"""How often a quantity is said to refer to the one before it; else it refers to any earlier one."""
CORRECTABLE = ("base", "more", "fewer")
"""Kinds of quantities whose sentence has a number that a correction can change."""


class NotCorrectable(ValueError):
    """No other number in any sentence of a problem changes its answer. One in a million is so."""


@dataclass(frozen=True)
class Quantity:
    """One quantity of a problem. `operands` are the places of the quantities that it refers to."""

    entity: str
    sentence: str
    short: str
    value: int
    operands: tuple[int, ...]
    kind: str
    number: int


@dataclass(frozen=True)
class Correction:
    """One sentence of a problem with another number, and the problem that it makes of it.

    `text` has neither a line break before nor after; `clause` is the sentence without capital and stop.
    """

    index: int
    old: int
    new: int
    clause: str
    problem: Problem

    @property
    def text(self) -> str:
        return f"Correction: {self.clause}."


@dataclass(frozen=True)
class Problem:
    """A problem, spelled out. Per quantity: what it is called, its kind, number, operands and wording.

    `second` is the place where a second chain begins, 0 if there is one chain. With two chains the
    question asks for the sum of the last quantities of both.
    """

    domain: Domain
    entities: tuple[str, ...]
    kinds: tuple[str, ...]
    numbers: tuple[int, ...]
    operands: tuple[tuple[int, ...], ...]
    wordings: tuple[int, ...]
    values: tuple[int, ...]
    second: int = 0

    @cached_property
    def key(self) -> str:
        """The instance: kinds, names and numbers. Wordings do not make another problem."""
        parts = [f"{self.domain.unit} {self.second}"]
        parts += [
            f"{kind} {entity} {number} {operands}"
            for kind, entity, number, operands in zip(
                self.kinds, self.entities, self.numbers, self.operands, strict=True
            )
        ]
        return "; ".join(parts)

    @property
    def unit(self) -> str:
        return self.domain.unit

    @property
    def asked(self) -> tuple[int, ...]:
        """The places of the quantities that the question names: one, or the ends of two chains."""
        last = len(self.kinds) - 1
        return (self.second - 1, last) if self.second else (last,)

    @property
    def entity(self) -> str:
        """What the question asks for: "the green box", or "the green box and the white box"."""
        return " and ".join(self.entities[place] for place in self.asked)

    @property
    def answer(self) -> int:
        return sum(self.values[place] for place in self.asked)

    @property
    def question(self) -> str:
        domain = self.domain
        if self.second:
            return f"How many {domain.unit} do {self.entity} {domain.verb} together?"
        return f"How many {domain.unit} does {self.entity} {domain.verb}?"

    @cached_property
    def text(self) -> str:
        """What the user says: all sentences and the question, one space between them."""
        sentences = [self.sentence(place, self.wordings[place]) for place in range(len(self.kinds))]
        return " ".join([*sentences, self.question])

    @property
    def answer_sentence(self) -> str:
        return capital(self.statement(len(self.kinds) if self.second else self.asked[0])) + "."

    @cached_property
    def thinking(self) -> tuple[str, ...]:
        """The paragraphs of the solution, the check included."""
        from .working import solution  # which imports this module

        return tuple(paragraph.text for paragraph in solution(self))

    @cached_property
    def quantities(self) -> tuple[Quantity, ...]:
        return tuple(
            Quantity(
                self.entities[place],
                self.sentence(place, self.wordings[place]),
                self.short(place),
                self.values[place],
                self.operands[place],
                self.kinds[place],
                self.numbers[place],
            )
            for place in range(len(self.kinds))
        )

    def sentence(self, place: int, wording: int = 0) -> str:
        """A quantity's sentence as a user says it, with capital and stop."""
        entity, operands = self.entities[place], self.operands[place]
        return SENTENCES[self.kinds[place]][wording].format(
            e=entity,
            E=capital(entity),
            v=self.domain.verbs,
            u=self.domain.unit,
            n=self.numbers[place],
            x=self.entities[operands[0]] if operands else "",
            y=self.entities[operands[1]] if len(operands) > 1 else "",
        )

    def clause(self, place: int) -> str:
        """A quantity's sentence as it is restated: "the red box holds 15 coins"."""
        entity = self.entities[place]
        return entity + self.sentence(place)[len(entity) : -1]

    def short(self, place: int) -> str:
        """The short form of a check: "the red box 15", "the blue box 7 more", "the green box twice"."""
        kind, entity = self.kinds[place], self.entities[place]
        if kind == "base":
            return f"{entity} {self.numbers[place]}"
        if kind in CORRECTABLE:
            return f"{entity} {self.numbers[place]} {kind}"
        return f"{entity} {kind}"

    def statement(self, place: int) -> str:
        """What a quantity was found to be: "the blue box holds 19 coins". Behind the last: the sum."""
        domain = self.domain
        if place == len(self.kinds):
            return f"together they {domain.verb} {self.answer} {domain.unit}"
        return f"{self.entities[place]} {domain.verbs} {self.values[place]} {domain.unit}"

    def with_number(self, place: int, number: int) -> Problem | None:
        """The problem with another number in one sentence; None if some value would leave its range."""
        numbers = (*self.numbers[:place], number, *self.numbers[place + 1 :])
        values = evaluate(self.kinds, numbers, self.operands)
        if values is None:
            return None
        return Problem(
            self.domain,
            self.entities,
            self.kinds,
            numbers,
            self.operands,
            self.wordings,
            values,
            self.second,
        )

    def corrected(self, rng: Random) -> Correction:
        """A correction that changes the answer. What it makes of a problem for training is for training.

        Raises:
            NotCorrectable: no other number of any sentence changes the answer; draw another problem.
        """
        places = [place for place, kind in enumerate(self.kinds) if kind in CORRECTABLE]
        for _ in range(20):
            place = pick(rng, places)
            low, high = BASE if self.kinds[place] == "base" else NUMBER
            found = self._correction(place, between(rng, low, high))
            if found is not None:
                return found
        for place in places:
            low, high = BASE if self.kinds[place] == "base" else NUMBER
            for number in range(low, high + 1):
                found = self._correction(place, number)
                if found is not None:
                    return found
        raise NotCorrectable(f"no number of this problem can be corrected: {self.text}")

    def _correction(self, place: int, number: int) -> Correction | None:
        if number == self.numbers[place]:
            return None
        other = self.with_number(place, number)
        if other is None or other.answer == self.answer or (held_out(other) and not held_out(self)):
            return None
        return Correction(place, self.numbers[place], number, other.clause(place), other)


def derived(kind: str, number: int, operands: Sequence[int]) -> int | None:
    """The value of a quantity from its number and its operands' values; None if out of range."""
    if kind == "base":
        value = number
    elif kind == "more":
        value = operands[0] + number
    elif kind == "fewer":
        value = operands[0] - number
    elif kind == "twice":
        value = operands[0] * 2
    elif kind == "three times":
        value = operands[0] * 3
    elif kind == "half":
        value = operands[0] // 2 if operands[0] % 2 == 0 else 0
    else:
        value = operands[0] + operands[1]
    return value if SMALLEST <= value <= LARGEST else None


def evaluate(
    kinds: Sequence[str], numbers: Sequence[int], operands: Sequence[tuple[int, ...]]
) -> tuple[int, ...] | None:
    """The values of all quantities in order; None if one is out of range."""
    values: list[int] = []
    for kind, number, places in zip(kinds, numbers, operands, strict=True):
        value = derived(kind, number, [values[place] for place in places])
        if value is None:
            return None
        values.append(value)
    return tuple(values)


def make_problem(
    rng: Random, steps: tuple[int, int] = (3, 6), chains: int = 1, held_out: bool | None = None
) -> Problem:
    """A problem of so many quantities, the sum of two chains not counted.

    `held_out`: True for evaluation, False for training, None for either.

    Raises:
        ValueError: steps outside 1 to 6, or chains that are neither 1 nor 2 or longer than the steps.
    """
    if not 1 <= steps[0] <= steps[1] <= 6:
        raise ValueError(f"steps is (fewest, most), within 1 to 6, not {steps}")
    if chains not in (1, 2) or chains > steps[0]:
        raise ValueError(f"chains is 1, or 2 with at least 2 steps, not {chains} with steps {steps}")
    return drawn(lambda: _draft(rng, between(rng, *steps), chains), held_out)


def _draft(rng: Random, count: int, chains: int) -> Problem:
    domain = pick(rng, DOMAINS)
    second = between(rng, 1, count - 1) if chains == 2 else 0
    kinds: list[str] = []
    numbers: list[int] = []
    operands: list[tuple[int, ...]] = []
    values: list[int] = []
    for place in range(count):
        start = second if second and place >= second else 0
        last = place in (second - 1, count - 1)
        base = place == start or (place > start and not last and rng.random() < 0.12)
        kind, number, of = ("base", between(rng, *BASE), ()) if base else _relation(rng, values, start)
        value = derived(kind, number, [values[operand] for operand in of])
        assert value is not None, "a relation is drawn so that its value is in range"
        kinds.append(kind)
        numbers.append(number)
        operands.append(of)
        values.append(value)
    return Problem(
        domain,
        tuple(several(rng, domain.entities, count)),
        tuple(kinds),
        tuple(numbers),
        tuple(operands),
        tuple(0 if rng.random() < 0.6 else between(rng, 1, 2) for _ in kinds),
        tuple(values),
        second,
    )


def _relation(rng: Random, values: list[int], start: int) -> tuple[str, int, tuple[int, ...]]:
    """A kind, its number (0 if it has none) and the places that it refers to, with a value in range."""
    place = len(values)
    while True:
        kind = weighted(rng, RELATIONS)
        first = place - 1 if rng.random() < PREVIOUS else between(rng, start, place - 1)
        of: tuple[int, ...] = (first,)
        if kind == "both":
            if place - start < 2:
                continue
            other = between(rng, start, place - 2)
            of = (min(first, other), max(first, other)) if other != first else (other, place - 1)
        number = between(rng, *NUMBER) if kind in CORRECTABLE else 0
        if derived(kind, number, [values[operand] for operand in of]) is not None:
            return kind, number, of
