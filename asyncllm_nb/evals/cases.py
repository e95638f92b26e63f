"""What is asked in an evaluation: a problem, and what is said about it later. Knows files and the made-up
problems of `asyncllm_nb.tasks`; no model.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..tasks import arithmetic

REQUIRED = ("problem", "correction", "answer_after")
OPTIONAL = ("answer_before", "id")


@dataclass(frozen=True)
class Case:
    """One problem. Answers are text, "38" or "\\\\frac{1}{2}"."""

    problem: str  # what the user says
    correction: str  # what the user says later
    before: str | None  # the answer without the correction; None if there is none
    after: str  # the answer with it
    id: str = ""


def as_cases(problems: Iterable[Case | Sequence[Any]]) -> list[Case]:
    """Cases; (problem, correction, answer before, answer after) is one too.

    Raises TypeError for anything else, ValueError for answers that a correction does not change.
    """
    cases = []
    for index, given in enumerate(problems):
        if not isinstance(given, Case):
            if isinstance(given, str) or not isinstance(given, Sequence) or len(given) != 4:
                raise TypeError(
                    f"problem {index} must be a Case or (problem, correction, answer before, answer after), "
                    f"not {given!r:.80}"
                )
            problem, correction, before, after = given
            given = Case(str(problem), str(correction), None if before is None else str(before), str(after))
        if given.before == given.after:
            raise ValueError(
                f"problem {given.id or index}: the answers before and after the correction are both "
                f"{given.after!r}, so nothing could be told from them: leave it out"
            )
        cases.append(given)
    if not cases:
        raise ValueError("there are no problems: give at least one")
    return cases


def arithmetic_cases(count: int, seed: int = 0, steps: tuple[int, int] = (3, 6)) -> list[Case]:
    """`count` word problems that were held out of training, each with a correction of a given value that
    changes the answer. The same arguments give the same cases, and fewer are the first ones of more."""
    rng = random.Random(f"sharded/{seed}")
    cases: list[Case] = []
    while len(cases) < count:
        problem = arithmetic.make_problem(rng, steps=steps, held_out=True)
        try:
            correction = problem.corrected(rng)
        except ValueError:  # no other number changes this one's answer
            continue
        before, after = str(problem.answer), str(correction.problem.answer)
        cases.append(Case(problem.text, correction.text, before, after, str(len(cases))))
    return cases


def load_jsonl(file: str | os.PathLike[str]) -> list[Case]:
    """Cases from a file with one JSON object a line (empty lines aside). Answers are text or numbers, all
    else is text, and other fields are left alone:

    problem: what the user says first. The text behind it is where a correction may stand.
    correction: what the user says later: a correction, or the part of the problem that was left out.
    answer_after: the answer with it.
    answer_before: the answer without it; left out or null if the problem has none then.
    id: a name of the problem; by default the number of its line.

    Raises ValueError that names the file, the line and the field.
    """
    cases = []
    # Not splitlines: within JSON text may stand other characters that count as ends of lines for it.
    for number, line in enumerate(Path(file).read_text(encoding="utf-8-sig").split("\n"), 1):
        if line.strip():
            cases.append(_parse(line, number, f"{file}, line {number}"))
    if not cases:
        raise ValueError(f"{file} has no problems: one JSON object a line, with {', '.join(REQUIRED)}")
    return cases


def _parse(line: str, number: int, where: str) -> Case:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: must be an object with {', '.join(REQUIRED)}, not {line:.40}")
    for name in REQUIRED:
        if fields.get(name) is None:
            others = ", ".join(sorted(fields)) or "nothing"
            raise ValueError(f"{where}: field {name!r} is missing (it has {others})")
    for name in ("problem", "correction"):
        if not isinstance(fields[name], str) or not fields[name].strip():
            raise ValueError(f"{where}: field {name!r} must be text, and not empty, not {fields[name]!r:.40}")
    answers = [_answer(fields.get(name), name, where) for name in ("answer_before", "answer_after")]
    if answers[0] == answers[1]:
        raise ValueError(
            f"{where}: field 'answer_before' equals 'answer_after', so nothing could be told from them: "
            "leave the line out"
        )
    assert answers[1] is not None
    name = str(fields.get("id", number))
    return Case(fields["problem"], fields["correction"], answers[0], answers[1], name)


def _answer(value: Any, name: str, where: str) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value == "":
        raise ValueError(f"{where}: field {name!r} must be text or a number, not {value!r:.40}")
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
