"""The ordinary loops that ready-made agents are compared with, and a meter for both.

Knows the public API and the trace. A loop does one thing after the other, and what one conversation has to
know of another is passed to it as text, which is encoded again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..agents import calc
from .passes import NewSteps

if TYPE_CHECKING:
    from ..engine.blocks import CacheBlock
    from ..engine.trace import StepRecord
    from ..llm import AsyncLLM

MOST = 800
"""Tokens of one stream."""
MOST_CALLS = 6

THINK_END = "</think>"
ASKS, RESULTS = re.compile(r"Sub-question:.*\?$"), re.compile(r"Sub-answer:.*\.$")
CALLS = re.compile(r"<tool_call>(\w+)\((.*)\)</tool_call>$")


@dataclass(frozen=True)
class Said:
    """What was said in all, and the blocks that stand first in its views: one for each conversation."""

    text: str
    firsts: list[CacheBlock]


class Meter(NewSteps):
    """Counts forward passes and tokens by the block that stands first in a view, while they are made."""

    def __init__(self, llm: AsyncLLM) -> None:
        super().__init__(llm)
        # By the first block's id: (step, tokens, was the thinking closed in it?).
        self._steps: dict[int, list[tuple[int, int, bool]]] = {}
        (self._end,) = llm.encode(THINK_END)[-1:]

    def count(self, step: StepRecord) -> None:
        for row in step.rows:
            if row.view_ids:
                closed = self._end in row.token_ids and row.kind != "probe"
                self._steps.setdefault(row.view_ids[0], []).append((step.number, row.num_tokens, closed))

    def take(self, firsts: Iterable[CacheBlock]) -> tuple[int, int | None, int]:
        """Passes, passes until the thinking was closed first, and tokens of the runs with these blocks; the
        numbers are dropped."""
        seen = [row for first in firsts for row in self._steps.pop(first.id, [])]
        passes = sorted({number for number, _, _ in seen})
        closed = min((number for number, _, closes in seen if closes), default=None)
        until = None if closed is None else passes.index(closed) + 1
        return len(passes), until, sum(tokens for _, tokens, _ in seen)


async def one_stream(llm: AsyncLLM, question: str) -> Said:
    """Everything in one stream."""
    block = await llm.create_block("loop")
    prompt = llm.chat_prompt(question)
    return Said(await llm.generate(prompt, [block], max_tokens=MOST, name="loop"), [block])


async def passed_to_helpers(llm: AsyncLLM, question: str) -> Said:
    """A caller that stops when it has asked; each question is another conversation, and its result is put
    behind the question in a third one, which goes on."""
    prompt = llm.chat_prompt(question)
    text = ""
    blocks: list[CacheBlock] = []
    for _ in range(2 * MOST_CALLS + 1):
        blocks.append(await llm.create_block("loop"))
        helps = ASKS.search(text) is not None
        begins = [*prompt, *llm.encode(text + "\n\n" if text else "")]
        said = ""
        stream = llm.generate(begins, [blocks[-1]], max_tokens=MOST, name="loop")
        async for token in stream:
            said += token
            if (RESULTS if helps else ASKS).search(said):
                break
        text += ("\n\n" if text else "") + said
        if not helps and not ASKS.search(said):
            break
    return Said(text, blocks)


async def passed_to_tools(llm: AsyncLLM, question: str) -> Said:
    """A caller that stops at a call; the result is put behind all of the text, which is encoded again."""
    prompt = llm.chat_prompt(question)
    text = ""
    blocks: list[CacheBlock] = []
    for _ in range(MOST_CALLS):
        blocks.append(await llm.create_block("loop"))
        stream = llm.generate(
            [*prompt, *llm.encode(text)], [blocks[-1]], stop="</tool_call>", max_tokens=MOST, name="loop"
        )
        await stream
        text += stream.full_text
        called = CALLS.search(stream.full_text)
        if called is None:
            break
        try:
            result = str(calc(called[2]))
        except ValueError as error:
            result = f"error: {error}"
        text += f"<tool_response>{result}</tool_response>"
    return Said(text, blocks)
