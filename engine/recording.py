"""The recorder: what happens in an engine, as records of its trace. Knows the engine's objects.

The engine calls it at each change; it takes numbers, names and texts and keeps no object. Streams have
their own numbers in the records, other requests negative ones.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .batch import PAGE_TOKENS
from .blocks import BlockRecord, BlockState, CacheBlock, Draft, PendingToken
from .measuring import attention_layers, linear_layers
from .naming import coroutine_name
from .observing import Seen, TaskObserver
from .scheduler import Chunk
from .trace import Commit, Ran, RowRecord, StepRecord

if TYPE_CHECKING:
    from .engine import Engine
    from .requests import Encoding
    from .streams import Token, TokenStream
    from .transactions import Transaction

LOOK_INTERVAL = 0.1  # s; states of streams and coroutines are looked at no more often


class Recorder:
    """Writes an engine's trace."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self.trace = engine.trace
        self.tasks = TaskObserver(self._task_changed)
        self._stream_states: dict[int, str] = {}  # of streams that are being read
        self._num_requests = 0
        self._num_transactions = 0
        self._transactions: weakref.WeakKeyDictionary[Transaction, int] = weakref.WeakKeyDictionary()
        self._last_look = 0.0
        self.trace.meta = {
            "name": engine.name,
            "model": engine.name,
            "page_tokens": PAGE_TOKENS,
            "pages": engine.memory.pages.size,
            "slots": engine.memory.slots.size,
            "attention_layers": attention_layers(engine.config),
            "linear_layers": linear_layers(engine.config),
        }

    # ---- blocks ---------------------------------------------------------------------------------

    def made(self, record: BlockRecord) -> None:
        self.trace.add("block", id=record.id, name=record.name)

    def changed(
        self,
        record: BlockRecord,
        op: str,
        read: Iterable[tuple[CacheBlock, BlockState]] = (),
        texts: Sequence[str] = (),
    ) -> None:
        """An operation changed a block; `read`: which states of which blocks it read; `texts`: of tokens
        that come from no block."""
        self.trace.add(
            "change",
            id=record.id,
            op=op,
            version=record.state.version,
            pages=list(record.state.pages),
            **{"from": [[block.id, state.version, state.num_tokens] for block, state in read]},
            **({"x": list(texts)} if texts else {}),
        )

    def freed(self, record: BlockRecord) -> None:
        self.trace.add("free", id=record.id)

    def began(self, transaction: Transaction) -> None:
        self._num_transactions += 1
        number = self._transactions[transaction] = self._num_transactions
        self.trace.add("begin", tx=number, blocks=[block.id for block in transaction.blocks])

    def finished(self, transaction: Transaction, *, restored: bool) -> None:
        """A transaction ended; its blocks are as they will be."""
        records = [block._record for block in transaction.blocks] if restored else []
        self.trace.add(
            "end",
            tx=self._transactions.pop(transaction),
            restored=[[r.id, r.state.version, list(r.state.pages)] for r in records],
        )

    # ---- streams and requests -------------------------------------------------------------------

    def stream_begun(self, stream: TokenStream, task: asyncio.Task[Any] | None) -> None:
        """A stream is read for the first time."""
        self._stream_states[stream.number] = "queued"
        self._request(
            stream.number,
            "stream",
            stream.name or "stream",
            stream.view,
            stream.block,
            self.tasks.watch(task, coroutine_name(task)),
        )

    def token(self, stream: TokenStream, token: Token) -> None:
        """A stream yielded a token."""
        self.trace.add("token", r=stream.number, id=token.id, x=str(token))
        self._stream_states[stream.number] = "body"

    def stream_ended(self, stream: TokenStream, rest: str) -> None:
        """`rest`: text of an unfinished character, not part of any token."""
        if self._stream_states.pop(stream.number, None) is None:
            return  # nobody has read it
        self.trace.add("ended", r=stream.number, reason=stream.stop_reason, error=stream.failure, x=rest)

    def dropped(self, encoding: Encoding) -> None:
        """A request that had begun will not finish. (A stream says so itself.)"""
        if encoding.number:
            self.trace.add("ended", r=encoding.number, reason="cancelled", error="", x="")

    def _request_of(self, encoding: Encoding) -> int:
        """The number of an encoding's request; a record of it the first time."""
        if encoding.stream is not None:
            return encoding.stream.number
        if not encoding.number:
            self._num_requests += 1
            encoding.number = -self._num_requests
            view = (*encoding.view, encoding.target) if encoding.target else encoding.view
            kind = "replace" if encoding.replaces else encoding.name
            self._request(encoding.number, kind, encoding.name, view, encoding.target, 0)
        return encoding.number

    def _request(
        self,
        number: int,
        kind: str,
        name: str,
        view: Sequence[CacheBlock],
        block: CacheBlock | None,
        task: int,
    ) -> None:
        ids = [one.id for one in view]
        written = block.id if block else None
        self.trace.add("request", r=number, kind=kind, name=name, view=ids, block=written, task=task)

    # ---- states that are looked at --------------------------------------------------------------

    def look(self, *, now: bool = False) -> None:
        """Record what streams and coroutines do, if the last look is long enough ago (or `now`)."""
        moment = self.trace.now()
        if not now and moment < self._last_look + LOOK_INTERVAL:
            return
        engine = self._engine()
        assert engine is not None
        self._last_look = moment
        reading = set()
        for stream in engine.scheduler.streams:
            if stream.asking:
                reading.add(stream.reader)
            if self._stream_states.get(stream.number) != stream.state:
                self._stream_states[stream.number] = stream.state
                self.trace.add("stream", r=stream.number, state=stream.state)
        self.tasks.look(reading.__contains__)

    def _task_changed(self, seen: Seen) -> None:
        state, line, error = seen.state, seen.line, seen.error
        self.trace.add("task", k=seen.number, name=seen.name, state=state, line=line, error=error)
        engine = self._engine()
        if engine is not None:
            engine.notify()

    # ---- steps ----------------------------------------------------------------------------------

    def decode_row(self, pending: PendingToken, states: tuple[BlockState, ...]) -> RowRecord:
        """The row of a yielded token; `states` of the blocks before the written one."""
        stream, base = pending.stream, pending.draft.base
        versions = [state.version for state in states]
        versions.append(base.version)
        return RowRecord(
            stream.name or "stream",
            "decode",
            stream.view_names[-1],
            tuple(zip(stream.view_names, versions, strict=True)),
            1,
            (pending.token_id,),
            stream.number,
            stream.view_ids,
            sum([state.num_tokens for state in states], base.num_tokens),
        )

    def chunk_row(self, chunk: Chunk) -> RowRecord:
        encoding = chunk.encoding
        assert encoding.snapshot is not None and encoding.draft is not None
        blocks, states = encoding.view, encoding.snapshot
        if encoding.target is not None:
            blocks, states = (*blocks, encoding.target), (*states, encoding.draft.base)
        start = encoding.num_done
        return RowRecord(
            encoding.name,
            encoding.kind,
            encoding.target.name if encoding.target else None,
            _versions(blocks, states),
            chunk.count,
            tuple(encoding.tokens[start : start + chunk.count]),
            self._request_of(encoding),
            tuple(block.id for block in blocks),
            sum(state.num_tokens for state in states) + start,
        )

    def step(
        self,
        number: int,
        started: float,
        seconds: float,
        rows: Sequence[RowRecord],
        error: str = "",
        ran: Ran = "",
    ) -> None:
        """A step is committed (rows with their commits), or failed with `error`."""
        engine = self._engine()
        assert engine is not None
        ledger = self.trace.ledger
        if not error:
            ledger.count(rows)
        self.trace.append(
            StepRecord(
                number,
                started,
                seconds,
                tuple(rows),
                tuple(w.name or "stream" for w in engine.scheduler.memory_waiters()),
                engine.memory.pages.num_free,
                engine.memory.slots.num_free,
                error,
                self.trace.now(),
                ledger.encoded,
                ledger.resent,
                ran,
            )
        )
        self.look()


def commit_of(draft: Draft, version: int) -> Commit:
    """What committing `draft` made of its block's pages."""
    if not draft.taken:
        return (version,)
    kept = sum(len(segment.pages) for segment in draft.base.segments)
    return (version, kept - 1 if draft.copy else kept, draft.taken)


def _versions(blocks: Sequence[CacheBlock], states: Sequence[BlockState]) -> tuple[tuple[str, int], ...]:
    pairs = zip(blocks, states, strict=True)
    return tuple((block.name, state.version) for block, state in pairs)
