"""The monitor agent beside an ordinary loop that does the same work, one thing after the other.

Knows both, and what is counted. A line is due every `pace` ticks. The *monitor* asks about each line while
its thinker explains older ones. The *loop* asks about all lines that are there before it explains one; a
line that comes meanwhile waits until that is written, and each text is encoded anew from its start.

Counted: of the lines that call for a warning, how many got one (detected); of the others (false alarms);
ticks from when a line was due until its warning was given (delay); of the lines that were due when a warning
was given, how many had been read (read before the answer); whether the conclusion is right.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..agents.monitor import monitor
from ..agents.turns import Turns
from ..tasks.logs import QUESTION, Log
from .clock import Clock, results_of

if TYPE_CHECKING:
    from ..engine.blocks import CacheBlock
    from ..llm import AsyncLLM

CHOICES = (" yes", " no")
END = "."
CONCLUSION = "\n</think>\n\n"
MOST = 90
"""Tokens of an explanation, and of the conclusion."""


@dataclass
class Watch:
    """What became of the lines of a log."""

    log: Log
    pace: int
    start: int = 0  # when the first was due
    warned: list[bool] = field(default_factory=list)
    ticks: dict[int, int] = field(default_factory=dict)  # when lines were warned of
    conclusion: str = ""

    def due(self, tick: int) -> int:
        """How many lines were due at a time."""
        return min(len(self.log.lines), 1 + (tick - self.start) // self.pace)

    def numbers(self) -> dict[str, list[float]]:
        """The measures."""
        pairs = list(zip(self.log.answers, self.warned, strict=True))
        return {
            "detected": [float(warned) for fires, warned in pairs if fires],
            "false alarms": [float(warned) for fires, warned in pairs if not fires],
            "delay": [tick - self.start - index * self.pace for index, tick in self.ticks.items()],
            "read before the answer, %": [
                100 * (index + 1) / self.due(tick) for index, tick in self.ticks.items()
            ],
            "conclusion right": [float(self.conclusion.strip() == self.log.verdict)],
        }


async def watched(
    llm: AsyncLLM,
    clock: Clock,
    log: Log,
    pace: int,
    name: str,
    *,
    reads_thinker: bool = False,
    note: str = "",
) -> tuple[Watch, list[CacheBlock]]:
    """The agent's way, and its blocks."""
    watch = Watch(log, pace)
    ticks: list[int] = []

    async def lines() -> AsyncIterator[str]:
        watch.start = clock.now
        async for line in clock.paced(log.lines, pace):
            yield line

    agent = monitor(
        llm,
        log.rule,
        lines(),
        question=QUESTION,
        choices=CHOICES,
        on_warning=lambda line: ticks.append(clock.now),
        explanation_end=END,
        conclusion=CONCLUSION,
        probe_reads_thinker=reads_thinker,
        probe_note=note,
        max_tokens=MOST,
        name=name,
    )
    results = await results_of(agent)
    watch.warned = [entry.warned for entry in results["watch"]]
    watch.ticks = dict(zip([i for i, warned in enumerate(watch.warned) if warned], ticks, strict=True))
    watch.conclusion = results["explain"]
    return watch, list(agent.blocks.values())


async def looped(
    llm: AsyncLLM, clock: Clock, log: Log, pace: int, name: str
) -> tuple[Watch, list[CacheBlock]]:
    """The loop's way, and its blocks, which are freed."""
    turns = Turns.of(llm)
    watch = Watch(log, pace, clock.now)
    blocks: list[CacheBlock] = []
    thoughts: list[str] = []

    async def told(text: str, most: int, end: str = "") -> str:
        """What follows `text`, which is encoded from its start."""
        blocks.append(await llm.create_block(name))
        read = "".join(f"{line}\n" for line in log.lines[: len(watch.warned)])
        said = turns.opening + log.head + read + text
        stream = llm.generate(said, [blocks[-1]], stop=end or (), max_tokens=most, name="loop")
        await stream
        await llm.free_block(blocks[-1])
        return stream.full_text

    while len(thoughts) < len(log.lines):
        while (index := len(watch.warned)) < watch.due(clock.now):
            watch.warned.append(False)
            if await told(QUESTION, 1) == CHOICES[0]:
                watch.warned[index] = True
                watch.ticks[index] = clock.now
        if len(thoughts) < len(watch.warned):
            begun = turns.answering + "".join(f"{thought}\n\n" for thought in thoughts)
            line = f"{log.lines[len(thoughts)]}:"
            thoughts.append(line + await told(begun + line, MOST, END))
        else:
            await clock.until(watch.start + len(watch.warned) * pace)
    watch.conclusion = await told(turns.answering + "\n\n".join(thoughts) + CONCLUSION, MOST)
    return watch, blocks
