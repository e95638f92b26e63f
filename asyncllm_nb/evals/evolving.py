"""A reader of a block that is replaced in place, beside a loop that takes a new prompt for each state.

Knows both, the page that changes, and what is counted. The page shows three metrics; one of them is asked
for. It changes at seeded random ticks, also in the middle of an answer. The *reader* sees each change at its
next token, and its versions tell it that there was one. The *loop* encodes page and question from their
start, answers for what it has encoded, and then looks at the page again.

Counted, of each answer: whether it is right about the page as it is when the answer ends; if it is not,
whether that was noticed; and ticks from a change until the first answer that is right about it has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from ..agents.context import Reading, evolving_context
from ..agents.turns import Turns
from ..tasks import parse_answer
from ..tasks.logs import HIGHEST, LOWEST, METRICS
from .clock import Clock, results_of

if TYPE_CHECKING:
    from ..engine.blocks import CacheBlock
    from ..llm import AsyncLLM

MOST = 30
"""Tokens of an answer."""
SHORTEST, LONGEST = 2, 30
"""Ticks from one change to the next."""


@dataclass
class Page:
    """A page that changes; knows what was answered about it."""

    clock: Clock
    subject: str
    states: list[tuple[int, int, str]]  # ticks until it changes to this, the value asked for, the text
    changed: list[tuple[int, int]] = field(default_factory=list)  # tick, value
    answers: list[tuple[int, int | None, bool]] = field(default_factory=list)  # tick, value, noticed?
    text: str = ""

    @property
    def rule(self) -> str:
        """What stands before it."""
        return f"Rule: warn if the {self.subject} is above 70.\nLog:\n"

    @property
    def question(self) -> str:
        return f"What is the {self.subject} now?"

    async def shown(self) -> AsyncIterator[str]:
        """Each state when it begins."""
        for wait, value, text in self.states:
            await self.clock.until(self.clock.now + wait)
            self.changed.append((self.clock.now, value))
            self.text = text
            yield text

    def told(self, answer: str, noticed: bool) -> None:
        """An answer has ended."""
        self.answers.append((self.clock.now, parse_answer(answer), noticed))

    def _value(self, tick: int) -> int:
        return [value for at, value in self.changed if at <= tick][-1]

    def numbers(self) -> dict[str, list[float]]:
        """The measures."""
        right = [value == self._value(tick) for tick, value, _ in self.answers]
        delays = []
        ends = [tick for tick, _ in self.changed[1:]]
        for (begin, value), end in zip(self.changed, [*ends, self.clock.now + 1], strict=True):
            good = [tick - begin for tick, said, _ in self.answers if begin < tick < end and said == value]
            delays += [float(good[0])] if good else []
        noticed = [float(n) for (_, _, n), ok in zip(self.answers, right, strict=True) if not ok]
        return {
            "answers": [float(len(self.answers))],
            "right when it ends": [float(ok) for ok in right],
            "stale, and noticed": noticed,
            "change to right answer": delays,
        }


def pages(clock: Clock, count: int, states: int, seed: int = 0) -> list[Page]:
    """So many, each with so many states. The same seed gives the same."""
    rng = Random(f"evolving/{seed}")
    made = []
    for _ in range(count):
        shown = rng.sample(METRICS, 3)
        subject, minute = shown[0], rng.randint(0, 20 * 60)
        told, value = list[tuple[int, int, str]](), 0
        for number in range(states):
            value = rng.choice([v for v in range(LOWEST, HIGHEST) if v != value])
            values = {metric: rng.randint(LOWEST, HIGHEST) for metric in shown} | {subject: value}
            minute += 1
            clock_time = f"{minute // 60:02}:{minute % 60:02}"
            lines = [f"{clock_time} {metric} {values[metric]}\n" for metric in sorted(shown)]
            told.append((rng.randint(SHORTEST, LONGEST) if number else 0, value, "".join(lines)))
        made.append(Page(clock, subject, told))
    return made


async def followed(llm: AsyncLLM, page: Page, name: str, restarts: int) -> list[CacheBlock]:
    """The agent's way; its blocks."""

    def told(reading: Reading) -> None:
        page.told(reading.text, reading.version != reading.latest)

    agent = evolving_context(
        llm,
        page.shown(),
        page.question,
        prompt=page.rule,
        restarts=restarts,
        on_reading=told,
        max_tokens=MOST,
        name=name,
        enable_thinking=False,
    )
    await results_of(agent)
    return list(agent.blocks.values())


async def looped(llm: AsyncLLM, page: Page, name: str) -> list[CacheBlock]:
    """The loop's way; its blocks, which are freed."""
    turns = Turns.of(llm, enable_thinking=False)
    blocks: list[CacheBlock] = []
    answered = ""

    async def change() -> None:
        async for _ in page.shown():
            pass

    changing = asyncio.create_task(change())
    while not changing.done() or page.text != answered:
        if page.text == answered:
            await page.clock.until(page.clock.now + 1)
            continue
        answered = page.text
        blocks.append(await llm.create_block(name))
        said = turns.opening + page.rule + answered + page.question + turns.answering
        page.told(await llm.generate(said, [blocks[-1]], max_tokens=MOST, name="loop"), False)
        await llm.free_block(blocks[-1])
    await changing
    return blocks
