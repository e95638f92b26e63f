"""One run of the sharded-input test: a thinker and a writer over shared blocks, and a correction that arrives
while the thinker thinks. Knows the public API; what the texts count as is `scoring`'s.

Blocks, and who reads them (each line is a view, the last block is written):

    prompt                                     the user's problem; the turn is left open
    prompt input                               a correction that stands right behind the problem
    prompt input thinker                       closes the turn, opens the thinking, thinks
    prompt input thinker late                  a correction that only the writer gets
    prompt input thinker late writer           sums up each paragraph, then answers

A block that holds nothing is as good as absent, so `input` is there for one routing and `late` for
another. Nothing is encoded twice, and nothing that was computed is taken back.

The correction arrives when the thinker has made exactly k tokens, in its own loop: those were encoded
without it, and each later one is encoded with it in view. (Where it does not go into the thinker's own
block, the next token was drawn from what the k-th was encoded under: it comes too late for that one.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ..agents.turns import Turns
from .passes import Passes

if TYPE_CHECKING:
    from ..engine.blocks import CacheBlock
    from ..engine.streams import Token, TokenStream
    from ..llm import AsyncLLM

Routing = Literal["before", "after", "writer", "never"]
ROUTINGS: tuple[Routing, ...] = ("before", "after", "writer")
"""Into a block that both read before the thinking; as a turn behind the thinking so far; as a turn that only
the writer reads. "never" is the control."""


@dataclass(frozen=True)
class Setup:
    """How thinker and writer work.

    think_end: what ends the thinking. None: "</think>" if that is one token of the model, else nothing
        does but the end token. opening: what the writer puts before its answer if there is no such mark.
    paragraph: what stands between two paragraphs of the thinking. summary: how each summary begins; "" for
        a writer that only answers. It ends at `summary_stop`.
    at_once: False lets the writer start when the thinker has ended.
    max_...: most tokens of each. template_args go to the chat template.
    """

    think_end: str | None = None
    opening: str = "\n\nThe answer is"
    paragraph: str = "\n\n"
    summary: str = "\n\nIn short,"
    summary_stop: str = "."
    at_once: bool = True
    max_thinking: int = 800
    max_summary: int = 40
    max_answer: int = 360
    system: str | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Frame:
    """The marks around turns, and the one that ends the thinking, if there is one."""

    turns: Turns
    think_end: str | None

    @staticmethod
    def of(llm: AsyncLLM, setup: Setup) -> Frame:
        """Raises ValueError for a model without a chat template, or with one that hides what is said."""
        turns = Turns.of(llm, system=setup.system, **setup.template_args)
        think_end = setup.think_end
        if think_end is None and len(llm.encode("</think>")) == 1:
            think_end = "</think>"
        return Frame(turns, think_end)


@dataclass(frozen=True)
class Transcript:
    """What a run gave. Passes are forward passes since the problem was encoded that had a row of this run.

    passes: until the last word was drawn. first_word, first_answer: until the writer's first word, and that
    of its answer, was drawn; None if it wrote none.
    """

    thinking: str  # what the thinker wrote itself, the mark at its end included
    thinking_tokens: int
    ended: bool  # did the thinking end by itself?
    arrived: bool  # did the correction arrive before that?
    summaries: tuple[str, ...]
    answer: str
    passes: int
    first_word: int | None
    first_answer: int | None


async def run_once(
    llm: AsyncLLM,
    frame: Frame,
    setup: Setup,
    passes: Passes,
    problem: str,
    correction: str,
    routing: Routing,
    k: int | None,
) -> Transcript:
    """Think, sum up and answer, with a correction after `k` tokens (None: never). No block is left."""
    run = _Run(llm, frame, setup, passes, correction, routing, k)
    run.blocks = dict(zip(_BLOCKS, await llm.create_blocks(*_BLOCKS), strict=True))
    try:
        return await run.transcript(problem)
    finally:
        passes.forget(run.blocks["prompt"])
        for block in run.blocks.values():
            await llm.free_block(block)


_BLOCKS = ("prompt", "input", "thinker", "late", "writer")


class _Run:
    """The coroutines of one run, and what they tell each other."""

    def __init__(
        self,
        llm: AsyncLLM,
        frame: Frame,
        setup: Setup,
        passes: Passes,
        correction: str,
        routing: Routing,
        k: int | None,
    ) -> None:
        self.llm, self.frame, self.setup, self.passes = llm, frame, setup, passes
        self.correction, self.routing, self.k = correction, routing, k
        self.blocks: dict[str, CacheBlock] = {}
        self.paragraph = asyncio.Event()  # the thinker has finished one, or all
        self.thinking: TokenStream | None = None
        self.paragraphs = 0  # that it has finished
        self.thought = False  # has it ended?
        self.arrived = False
        self.summaries: list[str] = []
        self.began = 0  # passes that the problem took
        self.first_word: int | None = None
        self.first_answer: int | None = None

    def view(self, last: str) -> list[CacheBlock]:
        """The view that writes block `last`."""
        return [self.blocks[name] for name in _BLOCKS[: _BLOCKS.index(last) + 1]]

    async def transcript(self, problem: str) -> Transcript:
        llm, prompt = self.llm, self.blocks["prompt"]
        said = [*llm.encode(self.frame.turns.opening), *llm.encode(problem, control=False)]
        await llm.forward(said, [prompt], logits="none")
        self.began = self.passes.of(prompt)
        if self.setup.at_once:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.think())
                writing = group.create_task(self.write())
            answer = writing.result()
        else:
            await self.think()
            answer = await self.write()
        assert self.thinking is not None
        return Transcript(
            thinking=self.thinking.full_text,
            thinking_tokens=len(self.thinking.token_ids),
            ended=self.thinking.stop_reason != "length",
            arrived=self.arrived,
            summaries=tuple(self.summaries),
            answer=answer.text,
            passes=self.passes.of(prompt) - self.began,
            first_word=self.first_answer if self.first_word is None else self.first_word,
            first_answer=self.first_answer,
        )

    # ---- the thinker ----------------------------------------------------------------------------

    async def think(self) -> None:
        llm, setup, view = self.llm, self.setup, self.view("thinker")
        if self.k == 0 and self.routing == "before":
            await self.arrive()
        await llm.forward(llm.encode(self.frame.turns.answering), view, logits="none")
        if self.k == 0 and not self.arrived:
            await self.arrive()
        stop = self.frame.think_end or ()
        self.thinking = llm.generate(None, view, stop=stop, max_tokens=setup.max_thinking, name="think")
        async for _ in self.thinking:
            found = self.thinking.full_text.count(self.setup.paragraph)
            if found > self.paragraphs:
                self.paragraphs = found
                self.paragraph.set()
            if len(self.thinking.token_ids) == self.k and not self.thinking.ended:
                await self.arrive()
        self.thought = True
        self.paragraph.set()

    async def arrive(self) -> None:
        """The correction is here: encode it where its routing says."""
        llm, turns = self.llm, self.frame.turns
        said = llm.encode("\n" + self.correction, control=False)
        block = "input"
        if self.routing != "before":
            said = llm.encode(self.correction, control=False)
            said = [*llm.encode(turns.next), *said, *llm.encode(turns.answering)]
            block = "thinker" if self.routing == "after" else "late"
        await llm.forward(said, self.view(block), logits="none")
        self.arrived = True

    # ---- the writer -----------------------------------------------------------------------------

    async def write(self) -> TokenStream:
        """Sum up what the thinker has finished, then answer."""
        if self.setup.at_once:
            while await self.next_paragraph():
                if self.setup.summary:
                    await self.sum_up()
        elif self.setup.summary:
            for _ in range(self.paragraphs):
                await self.sum_up()
        return await self.answer()

    async def next_paragraph(self) -> bool:
        """Wait for the thinker to finish one, or several since the last summary. False when it has ended."""
        await self.paragraph.wait()
        self.paragraph.clear()
        return not self.thought

    async def sum_up(self) -> None:
        setup = self.setup
        stream = self.llm.generate(
            setup.summary,
            self.view("writer"),
            stop=setup.summary_stop or (),
            max_tokens=setup.max_summary,
            name="sum up",
        )
        async for token in stream:
            if self.first_word is None and token.strip():
                self.first_word = self.passes_until(token)
        self.summaries.append(stream.full_text)

    async def answer(self) -> TokenStream:
        stream = self.llm.generate(
            self.closing(), self.view("writer"), max_tokens=self.setup.max_answer, name="answer"
        )
        async for token in stream:
            if self.first_answer is None and token.strip():
                self.first_answer = self.passes_until(token)
        return stream

    def passes_until(self, token: Token) -> int:
        """Until `token` was drawn."""
        return self.passes.until(self.blocks["prompt"], token.step) - self.began

    def closing(self) -> str:
        """What stands between the thinking and the answer: its end, unless the writer's view ends with that.
        Summaries are thoughts, and a turn that only the writer got opens the thinking again."""
        end, thinking = self.frame.think_end, self.thinking
        assert thinking is not None
        if end is None:
            return self.setup.opening
        if end in thinking.full_text and not self.summaries and not self.blocks["late"].num_tokens:
            return "\n\n"
        filled = [block for block in self.view("writer") if block.num_tokens]
        line = "" if filled[-1].text.endswith("\n") else "\n"
        return f"{line}{end}\n\n"
