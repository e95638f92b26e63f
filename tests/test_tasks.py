"""The seeded tasks: answers that another reader agrees with, corrections, and what is held out."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from task_reader import NUMBERS, TOGETHER, asked, compute, given, read_line, solve, warns

from asyncllm_nb.tasks import (
    KINDS,
    NotCorrectable,
    Problem,
    Utterance,
    calling,
    examples,
    held_out,
    make_example,
    make_log,
    make_problem,
    make_utterance,
    parse_answer,
    pieces,
    thinking,
)
from asyncllm_nb.tasks.arithmetic import PREVIOUS, evaluate
from asyncllm_nb.tasks.calling import make_sum
from asyncllm_nb.tasks.pieces import Keyed
from asyncllm_nb.tasks.words import DOMAINS

ROOT = Path(__file__).resolve().parent.parent


def problems(count: int, seed: str, chains: int = 1) -> Iterator[Problem]:
    rng = random.Random(seed)
    for _ in range(count):
        yield make_problem(rng, (chains + 1, 6), chains)


@pytest.mark.parametrize("chains", [1, 2])
def test_answers_are_those_of_another_reader(chains: int) -> None:
    for problem in problems(1000, "answers", chains):
        values = solve(problem.text)
        assert [values[entity] for entity in problem.entities] == list(problem.values), problem.text
        assert values["?"] == problem.answer == parse_answer(problem.answer_sentence)
        assert all(1 <= value <= 199 for value in problem.values)


@pytest.mark.parametrize("chains", [1, 2])
def test_corrections_change_one_number_and_the_answer(chains: int) -> None:
    rng = random.Random("corrections")
    for problem in problems(1000, "corrected", chains):
        correction = problem.corrected(rng)
        values = solve(f"{problem.text}\n{correction.text}")
        assert values["?"] == correction.problem.answer != problem.answer
        assert [values[entity] for entity in problem.entities] == list(correction.problem.values)
        changed = [a != b for a, b in zip(problem.numbers, correction.problem.numbers, strict=True)]
        assert [place for place, is_new in enumerate(changed) if is_new] == [correction.index]


def test_quantities_say_what_the_text_says() -> None:
    for problem in problems(63, "quantities"):
        assert problem.text == " ".join([*(q.sentence for q in problem.quantities), problem.question])
        shorts = ", ".join(quantity.short for quantity in problem.quantities)
        assert problem.thinking[-1] == f"Check: {shorts}."
        assert problem.quantities[-1].entity == problem.entity


@pytest.mark.parametrize("chains", [1, 2])
def test_quantities_refer_to_older_ones_as_often_as_is_said(chains: int) -> None:
    """Counted where there is a choice: from the third of a chain on, sums of two aside."""
    older, expected = 0, 0.0
    for problem in problems(4000, "references", chains):
        said = given(problem.text)
        names = list(said)
        second = names.index(asked(problem.text)[0]) + 1 if chains == 2 else len(names)
        for place, (_, rest) in enumerate(said.values()):
            of = [names.index(part) for part in rest if isinstance(part, str)]
            before = place - second * (place >= second)  # in its own chain
            assert all(place - before <= one < place for one in of), problem.text
            if len(of) == 1 and before > 1:
                older += of[0] < place - 1
                expected += (1 - PREVIOUS) * (1 - 1 / before)
    assert expected > 1000 and older == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize("chains", [1, 2])
def test_lines_recall_the_value_of_what_they_name(chains: int) -> None:
    """Often it is neither the one before nor has its value: who takes that one is wrong."""
    apart = 0
    for problem in problems(1000, "recalled", chains):
        said, values = given(problem.text), solve(problem.text)
        lines = [read_line(paragraph) for paragraph in problem.thinking[:-1]]
        assert [line.who for line in lines if line] == [*said, *[TOGETHER] * (chains - 1)], problem.thinking
        for before, line in pairwise([None, *lines]):
            assert line
            if line.who == TOGETHER:
                assert line.work and line.work[::2] == tuple(values[who] for who in asked(problem.text))
                continue
            assert (line.reading, line.rest) == said[line.who], problem.text
            assert line.recalled == tuple((who, values[who]) for who in line.names), problem.text
            assert line.value == values[line.who]
            if before and len(line.names) == 1:
                apart += before.who not in line.names and before.value != line.recalled[0][1]
    assert apart > 250


def test_make_problem_rejects_what_cannot_be_made() -> None:
    rng = random.Random(0)
    for steps, chains in (((0, 3), 1), ((3, 7), 1), ((5, 3), 1), ((1, 3), 2), ((3, 6), 3)):
        with pytest.raises(ValueError, match=r"steps|chains"):
            make_problem(rng, steps, chains)


def test_logs_warn_as_another_reader_does() -> None:
    rng = random.Random("logs")
    fired = 0
    for number in range(1000):
        log = make_log(rng, 1 + number % 13)
        expected = [warns(log.rule, line) for line in log.lines]
        assert list(log.answers) == expected
        assert [why.endswith("so warn.") for why in log.explanations] == expected
        times = [line[:5] for line, fires in zip(log.lines, expected, strict=True) if fires]
        assert re.findall(r"\d\d:\d\d", log.verdict) == times
        assert all(a[:5] < b[:5] for a, b in pairwise(log.lines))
        fired += sum(expected)
    assert 0.25 < fired / sum(1 + number % 13 for number in range(1000)) < 0.5
    with pytest.raises(ValueError, match="at least one line"):
        make_log(rng, 0)


def test_utterances_are_complete_at_their_end_only_and_answered_right() -> None:
    rng = random.Random("speech")
    for _ in range(1000):
        utterance = make_utterance(rng)
        assert utterance.complete == (False,) * (len(utterance.words) - 1) + (True,)
        assert utterance.answer == f"It is {NUMBERS[compute(utterance.text)]}."
        said, other = utterance.changed(rng)
        assert isinstance(other, Utterance) and said.startswith("no wait, ") and said.endswith("?")
        left = next(word for word in utterance.words if word in NUMBERS)
        assert other.answer == f"It is {NUMBERS[compute(f'{left} {said}')]}.", (utterance.text, said)


def test_nothing_that_is_held_out_is_in_the_training_texts() -> None:
    rng = random.Random("held out")
    makers = (
        lambda wanted: make_problem(rng, (2, 6), 2, held_out=wanted),
        lambda wanted: make_log(rng, 3, held_out=wanted),
        lambda wanted: make_utterance(rng, held_out=wanted),
        lambda wanted: make_sum(rng, held_out=wanted),
    )
    for make in makers:
        for wanted in (True, False):
            assert all(held_out(make(wanted)) == wanted for _ in range(63))
    for problem in problems(1000, "kept apart"):
        assert held_out(problem) or not held_out(problem.corrected(rng).problem)


def uncorrectable() -> Problem:
    """Max can have no other number: Sam would have more than 199, or Lea fewer than 2."""
    (pages,) = (domain for domain in DOMAINS if domain.unit == "pages")
    names = ("Max", "Tom", "Eva", "Ann", "Sam", "Lea")
    kinds = ("base", "base", "more", "both", "three times", "half")
    operands: tuple[tuple[int, ...], ...] = ((), (), (1,), (0, 2), (3,), (0,))
    numbers = (4, 53, 9, 0, 0, 0)
    values = evaluate(kinds, numbers, operands)
    assert values == (4, 53, 62, 66, 198, 2)
    return Problem(pages, names, kinds, numbers, operands, (0,) * 6, values)


def test_a_problem_that_no_correction_changes_says_so_and_another_one_is_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = uncorrectable()
    assert problem.text.startswith("Max reads 4 pages. Tom reads 53 pages. Eva reads 9 more pages than Tom. ")
    with pytest.raises(NotCorrectable, match="can be corrected: Max reads 4 pages"):
        problem.corrected(random.Random(3))

    drawn: list[Problem] = []

    def draw(*args: Any, **options: Any) -> Problem:
        drawn.append(make_problem(*args, **options) if len(drawn) % 3 == 2 else problem)
        return drawn[-1]

    monkeypatch.setattr(thinking, "make_problem", draw)
    monkeypatch.setattr(thinking, "_PROBLEMS", ((thinking.read_at_once, 1.0),))
    text = "".join(piece.text for piece in make_example(random.Random(4), "a"))
    assert len(drawn) >= 3 and drawn[-1].text in text and problem.text not in text


def test_every_training_text_is_made_of_what_is_not_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []

    def watched(make: Callable[..., Keyed]) -> Callable[..., Keyed]:
        def call(*args: Any, **options: Any) -> Keyed:
            item = make(*args, **options)
            made.append(held_out(item))
            return item

        return call

    for module in (thinking, calling, examples):
        for name in ("make_problem", "make_sum", "make_log", "make_utterance"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, watched(getattr(module, name)))
    monkeypatch.setattr(pieces, "HELD_OUT_ONE_IN", 2)
    rng = random.Random("training")
    for number in range(700):
        make_example(rng, KINDS[number % len(KINDS)])
    assert len(made) >= 700 and not any(made)


def test_one_instance_in_fifty_is_held_out_however_it_is_worded() -> None:
    share = sum(map(held_out, problems(5000, "share"))) / 5000
    assert 0.01 < share < 0.03
    rng = random.Random("words")
    for _ in range(100):
        spoken = make_utterance(rng)
        assert set(spoken.key.split()) <= set(spoken.words)  # fillers do not count


@pytest.mark.parametrize(
    ("text", "answer"),
    [("The green box holds 38 coins.", 38), ("12, then 7", 7), ("It is -3.", -3), ("no", None), ("", None)],
)
def test_parse_answer_takes_the_last_number(text: str, answer: int | None) -> None:
    assert parse_answer(text) == answer


def test_the_tasks_load_no_tensors() -> None:
    code = "import sys, asyncllm_nb.tasks; print({'torch', 'numpy', 'IPython'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "set()", done.stderr
