"""Streams: the tokens of one coroutine as they come, what ends them, and what is left behind.

Knows one stream's own state. When its rows run is decided in `scheduler`; the engine calls `opened`,
`advanced` and `fail`, and asks `can_yield`.

A token is yielded where the consumer takes it (`_take`), not where it is sampled: a consumer that was
cancelled in between has not got it, and the block must not have it either.
"""

from __future__ import annotations

import asyncio
import warnings
import weakref
from collections.abc import AsyncIterator, Generator
from typing import TYPE_CHECKING, Any, Literal, Self

from torch import Tensor

from .blocks import CacheBlock
from .continuing import view_span
from .runner import Draw
from .sampling import Choice, SamplingParams
from .text import IncrementalDecoder, StopRule
from .transactions import Transaction, may_write

if TYPE_CHECKING:
    from .engine import Engine
    from .requests import Encoding

StopReason = Literal["stop", "eos", "length", "cancelled", "error"]


class Token(str):
    """The text that a token completes ('' while a character is unfinished), with its numbers.

    Attributes
    ----------
    id: the token's id in the vocabulary.
    logprob: its log-probability (nats) in the model's own distribution, before temperature, filters
        and forbid.
    step: number of the forward pass that gave its distribution.
    """

    __slots__ = ("id", "logprob", "step")
    id: int
    logprob: float
    step: int

    def __new__(cls, text: str, token_id: int, logprob: float, step: int) -> Self:
        self = super().__new__(cls, text)
        self.id, self.logprob, self.step = token_id, logprob, step
        return self

    def __repr__(self) -> str:
        return f"<Token {str(self)!r} id={self.id} logprob={self.logprob:.3f} step={self.step}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return (Token, (str(self), self.id, self.logprob, self.step))


class TokenStream:
    """What `generate` returns: an async iterator of `Token`.

    ``async for token in stream`` ends the stream when the loop is left in any way. ``await stream`` gives
    its text, without the stop string. ``stream.split(sep)`` iterates over parts of the text. As an
    ``async with`` it is cancelled at the end.
    """

    def __init__(
        self,
        engine: Engine,
        view: tuple[CacheBlock, ...],
        inputs: list[int] | None,
        sampling: SamplingParams,
        stop: StopRule,
        max_tokens: int | None,
        name: str | None,
        transaction: Transaction | None,
    ) -> None:
        self.block = view[-1]
        self.sampling = sampling
        self.stop_reason: StopReason | None = None
        self.name = name
        self.failure = ""  # the error that ended it, in one line
        self.logprobs: list[float] = []
        self._engine = engine
        engine.num_streams += 1
        self.number = engine.num_streams
        self.view = view
        self.view_ids = tuple([block.id for block in view])
        self.view_names = tuple([block.name for block in view])
        self.transaction = transaction
        self._inputs = inputs
        self._stop = stop
        self._max_tokens = max_tokens
        self._ids: list[int] = []
        self._text = ""
        self._stop_at: int | None = None  # where in the text the stop string starts
        self._decoder = IncrementalDecoder(engine.codec)
        self._opening: Encoding | None = None  # the request that encodes its input
        self._opened = False
        self._logits: Tensor | None = None  # [vocab] after its last token, once that is encoded
        self._logits_version = -1  # version of the block that they belong to
        self._logits_step = 0
        self._sampled: tuple[int, float] | None = None  # drawn from them, not yielded: id, logprob
        self._error: BaseException | None = None  # until the consumer gets it
        self._asked: asyncio.Future[None] | None = None
        self.order = 0  # of the last asking
        self._reader: weakref.ref[asyncio.Task[Any]] | None = None
        self.waits_for_memory = False
        if transaction is not None:
            transaction.streams.add(self)

    # ---- reading --------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[Token]:
        return _Reading(self)

    async def __anext__(self) -> Token:
        """The next token; StopAsyncIteration at the end. Several tasks cannot read one stream."""
        engine = self._engine
        if self.stop_reason is None:
            engine.check_usable()
            self._begin_reading()
        while True:
            if self.stop_reason is not None:
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error
                raise StopAsyncIteration
            if self.can_yield():
                token = self._take()
                if token is not None:
                    return token
                continue
            await self._ask()

    def __await__(self) -> Generator[Any, None, str]:
        return self._whole_text().__await__()

    async def _whole_text(self) -> str:
        async for _ in self:
            pass
        return self.text

    def split(self, separator: str) -> AsyncIterator[str]:
        """Iterate over the parts of the text between `separator`s, which may span tokens; the rest
        comes at the end, if there is any. Leaving the loop ends the stream."""
        if not separator:
            raise ValueError("split needs a separator of at least one character")
        return _Parts(_Reading(self), separator)

    @property
    def text(self) -> str:
        """The text so far, without the stop string that ended it."""
        return self._text[: self._stop_at]

    @property
    def full_text(self) -> str:
        """The text so far, the stop string included."""
        return self._text

    @property
    def token_ids(self) -> list[int]:
        """A copy of the ids of the tokens that were yielded."""
        return list(self._ids)

    @property
    def ended(self) -> bool:
        return self.stop_reason is not None

    @property
    def state(self) -> Literal["new", "queued", "running", "waiting", "body", "ended"]:
        """new: nobody has read it; queued: its input is not encoded; waiting: for memory; running: its
        consumer waits for a token; body: its consumer is busy with the last one."""
        if self.ended:
            return "ended"
        if self._reader is None:
            return "new"
        if self.waits_for_memory or (self._opening is not None and self._opening.waits_for_memory):
            return "waiting"
        if not self._opened:
            return "queued"
        return "running" if self._asked is not None else "body"

    async def cancel(self) -> None:
        """End the stream and return when it has ended: no later step has a row that it asked for."""
        self.finish("cancelled")
        if not self._engine.closed and self._reader is not None:
            await self._engine.server.between_steps()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cancel()

    # ---- the consumer's side --------------------------------------------------------------------

    def _begin_reading(self) -> None:
        if self.asking:
            raise RuntimeError(
                f"stream {self.name!r} is being read by another task; one task reads a stream, and "
                "passes tokens on through a queue"
            )
        task = asyncio.current_task()
        if self._reader is None:
            self._engine.enlist(self, task)
        if task is not None and (self._reader is None or self._reader() is not task):
            self._reader = weakref.ref(task)
        self.order = self._engine.next_order()
        self._check_turn()
        if self._opening is None and not self._opened:
            self._opening = self._engine.open_stream(self, self._inputs)

    def _check_turn(self) -> None:
        """Raise where asking could never be answered."""
        record = self.block._record
        current = self._engine.current_transaction()
        if (
            current is not None
            and not may_write(record, self.transaction)
            and may_write(record, current)
        ):
            raise ValueError(
                f"stream {self.name!r} was made outside of the transaction that has block "
                f"{record.name!r} now, and pauses until its end: make a stream inside, or read it after"
            )

    async def _ask(self) -> None:
        engine = self._engine
        self._asked = engine.loop.create_future()
        engine.wake()
        try:
            await engine.wait(self._asked)
        finally:
            self._asked = None
            self.waits_for_memory = False

    def _take(self) -> Token | None:
        """Yield the sampled token: from here on it is in the block. None when the stream ends instead."""
        assert self._sampled is not None
        token_id, logprob = self._sampled
        engine = self._engine
        if token_id in engine.eos_ids and token_id not in self._stop.ids:
            self.finish("eos")
            return None
        if view_span(self.view, self.transaction) + 1 > engine.max_positions:
            self.finish("length")
            return None
        engine.put_token(self, token_id)
        self._sampled = self._logits = None
        self._ids.append(token_id)
        self.logprobs.append(logprob)
        new = self._decoder.push(token_id)
        reason: StopReason | None = "length" if len(self._ids) == self._max_tokens else None
        self._text += new
        self._stop_at = self._stop.find(self._text, len(new))
        if self._stop_at is not None or token_id in self._stop.ids:
            reason = "stop"
        token = Token(new, token_id, logprob, self._logits_step)
        if reason is not None:
            rest = self._decoder.flush()
            self._text += rest
            token = Token(new + rest, token_id, logprob, self._logits_step)
        engine.recorder.token(self, token)
        if reason is not None:
            self.finish(reason)
        engine.wake()
        return token

    # ---- the engine's side ----------------------------------------------------------------------

    def can_yield(self) -> bool:
        """A token is sampled for the block as it is now, nothing asked for earlier waits to be written
        before it, and there is memory for it."""
        return self._sampled is not None and self.may_sample() and self.fits

    @property
    def fits(self) -> bool:
        """Is there memory for one more token?"""
        memory = self._engine.memory
        return memory.fits(memory.needs(self.block._record.state, 1))

    def may_sample(self) -> bool:
        """Is it this stream's turn to write its block?"""
        record = self.block._record
        if self.ended or not self._opened or not self._engine.running:
            return False
        if record.pending is not None or self._logits_version != record.state.version:
            return False
        if not may_write(record, self.transaction) or record.stream is not self:
            return False
        return not any(
            write.order < self.order
            and write.opens_stream is None
            and may_write(record, write.transaction)
            for write in record.writes
        )

    @property
    def is_stale(self) -> bool:
        """Was its block written by others since its last token was encoded?"""
        record = self.block._record
        return (
            self._opened
            and not self.ended
            and record.stream is self
            and record.pending is None
            and self._logits_version != record.state.version
        )

    @property
    def wants_draw(self) -> bool:
        """Its consumer waits, it is its turn, and no token is drawn yet."""
        return self.asking and self._sampled is None and self.may_sample()

    def next_draw(self) -> Draw:
        """How its next token is drawn: from the logits that it has, else from those of the step."""
        return Draw(Choice(self.sampling, len(self._ids)), self._logits)

    @property
    def asking(self) -> bool:
        return self._asked is not None and not self._asked.done()

    @property
    def in_body(self) -> bool:
        """Its consumer has got a token, is alive, and does not ask for the next one."""
        return self._opened and not self.ended and self._asked is None and self.has_reader

    @property
    def is_read_by_current_task(self) -> bool:
        return self._reader is not None and self._reader() is asyncio.current_task()

    @property
    def reader(self) -> asyncio.Task[Any] | None:
        """The task that read it last, if it still exists."""
        return self._reader() if self._reader is not None else None

    @property
    def has_reader(self) -> bool:
        """Is there a live task that reads it?"""
        return self.reader is not None and not self.reader.done()

    @property
    def has_draw(self) -> bool:
        """Is its next token drawn?"""
        return self._sampled is not None

    def take_draw(self, drawn: tuple[int, float]) -> None:
        """Its next token was drawn: id and log-probability."""
        self._sampled = drawn

    def opened(self, logits: Tensor, step: int, drawn: tuple[int, float] | None) -> None:
        """Its input is committed (or it goes on from kept logits): it may yield from now on."""
        if not self.ended:
            self._opened, self._opening = True, None
            self.block._record.stream = self
            self.advanced(logits, step, drawn)

    def go_on(self, logits: Tensor | None) -> None:
        """Others wrote the block: the next token is drawn anew, from `logits` or else from its own."""
        assert self._logits is not None
        step = self._logits_step
        self.advanced(self._logits if logits is None else logits, step, None)

    def advanced(self, logits: Tensor, step: int, sampled: tuple[int, float] | None) -> None:
        """Its last token is encoded: the distribution of the next one, and the one drawn from it."""
        self._logits, self._logits_step, self._sampled = logits, step, sampled
        self._logits_version = self.block._record.state.version

    def call_consumer(self) -> None:
        """Let a waiting consumer look again."""
        if self._asked is not None and not self._asked.done():
            self._asked.set_result(None)

    def fail(self, error: BaseException) -> None:
        """End with an error, which the consumer gets."""
        if not self.ended:
            self._error, self.failure = error, f"{type(error).__name__}: {error}"
            self.finish("error")

    def finish(self, reason: StopReason) -> None:
        """End the stream now. Safe to call in any state and from a finalizer on the engine's loop."""
        if self.ended:
            return
        self.stop_reason = reason
        rest = self._decoder.flush() if self._stop_at is None else ""
        self._text += rest
        self._engine.recorder.stream_ended(self, rest)
        record = self.block._record
        if record.stream is self:
            record.stream = None
        if self.transaction is not None:
            self.transaction.streams.discard(self)
        if self._opening is not None:
            self._engine.cancel_request(self._opening)
        self._sampled = self._logits = None
        self._engine.delist(self)
        self.call_consumer()
        self._engine.wake()

    def __repr__(self) -> str:
        how = f"ended: {self.stop_reason}" if self.ended else self.state
        where = f"into {self.block.name!r}, {len(self._ids)} tokens"
        return f"<TokenStream {self.name or 'unnamed'!r} {where}, {how}>"

    def _repr_html_(self) -> str | None:
        show = self._engine.show_html
        return show(self) if show else None

    def _ipython_display_(self) -> None:
        """As a cell's last expression a stream shows its text live."""
        show = self._engine.show_stream
        if show is None or self._reader is not None:
            raise NotImplementedError  # IPython then shows the repr
        show(self)

    def __del__(self) -> None:
        if self.stop_reason is None and self._reader is None and not self._engine.closed:
            warnings.warn(
                f"a stream into block {self.block.name!r} was made and never read; read it with "
                "`async for`, or await it",
                RuntimeWarning,
                stacklevel=2,
            )


class _Reading:
    """An iterator over a stream whose release ends it: Python tells nobody else about a ``break``.

    One that never read (somebody else does) ends nothing.
    """

    def __init__(self, stream: TokenStream) -> None:
        self._stream = stream
        self._reads = False

    def __aiter__(self) -> AsyncIterator[Token]:
        return self

    async def __anext__(self) -> Token:
        self._reads = self._reads or not self._stream.asking
        try:
            return await self._stream.__anext__()
        except BaseException:  # leaves the loop; a traceback may keep this iterator alive for long
            if self._reads:
                self._stream.finish("cancelled")
            raise

    def __del__(self) -> None:
        if self._reads:
            self._stream._engine.release_stream(self._stream)


class _Parts:
    """Parts of a stream's text between separators."""

    def __init__(self, tokens: _Reading, separator: str) -> None:
        self._tokens = tokens
        self._separator = separator
        self._rest = ""
        self._ended = False

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        while True:
            part, found, rest = self._rest.partition(self._separator)
            if found:
                self._rest = rest
                return part
            if self._ended:
                raise StopAsyncIteration
            try:
                self._rest += await self._tokens.__anext__()
            except StopAsyncIteration:
                self._ended = True
                if self._rest:
                    part, self._rest = self._rest, ""
                    return part
