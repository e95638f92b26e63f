"""Ready-made agents beside the ordinary loop that does the same work: accuracy, forward passes, delays.

    python -m asyncllm_nb.evals.patterns --model tiny-hybrid --pattern all --problems 100 --out patterns.json

Knows how each agent is measured; the loops stand in `loops`. All use the same model, greedily, and problems
that were held out of training. Forward passes count from the first encoding of the question on. To the
answer: the pass after which the thinking is closed and the answer begins. Encoded: tokens, those of probes
included.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from itertools import chain
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from ..agents import delegation, thinker_writer, tool_calls, workers
from ..tasks import calling, make_problem, parse_answer
from ..tasks.words import capital
from . import commands, loops
from .dealing import Tell, each
from .files import read_json, write_json
from .loops import Meter
from .machine import describe
from .statistics import Share, mean
from .tables import Table

if TYPE_CHECKING:
    from ..agent import Agent
    from ..llm import AsyncLLM

FORMAT = "asyncllm_nb.evals.patterns"
VERSION = 1
BATCH = 1024
"""Tokens in a step: room for what all problems at a time ask for at once."""
SLOTS = 12
"""Of a problem at a time, in models that have some."""

Task = Any
"""A problem of `asyncllm_nb.tasks`: .text, .answer, .answer_sentence."""


@dataclass(frozen=True)
class Pattern:
    """An agent, the loop to compare it with, and the problems of both. `said`: what the agent says in all."""

    problem: Callable[[Random], Task]
    agent: Callable[[AsyncLLM, Task, str], Agent]
    said: Callable[[dict[str, Any]], str]
    loop: Callable[[AsyncLLM, Task], Awaitable[loops.Said]]
    about: str  # the loop, in a few words


# ---- the agents, in the formats of the bundled model ------------------------------------------------


LONGEST = 400
"""Tokens of a worker's piece, and of what is concluded, at most: it may redo everything."""


def _workers(llm: AsyncLLM, task: Task, name: str) -> Agent:
    # A chain each; the first words of each line say whose it is, and are given as the model writes them.
    verbs = [f" {task.domain.verbs}" if kind == "base" else ":" for kind in task.kinds]
    begins = [f"\n\n{capital(entity)}{verb}" for entity, verb in zip(task.entities, verbs, strict=True)]
    pieces = [begins[: task.second], begins[task.second :]]
    return workers(
        llm,
        task.text,
        pieces,
        is_finished=lambda piece: piece.endswith("."),
        conclusion="\n\nTogether",
        max_tokens=LONGEST,
        name=name,
    )


def _thinker_writer(llm: AsyncLLM, task: Task, name: str) -> Agent:
    begins = task.answer_sentence.rsplit(" ", 2)[0]  # "The green box holds"
    closing = "\n</think>\n\n"
    return thinker_writer(llm, task.text, probe=closing, choices=(begins, "So far:"), name=name)


def _delegation(llm: AsyncLLM, task: Task, name: str) -> Agent:
    return delegation(llm, task.text + calling.USE_SUB_QUESTIONS, name=name)


def _tool_calls(llm: AsyncLLM, task: Task, name: str) -> Agent:
    return tool_calls(llm, task.text, name=name)


def _two_chains(rng: Random) -> Task:
    return make_problem(rng, (4, 6), chains=2, held_out=True)


PATTERNS = {
    "workers": Pattern(
        _two_chains,
        _workers,
        lambda results: str(results["conclude"]),
        lambda llm, task: loops.one_stream(llm, task.text),
        "one stream writes both parts",
    ),
    "thinker and writer": Pattern(
        lambda rng: make_problem(rng, held_out=True),
        _thinker_writer,
        lambda results: str(results["write"].text),
        lambda llm, task: loops.one_stream(llm, task.text),
        "one stream thinks, then answers",
    ),
    "delegation": Pattern(
        _two_chains,
        _delegation,
        lambda results: str(results["call"]),
        lambda llm, task: loops.passed_to_helpers(llm, task.text + calling.USE_SUB_QUESTIONS),
        "questions and results passed as text",
    ),
    "tool calls": Pattern(
        lambda rng: calling.make_sum(rng, held_out=True),
        _tool_calls,
        lambda results: str(results["call"]),
        lambda llm, task: loops.passed_to_tools(llm, task.text),
        "calls and results passed as text",
    ),
}


# ---- what came out ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One problem in one way, "agent" or "loop". `to_answer`: None if no answer began."""

    pattern: str
    way: str
    problem: int
    right: bool
    passes: int
    to_answer: int | None
    encoded: int
    text: str


COLUMNS = tuple(f.name for f in fields(Run))


@dataclass
class Comparison:
    """All runs, and the settings that they were made with."""

    settings: dict[str, Any]
    runs: list[Run] = field(default_factory=list)
    machine: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def of(self, pattern: str, way: str) -> list[Run]:
        """The runs of a pattern in one way, by problem."""
        return sorted((r for r in self.runs if (r.pattern, r.way) == (pattern, way)), key=lambda r: r.problem)

    def table(self) -> Table:
        """Two rows for each pattern; means over the problems, aside from what is right."""
        columns = ["pattern", "way", "problems", "right (95 %)", "forward passes", "to the answer", "encoded"]
        rows = []
        for pattern in dict.fromkeys(run.pattern for run in self.runs):
            for way, words in (("agent", "agent"), ("loop", PATTERNS[pattern].about)):
                runs = self.of(pattern, way)
                means = [
                    mean([run.passes for run in runs]),
                    mean([run.to_answer for run in runs if run.to_answer is not None]),
                    mean([run.encoded for run in runs]),
                ]
                right = Share(sum(run.right for run in runs), len(runs))
                rows.append(
                    [pattern, words, str(len(runs)), str(right), *(f"{value:.1f}" for value in means)]
                )
        return Table.of(columns, rows)

    def to_json(self, file: str | os.PathLike[str]) -> Path:
        """Write all of it, whole or not at all. Returns the path."""
        runs = [list(astuple(run)) for run in self.runs]
        head = {"format": FORMAT, "version": VERSION, "machine": dict(self.machine)}
        return write_json(file, {**head, "settings": self.settings, "columns": list(COLUMNS), "runs": runs})

    @staticmethod
    def from_json(file: str | os.PathLike[str]) -> Comparison:
        """Read what `to_json` wrote. Raises ValueError for any other file."""

        def build(document: Any) -> Comparison:
            runs = [Run(**dict(zip(document["columns"], row, strict=True))) for row in document["runs"]]
            return Comparison(document["settings"], runs, document.get("machine", {}))

        return read_json(file, FORMAT, VERSION, build, f"is no comparison of patterns, version {VERSION}")

    def __repr__(self) -> str:
        return f"<Comparison of {', '.join(dict.fromkeys(run.pattern for run in self.runs))}>"

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


async def run(
    llm: AsyncLLM,
    patterns: Sequence[str] = tuple(PATTERNS),
    problems: int = 100,
    *,
    seed: int = 0,
    concurrency: int = 16,
    progress: Callable[[str, int], None] | None = None,
) -> Comparison:
    """Work on so many problems of each pattern, in both ways; `concurrency` problems at a time.

    The same seed gives the same problems. `progress` is called with a pattern and the number of its problems
    done. Raises ValueError for an unknown pattern.
    """
    for pattern in patterns:
        if pattern not in PATTERNS:
            raise ValueError(f"no pattern {pattern!r}; there are {', '.join(PATTERNS)}")
    if problems < 1 or concurrency < 1:
        raise ValueError("give at least one problem, and a concurrency of at least 1")
    found: list[Run] = []

    def add(runs: list[Run]) -> None:
        found.extend(runs)
        if progress is not None:
            pattern = runs[0].pattern
            progress(pattern, sum(run.pattern == pattern and run.way == "agent" for run in found))

    await _runs(llm, patterns, problems, range(problems), seed, concurrency, add)
    return _comparison(llm.trace.model, patterns, problems, seed, found)


async def _runs(
    llm: AsyncLLM,
    patterns: Sequence[str],
    problems: int,
    numbers: Sequence[int],
    seed: int,
    concurrency: int,
    tell: Callable[[list[Run]], None],
) -> None:
    """The problems with these numbers, of those that there are of each pattern."""

    async def both(todo: tuple[str, int, Task]) -> None:
        tell(await _both(llm, meter, *todo))

    with Meter(llm) as meter:
        for pattern in patterns:
            rng = Random(f"patterns/{pattern}/{seed}")
            tasks = [PATTERNS[pattern].problem(rng) for _ in range(problems)]
            await each([(pattern, number, tasks[number]) for number in numbers], both, concurrency)


def _comparison(
    model: str, patterns: Sequence[str], problems: int, seed: int, runs: Iterable[Run]
) -> Comparison:
    settings = {"model": commands.model_name(model), "problems": problems, "seed": seed}
    order = {pattern: place for place, pattern in enumerate(patterns)}
    return Comparison(settings, sorted(runs, key=lambda run: (order[run.pattern], run.problem)))


async def _both(llm: AsyncLLM, meter: Meter, pattern: str, number: int, task: Task) -> list[Run]:
    """One problem, by the agent and by the loop. No block is left."""
    about = PATTERNS[pattern]

    def told(way: str, said: loops.Said) -> Run:
        _, closed, answer = said.text.rpartition("</think>")
        right = parse_answer(answer or said.text) == task.answer
        return Run(pattern, way, number, right, *meter.take(said.firsts), said.text)

    agent = about.agent(llm, task, f"{pattern} {number}")
    results = await agent.start()
    runs = [told("agent", loops.Said(about.said(results), [agent.blocks["prompt"]]))]
    blocks = list(agent.blocks.values())
    said = await about.loop(llm, task)
    runs.append(told("loop", said))
    for block in [*blocks, *said.firsts]:
        await llm.free_block(block)
    return runs


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = commands.patterns_parser("patterns", __doc__, PATTERNS, 100)
    options = parser.parse_args(arguments)
    result = commands.run_command(parser, lambda: _main(options))
    if options.out is not None:
        result.to_json(options.out)
    print(result.table())


async def _work(options: argparse.Namespace, numbers: Sequence[int], tell: Tell) -> None:
    patterns, problems = commands.patterns_of(options, PATTERNS), options.problems
    async with commands.engine_of(options, BATCH, max_blocks=options.concurrency * SLOTS) as llm:
        await _runs(llm, patterns, problems, numbers, options.seed, options.concurrency, tell)


def _main(options: argparse.Namespace) -> Comparison:
    patterns, problems = commands.patterns_of(options, PATTERNS), options.problems
    found = commands.gathered(options, _work, problems, len(patterns) * problems)
    result = _comparison(options.model, patterns, problems, options.seed, chain.from_iterable(found))
    result.machine = describe(options.processes)
    return result


if __name__ == "__main__":
    main()
