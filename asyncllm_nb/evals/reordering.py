"""Views whose blocks were not written in the order in which they are read, as agents make them.

Knows problems, their solutions and the chat template: which tokens stand in which block, who read what while
they were written, and in which order they are read. Knows no logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from ..agents.turns import Turns
from ..tasks import Problem, make_problem
from .protocol import Setup

if TYPE_CHECKING:
    from ..engine.blocks import CacheBlock
    from ..llm import AsyncLLM

Ids = tuple[int, ...]
Write = tuple[tuple[str, ...], int]
"""Names of the blocks of a view, and how many of the last one's tokens are written under it next."""


@dataclass(frozen=True)
class Scene:
    """Blocks by name, how they are written, and how they are read."""

    name: str
    tokens: Mapping[str, Ids]  # of each block
    writes: tuple[Write, ...]  # one after the other
    read: tuple[str, ...]
    given: Ids  # what the continuation of that view begins with

    async def as_shared(self, llm: AsyncLLM) -> list[CacheBlock]:
        """The blocks of the view, written as the scene says. Its caller frees them."""
        blocks = dict(zip(self.tokens, await llm.create_blocks(*self.tokens), strict=True))
        left = {name: list(ids) for name, ids in self.tokens.items()}
        for view, count in self.writes:
            ids, left[view[-1]] = left[view[-1]][:count], left[view[-1]][count:]
            await llm.forward(ids, [blocks[name] for name in view], logits="none")
        assert not any(left.values()), f"{self.name}: tokens that nothing writes"
        return [blocks[name] for name in self.read]

    async def as_fresh(self, llm: AsyncLLM) -> list[CacheBlock]:
        """The same blocks, each written whole under those before it in the view."""
        view: list[CacheBlock] = []
        for name in self.read:
            view.append(await llm.create_block(f"fresh {name}"))
            await llm.forward(self.tokens[name], view, logits="none")
        return view

    async def as_one(self, llm: AsyncLLM) -> list[CacheBlock]:
        """All of it in one block."""
        ids = [id for name in self.read for id in self.tokens[name]]
        block = await llm.create_block("one")
        await llm.forward(ids, [block], logits="none")
        return [block]


def make_scenes(llm: AsyncLLM, seed: int) -> list[Scene]:
    """One scene of each kind, about problems that no training has seen. The same seed gives the same.

    Raises ValueError for a model without a tokenizer or a chat template.
    """
    rng = Random(f"reordered views {seed}")
    text = _Text(llm)
    one, two = (make_problem(rng, steps, n, held_out=True) for steps, n in (((3, 6), 1), ((4, 6), 2)))
    return [
        *_halves(text, one),
        _input(text, one, rng),
        _writer(text, one),
        _workers(text, two),
    ]


class _Text:
    """What is said, as tokens."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        turns = Turns.of(llm)
        self.before, self.behind = turns.opening, turns.answering

    def prompt(self, problem: Problem) -> Ids:
        """The user's turn, left open."""
        return self.marks(self.before) + self.said(problem.text)

    def marks(self, text: str) -> Ids:
        return tuple(self._llm.encode(text))

    def said(self, text: str) -> Ids:
        return tuple(self._llm.encode(text, control=False))


def _halves(text: _Text, problem: Problem) -> Iterator[Scene]:
    """A prompt in two halves: swapped after they were written, and written without sight of each other."""
    sentences = [quantity.sentence for quantity in problem.quantities]
    middle = (len(sentences) + 1) // 2
    tokens = {
        "opening": text.marks(text.before),
        "first": text.said("".join(f" {sentence}" for sentence in sentences[:middle])),
        "second": text.said("".join(f" {said}" for said in (*sentences[middle:], problem.question))),
    }
    opening, first, second = ((name, len(ids)) for name, ids in tokens.items())
    given = text.marks(text.behind)
    begin: Write = (("opening",), opening[1])
    behind_each_other: list[Write] = [
        (("opening", "first"), first[1]),
        (("opening", "first", "second"), second[1]),
    ]
    apart: list[Write] = [(("opening", "first"), first[1]), (("opening", "second"), second[1])]
    yield Scene(
        "halves of a prompt swapped",
        tokens,
        (begin, *behind_each_other),
        ("opening", "second", "first"),
        given,
    )
    yield Scene("halves written apart", tokens, (begin, *apart), ("opening", "first", "second"), given)


def _input(text: _Text, problem: Problem, rng: Random) -> Scene:
    """A correction behind the prompt that arrives while a thinker thinks: what it thought stays."""
    thinking = text.marks(text.behind) + text.said(Setup.paragraph.join(problem.thinking))
    thought = rng.randrange(len(thinking) // 3, len(thinking) - 1)
    tokens = {
        "prompt": text.prompt(problem),
        "input": text.said(f"\n{problem.corrected(rng).text}"),
        "thinker": thinking[:thought],
    }
    writes: tuple[Write, ...] = (
        (("prompt",), len(tokens["prompt"])),
        (("prompt", "thinker"), thought),
        (("prompt", "input"), len(tokens["input"])),
    )
    read = ("prompt", "input", "thinker")
    return Scene("an input before the thinking", tokens, writes, read, thinking[thought : thought + 1])


def _writer(text: _Text, problem: Problem) -> Scene:
    """A thinker, and a writer that sums up each paragraph while the thinker writes the next ones."""
    count = len(problem.quantities)
    paragraphs = [f"{said}{Setup.paragraph}" for said in problem.thinking[:count]]
    summaries = [f"{Setup.summary} {problem.statement(i)}." for i in range(count - 1)]
    thought = [text.said(paragraph) for paragraph in paragraphs]
    thought[0] = text.marks(text.behind) + thought[0]
    summed = [text.said(summary) for summary in summaries]
    tokens = {
        "prompt": text.prompt(problem),
        "thinker": sum(thought, ()),
        "writer": sum(summed, ()),
    }
    writes: list[Write] = [(("prompt",), len(tokens["prompt"]))]
    think, write = ("prompt", "thinker"), ("prompt", "thinker", "writer")
    writes.append((think, len(thought[0])))
    for paragraph, summary in zip(thought[1:], summed, strict=True):
        writes += _in_turns((think, len(paragraph)), (write, len(summary)))
    return Scene("thinker and writer", tokens, tuple(writes), write, text.said(Setup.summary))


def _workers(text: _Text, problem: Problem) -> Scene:
    """Two workers on a problem of two chains: each reads what the other has written before its own."""
    count, second = len(problem.quantities), problem.second
    tokens = {
        "prompt": text.prompt(problem) + text.marks(text.behind),
        "one": text.said(Setup.paragraph.join(problem.thinking[:second])),
        "other": text.said("".join(f"{Setup.paragraph}{said}" for said in problem.thinking[second:count])),
    }
    read = ("prompt", "one", "other")
    turns = _in_turns((("prompt", "other", "one"), len(tokens["one"])), (read, len(tokens["other"])))
    writes: tuple[Write, ...] = ((("prompt",), len(tokens["prompt"])), *turns)
    return Scene("two workers", tokens, writes, read, text.said(Setup.paragraph))


def _in_turns(*writers: tuple[Sequence[str], int]) -> list[Write]:
    """Token by token, each writer one, until all have written as many as they are to."""
    longest = max(count for _, count in writers)
    return [(tuple(view), 1) for turn in range(longest) for view, count in writers if turn < count]
