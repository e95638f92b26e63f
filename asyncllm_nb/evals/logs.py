"""A log that is watched by probes while a thinker explains it, beside a loop that reads everything first.

    python -m asyncllm_nb.evals.logs --model tiny-hybrid --logs 300 --out logs.json

Knows the public API and the logs of `asyncllm_nb.tasks`. Views (the last block is written):

    log                 the rule and the lines so far; the user's turn stays open
    log thinker         closes the turn, explains line by line, and sees new lines as they come

The thinker's words on a line begin with the line, which is given: a model may take the log to have ended
where it ended when it began to think, and would close its thoughts there.

Time is counted in forward passes. A line is due after every `pace` tokens of the thinker. The *watcher*
encodes it and asks "Warn?" by a probe. The *sequential* loop waits for the last line, then writes an
explanation of each, and warns in it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..tasks.logs import QUESTION, Log, make_log
from ..tasks.pieces import BREAK
from .commands import at_least_one, engine_of, gathered, model_arguments, model_name, run_command
from .dealing import Tell, each
from .files import read_json, write_json
from .machine import describe
from .passes import Passes
from .protocol import Frame, Setup
from .sharded import BATCH
from .statistics import Share, mean
from .tables import Table

if TYPE_CHECKING:
    from ..engine.blocks import CacheBlock
    from ..llm import AsyncLLM

FORMAT = "asyncllm_nb.evals.logs"
VERSION = 1
MOST = 600
"""Tokens of an explanation."""
CHOICES = (" yes", " no")
WARNS = "so warn."
"""How the explanation of a line that calls for a warning ends."""

Way = Literal["watcher", "sequential"]
WAYS: tuple[Way, ...] = ("watcher", "sequential")


@dataclass(frozen=True)
class Line:
    """One line of one log, and what a way made of it.

    fires: does it call for a warning? warned: did it get one? None if nothing was said about it.
    delay: forward passes from when the line was due until that was known.
    """

    log: int
    index: int
    way: Way
    fires: bool
    warned: bool | None
    delay: int | None


COLUMNS = tuple(f.name for f in fields(Line))


@dataclass
class Watch:
    """All lines of an evaluation, its settings, and for each way the forward passes of each log."""

    settings: dict[str, Any]
    lines: list[Line] = field(default_factory=list)
    passes: dict[str, list[int]] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def detected(self, way: Way) -> Share:
        """Of the lines that call for a warning, how many got one."""
        fired = [line for line in self.lines if line.way == way and line.fires]
        return Share(sum(line.warned is True for line in fired), len(fired))

    def false_alarms(self, way: Way) -> Share:
        """Of the other lines, how many got one."""
        quiet = [line for line in self.lines if line.way == way and not line.fires]
        return Share(sum(line.warned is True for line in quiet), len(quiet))

    def delays(self, way: Way) -> list[int]:
        """Of the lines that were rightly warned of."""
        return [
            line.delay
            for line in self.lines
            if line.way == way and line.fires and line.warned and line.delay is not None
        ]

    def table(self) -> Table:
        """A row for each way."""
        columns = ["way", "lines", "detected (95 %)", "false alarms (95 %)", "delay, mean", "delay, worst",
                   "forward passes a log"]  # fmt: skip
        rows = []
        for way in WAYS:
            delays = self.delays(way)
            rows.append(
                [
                    way,
                    str(sum(line.way == way for line in self.lines)),
                    str(self.detected(way)),
                    str(self.false_alarms(way)),
                    f"{mean([float(d) for d in delays]):.1f}",
                    str(max(delays, default="–")),
                    f"{mean([float(p) for p in self.passes.get(way, [])]):.1f}",
                ]
            )
        return Table.of(columns, rows)

    def to_json(self, file: str | os.PathLike[str]) -> Path:
        """Write all of it, whole or not at all. Returns the path."""
        document = {
            "format": FORMAT,
            "version": VERSION,
            "machine": dict(self.machine),
            "settings": self.settings,
            "passes": self.passes,
            "columns": list(COLUMNS),
            "lines": [list(astuple(line)) for line in self.lines],
        }
        return write_json(file, document)

    @staticmethod
    def from_json(file: str | os.PathLike[str]) -> Watch:
        """Read what `to_json` wrote. Raises ValueError for any other file."""

        def build(document: Any) -> Watch:
            names = document["columns"]
            lines = [Line(**dict(zip(names, row, strict=True))) for row in document["lines"]]
            return Watch(document["settings"], lines, document["passes"], document.get("machine", {}))

        return read_json(file, FORMAT, VERSION, build, f"is no result of the log watcher, version {VERSION}")

    def __repr__(self) -> str:
        return f"<Watch of {len(self.lines)} lines>"

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def held_out_logs(count: int, lines: int = 12, seed: int = 0) -> list[Log]:
    """`count` logs that were held out of training. The same arguments give the same logs."""
    rng = random.Random(f"logs/{seed}")
    return [make_log(rng, lines, held_out=True) for _ in range(count)]


async def run(
    llm: AsyncLLM,
    logs: Iterable[Log],
    *,
    pace: int = 8,
    max_tokens: int = MOST,
    concurrency: int = 16,
    progress: Callable[[int], None] | None = None,
) -> Watch:
    """Watch every log in both ways. `pace`: tokens of the thinker from one line to the next; `progress` is
    called with the number of logs done.

    Raises ValueError for wrong arguments, before anything runs.
    """
    logs = list(logs)
    if not logs or pace < 1 or max_tokens < 1 or concurrency < 1:
        raise ValueError("give at least one log, and pace, max_tokens and concurrency of at least 1")
    found: list[Both] = []

    def add(one: Both) -> None:
        found.append(one)
        if progress is not None:
            progress(len(found))

    await _both(llm, enumerate(logs), pace, max_tokens, concurrency, add)
    return _watch(llm.trace.model, pace, max_tokens, found)


Both = tuple[int, dict[Way, tuple[list[Line], int]]]
"""The number of a log, and for each way its lines and how many forward passes it took."""


async def _both(
    llm: AsyncLLM,
    logs: Iterable[tuple[int, Log]],
    pace: int,
    max_tokens: int,
    concurrency: int,
    tell: Callable[[Both], None],
) -> None:
    """Watch numbered logs in both ways."""
    frame = Frame.of(llm, Setup())

    async def both(numbered: tuple[int, Log]) -> None:
        one = _OneLog(llm, frame, passes, *numbered, pace, max_tokens)
        tell((numbered[0], {"watcher": await one.watched(), "sequential": await one.read_first()}))

    with Passes(llm) as passes:
        await each(logs, both, concurrency)


def _watch(model: str, pace: int, max_tokens: int, found: Collection[Both]) -> Watch:
    settings = {"model": model_name(model), "logs": len(found), "pace": pace, "max_tokens": max_tokens}
    result = Watch(settings)
    in_order = sorted(found, key=lambda one: one[0])
    for way in WAYS:
        for _, ways in in_order:
            lines, count = ways[way]
            result.lines += lines
            result.passes.setdefault(way, []).append(count)
    return result


class _OneLog:
    """One log, watched in each way."""

    def __init__(
        self, llm: AsyncLLM, frame: Frame, passes: Passes, number: int, log: Log, pace: int, most: int
    ) -> None:
        self.llm, self.frame, self.passes = llm, frame, passes
        self.number, self.log, self.pace, self.most = number, log, pace, most

    def line(self, index: int, way: Way, warned: bool | None, delay: int | None) -> Line:
        return Line(self.number, index, way, self.log.answers[index], warned, delay)

    def opening(self, lines: Iterable[str] = ()) -> list[int]:
        """The user's turn with the rule, and lines behind it."""
        said = self.log.head + "".join(line + "\n" for line in lines)
        return [*self.llm.encode(self.frame.turns.opening), *self.llm.encode(said, control=False)]

    # ---- the watcher ----------------------------------------------------------------------------

    async def watched(self) -> tuple[list[Line], int]:
        """Its lines, and how many forward passes all of it took."""
        log, thinker = await self.llm.create_blocks("log", "thinker")
        await self.llm.forward(self.opening(), [log], logits="none")
        due = asyncio.Queue[int | None]()  # for each line, the passes made when it was due
        due.put_nowait(None)
        arrived = asyncio.Queue[str]()
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self.watch(log, due, arrived))
            group.create_task(self.explain(log, thinker, due, arrived))
        count = self.passes.of(log)
        self.passes.forget(log)
        for block in (log, thinker):
            await self.llm.free_block(block)
        return watching.result(), count

    async def watch(
        self, log: CacheBlock, due: asyncio.Queue[int | None], arrived: asyncio.Queue[str]
    ) -> list[Line]:
        """Encode each line when it is due, and ask behind it."""
        found = []
        for index, text in enumerate(self.log.lines):
            since = await due.get()
            if since is None:  # now
                since = self.passes.of(log)
            await self.llm.forward(self.llm.encode(text + "\n", control=False), [log], logits="none")
            arrived.put_nowait(text)
            chances = await self.llm.probe(QUESTION, [log], CHOICES)
            warned = chances[CHOICES[0]] > chances[CHOICES[1]]
            found.append(self.line(index, "watcher", warned, self.passes.of(log) - since))
        return found

    async def explain(
        self,
        log: CacheBlock,
        thinker: CacheBlock,
        due: asyncio.Queue[int | None],
        arrived: asyncio.Queue[str],
    ) -> None:
        """Explain one line after the other while more come. Where it has explained all that are due, the next
        one is due at once; when it has no tokens left, each is, as soon as the one before was answered."""
        lines, told, num_due = self.log.lines, 0, 1
        for index in range(len(lines)):
            if told >= self.most:
                break
            if num_due == index:
                due.put_nowait(None)
                num_due += 1
            begun = self.llm.encode(BREAK) if index else self.llm.encode(self.frame.turns.answering)
            begun += self.llm.encode(f"{await arrived.get()}:", control=False)
            most = self.most - told
            words = self.llm.generate(begun, [log, thinker], stop=".", max_tokens=most, name="explain")
            async for _ in words:
                told += 1
                if told % self.pace == 0 and num_due < len(lines):
                    due.put_nowait(self.passes.of(log))
                    num_due += 1
        for _ in range(num_due, len(lines)):
            due.put_nowait(None)

    # ---- everything first -----------------------------------------------------------------------

    async def read_first(self) -> tuple[list[Line], int]:
        """The same for the loop that reads everything, then explains line by line."""
        block = await self.llm.create_block("all of the log")
        said = [*self.opening(self.log.lines), *self.llm.encode(self.frame.turns.answering)]
        stop = self.frame.think_end or ()
        told = self.llm.generate(said, [block], stop=stop, max_tokens=self.most, name="explain all")
        ends: list[int] = []  # for each character of the text, the passes after which it was there
        async for token in told:
            ends += [self.passes.until(block, token.step)] * (len(told.full_text) - len(ends))
        found = [self.read(index, told.full_text, ends) for index in range(len(self.log.lines))]
        count = self.passes.of(block)
        self.passes.forget(block)
        await self.llm.free_block(block)
        return found, count

    def read(self, index: int, text: str, ends: Sequence[int]) -> Line:
        """What the explanation says about a line, and when that was there. The last line was due
        `pace` passes after the one before, and so on."""
        at = text.find(self.log.lines[index] + ":")
        end = text.find("\n", at) if at >= 0 else -1
        if end < 0:
            return self.line(index, "sequential", None, None)
        waited = (len(self.log.lines) - 1 - index) * self.pace
        return self.line(index, "sequential", text[at:end].endswith(WARNS), waited + ends[end - 1])


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m asyncllm_nb.evals.logs", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    model_arguments(parser)
    parser.add_argument("--logs", type=at_least_one, default=300, help="how many")
    parser.add_argument("--lines", type=at_least_one, default=12, help="of each log")
    parser.add_argument("--pace", type=at_least_one, default=8, help="tokens thought from line to line")
    parser.add_argument("--max-tokens", type=at_least_one, default=MOST, help="of an explanation")
    parser.add_argument("--seed", type=int, default=0, help="of the made-up logs")
    parser.add_argument("--concurrency", type=at_least_one, default=16, help="at a time, in each process")
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(arguments)
    result = run_command(parser, lambda: _main(options))
    if options.out is not None:
        result.to_json(options.out)
    print(result.table())


async def _work(options: argparse.Namespace, numbers: Sequence[int], tell: Tell) -> None:
    logs = held_out_logs(options.logs, options.lines, options.seed)
    async with engine_of(options, BATCH) as llm:
        todo = [(number, logs[number]) for number in numbers]
        await _both(llm, todo, options.pace, options.max_tokens, options.concurrency, tell)


def _main(options: argparse.Namespace) -> Watch:
    found = gathered(options, _work, options.logs, options.logs)
    result = _watch(options.model, options.pace, options.max_tokens, found)
    result.machine = describe(options.processes)
    return result


if __name__ == "__main__":
    main()
