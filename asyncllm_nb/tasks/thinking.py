"""Problems worked out in training texts: when a correction is read, overlooked, found and taken up.

Knows whole solutions, each an ordinary sequence. What is said behind a thinking that was cut stands in
`breaking_off`.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from .arithmetic import Correction, Problem, make_problem
from .pieces import ANSWER_NEXT, BREAK, CLOSE, END, THINK, USER, Example, cut, example, weighted
from .words import capital
from .working import Paragraph, after_wait, check, found_late, lines, solution, wait


@dataclass(frozen=True)
class Thinking:
    """A user's text, the paragraphs behind it, and how many of them are given.

    `problem` is the one that the last paragraphs solve, with all corrections in it. Where a correction came
    as a turn, `earlier` is the thinking that it interrupted, `lead` all that stands before the paragraphs,
    and `told` the last quantity in it.
    """

    user: str
    paragraphs: tuple[Paragraph, ...]
    problem: Problem
    given: int = 0
    earlier: Thinking | None = None
    lead: tuple[tuple[str, bool], ...] = ()
    told: str = ""

    @property
    def opening(self) -> list[tuple[str, bool]]:
        """What stands before the paragraphs."""
        return list(self.lead) or [(USER + self.user + CLOSE + THINK, False)]

    @property
    def text(self) -> str:
        return BREAK.join(paragraph.text for paragraph in self.paragraphs)

    @property
    def answer(self) -> str:
        return self.problem.answer_sentence

    def pieces(self) -> list[tuple[str, bool]]:
        """The paragraphs: those given, then those learned."""
        given = "".join(paragraph.text + BREAK for paragraph in self.paragraphs[: self.given])
        learned = BREAK.join(paragraph.text for paragraph in self.paragraphs[self.given :])
        return [(given, False), (learned, True)]

    def said(self, place: int) -> tuple[str, bool]:
        """The last quantity that the first so many characters establish, "" if none does, and if it holds.

        It does not where a correction came after it.
        """
        end, found, reopened = 0, self.told, self.earlier is not None
        for paragraph in self.paragraphs:
            end += len(paragraph.text)
            if end > place:
                break
            if paragraph.statement is not None:
                found, reopened = paragraph.statement, False
            elif paragraph.reopens:
                reopened = True
            end += len(BREAK)
        return found, not reopened


def correction_wording(rng: Random, correction: Correction) -> str:
    """A correction in the words of some user."""
    clause = correction.clause if rng.random() < 0.75 else capital(correction.clause)
    way = rng.random()
    if way < 0.5:
        return f"Correction: {clause}."
    if way < 0.7:
        return f"Sorry, {clause}, not {correction.old}."
    return f"Wait, {clause}." if way < 0.85 else f"Sorry, {clause}."


def _problem(rng: Random, steps: tuple[int, int] = (3, 6)) -> Problem:
    chains = 2 if steps[0] > 1 and rng.random() < 0.1 else 1
    return make_problem(rng, steps, chains, held_out=False)


def plain(rng: Random) -> Thinking:
    problem = _problem(rng)
    return Thinking(problem.text, tuple(solution(problem)), problem)


def warm_up(rng: Random) -> Thinking:
    problem = _problem(rng, (1, 2))
    return Thinking(problem.text, tuple(solution(problem)), problem)


def read_at_once(rng: Random) -> Thinking:
    """The correction stands in the prompt and is used from the first line on."""
    problem = _problem(rng)
    correction = problem.corrected(rng)
    user = f"{problem.text}\n{correction_wording(rng, correction)}"
    return Thinking(user, tuple(solution(correction.problem)), correction.problem)


def overlooked(rng: Random) -> Thinking:
    """The correction stands in the prompt; the first lines, or all, use the old number; the check finds it.

    Lines behind the old ones follow from what stands above them, or begin anew with the new number.
    """
    problem = _problem(rng)
    correction = problem.corrected(rng)
    user = f"{problem.text}\n{correction_wording(rng, correction)}"
    true, place = correction.problem, correction.index
    written, found = found_late(true, place, problem)
    given = len(written)
    if problem.kinds[place] == "base" and rng.random() < 0.3:
        written = [*written[: place + 1], *lines(true, place + 1)]
    elif rng.random() < 0.5:
        given = place + 1 + int(rng.random() * (given - place))
    return Thinking(user, (*written, *found), true, given)


def slip(rng: Random) -> Thinking:
    """The writer copies a number wrongly, and the check finds it."""
    problem = _problem(rng)
    wrong = problem.corrected(rng)
    written, found = found_late(problem, wrong.index, wrong.problem)
    return Thinking(problem.text, (*written, *found), problem, len(written))


def interjected(rng: Random) -> Thinking:
    """A correction as a paragraph in the middle of the thinking."""
    problem = _problem(rng)
    correction = problem.corrected(rng)
    true, place = correction.problem, correction.index
    above = solution(problem)
    above = above[: 1 + int(rng.random() * len(above))]
    told = wait(true, place, correction.old if rng.random() < 0.6 else None)
    below = [*after_wait(true, place, len(above)), check(true)]
    return Thinking(problem.text, (*above, told, *below), true, len(above) + 1)


def corrected_later(rng: Random, ended: float = 0.08) -> Thinking:
    """A correction arrives as a turn of its own, anywhere in the thinking or the answer.

    `ended`: how often it comes just when the thinking has ended. Now and then it is the second one.
    """
    earlier = weighted(rng, _CORRECTED)(rng)
    correction = earlier.problem.corrected(rng)
    true, place = correction.problem, correction.index
    whole = earlier.text + ANSWER_NEXT + earlier.answer
    turn = f"{CLOSE}{USER}{correction_wording(rng, correction)}{CLOSE}{THINK}"
    end = cut(rng, whole)
    if rng.random() < ended:
        end = len(earlier.text + ANSWER_NEXT.rstrip())
    anew = [wait(true, place), *after_wait(true, place, 0), check(true)]
    return Thinking(
        earlier.user,
        tuple(anew),
        true,
        earlier=earlier,
        lead=(*earlier.opening, (whole[:end], True), (turn, False)),
        told=earlier.said(end)[0],
    )


_CORRECTED = ((plain, 0.66), (read_at_once, 0.26), (corrected_later, 0.08))
_PROBLEMS = (
    (plain, 0.36),
    (warm_up, 0.05),
    (read_at_once, 0.14),
    (overlooked, 0.18),
    (slip, 0.07),
    (interjected, 0.07),
    (corrected_later, 0.13),
)


def problem_example(rng: Random) -> Example:
    """A problem, worked out, with or without a correction."""
    thinking = weighted(rng, _PROBLEMS)(rng)
    ending = (ANSWER_NEXT + thinking.answer + END, True)
    return example(*thinking.opening, *thinking.pieces(), ending)
