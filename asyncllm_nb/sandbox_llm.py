"""`llm` as a sandboxed coroutine sees it, and the modules that it has beside it.

Runs in the child, like `sandbox_proxy`. Names and meanings are those of `AsyncLLM`; what is missing here
cannot be had inside: logits, transactions, pausing, blocks that were not given.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from .sandbox_pipe import Wire
from .sandbox_proxy import Block, ForwardOutput, TokenStream

READY_MADE = ("asyncio", "json", "math", "re")
"""Modules that code inside finds under their names without an import."""

OFFERED = (
    *READY_MADE,
    "bisect",
    "collections",
    "collections.abc",
    "contextlib",
    "copy",
    "dataclasses",
    "datetime",
    "difflib",
    "enum",
    "functools",
    "heapq",
    "itertools",
    "operator",
    "random",
    "statistics",
    "string",
    "textwrap",
    "time",
    "typing",
)
"""Modules that it can import: loaded before everything else is closed."""

View = Block | Sequence[Block]


class LLM:
    """The model as a sandboxed coroutine has it."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._blocks: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()

    def known_block(self, number: int, name: str) -> Block:
        """A block that the coroutine was given."""
        block = self._blocks[number] = Block(self._wire, number, name, own=False)
        return block

    def _made(self, answer: list[Any]) -> Block:
        number, name = answer
        block = self._blocks.get(number)
        if block is None:
            block = self._blocks[number] = Block(self._wire, number, name, own=True)
        return block

    async def create_block(self, name: str | None = None) -> Block:
        return self._made(await self._wire.request("create_block", name=name))

    async def create_blocks(self, *names: str | int) -> list[Block]:
        if len(names) == 1 and isinstance(names[0], int):
            return [await self.create_block() for _ in range(names[0])]
        return [await self.create_block(str(name)) for name in names]

    async def forward(
        self,
        inputs: str | Sequence[int],
        cache_view: View | None = None,
        *,
        write_to: Block | None = None,
        logits: str = "none",
    ) -> ForwardOutput:
        if logits != "none":
            raise ValueError("logits stay outside of the sandbox: use probe, or a stream's logprob")
        view, target = _view(cache_view), _number(write_to)
        answer = await self._wire.request("forward", inputs=_ids(inputs), view=view, write_to=target)
        return ForwardOutput(self._made(answer))

    def generate(
        self,
        inputs: str | Sequence[int] | None = None,
        cache_view: View | None = None,
        *,
        write_to: Block | None = None,
        max_tokens: int | None = None,
        stop: str | int | Sequence[str | int] = (),
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int | None = None,
        forbid: str | int | Sequence[str | int] = (),
        name: str | None = None,
    ) -> TokenStream:
        answer = self._wire.ask(
            "generate",
            inputs=None if inputs is None else _ids(inputs),
            view=_view(cache_view),
            write_to=_number(write_to),
            max_tokens=max_tokens,
            stop=stop if isinstance(stop, str | int) else list(stop),
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            forbid=forbid if isinstance(forbid, str | int) else list(forbid),
            name=name,
        )
        stream, block = answer
        return TokenStream(self._wire, stream, self._made(block))

    async def probe(
        self, question: str | Sequence[int], cache_view: View, choices: Sequence[str] = ("yes", "no")
    ) -> dict[str, float]:
        view = _view(cache_view)
        answer = await self._wire.request("probe", question=_ids(question), view=view, choices=list(choices))
        return dict(answer)

    async def merge_blocks(self, left: Block, right: Block, *, name: str | None = None) -> Block:
        numbers = {"left": _number(left), "right": _number(right)}
        return self._made(await self._wire.request("merge_blocks", name=name, **numbers))

    async def append_block(self, left: Block, right: Block) -> Block:
        await self._wire.request("append_block", left=_number(left), right=_number(right))
        return left

    async def fork(self, block: Block, *, name: str | None = None) -> Block:
        return self._made(await self._wire.request("fork", block=_number(block), name=name))

    async def replace(
        self, block: Block, inputs: str | Sequence[int], cache_view: View | None = None
    ) -> Block:
        view = _view(cache_view)
        await self._wire.request("replace", block=_number(block), inputs=_ids(inputs), view=view)
        return block

    async def clear(self, block: Block) -> Block:
        await self._wire.request("clear", block=_number(block))
        return block

    async def free_block(self, block: Block) -> None:
        await self._wire.request("free_block", block=_number(block))

    def encode(self, text: str, control: bool = True) -> list[int]:
        return list(self._wire.ask("encode", text=text, control=control))

    def turn(self, text: str, role: str = "user") -> list[int]:
        return list(self._wire.ask("turn", text=text, role=role))

    def chat_prompt(
        self,
        messages_or_text: str | Sequence[dict[str, str]],
        *,
        system: str | None = None,
        generation_prompt: bool = True,
        enable_thinking: bool | None = None,
    ) -> list[int]:
        said = messages_or_text if isinstance(messages_or_text, str) else list(messages_or_text)
        answer = self._wire.ask(
            "chat_prompt",
            messages=said,
            system=system,
            generation_prompt=generation_prompt,
            enable_thinking=enable_thinking,
        )
        return list(answer)


def _number(block: Block | None) -> int | None:
    if block is None:
        return None
    if not isinstance(block, Block):
        raise TypeError(f"a block is expected, not {type(block).__name__}: did you forget await?")
    return block._number


def _view(view: View | None) -> list[int | None] | None:
    if view is None:
        return None
    return [_number(block) for block in ([view] if isinstance(view, Block) else view)]


def _ids(inputs: str | Sequence[int]) -> str | list[int]:
    return inputs if isinstance(inputs, str) else list(inputs)
