r"""The sharded-input test: how good are answers when part of the input arrives while the model thinks?

    python -m asyncllm_nb.evals.sharded --model tiny-hybrid --problems 300 --out result.json
    python -m asyncllm_nb.evals.sharded --model Qwen/Qwen3.5-9B --dataset math.jsonl --out result.json \
        --max-thinking 16384 --max-answer 1024 --system 'Put the final answer in \boxed{}.'

Knows what is run, and how many runs share one engine. One run is `protocol`, what came out is `results`.

For each problem, each k and each routing a thinker and a writer run at once; a correction arrives when the
thinker has made k tokens, and everything computed stays. An evaluation that was stopped goes on where its
file ends.

In the first table "after" is the share of answers that are right with the correction, "before" of those that
are right without it. "Taken up": the thinking's own conclusion is the answer after. "Arrived": the correction
came before the thinking had ended; otherwise it was never said. The second one has means over the runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import commands
from .cases import Case, as_cases
from .dealing import Tell, each, gather
from .machine import describe
from .passes import Passes
from .protocol import ROUTINGS, Frame, Routing, Setup, run_once
from .results import Result, Run
from .scoring import SCORINGS, Scoring

if TYPE_CHECKING:
    from ..llm import AsyncLLM

KS: tuple[int | None, ...] = (0, 4, 8, 16, 32, 64, 128, None)
"""Tokens that the thinker has made when the correction comes; None: it never comes."""

BATCH = 4096
"""Tokens in a step: room for whatever all runs ask for at once, so that none of them waits for others."""

SLOTS = 6
"""Of a run, in models that have some: four blocks that hold something, and one for each of two that write."""

Job = tuple[Case, Routing, int | None]


@dataclass(frozen=True)
class Plan:
    """What is run: every problem at each of `ks` and through each of `routings`."""

    cases: tuple[Case, ...]
    ks: tuple[int | None, ...]
    routings: tuple[Routing, ...]
    setup: Setup
    scoring: Scoring

    @staticmethod
    def of(
        problems: Iterable[Case | Sequence[Any]],
        ks: Sequence[int | None] = KS,
        routings: Sequence[Routing] = ROUTINGS,
        setup: Setup | None = None,
        scoring: str | Scoring = "integer",
    ) -> Plan:
        """Arguments as for `run`. Raises ValueError for wrong ones."""
        cases = as_cases(problems)
        scoring = _scoring(scoring)
        _check(ks, routings)
        cases = [replace(case, id=case.id or str(index)) for index, case in enumerate(cases)]
        twice = [name for name, times in Counter(case.id for case in cases).items() if times > 1]
        if twice:
            raise ValueError(f"two problems have the id {twice[0]!r}: give each one of its own, or none")
        _check_answers(cases, scoring)
        return Plan(tuple(cases), tuple(ks), tuple(routings), setup or Setup(), scoring)

    @cached_property
    def jobs(self) -> list[Job]:
        """Problem by problem, so that an unfinished evaluation has whole problems."""
        return [
            (case, routing, k)
            for case in self.cases
            for k in self.ks
            for routing in (self.routings if k is not None else ("never",))
        ]

    def begun(self, model: str, done: Result | None = None) -> Result:
        """A result that has the runs of `done`, or none. Raises ValueError if that has other settings."""
        settings = self.settings(model)
        if done is None:
            return Result(settings)
        check_same(done.settings, settings)
        return Result(settings, [*done.runs])

    def missing(self, result: Result) -> list[int]:
        """Numbers of the jobs that it has no run of."""
        made = {run.key for run in result.runs}
        return [n for n, (case, routing, k) in enumerate(self.jobs) if (case.id, routing, k) not in made]

    def sort(self, result: Result) -> None:
        """Put its runs in the order of the jobs."""
        order = {(case.id, routing, k): number for number, (case, routing, k) in enumerate(self.jobs)}
        result.runs.sort(key=lambda run: order[run.key])

    async def make(
        self, llm: AsyncLLM, numbers: Sequence[int], concurrency: int, tell: Callable[[Run], None]
    ) -> None:
        """Do the jobs with these numbers, `concurrency` at a time. Raises what a run raises, in a group."""
        _check_slots(llm, min(concurrency, len(numbers)))
        frame = Frame.of(llm, self.setup)

        async def make_one(job: Job) -> None:
            tell(await _run(llm, frame, self.setup, self.scoring, passes, *job))

        with Passes(llm) as passes:
            await each([self.jobs[number] for number in numbers], make_one, concurrency)

    def settings(self, model: str) -> dict[str, Any]:
        """What a result depends on, as JSON knows it."""
        text = json.dumps([asdict(case) for case in self.cases], ensure_ascii=False)
        return {
            "model": commands.model_name(model),
            "problems": len(self.cases),
            "digest": hashlib.sha256(text.encode()).hexdigest()[:16],
            "ks": list(self.ks),
            "routings": list(self.routings),
            "scoring": self.scoring.name,
            "setup": {**asdict(self.setup), "template_args": dict(self.setup.template_args)},
        }


async def run(
    llm: AsyncLLM,
    problems: Iterable[Case | Sequence[Any]],
    ks: Sequence[int | None] = KS,
    routings: Sequence[Routing] = ROUTINGS,
    *,
    setup: Setup | None = None,
    scoring: str | Scoring = "integer",
    concurrency: int = 32,
    done: Result | None = None,
    progress: Callable[[Result, int], None] | None = None,
) -> Result:
    """Run every problem at each `ks` and through each of `routings`; `concurrency` at a time.

    Parameters
    ----------
    problems: cases, or (problem, correction, answer before, answer after).
    ks: tokens thought when the correction comes; None is the control "never", one run for all routings.
    scoring: "integer", "boxed", or a `Scoring`.
    done: a result of the same settings, whose runs are not made again.
    progress: called after each run with the result so far and the number of all runs.

    Raises ValueError for wrong arguments, before anything runs, and whatever a run raises. Streams are
    greedy: a run gives the same on its own and beside others, near ties of two tokens aside.
    """
    plan = Plan.of(problems, ks, routings, setup, scoring)
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, not {concurrency}")
    result = plan.begun(llm.trace.model, done)

    def add(run: Run) -> None:
        result.runs.append(run)
        if progress is not None:
            progress(result, len(plan.jobs))

    await plan.make(llm, plan.missing(result), concurrency, add)
    plan.sort(result)
    return result


async def _run(
    llm: AsyncLLM,
    frame: Frame,
    setup: Setup,
    scoring: Scoring,
    passes: Passes,
    case: Case,
    routing: Routing,
    k: int | None,
) -> Run:
    found = await run_once(llm, frame, setup, passes, case.problem, case.correction, routing, k)
    return Run(
        case=case.id,
        routing=routing,
        k=k,
        outcome=scoring.outcome(found.answer, case.before, case.after),
        taken_up=scoring.takes_up(found.thinking, case.after),
        arrived=found.arrived,
        ended=found.ended,
        tokens=found.thinking_tokens,
        passes=found.passes,
        first_word=found.first_word,
        first_answer=found.first_answer,
        answer=found.answer,
    )


def _scoring(scoring: str | Scoring) -> Scoring:
    if isinstance(scoring, Scoring):
        return scoring
    if scoring not in SCORINGS:
        raise ValueError(f"scoring must be one of {', '.join(SCORINGS)}, or a Scoring, not {scoring!r}")
    return SCORINGS[scoring]


def _check(ks: Sequence[int | None], routings: Sequence[Routing]) -> None:
    for k in ks:
        if k is not None and (isinstance(k, bool) or not isinstance(k, int) or k < 0):
            raise ValueError(f"ks are numbers of tokens from 0 on, or None for never, not {k!r}")
    for routing in routings:
        if routing not in ROUTINGS:
            raise ValueError(f"a routing is one of {', '.join(ROUTINGS)}, not {routing!r}")
    if not ks or len(set(ks)) < len(ks) or len(set(routings)) < len(routings):
        raise ValueError("give one or more different ks, and each routing once")
    if not routings and any(k is not None for k in ks):
        raise ValueError(f"give one or more routings of {', '.join(ROUTINGS)}")


def _check_answers(cases: Iterable[Case], scoring: Scoring) -> None:
    for case in cases:
        try:
            before = None if case.before is None else scoring.normal(case.before)
            after = scoring.normal(case.after)
        except ValueError as error:
            raise ValueError(f"problem {case.id}: {error}") from None
        if before == after:
            raise ValueError(
                f"problem {case.id}: the answers {case.before!r} and {case.after!r} are the same to the "
                f"scoring {scoring.name!r}, so nothing could be told from them: leave it out"
            )


def _check_slots(llm: AsyncLLM, together: int) -> None:
    slots, needed = llm.stats()["slots"], SLOTS * together
    if 0 < slots < needed:
        fewer = f"ask for a concurrency of {slots // SLOTS}, or " if slots >= SLOTS else ""
        raise ValueError(
            f"{together} problems at a time need {needed} slots and the engine has {slots}: {fewer}make the "
            f"engine with max_blocks={needed}"
        )


def check_same(done: Any, wanted: Any) -> None:
    """Raise ValueError that names what differs between the settings of two results."""
    done, wanted = _flat(done), _flat(wanted)
    differ = [name for name in wanted if done.get(name) != wanted[name]]
    if differ:
        pairs = "; ".join(f"{name}: {done.get(name)!r}, now {wanted[name]!r}" for name in differ)
        raise ValueError(f"the result was made with other settings ({pairs}): start a new file")


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of "setup" beside the others, so that a message names the few that differ."""
    others = {name: value for name, value in settings.items() if name != "setup"}
    return {**others, **settings.get("setup", {})}


# ---- the command line -------------------------------------------------------------------------------


def _plan(options: argparse.Namespace) -> Plan:
    return Plan.of(
        commands.cases_of(options),
        options.ks,
        options.routing or ROUTINGS,
        commands.setup_of(options),
        commands.scoring_of(options),
    )


async def _work(options: argparse.Namespace, numbers: Sequence[int], tell: Tell) -> None:
    async with commands.engine_of(options, BATCH, dtype=options.dtype, max_blocks=options.max_blocks) as llm:
        await _plan(options).make(llm, numbers, options.concurrency, tell)


def _main(options: argparse.Namespace) -> Result:
    plan, out = _plan(options), options.out
    result = plan.begun(options.model, Result.from_json(out) if out is not None and out.exists() else None)
    result.machine = describe(options.processes)

    def save() -> None:
        if out is not None:
            result.to_json(out)

    progress = commands.Progress(len(plan.jobs), len(result.runs), save=save)

    def add(run: Run) -> None:
        result.runs.append(run)
        progress.one_more()

    gather(partial(_work, options), plan.missing(result), options.processes, add)
    plan.sort(result)
    save()
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = commands.common_parser("sharded", __doc__)
    parser.add_argument("--out", type=Path, help="JSON file; one that is there is continued")
    parser.add_argument("--ks", type=commands.parse_ks, default=list(KS), help="as in 0,16,never")
    parser.add_argument(
        "--routing",
        action="append",
        choices=ROUTINGS,
        help="where it goes: before the thinking, after the thinking so far, or to the writer only; may be "
        "given several times, default: all three",
    )
    parser.add_argument("--plot", type=Path, help="write the curve as an HTML page")
    options = parser.parse_args(arguments)
    if options.plot is not None:
        if options.plot.is_dir():  # said before the work, not after it
            parser.error(f"--plot {options.plot} is a folder: give the name of an HTML file")
        options.plot.parent.mkdir(parents=True, exist_ok=True)
    result = commands.run_command(parser, lambda: _main(options))
    print(result.table(), result.work_table(), sep="\n\n")
    if all(run.outcome == "unfinished" for run in result.runs):
        print(
            f"\nNo answer was found by --scoring {result.settings['scoring']}: see --help for what it wants, "
            "--out for what was answered, and whether --max-thinking and --max-answer leave room for it."
        )
    if options.plot is not None:
        result.plot().write_html(options.plot)


if __name__ == "__main__":
    main()
