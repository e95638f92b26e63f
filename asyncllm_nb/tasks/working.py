"""How a solution is written down: lines, the check, and what is redone when the check finds something.

Knows problems, and writes paragraphs. Draws nothing: the same problem is always written in the same way.
"""

from __future__ import annotations

from typing import NamedTuple

from .arithmetic import Problem
from .words import capital

_SIGNS = {"more": "+", "fewer": "-", "twice": "*", "three times": "*", "half": "/"}
_FACTORS = {"twice": 2, "three times": 3, "half": 2}
_REFERS = {
    "more": "{n} more than {x}",
    "fewer": "{n} fewer than {x}",
    "twice": "twice {x}",
    "three times": "three times {x}",
    "half": "half {x}",
    "both": "{x}",
}
"""What a line says that a quantity refers to. n: its number, x: what it is derived from."""


class Paragraph(NamedTuple):
    """One line of the thinking. `statement`: the quantity that it establishes, "the red box holds 15 coins".

    `reopens`: it says that an earlier line is wrong, without a value in its place.
    """

    text: str
    statement: str | None = None
    reopens: bool = False


def line(problem: Problem, place: int) -> Paragraph:
    """The line that recalls or computes a quantity. Behind the last quantity: the sum of two chains.

    A computed one says first what it refers to, then recalls that, so that each word follows from one place
    above: "The blue box: 7 more than the red box; the red box holds 12, 12 + 7 = 19, so ..."
    """
    domain, values = problem.domain, problem.values
    statement = problem.statement(place)
    if place == len(problem.kinds):
        left, right = problem.asked
        found = f"Together they {domain.verb} {values[left]} + {values[right]} = {problem.answer}"
        return Paragraph(f"{found} {domain.unit}.", statement)
    kind = problem.kinds[place]
    if kind == "base":
        return Paragraph(capital(statement) + ".", statement)
    of = problem.operands[place]
    if kind == "both":
        work = f"{values[of[0]]} + {values[of[1]]}"
    else:
        work = f"{values[of[0]]} {_SIGNS[kind]} {_FACTORS.get(kind, problem.numbers[place])}"
    refers = _REFERS[kind].format(n=problem.numbers[place], x=" and ".join(problem.entities[i] for i in of))
    recalled = ", ".join(f"{problem.entities[i]} {domain.verbs} {values[i]}" for i in of)
    begun = f"{capital(problem.entities[place])}: {refers}; {recalled}"
    return Paragraph(f"{begun}, {work} = {values[place]}, so {statement}.", statement)


def lines(problem: Problem, start: int = 0) -> list[Paragraph]:
    """All lines from a quantity on, with the sum of two chains."""
    return [line(problem, place) for place in range(start, len(problem.kinds) + (problem.second > 0))]


def check(problem: Problem) -> Paragraph:
    """The check that finds nothing: every sentence in short form."""
    return Paragraph("Check: " + ", ".join(map(problem.short, range(len(problem.kinds)))) + ".")


def check_finds(problem: Problem, place: int, used: int) -> Paragraph:
    """The check that finds at one sentence that another number was used."""
    short = ", ".join(map(problem.short, range(place + 1)))
    told = wait(problem, place)
    return Paragraph(f"Check: {short}, not {used}. {told.text}", told.statement, told.reopens)


def wait(problem: Problem, place: int, used: int | None = None) -> Paragraph:
    """ "Wait, the red box holds 15 coins." With `used`: "Wait, ... coins, not 12." """
    clause = problem.clause(place)
    base = problem.kinds[place] == "base"
    text = f"Wait, {clause}." if used is None else f"Wait, {clause}, not {used}."
    return Paragraph(text, clause if base else None, not base)


def after_wait(problem: Problem, place: int, written: int | None = None) -> list[Paragraph]:
    """The lines behind a "Wait": from the first that is missing or wrong. What it just said is not repeated.

    `written`: how many lines stand above, all if None.
    """
    start = place if written is None else min(place, written)
    if start == place and problem.kinds[place] == "base":
        start += 1
    return lines(problem, start)


def solution(problem: Problem) -> list[Paragraph]:
    """Lines and the check."""
    return [*lines(problem), check(problem)]


def found_late(problem: Problem, place: int, written: Problem) -> tuple[list[Paragraph], list[Paragraph]]:
    """A solution that used another number in one sentence: what was written, and what is then found.

    `problem` has the right number at `place`, `written` the one that was used.
    """
    found = check_finds(problem, place, written.numbers[place])
    return lines(written), [found, *after_wait(problem, place), check(problem)]
