"""Agents that take input while they work, beside ordinary loops: the monitor, the listener, the reader of a
context that changes.

    python -m asyncllm_nb.evals.patterns_io --model tiny-hybrid --pattern all --problems 60 --out io.json

Knows which ways there are for each pattern; what happens in one stands in `monitoring`, `listening` and
`evolving`. All use the same model, greedily, and inputs that were held out of training, on one clock of
forward passes (`clock`). Passes are those that had a row of the run; encoded: tokens, those of probes
included.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import commands, evolving, listening, monitoring
from .clock import Clock
from .logs import held_out_logs
from .loops import Meter
from .measured import Measured, Measures, Numbers

if TYPE_CHECKING:
    from ..engine.blocks import CacheBlock
    from ..llm import AsyncLLM

BATCH, SLOTS = 8192, 12
"""Tokens of a step: room for all that ask at once. Slots of a problem at a time."""
LINES, PACE = 12, 4
"""Of a log: its lines, and ticks from one to the next."""
GAP, SILENCE = 3, 8
"""Ticks from one word to the next, and those after which a sentence counts as ended."""
STATES = 10
"""Of a page."""
SHARES = frozenset(
    (
        "detected",
        "false alarms",
        "conclusion right",
        "right",
        "right after a change",
        "too early",
        "right when it ends",
        "stale, and noticed",
    )
)

Outcome = tuple[Numbers, list["CacheBlock"]]
Way = Callable[["AsyncLLM", Any, str], Awaitable[Outcome]]


# ---- the ways ---------------------------------------------------------------------------------------


def _monitors(clock: Clock) -> dict[str, Way]:
    def watched(**options: Any) -> Way:
        async def way(llm: AsyncLLM, log: Any, name: str) -> Outcome:
            watch, blocks = await monitoring.watched(llm, clock, log, PACE, name, **options)
            return watch.numbers(), blocks

        return way

    async def looped(llm: AsyncLLM, log: Any, name: str) -> Outcome:
        watch, blocks = await monitoring.looped(llm, clock, log, PACE, name)
        return watch.numbers(), blocks

    return {
        "monitor": watched(),
        "monitor, its probe reads the thinker": watched(reads_thinker=True, note="\n"),
        "loop": looped,
    }


def _listeners(clock: Clock) -> dict[str, Way]:
    def turns(silence: int) -> Way:
        async def way(llm: AsyncLLM, speaker: Any, name: str) -> Outcome:
            last, blocks = await listening.took_turns(llm, speaker, name, silence)
            return speaker.numbers(last), blocks

        return way

    async def listened(llm: AsyncLLM, speaker: Any, name: str) -> Outcome:
        last, blocks = await listening.listened(llm, speaker, name)
        return speaker.numbers(last), blocks

    return {
        "listener": listened,
        f"turns, after a silence of {SILENCE}": turns(SILENCE),
        "turns, told the end": turns(0),
    }


def _readers(clock: Clock) -> dict[str, Way]:
    def followed(restarts: int) -> Way:
        async def way(llm: AsyncLLM, page: Any, name: str) -> Outcome:
            blocks = await evolving.followed(llm, page, name, restarts)
            return page.numbers(), blocks

        return way

    async def looped(llm: AsyncLLM, page: Any, name: str) -> Outcome:
        blocks = await evolving.looped(llm, page, name)
        return page.numbers(), blocks

    return {"reader": followed(0), "reader, begins anew once": followed(1), "loop": looped}


Inputs = Callable[[Clock, int, int], Sequence[Any]]
"""From a clock, a count and a seed. A way gets its own: some of them keep what happened."""

PATTERNS: dict[str, tuple[Inputs, Callable[[Clock], dict[str, Way]]]] = {
    "monitor": (lambda clock, count, seed: held_out_logs(count, LINES, seed), _monitors),
    "listener": (lambda clock, count, seed: listening.speakers(clock, count, GAP, seed), _listeners),
    "context": (lambda clock, count, seed: evolving.pages(clock, count, STATES, seed), _readers),
}


# ---- running them -----------------------------------------------------------------------------------


async def run(
    llm: AsyncLLM,
    patterns: Sequence[str] = tuple(PATTERNS),
    problems: int = 60,
    *,
    seed: int = 0,
    concurrency: int = 16,
    progress: Callable[[str, str], None] | None = None,
) -> Measures:
    """So many problems of each pattern, in each way; `concurrency` at a time. The same seed gives the same
    problems. `progress` is called with a pattern and each way of it that is through.

    Raises ValueError for wrong arguments, before anything runs.
    """
    for pattern in patterns:
        if pattern not in PATTERNS:
            raise ValueError(f"no pattern {pattern!r}; there are {', '.join(PATTERNS)}")
    if problems < 1 or concurrency < 1:
        raise ValueError("give at least one problem, and a concurrency of at least 1")
    model = Path(llm.trace.model).name or llm.trace.model
    settings = {"model": model, "problems": problems, "seed": seed, "lines": LINES, "pace": PACE, "gap": GAP}
    result = Measures(settings, SHARES)
    clock = Clock(llm)
    with Meter(llm) as meter:
        for pattern in patterns:
            inputs, ways_of = PATTERNS[pattern]
            for name, way in ways_of(clock).items():
                todo = iter(list(enumerate(inputs(clock, problems, seed))))
                work = _work(llm, meter, pattern, name, way, todo, concurrency)
                result.runs += await clock.run(work)
                if progress is not None:
                    progress(pattern, name)
    return result


async def _work(
    llm: AsyncLLM,
    meter: Meter,
    pattern: str,
    name: str,
    way: Way,
    todo: Iterator[tuple[int, Any]],
    concurrency: int,
) -> list[Measured]:
    """All problems of a pattern in one way. No block is left."""
    found: list[Measured] = []

    async def work() -> None:
        for number, problem in todo:  # shared by all that work
            numbers, blocks = await way(llm, problem, f"{pattern}, {name}, {number}")
            passes, _, encoded = meter.take(blocks)
            counts = {"forward passes": [float(passes)], "encoded": [float(encoded)]}
            found.append(Measured(pattern, name, number, {**numbers, **counts}))
            for block in set(blocks) & set(llm.blocks.values()):
                await llm.free_block(block)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
    return sorted(found, key=lambda run: run.problem)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = commands.patterns_parser("patterns_io", __doc__, PATTERNS, 60)
    options = parser.parse_args(arguments)
    patterns = list(PATTERNS) if options.pattern == "all" else [options.pattern]
    result = commands.run_command(parser, _main(options, patterns))
    if options.out is not None:
        result.to_json(options.out)
    for pattern in patterns:
        print(f"{pattern}\n{result.table(pattern)}\n")


async def _main(options: argparse.Namespace, patterns: Sequence[str]) -> Measures:
    from ..llm import AsyncLLM

    def progress(pattern: str, way: str) -> None:
        print(f"{pattern}: {way}", file=sys.stderr, flush=True)

    slots = options.concurrency * SLOTS
    async with AsyncLLM(options.model, max_batch_tokens=BATCH, max_blocks=slots) as llm:
        return await run(
            llm,
            patterns,
            options.problems,
            seed=options.seed,
            concurrency=options.concurrency,
            progress=progress,
        )


if __name__ == "__main__":
    main()
