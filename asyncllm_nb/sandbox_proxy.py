"""Blocks and streams as a sandboxed coroutine sees them: they ask the parent process.

Runs in the child and knows the standard library and the pipe only. It is a convenience for the code
inside, not a guard: everything is checked again by the parent (`sandbox_calls`). Names and meanings are
those of `CacheBlock` and `TokenStream`.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterator, Generator
from typing import Any, Self

from .sandbox_pipe import Wire

writers: weakref.WeakValueDictionary[int, TokenStream] = weakref.WeakValueDictionary()
"""By the number of its block: the stream that was read last."""


class Block:
    """A cache block of the parent."""

    def __init__(self, wire: Wire, number: int, name: str, *, own: bool) -> None:
        self._wire, self._number, self.name = wire, number, name
        self._own = own  # made inside: without it here, nobody can reach it

    def _ask(self, what: str) -> Any:
        return self._wire.ask("block", block=self._number, what=what)

    @property
    def id(self) -> int:
        return int(self._ask("id"))

    @property
    def num_tokens(self) -> int:
        return int(self._ask("num_tokens"))

    @property
    def span(self) -> int:
        return int(self._ask("span"))

    @property
    def version(self) -> int:
        return int(self._ask("version"))

    @property
    def token_ids(self) -> list[int]:
        return list(self._ask("token_ids"))

    @property
    def text(self) -> str:
        return str(self._ask("text"))

    def __repr__(self) -> str:
        return f"<Block {self.name!r}>"

    def __del__(self) -> None:
        if self._own and not self._wire.loop.is_closed():
            self._wire.send_later(call="drop", block=self._number)


class Token(str):
    """The text that a token completes, with its `id`, `logprob` and `step`."""

    id: int
    logprob: float
    step: int


class ForwardOutput:
    """What `forward` returns: the block that was written. Logits stay outside."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.logits = None


class TokenStream:
    """What `generate` returns: an async iterator of `Token`."""

    def __init__(self, wire: Wire, number: int, block: Block) -> None:
        self.block = block
        self.stop_reason: str | None = None
        self._wire, self._number = wire, number
        self._ids: list[int] = []
        self._text = ""
        self._reader: asyncio.Task[Any] | None = None

    def __aiter__(self) -> AsyncIterator[Token]:
        return _Reading(self)

    async def __anext__(self) -> Token:
        if self.stop_reason is not None:
            raise StopAsyncIteration
        self._check_turn()
        answer = await self._wire.request("next", stream=self._number)
        if "end" in answer:
            self.stop_reason, self._text = answer["end"]
        if "token" not in answer:
            raise StopAsyncIteration
        text, token_id, logprob, step = answer["token"]
        token = Token(text)
        token.id, token.logprob, token.step = token_id, logprob, step
        self._ids.append(token_id)
        if self.stop_reason is None:
            self._text += text
        return token

    def _check_turn(self) -> None:
        """Raise where asking could never be answered; the parent does not know the tasks in here."""
        self._reader = asyncio.current_task()
        other = writers.get(self.block._number, self)
        if other is not self and other.stop_reason is None and other._reader is self._reader:
            raise ValueError(
                f"this task is still reading another stream into block {self.block.name!r}: leave its "
                "loop or cancel it first"
            )
        writers[self.block._number] = self

    def __await__(self) -> Generator[Any, None, str]:
        return self._whole_text().__await__()

    async def _whole_text(self) -> str:
        async for _ in self:
            pass
        return self.text

    def split(self, separator: str) -> AsyncIterator[str]:
        """Iterate over the parts of the text between `separator`s, the rest at the end."""
        if not separator:
            raise ValueError("split needs a separator of at least one character")
        return _Parts(_Reading(self), separator)

    @property
    def text(self) -> str:
        """The text so far, without the stop string that ended it."""
        return self._text

    @property
    def token_ids(self) -> list[int]:
        return list(self._ids)

    async def cancel(self) -> None:
        """End the stream and return when it has ended."""
        self.stop_reason = self.stop_reason or "cancelled"
        await self._wire.request("cancel", stream=self._number)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cancel()

    def _leave(self) -> None:
        if self.stop_reason is None:
            self.stop_reason = "cancelled"
            self._wire.send_later(call="drop", stream=self._number)

    def __del__(self) -> None:
        if not self._wire.loop.is_closed():
            self._leave()


class _Reading:
    """An iterator over a stream whose release ends it, as leaving a loop does."""

    def __init__(self, stream: TokenStream) -> None:
        self._stream = stream

    def __aiter__(self) -> AsyncIterator[Token]:
        return self

    async def __anext__(self) -> Token:
        try:
            return await self._stream.__anext__()
        except BaseException:
            self._stream._leave()
            raise

    def __del__(self) -> None:
        self._stream._leave()


class _Parts:
    """Parts of a stream's text between separators."""

    def __init__(self, tokens: _Reading, separator: str) -> None:
        self._tokens, self._separator = tokens, separator
        self._ready: deque[str] = deque()
        self._rest = ""
        self._ended = False

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        while not self._ready and not self._ended:
            try:
                *parts, self._rest = (self._rest + await self._tokens.__anext__()).split(self._separator)
                self._ready.extend(parts)
            except StopAsyncIteration:
                self._ended = True
                self._ready.extend([self._rest] if self._rest else [])
        if not self._ready:
            raise StopAsyncIteration
        return self._ready.popleft()
