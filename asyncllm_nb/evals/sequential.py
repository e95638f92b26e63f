"""A thinker and a writer at once, beside the same model that writes when it has thought.

    python -m asyncllm_nb.evals.sequential --model tiny-hybrid --problems 300 --out sequential.json

Knows three ways to work on a problem, each a `Setup` of the sharded-input test without a correction. All of
them write the same kind of text; what differs is when, and how many forward passes it takes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import commands, sharded
from .cases import Case
from .dealing import Tell
from .files import read_json, write_json
from .machine import describe
from .protocol import Setup
from .results import Result, Run
from .scoring import Scoring
from .statistics import Share, mean
from .tables import Table

if TYPE_CHECKING:
    from ..llm import AsyncLLM

FORMAT = "asyncllm_nb.evals.sequential"
VERSION = 1


def ways_of(setup: Setup) -> dict[str, Setup]:
    """The three ways.

    shared: the writer sums up each paragraph while the thinker goes on, and answers when it has ended.
    sequential: the same summaries and answer, all behind the thinking.
    answer only: thinks, then answers, without a summary.
    """
    return {
        "shared": replace(setup, at_once=True),
        "sequential": replace(setup, at_once=False),
        "answer only": replace(setup, at_once=False, summary=""),
    }


@dataclass
class Comparison:
    """A result for each way; in all of them no correction came, and the answer before is the right one."""

    ways: Mapping[str, Result]
    machine: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def right(self, way: str) -> Share:
        """How many answers of one way are right."""
        return self.ways[way].share("never", None, "before")

    def table(self) -> Table:
        """A row for each way: accuracy, and means over the problems of forward passes and delays, in passes
        since the prompt. First word: the first that a reader gets, of a summary or of the answer."""
        columns = ["way", "problems", "right (95 %)", "forward passes", "to the first word", "to the answer"]
        rows = []
        for way, result in self.ways.items():
            runs = result.runs
            means = [
                mean([run.passes for run in runs]),
                mean([run.first_word for run in runs if run.first_word is not None]),
                mean([run.first_answer for run in runs if run.first_answer is not None]),
            ]
            rows.append([way, str(len(runs)), str(self.right(way)), *(f"{value:.1f}" for value in means)])
        return Table.of(columns, rows)

    def differing(self, way: str, other: str) -> list[str]:
        """Problems that one of two ways answers right and the other does not."""
        here, there = ({run.case: run.outcome == "before" for run in self.ways[w].runs} for w in (way, other))
        return [case for case, right in here.items() if there[case] != right]

    def same_words(self, way: str, other: str) -> int:
        """How many answers of two ways are the same word for word."""
        here, there = ({run.case: run.answer.split() for run in self.ways[w].runs} for w in (way, other))
        return sum(there[case] == answer for case, answer in here.items())

    def to_json(self, file: str | os.PathLike[str]) -> Path:
        """Write all results, whole or not at all. Returns the path."""
        ways = {way: result.document() for way, result in self.ways.items()}
        head = {"format": FORMAT, "version": VERSION, "machine": dict(self.machine)}
        return write_json(file, {**head, "ways": ways})

    @staticmethod
    def from_json(file: str | os.PathLike[str]) -> Comparison:
        """Read what `to_json` wrote. Raises ValueError for any other file."""

        def build(document: Any) -> Comparison:
            ways = {way: Result.of_document(inner) for way, inner in document["ways"].items()}
            return Comparison(ways, document.get("machine", {}))

        return read_json(file, FORMAT, VERSION, build, "is no comparison of this version")

    def __repr__(self) -> str:
        return f"<Comparison of {', '.join(self.ways)}>"

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


async def run(
    llm: AsyncLLM,
    problems: Iterable[Case | Sequence[Any]],
    *,
    setup: Setup | None = None,
    scoring: str | Scoring = "integer",
    concurrency: int = 32,
    progress: Callable[[Result, int], None] | None = None,
) -> Comparison:
    """Work on every problem in each way; arguments as for `sharded.run`."""
    problems = list(problems)
    ways = {}
    for way, way_setup in ways_of(setup or Setup()).items():
        ways[way] = await sharded.run(
            llm,
            problems,
            [None],
            (),
            setup=way_setup,
            scoring=scoring,
            concurrency=concurrency,
            progress=progress,
        )
    return Comparison(ways)


def _plans(options: argparse.Namespace) -> dict[str, sharded.Plan]:
    cases, scoring = commands.cases_of(options), commands.scoring_of(options)
    ways = ways_of(commands.setup_of(options))
    return {way: sharded.Plan.of(cases, [None], (), setup, scoring) for way, setup in ways.items()}


async def _work(options: argparse.Namespace, numbers: Sequence[int], tell: Tell) -> None:
    async with commands.engine_of(
        options, sharded.BATCH, dtype=options.dtype, max_blocks=options.max_blocks
    ) as llm:
        for way, plan in _plans(options).items():
            await plan.make(llm, numbers, options.concurrency, partial(_tell_of, tell, way))


def _tell_of(tell: Tell, way: str, run: Run) -> None:
    tell((way, run))


def _main(options: argparse.Namespace) -> Comparison:
    plans = _plans(options)
    ways = {way: plan.begun(options.model) for way, plan in plans.items()}
    count = len(plans["shared"].jobs)
    for way, run in commands.gathered(options, _work, count, len(ways) * count):
        ways[way].runs.append(run)
    for way, plan in plans.items():
        plan.sort(ways[way])
    return Comparison(ways, describe(options.processes))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = commands.common_parser("sequential", __doc__)
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(arguments)
    comparison = commands.run_command(parser, lambda: _main(options))
    if options.out is not None:
        comparison.to_json(options.out)
    print(comparison.table())


if __name__ == "__main__":
    main()
