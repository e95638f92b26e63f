"""Training texts of seven kinds, and their mixture.

Knows which kinds there are and how often each comes. What a text about problems looks like stands in
`thinking` and `breaking_off`, one with calls in `calling`. Those about logs and speech, which are short,
stand here.

Kinds: "a" problems, "b" summaries, "c" logs, "d" interruptions, "e" a calculator, "f" sub-questions,
"g" speech.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from .arithmetic import NotCorrectable
from .breaking_off import stopped_example, summary_example
from .calling import calc_example, sub_question_example
from .logs import QUESTION, Log, make_log
from .pieces import (
    ANSWER_NEXT,
    BREAK,
    CLOSE,
    END,
    NO_THINKING,
    THINK,
    USER,
    Example,
    between,
    cut,
    example,
    weighted,
)
from .speech import make_utterance
from .thinking import problem_example

ANSWER_NOW = "\nAnswer now?"


def _yes(answer: bool) -> str:
    return " yes" if answer else " no"


def log_example(rng: Random) -> Example:
    """A log and questions about it."""
    way = rng.random()
    most = 12 if rng.random() < 0.25 else 6
    log = make_log(rng, between(rng, 1, most), held_out=False)
    if way < 0.35:
        return example(*_asked(log, [True] * len(log.lines)), (END, False))
    if way < 0.6:
        some = 0.4 if rng.random() < 0.4 else 0.0
        asked = [rng.random() < some for _ in log.lines]
        return example(*_asked(log, [*asked[:-1], True]), (END, False))
    if way < 0.85:
        return _explained(rng, log)
    return _told_now(rng, log)


def _asked(log: Log, asked: list[bool]) -> list[tuple[str, bool]]:
    """The log as a user's turn, with the question and its answer after the lines that are asked about."""
    pieces = [(USER + log.head, False)]
    for line, answer, ask in zip(log.lines, log.answers, asked, strict=True):
        pieces.append((line + "\n", False))
        if ask:
            pieces += [(QUESTION, False), (_yes(answer), True), ("\n", False)]
    return pieces


def _explained(rng: Random, log: Log) -> Example:
    """The explanation of each line; in part of the texts it breaks off and the question is asked again."""
    asked = len(log.lines) <= 6 and rng.random() < 0.4
    opening = [*_asked(log, [asked] * len(log.lines)), (CLOSE + THINK, False)]
    text = BREAK.join(log.explanations)
    if rng.random() < 0.7:
        return example(*opening, (text + ANSWER_NEXT + log.verdict + END, True))
    return example(
        *opening,
        (text[: cut(rng, text)], True),
        ("\n" + QUESTION, False),
        (_yes(log.answers[-1]), True),
    )


def _told_now(rng: Random, log: Log) -> Example:
    while log.last_value is None:
        log = make_log(rng, between(rng, 1, 6), held_out=False)
    asked = rng.random() < 0.3
    return example(
        *_asked(log, [asked] * len(log.lines)),
        (f"What is the {log.subject} now?{CLOSE}{NO_THINKING}", False),
        (f"The {log.subject} is {log.last_value}.{END}", True),
    )


def speech_example(rng: Random) -> Example:
    """A spoken question as it is heard, and its answer."""
    utterance = make_utterance(rng, held_out=False)
    words, complete = utterance.words, utterance.complete
    way = rng.random()
    if way < 0.3:  # once, after some prefix
        count = between(rng, 1, len(words) - 1)
        heard = " ".join(words[:count])
        return example((f"{USER}Heard: {heard}{ANSWER_NOW}", False), (" no", True), ("\n" + END, False))
    first = 0 if way < 0.5 else len(words) - 1  # after every word, or only after the last
    pieces = [(USER, False)]
    for count in range(first, len(words)):
        heard = " ".join(words[: count + 1])
        pieces += [(f"Heard: {heard}{ANSWER_NOW}", False), (_yes(complete[count]), True), ("\n", False)]
    pieces.append((CLOSE + NO_THINKING, False))
    if way < 0.8:
        return example(*pieces, (utterance.answer + END, True))
    said, other = utterance.changed(rng)
    begun = utterance.answer[: cut(rng, utterance.answer)]
    return example(
        *pieces,
        (begun, True),
        (f"{CLOSE}{USER}Heard: {said}{ANSWER_NOW}", False),
        (" yes", True),
        (f"\n{CLOSE}{NO_THINKING}", False),
        (other.answer + END, True),
    )


_MAKERS: dict[str, Callable[[Random], Example]] = {
    "a": problem_example,
    "b": summary_example,
    "c": log_example,
    "d": stopped_example,
    "e": calc_example,
    "f": sub_question_example,
    "g": speech_example,
}
KINDS = tuple(_MAKERS)

LONGEST = 2050
"""Characters of a text, at most: seldom over 660 tokens. One in a hundred about problems would be longer."""

SHARES = {"a": 0.50, "b": 0.08, "c": 0.12, "d": 0.08, "e": 0.06, "f": 0.08, "g": 0.08}
"""Of the tokens of a mixture, how many are of each kind."""

MEAN_TOKENS = {"a": 307, "b": 258, "c": 104, "d": 240, "e": 117, "f": 245, "g": 54}
"""Of one text of each kind, about."""

_RATES = {kind: SHARES[kind] / MEAN_TOKENS[kind] for kind in KINDS}
_CHANCES = tuple((kind, rate / sum(_RATES.values())) for kind, rate in _RATES.items())


def make_example(rng: Random, kind: str) -> Example:
    """A text of one kind, for training: never of an instance that is held out.

    Raises:
        ValueError: an unknown kind.
    """
    if kind not in _MAKERS:
        raise ValueError(f"no kind {kind!r}; there are {', '.join(KINDS)}")
    while True:
        try:
            made = _MAKERS[kind](rng)
        except NotCorrectable:
            continue
        if sum(len(piece.text) for piece in made) <= LONGEST:
            return made


def mixture_kind(rng: Random) -> str:
    """A kind, as often as the mixture has it."""
    return weighted(rng, _CHANCES)


def mixture(rng: Random) -> Example:
    """A text of the mixture."""
    return make_example(rng, mixture_kind(rng))
