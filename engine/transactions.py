"""Transactions: some blocks change together or not at all, and only for the task that asked.

Knows blocks and who may write and read them meanwhile. The order in which a transaction gets its
blocks is decided, like all order, in `scheduler`.

A transaction belongs to the task that enters it and to tasks started inside (a context variable). They
see each change at once; everybody else reads the blocks as they were at its start, and writers that
were there before pause. Since inside nothing else may be written, transactions cannot deadlock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextvars import ContextVar, Token
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from .blocks import BlockRecord, BlockState, CacheBlock

if TYPE_CHECKING:
    from .engine import Engine
    from .requests import Request
    from .streams import TokenStream

_current: ContextVar[Transaction | None] = ContextVar("asyncllm_nb_transaction", default=None)


def current_transaction(engine: Engine) -> Transaction | None:
    """The innermost transaction of `engine` that the running task is inside of, if it still goes on."""
    transaction = _current.get()
    while transaction is not None and not (transaction.active and transaction.engine is engine):
        transaction = transaction.parent
    return transaction


@dataclass(frozen=True, slots=True)
class _Saved:
    """A block as it was when the transaction began; its state is held until the end."""

    state: BlockState
    tokens: tuple[int, ...]
    stream: TokenStream | None  # the stream that wrote it, which pauses until the end


class Transaction:
    """What ``async with llm.transaction(*blocks)`` enters."""

    def __init__(self, engine: Engine, blocks: tuple[CacheBlock, ...]) -> None:
        self.engine = engine
        self.blocks = blocks
        self.parent: Transaction | None = None
        self.active = False
        self.made: set[int] = set()  # ids of blocks made inside
        self.streams: set[TokenStream] = set()
        self.requests: set[Request] = set()
        self._saved: dict[int, _Saved] = {}
        self._token: Token[Transaction | None] | None = None

    # ---- who may do what ------------------------------------------------------------------------

    def includes(self, other: Transaction | None) -> bool:
        """Is `other` this transaction or one inside it?"""
        while other is not None and other is not self:
            other = other.parent
        return other is self

    def holds(self, record: BlockRecord) -> bool:
        return record.id in self._saved

    def check_write(self, block: CacheBlock) -> None:
        """Raise ValueError unless `block` may be written inside."""
        record = block._record
        scope: Transaction | None = self
        while scope is not None:
            if record.id in scope.made:
                return
            scope = scope.parent
        if not self.holds(record):
            names = ", ".join(repr(b.name) for b in self.blocks)
            raise ValueError(
                f"block {record.name!r} is not part of this transaction, which may write {names} and "
                f"blocks made inside: name it in transaction(...), or write it after the transaction"
            )

    def check_free(self, block: CacheBlock) -> None:
        """Raise ValueError if `block` is one that the transaction might have to restore."""
        scope: Transaction | None = self
        while scope is not None:
            if scope.holds(block._record):
                raise ValueError(
                    f"block {block.name!r} belongs to a transaction that goes on and may have to restore "
                    "it: free it after the transaction, or clear it inside"
                )
            scope = scope.parent

    # ---- its life -------------------------------------------------------------------------------

    async def __aenter__(self) -> Transaction:
        if self._token is not None or self._saved:
            raise RuntimeError("a transaction is entered once; call llm.transaction(...) again")
        self.engine.check_usable()
        self.parent = current_transaction(self.engine)
        if self.parent is not None:
            for block in self.blocks:
                self.parent.check_write(block)
        try:
            await self.engine.begin_transaction(self)
        except BaseException:  # cancelled, perhaps just after it got its blocks
            self.end(restore=True)
            raise
        self._token = _current.set(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._token is not None
        try:
            _current.reset(self._token)
        except ValueError:  # left in another context than entered (an async generator's finalizer)
            pass
        if kind is not None:
            self.end(restore=True)
            return
        try:
            await self._finish_requests()
        except BaseException:
            self.end(restore=True)
            raise
        self.end(restore=False)

    async def _finish_requests(self) -> None:
        """Streams opened inside end now; what else was asked for inside is done before the end."""
        for stream in list(self.streams):
            stream.finish("cancelled")
        while self.requests and not self.engine.closed:
            futures = [request.future for request in self.requests]
            await self.engine.wait(asyncio.gather(*futures, return_exceptions=True))

    def begin(self) -> None:
        """Take the blocks. Called by the engine at a step boundary, when all of them are at rest."""
        memory = self.engine.memory
        for block in self.blocks:
            record = block._record
            assert record.pending is None
            memory.hold(record.state)
            self._saved[record.id] = _Saved(record.state, tuple(record.tokens), record.stream)
            record.owner, record.stream = self, None
        self.active = True
        self.engine.transactions.append(self)
        self.engine.recorder.began(self)

    def end(self, *, restore: bool) -> None:
        """Give the blocks back, as they are or as they were at the start. Needs no await."""
        if not self.active:
            return
        self.active = False
        self.engine.transactions.remove(self)
        for stream in list(self.streams):
            stream.finish("cancelled")
        for request in list(self.requests):
            self.engine.cancel_request(request)
        for block in self.blocks:
            record = block._record
            saved = self._saved[record.id]
            if restore and not self.engine.closed:
                self._restore(record, saved)
            outer = self.parent
            while outer is not None and not outer.holds(record):
                outer = outer.parent
            record.owner = outer
            record.stream = saved.stream if saved.stream and not saved.stream.ended else None
            self.engine.memory.drop(saved.state)
        self.engine.recorder.finished(self, restored=restore and not self.engine.closed)
        if self.parent is not None:
            self.parent.made |= self.made
        self.engine.wake()

    def _restore(self, record: BlockRecord, saved: _Saved) -> None:
        memory = self.engine.memory
        if record.pending is not None:
            self.engine.drop_pending(record)
        if record.state is not saved.state:
            memory.own(saved.state)
            memory.disown(record.state)
            record.commit(saved.state)
        record.tokens[:] = saved.tokens

    def saved_states(self) -> Iterator[BlockState]:
        """States held until the end, for those outside and for going back."""
        return (saved.state for saved in self._saved.values())

    def saved_tokens(self, record: BlockRecord, state: BlockState) -> list[int]:
        """The tokens of a state that this transaction, or one around it, has saved."""
        saved = self._saved.get(record.id)
        if saved is not None and saved.state.version == state.version:
            return list(saved.tokens)
        assert self.parent is not None, "a state that nobody saved"
        return self.parent.saved_tokens(record, state)

    def state_outside(self, record: BlockRecord) -> tuple[BlockState, Transaction | None]:
        """The state that others read meanwhile, and the transaction around this one, if it has the
        block too."""
        outer = self.parent
        while outer is not None and not outer.holds(record):
            outer = outer.parent
        return self._saved[record.id].state, outer


def visible_state(record: BlockRecord, reader: Transaction | None) -> BlockState:
    """The committed state of a block for somebody who is inside `reader` (None: no transaction)."""
    state, owner = record.state, record.owner
    while owner is not None and not owner.includes(reader):
        state, owner = owner.state_outside(record)
    return state


def may_write(record: BlockRecord, writer: Transaction | None) -> bool:
    """Is the block free of transactions that `writer` is not inside of?"""
    return record.owner is None or record.owner.includes(writer)
