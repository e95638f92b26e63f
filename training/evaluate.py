"""How good the model is at each of its tasks, on examples that it was never trained on, one text at a time.

    python -m training.evaluate [FOLDER] [--problems 200] --out training/accuracy.json

Knows the runs, many at once on one engine, and the file of results. What is asked and what counts as right
stands in `examinations`. Knows nothing about shared memory: every text is an ordinary sequence.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from asyncllm_nb import AsyncLLM
from asyncllm_nb.evals.files import write_json
from asyncllm_nb.evals.statistics import Share
from asyncllm_nb.models import resolve

from .examinations import EXAMINATIONS, Examination

BATCH = 4096
"""Tokens in a step: room for all that the runs ask for at once."""
WEIGHTS = "model.safetensors"


async def examined(llm: AsyncLLM, examination: Examination, count: int, seed: int, streams: int) -> Share:
    """How many answers are right of those that `count` examples ask for, `streams` examples at a time.

    The same seed gives the same examples, and fewer are the first ones of more.
    """
    places = asyncio.Semaphore(streams)

    async def one(number: int) -> list[bool]:
        # The number is part of the seed: which examples there are does not depend on who is quick.
        rng = random.Random(f"evaluation/{examination.what}/{seed}/{number}")
        async with places:
            return await examination.ask(llm, rng)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(number)) for number in range(count)]
    answers = [answer for task in tasks for answer in task.result()]
    return Share(sum(answers), len(answers))


async def evaluate(
    folder: Path, count: int, seed: int = 0, streams: int = 48, only: Sequence[str] = ()
) -> dict[str, Any]:
    """The document that `--out` gets: of each examination its kind, what it asks, and right answers.

    `only`: kinds to examine; all if empty.
    """
    began = time.monotonic()
    results = []
    chosen = [examination for examination in EXAMINATIONS if not only or examination.kind in only]
    # Several blocks a stream, and the spare slot of each that is written.
    slots = 4 * streams
    async with AsyncLLM(
        folder, max_batch_tokens=BATCH, max_blocks=slots, cache_tokens=2048 * streams
    ) as llm:
        for examination in chosen:
            share = await examined(llm, examination, count, seed, streams)
            low, high = share.interval
            results.append(
                {
                    "kind": examination.kind,
                    "what": examination.what,
                    "right": share.hits,
                    "of": share.of,
                    "low": round(low, 4),
                    "high": round(high, 4),
                }
            )
            print(f"({examination.kind}) {examination.what}: {share}", flush=True)
        settings = {key: llm.stats()[key] for key in ("device", "dtype")}
    return {
        "weights": hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest(),
        "examples": count,
        "seed": seed,
        **settings,
        "seconds": round(time.monotonic() - began),
        "results": results,
    }


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m training.evaluate", description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="tiny-hybrid", help="a folder (default: the bundled one)")
    parser.add_argument("--problems", type=int, default=200, help="examples of each examination")
    parser.add_argument("--streams", type=int, default=48, help="examples at a time")
    parser.add_argument("--kinds", default="", help="only these kinds, such as 'ac'")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a JSON file")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    folder = resolve(chosen.model)
    document = asyncio.run(evaluate(folder, chosen.problems, chosen.seed, chosen.streams, chosen.kinds))
    if chosen.out:
        write_json(chosen.out, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
