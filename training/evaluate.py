"""How good the model is at each of its tasks, on examples that it was never trained on, one text at a time.

    python -m training.evaluate [FOLDER] [--problems 200] --out training/accuracy.json

Knows the runs, many at once on one engine, and the file of results. What is asked and what counts as right
stands in `examinations`. Knows nothing about shared memory: every text is an ordinary sequence.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from asyncllm_nb import AsyncLLM
from asyncllm_nb.evals.commands import Progress, at_least_one, engine_of, run_on
from asyncllm_nb.evals.dealing import Tell, each, gather
from asyncllm_nb.evals.files import write_json
from asyncllm_nb.evals.machine import describe
from asyncllm_nb.evals.statistics import Share
from asyncllm_nb.models import resolve

from .examinations import EXAMINATIONS, Examination

BATCH = 4096
"""Tokens in a step: room for all that the runs ask for at once."""
WEIGHTS = "model.safetensors"


async def examined(
    llm: AsyncLLM, examination: Examination, numbers: Iterable[int], seed: int, streams: int, tell: Tell
) -> None:
    """Tell of each example with one of these numbers which of its answers are right, `streams` at a time.

    The same seed gives the same examples, and fewer are the first ones of more.
    """

    async def one(number: int) -> None:
        # The number is part of the seed: which examples there are does not depend on who is quick.
        rng = random.Random(f"evaluation/{examination.what}/{seed}/{number}")
        tell((examination.what, await examination.ask(llm, rng)))

    await each(numbers, one, streams)


def chosen(kinds: Sequence[str]) -> list[Examination]:
    """The examinations of these kinds; all if there are none."""
    return [examination for examination in EXAMINATIONS if not kinds or examination.kind in kinds]


async def _work(options: argparse.Namespace, numbers: Sequence[int], tell: Tell) -> None:
    streams = options.streams
    # Several blocks a stream, and the spare slot of each that is written.
    async with engine_of(options, BATCH, max_blocks=4 * streams, cache_tokens=2048 * streams) as llm:
        for examination in chosen(options.kinds):
            await examined(llm, examination, numbers, options.seed, streams, tell)
        tell({key: llm.stats()[key] for key in ("device", "dtype")})


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """The document that `--out` gets: of each examination its kind, what it asks, and right answers."""
    began = time.monotonic()
    examinations = {examination.what: examination for examination in chosen(options.kinds)}
    answers: dict[str, list[list[bool]]] = {what: [] for what in examinations}
    settings: dict[str, Any] = {}
    progress = Progress(len(examinations) * options.problems)

    def add(told: tuple[str, list[bool]] | dict[str, Any]) -> None:
        if isinstance(told, dict):  # the same from each process
            settings.update(told)
            return
        what, right = told
        answers[what].append(right)
        progress.one_more()
        if len(answers[what]) == options.problems:
            print(f"({examinations[what].kind}) {what}: {_share(answers[what])}", flush=True)

    gather(partial(_work, options), range(options.problems), options.processes, add)
    weights = resolve(options.model) / WEIGHTS
    return {
        "weights": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "machine": describe(options.processes),
        "examples": options.problems,
        "seed": options.seed,
        **settings,
        "seconds": round(time.monotonic() - began),
        "results": [
            _result(examination, _share(answers[what])) for what, examination in examinations.items()
        ],
    }


def _share(answers: Iterable[Sequence[bool]]) -> Share:
    every = [answer for some in answers for answer in some]
    return Share(sum(every), len(every))


def _result(examination: Examination, share: Share) -> dict[str, Any]:
    low, high = share.interval
    return {
        "kind": examination.kind,
        "what": examination.what,
        "right": share.hits,
        "of": share.of,
        "low": round(low, 4),
        "high": round(high, 4),
    }


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m training.evaluate", description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="tiny-hybrid", help="a folder (default: the bundled one)")
    run_on(parser)
    parser.add_argument("--problems", type=at_least_one, default=200, help="examples of each examination")
    parser.add_argument("--streams", type=at_least_one, default=48, help="at a time, in each process")
    parser.add_argument("--kinds", default="", help="only these kinds, such as 'ac'")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of one process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a JSON file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    options = parsed(arguments)
    torch.set_num_threads(options.threads)
    document = evaluate(options)
    if options.out:
        write_json(options.out, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
