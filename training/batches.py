"""Rows of tokens to train on, made by worker processes while the device computes.

Knows how examples become marked tokens and how whole examples are packed into rows of one length. Knows
nothing about what the examples say, and imports no torch, so that workers start at once.
"""

from __future__ import annotations

import multiprocessing
import queue
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from .tokens import BETWEEN, Encoder, marker_id

KINDS = "abcdefg"
GIVEN = 0
"""The mark of a token that is read, not learned; that of a learned one is 1 + the place of its kind."""
PADDING = 255
"""The mark of what fills up a row."""

OPEN_ROWS = 24
"""Rows that still take examples. More fill better, and need no more work worth mentioning."""


@dataclass(frozen=True)
class Rows:
    """Rows of whole examples. An example ends with a separator, which is given."""

    tokens: NDArray[np.int16]  # [rows, length]
    marks: NDArray[np.uint8]  # [rows, length]: GIVEN, 1 + kind, or PADDING

    @property
    def num_tokens(self) -> int:
        """Tokens that are no padding."""
        return int((self.marks != PADDING).sum())


class Marker:
    """Turns an example into tokens and their marks."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encoder = Encoder(tokenizer)
        self.between = marker_id(tokenizer, BETWEEN)

    def mark(self, kind: str, pieces: Iterable[Any]) -> tuple[list[int], list[int]]:
        """Token ids and marks. Each piece is tokenised by itself, as it is when it is given or said."""
        ids: list[int] = []
        marks: list[int] = []
        learned = 1 + KINDS.index(kind)
        for piece in pieces:
            new = self._encoder.encode(piece.text)
            ids += new
            marks += [learned if piece.learned else GIVEN] * len(new)
        return [*ids, self.between], [*marks, GIVEN]


def packed(
    examples: Iterable[tuple[list[int], list[int]]], rows: int, length: int, padding: int
) -> Iterator[Rows]:
    """Blocks of `rows` rows: each example goes into the first open row that has room for it.

    Ends with the last full block. Raises ValueError for an example that no row can hold.
    """
    full: list[_Row] = []
    for row in _filled(examples, length):
        full.append(row)
        if len(full) == rows:
            yield _block(full, length, padding)
            full = []


def packed_whole(examples: Iterable[tuple[list[int], list[int]]], length: int, padding: int) -> Rows:
    """One block of as many rows as it takes to hold all examples."""
    opened: list[_Row] = []
    return _block([*_filled(examples, length, opened), *opened], length, padding)


_Row = tuple[list[int], list[int]]


def _filled(
    examples: Iterable[tuple[list[int], list[int]]], length: int, opened: list[_Row] | None = None
) -> Iterator[_Row]:
    """Rows that take nothing more; those that still would are left in `opened`."""
    opened = [] if opened is None else opened
    for ids, marks in examples:
        if len(ids) > length:
            raise ValueError(f"an example of {len(ids)} tokens is longer than a row of {length}")
        row = next((row for row in opened if len(row[0]) + len(ids) <= length), None)
        if row is not None:
            row[0].extend(ids)
            row[1].extend(marks)
            continue
        opened.append((list(ids), list(marks)))
        if len(opened) > OPEN_ROWS:
            yield opened.pop(max(range(len(opened)), key=lambda i: len(opened[i][0])))


def _block(rows: list[_Row], length: int, padding: int) -> Rows:
    tokens = np.full((len(rows), length), padding, np.int16)
    marks = np.full((len(rows), length), PADDING, np.uint8)
    for place, (ids, flags) in enumerate(rows):
        tokens[place, : len(ids)], marks[place, : len(ids)] = ids, flags
    return Rows(tokens, marks)


def training_rows(seed: str, tokenizer: Path, rows: int, length: int) -> Iterator[Rows]:
    """Endless rows of the mixture; the same seed gives the same ones."""
    from asyncllm_nb.tasks import examples

    rng = random.Random(seed)
    marker = Marker(Tokenizer.from_file(str(tokenizer)))

    def marked() -> Iterator[tuple[list[int], list[int]]]:
        while True:
            kind = examples.mixture_kind(rng)
            ids, marks = marker.mark(kind, examples.make_example(rng, kind))
            if len(ids) <= length:  # all but a few in a thousand
                yield ids, marks

    return packed(marked(), rows, length, marker.between)


class Feed:
    """Worker processes that make rows ahead of time. Leave it as a context manager, or they stay.

    Forks: make it before anything starts a thread or a device.
    """

    def __init__(
        self, workers: int, make: Callable[..., Iterator[Rows]], seed: str, *arguments: Any, ahead: int = 8
    ) -> None:
        """`make(seed, *arguments)` gives the rows of one worker, whose number is appended to `seed`."""
        context = multiprocessing.get_context("fork")
        self._queue: Any = context.Queue(maxsize=max(2, ahead * workers))
        self._workers = [
            context.Process(target=_work, args=(self._queue, make, f"{seed}/{i}", arguments), daemon=True)
            for i in range(workers)
        ]
        for worker in self._workers:
            worker.start()

    def get(self, wait: bool) -> Rows | None:
        """The next rows; None if there are none yet and `wait` is False.

        Raises RuntimeError if a worker failed.
        """
        while True:
            try:
                rows: Rows | str = self._queue.get(timeout=5.0) if wait else self._queue.get_nowait()
            except queue.Empty:
                if not all(worker.is_alive() for worker in self._workers):
                    raise RuntimeError("a worker that makes rows has died") from None
                if not wait:
                    return None
                continue
            if isinstance(rows, str):
                raise RuntimeError(f"a worker that makes rows failed: {rows}")
            return rows

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            worker.join()
        self._queue.cancel_join_thread()
        self._queue.close()


def _work(results: Any, make: Callable[..., Iterator[Rows]], seed: str, arguments: tuple[Any, ...]) -> None:
    try:
        for rows in make(seed, *arguments):
            results.put(rows)
    except Exception as error:  # reported where the rows are awaited
        results.put(f"{type(error).__name__}: {error}")
