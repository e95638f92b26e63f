"""Seeded tasks: problems with corrections, logs to watch, spoken questions, and training texts of them.

Plain Python; knows no model and no tensors. The same seed gives the same text everywhere.
"""

from __future__ import annotations

import re

from . import arithmetic, calling, examples, logs, speech
from .arithmetic import Correction, NotCorrectable, Problem, Quantity, make_problem
from .calling import calculate
from .examples import KINDS, make_example, mixture
from .logs import Log, make_log
from .pieces import Example, Piece, held_out
from .speech import Utterance, make_utterance

_NUMBER = re.compile(r"-?\d+")


def parse_answer(text: str) -> int | None:
    """The last whole number of an answer; None if there is none."""
    numbers = _NUMBER.findall(text)
    return int(numbers[-1]) if numbers else None


__all__ = [
    "KINDS",
    "Correction",
    "Example",
    "Log",
    "NotCorrectable",
    "Piece",
    "Problem",
    "Quantity",
    "Utterance",
    "arithmetic",
    "calculate",
    "calling",
    "examples",
    "held_out",
    "logs",
    "make_example",
    "make_log",
    "make_problem",
    "make_utterance",
    "mixture",
    "parse_answer",
    "speech",
]
