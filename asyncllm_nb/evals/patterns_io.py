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
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from . import commands, evolving, listening, monitoring
from .clock import Clock
from .dealing import Tell, each
from .logs import held_out_logs
from .loops import Meter
from .machine import describe
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
Way = Callable[["AsyncLLM", Clock, Any, str], Awaitable[Outcome]]


# ---- the ways ---------------------------------------------------------------------------------------


def _watched(**options: Any) -> Way:
    async def way(llm: AsyncLLM, clock: Clock, log: Any, name: str) -> Outcome:
        watch, blocks = await monitoring.watched(llm, clock, log, PACE, name, **options)
        return watch.numbers(), blocks

    return way


async def _read_in_turn(llm: AsyncLLM, clock: Clock, log: Any, name: str) -> Outcome:
    watch, blocks = await monitoring.looped(llm, clock, log, PACE, name)
    return watch.numbers(), blocks


async def _listened(llm: AsyncLLM, clock: Clock, speaker: Any, name: str) -> Outcome:
    last, blocks = await listening.listened(llm, speaker, name)
    return speaker.numbers(last), blocks


def _took_turns(silence: int) -> Way:
    async def way(llm: AsyncLLM, clock: Clock, speaker: Any, name: str) -> Outcome:
        last, blocks = await listening.took_turns(llm, speaker, name, silence)
        return speaker.numbers(last), blocks

    return way


def _followed(restarts: int) -> Way:
    async def way(llm: AsyncLLM, clock: Clock, page: Any, name: str) -> Outcome:
        blocks = await evolving.followed(llm, page, name, restarts)
        return page.numbers(), blocks

    return way


async def _asked_anew(llm: AsyncLLM, clock: Clock, page: Any, name: str) -> Outcome:
    blocks = await evolving.looped(llm, page, name)
    return page.numbers(), blocks


Inputs = Callable[[Clock, int, int], Sequence[Any]]
"""From a clock, a count and a seed. A way gets its own: some of them keep what happened."""

PATTERNS: dict[str, tuple[Inputs, dict[str, Way]]] = {
    "monitor": (
        lambda clock, count, seed: held_out_logs(count, LINES, seed),
        {
            "monitor": _watched(),
            "monitor, its probe reads the thinker": _watched(reads_thinker=True, note="\n"),
            "loop": _read_in_turn,
        },
    ),
    "listener": (
        lambda clock, count, seed: listening.speakers(clock, count, GAP, seed),
        {
            "listener": _listened,
            f"turns, after a silence of {SILENCE}": _took_turns(SILENCE),
            "turns, told the end": _took_turns(0),
        },
    ),
    "context": (
        lambda clock, count, seed: evolving.pages(clock, count, STATES, seed),
        {"reader": _followed(0), "reader, begins anew once": _followed(1), "loop": _asked_anew},
    ),
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
    runs: list[Measured] = []
    left = {(pattern, way): problems for pattern in patterns for way in PATTERNS[pattern][1]}

    def add(run: Measured) -> None:
        runs.append(run)
        left[run.pattern, run.way] -= 1
        if progress is not None and not left[run.pattern, run.way]:
            progress(run.pattern, run.way)

    await _runs(llm, patterns, problems, range(problems), seed, concurrency, add)
    return _measures(llm.trace.model, patterns, problems, seed, runs)


async def _runs(
    llm: AsyncLLM,
    patterns: Sequence[str],
    problems: int,
    numbers: Sequence[int],
    seed: int,
    concurrency: int,
    tell: Callable[[Measured], None],
) -> None:
    """The problems with these numbers, of those that there are of each pattern."""
    clock = Clock(llm)
    with Meter(llm) as meter:
        for pattern in patterns:
            inputs, ways = PATTERNS[pattern]
            for name, way in ways.items():
                made = inputs(clock, problems, seed)
                todo = [(number, made[number]) for number in numbers]
                one = partial(_one, llm, clock, meter, pattern, name, way, tell)
                await clock.run(each(todo, one, concurrency))


async def _one(
    llm: AsyncLLM,
    clock: Clock,
    meter: Meter,
    pattern: str,
    name: str,
    way: Way,
    tell: Callable[[Measured], None],
    numbered: tuple[int, Any],
) -> None:
    """A problem in one way. No block is left."""
    number, problem = numbered
    numbers, blocks = await way(llm, clock, problem, f"{pattern}, {name}, {number}")
    passes, _, encoded = meter.take(blocks)
    counts = {"forward passes": [float(passes)], "encoded": [float(encoded)]}
    tell(Measured(pattern, name, number, {**numbers, **counts}))
    for block in set(blocks) & set(llm.blocks.values()):
        await llm.free_block(block)


def _measures(
    model: str, patterns: Sequence[str], problems: int, seed: int, runs: Iterable[Measured]
) -> Measures:
    settings = {
        "model": commands.model_name(model),
        "problems": problems,
        "seed": seed,
        "lines": LINES,
        "pace": PACE,
        "gap": GAP,
    }
    ways = [(pattern, way) for pattern in patterns for way in PATTERNS[pattern][1]]
    order = {way: place for place, way in enumerate(ways)}
    return Measures(
        settings, SHARES, sorted(runs, key=lambda run: (order[run.pattern, run.way], run.problem))
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = commands.patterns_parser("patterns_io", __doc__, PATTERNS, 60)
    options = parser.parse_args(arguments)
    result = commands.run_command(parser, lambda: _main(options))
    if options.out is not None:
        result.to_json(options.out)
    for pattern in commands.patterns_of(options, PATTERNS):
        print(f"{pattern}\n{result.table(pattern)}\n")


async def _work(options: argparse.Namespace, numbers: Sequence[int], tell: Tell) -> None:
    patterns, problems = commands.patterns_of(options, PATTERNS), options.problems
    async with commands.engine_of(options, BATCH, max_blocks=options.concurrency * SLOTS) as llm:
        await _runs(llm, patterns, problems, numbers, options.seed, options.concurrency, tell)


def _main(options: argparse.Namespace) -> Measures:
    patterns, problems = commands.patterns_of(options, PATTERNS), options.problems
    ways = sum(len(PATTERNS[pattern][1]) for pattern in patterns)
    found = commands.gathered(options, _work, problems, ways * problems)
    result = _measures(options.model, patterns, problems, options.seed, found)
    result.machine = describe(options.processes)
    return result


if __name__ == "__main__":
    main()
