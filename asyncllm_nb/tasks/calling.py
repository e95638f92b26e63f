"""Solutions that call: a calculator in the middle of a line, and sub-questions that open and close.

Knows the texts of both. A calculator's result and an answer that somebody else found are given; all else
is learned. Does not know who computes the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from .arithmetic import Problem, make_problem
from .pieces import (
    ANSWER_NEXT,
    BREAK,
    CLOSE,
    END,
    THINK,
    USER,
    Example,
    between,
    drawn,
    example,
    pick,
    several,
)
from .words import DOMAINS, Domain, capital
from .working import line

USE_CALC = " Use calc."
USE_SUB_QUESTIONS = " Use sub-questions."

CALL, CALL_END = "<tool_call>", "</tool_call>"
RESPONSE, RESPONSE_END = "<tool_response>", "</tool_response>"


@dataclass(frozen=True)
class Sum:
    """A problem with numbers too large for the head: a base quantity and one or two steps from it.

    Kinds are "base", "times", "more" and "fewer"; each step starts from the quantity before it.
    """

    domain: Domain
    entities: tuple[str, ...]
    kinds: tuple[str, ...]
    numbers: tuple[int, ...]
    values: tuple[int, ...]

    @property
    def key(self) -> str:
        return f"{self.domain.unit}: {' '.join(self.entities)}; {' '.join(self.kinds)}; {self.numbers}"

    @property
    def text(self) -> str:
        domain = self.domain
        question = f"How many {domain.unit} does {self.entities[-1]} {domain.verb}?"
        sentences = [capital(self.clause(place)) + "." for place in range(len(self.kinds))]
        return " ".join([*sentences, question]) + USE_CALC

    @property
    def answer(self) -> int:
        return self.values[-1]

    @property
    def answer_sentence(self) -> str:
        return f"{capital(self.entities[-1])} {self.domain.verbs} {self.answer} {self.domain.unit}."

    def clause(self, place: int) -> str:
        subject, unit = f"{self.entities[place]} {self.domain.verbs} {self.numbers[place]}", self.domain.unit
        kind = self.kinds[place]
        if kind == "base":
            return f"{subject} {unit}"
        than = self.entities[place - 1]
        if kind == "times":
            return f"{subject} times as many {unit} as {than}"
        return f"{subject} {kind} {unit} than {than}"

    def call(self, place: int) -> str:
        """What the calculator is asked for a quantity: "37 * 48"."""
        sign = {"times": "*", "more": "+", "fewer": "-"}[self.kinds[place]]
        return f"{self.values[place - 1]} {sign} {self.numbers[place]}"


def calculate(expression: str) -> int:
    """The calculator: "37 * 48" gives 1776.

    Raises:
        ValueError: not two whole numbers with +, - or * between them.
    """
    parts = expression.split()
    if len(parts) != 3 or parts[1] not in ("+", "-", "*"):
        raise ValueError(f"calc takes two whole numbers with +, - or * between them, not {expression!r}")
    kind = {"*": "times", "+": "more", "-": "fewer"}[parts[1]]
    return _computed(int(parts[0]), kind, int(parts[2]))


def _computed(left: int, kind: str, right: int) -> int:
    if kind == "times":
        return left * right
    return left + right if kind == "more" else left - right


def make_sum(rng: Random, held_out: bool | None = None) -> Sum:
    """A problem for the calculator."""
    return drawn(lambda: _draft(rng), held_out)


def _draft(rng: Random) -> Sum:
    domain = pick(rng, DOMAINS)
    kinds, numbers = ["base"], [between(rng, 11, 99)]
    values = [numbers[0]]
    for _ in range(between(rng, 1, 2)):
        before = values[-1]
        kind = pick(rng, ("times", "times", "more", "fewer"))
        if (kind == "fewer" and before < 200) or (kind == "times" and before > 99):
            kind = "more"
        low, high = (11, 99) if kind == "times" else (101, 999)
        kinds.append(kind)
        numbers.append(between(rng, low, min(high, before - 1) if kind == "fewer" else high))
        values.append(_computed(before, kind, numbers[-1]))
    entities = several(rng, domain.entities, len(kinds))
    return Sum(domain, tuple(entities), tuple(kinds), tuple(numbers), tuple(values))


def calc_example(rng: Random) -> Example:
    """A problem whose sums a calculator does."""
    task = make_sum(rng, held_out=False)
    domain = task.domain
    pieces = [(f"{USER}{task.text}{CLOSE}{THINK}", False)]
    for place, kind in enumerate(task.kinds):
        subject = f"{capital(task.entities[place])} {domain.verbs}"
        value = task.values[place]
        if kind == "base":
            pieces.append((f"{subject} {value} {domain.unit}.", True))
        else:
            pieces.append((f"{BREAK}{subject} {CALL}calc({task.call(place)}){CALL_END}", True))
            pieces.append((f"{RESPONSE}{value}{RESPONSE_END}", False))
            pieces.append((f" {value} {domain.unit}.", True))
    pieces.append((ANSWER_NEXT + task.answer_sentence + END, True))
    return example(*pieces)


def sub_question(problem: Problem, chain: int) -> str:
    """The question for the end of one chain, 0 or 1."""
    domain = problem.domain
    entity = problem.entities[problem.asked[chain]]
    return f"Sub-question: how many {domain.unit} does {entity} {domain.verb}?"


def sub_answer(problem: Problem, chain: int) -> str:
    """What the end of one chain was found to be."""
    return f"Sub-answer: {problem.statement(problem.asked[chain])}."


def sub_work(problem: Problem, chain: int) -> list[str]:
    """The lines of one chain."""
    places = range(problem.second, len(problem.kinds)) if chain else range(problem.second)
    return [line(problem, place).text for place in places]


def sub_question_example(rng: Random) -> Example:
    """A problem of two chains, with a sub-question for each.

    Both are worked out, or one was answered by somebody else, or both were. Whoever is handed a
    sub-question finds it given, and it may be the second one.
    """
    problem = make_problem(rng, (3, 6), chains=2, held_out=False)
    told = rng.random() < 0.7  # else nobody asked for sub-questions, and the first one is given
    user = problem.text + (USE_SUB_QUESTIONS if told else "")
    way = rng.random()
    handed = not told or way >= 0.55
    order = (1, 0) if handed and rng.random() < 0.5 else (0, 1)
    asked = [sub_question(problem, chain) for chain in order]
    answers = [sub_answer(problem, chain) for chain in order]
    work = [[*sub_work(problem, chain), sub_answer(problem, chain)] for chain in order]
    if way < 0.55:
        texts, given = [asked[0], *work[0], asked[1], *work[1]], int(handed)
    elif way < 0.8:
        texts, given = [asked[0], answers[0], asked[1], *work[1]], 2
    else:
        texts = [*asked, *answers] if way < 0.9 else [asked[0], *work[0], asked[1], *work[1]]
        given = len(texts)
    ending = line(problem, len(problem.kinds)).text + ANSWER_NEXT + problem.answer_sentence + END
    return example(
        (f"{USER}{user}{CLOSE}{THINK}", False),
        ("".join(text + BREAK for text in texts[:given]), False),
        (BREAK.join([*texts[given:], ending]), True),
    )
