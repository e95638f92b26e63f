"""Examples that are never trained on, written out whole, to score a network while it trains.

Knows how a held-out problem, log or spoken question is laid out as text. Knows nothing about how it is
answered or scored.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from asyncllm_nb.tasks import logs, make_log, make_problem, make_utterance
from asyncllm_nb.tasks.pieces import (
    ANSWER_NEXT,
    BREAK,
    CLOSE,
    END,
    NO_THINKING,
    THINK,
    USER,
    Example,
    example,
)

from .batches import Marker, Rows, packed_whole


def problem(rng: random.Random, number: int) -> Example:
    """A problem of 3 to 6 quantities; every second one with a correction behind it."""
    steps = 3 + number % 4
    asked = make_problem(rng, (steps, steps), held_out=True)
    text, solved = asked.text, asked
    if number // 4 % 2:
        correction = asked.corrected(rng)
        text, solved = f"{text}\n{correction.text}", correction.problem
    answer = BREAK.join(solved.thinking) + ANSWER_NEXT + solved.answer_sentence + END
    return example((USER + text + CLOSE + THINK, False), (answer, True))


def log(rng: random.Random, number: int) -> Example:
    """A log of 2 to 8 lines and the answer after each."""
    watched = make_log(rng, 2 + number % 7, held_out=True)
    pieces = [(USER + watched.head, False)]
    for line, answer in zip(watched.lines, watched.answers, strict=True):
        pieces += [(f"{line}\n{logs.QUESTION}", False), (" yes" if answer else " no", True), ("\n", False)]
    return example(*pieces, (END, False))


def spoken(rng: random.Random, number: int) -> Example:
    """A spoken question, heard whole, and its answer."""
    utterance = make_utterance(rng, held_out=True)
    heard = f"{USER}Heard: {' '.join(utterance.words)}\nAnswer now?"
    return example(
        (heard, False), (" yes", True), (f"\n{CLOSE}{NO_THINKING}", False), (utterance.answer + END, True)
    )


def held_out_rows(tokenizer: Path, length: int, count: int, seed: int = 0) -> Rows:
    """So many of each kind in rows; the same seed gives the same ones."""
    rng = random.Random(f"held out/{seed}")
    marker = Marker(Tokenizer.from_file(str(tokenizer)))
    made = [("a", problem), ("c", log), ("g", spoken)]

    def marked() -> Iterator[tuple[list[int], list[int]]]:
        for kind, make in made:
            for number in range(count):
                yield marker.mark(kind, make(rng, number))

    return packed_whole(marked(), length, marker.between)
