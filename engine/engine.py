"""The engine at rest: its parts, its blocks, and what is asked of it from the event loop.

Here requests enter and waiting is done; `serving` makes the steps, `scheduler` decides what runs. All
state changes on the event loop of the engine's first await, and only between two steps.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, TypeVar

from .blocks import BlockRecord, CacheBlock, Memory, PendingToken
from .config import ModelConfig
from .errors import EngineClosedError
from .instruments import Instruments
from .naming import coroutine_name, unique_name
from .operations import begin
from .recording import Recorder
from .requests import Encoding, Request
from .runner import Runner
from .scheduler import Scheduler
from .serving import Server
from .streams import TokenStream
from .text import Codec
from .trace import Trace
from .transactions import Transaction, current_transaction, visible_state

T = TypeVar("T")

HEARTBEAT = 0.1  # s; an idle event loop would not notice the notebook's stop button
PAUSE_NOTICE = 2.0  # s until somebody who waits on a paused engine is told so

in_background: ContextVar[bool] = ContextVar("asyncllm_nb_in_background", default=False)
"""Does the running code belong to something that goes on after its cell, as an agent's coroutines do?"""


class Engine:
    """Shared-memory inference for one model. Made by `build.build_engine`; used through `AsyncLLM`."""

    def __init__(
        self,
        config: ModelConfig,
        codec: Codec,
        memory: Memory,
        runner: Runner,
        *,
        model: str,
        name: str,
        max_batch_tokens: int,
        seed: int,
    ) -> None:
        self.config = config
        self.codec = codec
        self.memory = memory
        self.runner = runner
        self.name = name
        self.seed = seed
        self.max_batch_tokens = max_batch_tokens
        self.max_positions = config.max_positions
        self.eos_ids = frozenset(config.eos_token_ids)
        self.scheduler = Scheduler(memory)
        self.trace = Trace(model, codec)
        self.records: dict[int, BlockRecord] = {}
        self.closed = False
        self.paused = False
        self.made_in = ""  # " (In [3])": the cell to run again once it is closed
        self.step_interval = 0.0  # s from the start of one step to the next, at least
        self.current_cell: Callable[[], object] | None = None  # the cell that the running code is of
        self.show_html: Callable[[object], str] | None = None  # how a notebook shows a block, a stream
        self.show_stream: Callable[[TokenStream], None] | None = None  # as a cell's last expression
        self.observers: list[Callable[[], None]] = []
        self.agents: dict[str, Any] = {}  # by name; what they are, the engine does not know
        self.num_streams = 0  # ever made: seeds those without a seed
        self.num_generated = 0  # tokens yielded
        self._handles: weakref.WeakValueDictionary[int, CacheBlock] = weakref.WeakValueDictionary()
        self._dropped: deque[int] = deque()  # ids of blocks whose last reference is gone
        self._released: deque[weakref.ref[TokenStream]] = deque()  # streams whose loop was left
        self.transactions: list[Transaction] = []  # that go on
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.executor = ThreadPoolExecutor(1, thread_name_prefix=f"asyncllm_nb-{name}")
        self._ended_streams: deque[weakref.ref[TokenStream]] = deque(maxlen=16)
        self._order = 0
        self._next_id = 0
        self.awaited: set[asyncio.Future[Any]] = set()  # futures of the engine that somebody awaits
        self._beating = False
        self._told_paused: set[object] = set()  # cells that know that the engine is paused
        self.server = Server(self)
        self.recorder = Recorder(self)
        self.instruments = Instruments(self)

    # ---- the loop that it belongs to ------------------------------------------------------------

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None
        return self._loop

    @property
    def is_bound(self) -> bool:
        return self._loop is not None

    def check_open(self) -> None:
        """Raise EngineClosedError if the engine is closed."""
        if self.closed:
            raise EngineClosedError(
                f"engine {self.name!r} is closed: run the cell that makes it{self.made_in} again, then those "
                "that make its blocks"
            )

    def check_usable(self) -> None:
        """Bind to the running loop at the first await; raise where the engine cannot be used."""
        self.check_open()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError(
                "no event loop runs here: await this in a coroutine or a notebook cell, or call "
                "asyncllm_nb.run(...)"
            ) from None
        if self._loop is None:
            self._loop, self._thread = loop, threading.get_ident()
        elif loop is not self._loop:
            raise RuntimeError(
                f"engine {self.name!r} belongs to the event loop of its first await, and this is another "
                "one. From another thread use asyncio.run_coroutine_threadsafe(coroutine, loop) with "
                "that loop; in a script use one asyncio.run(main()), or asyncllm_nb.run(...), for all"
            )
        if self._task is None or self._task.done():
            self._task = loop.create_task(
                Server.serve(weakref.ref(self, _waker(loop, self._wake)), self._wake),
                name=f"asyncllm_nb engine {self.name}",
            )

    def check_thread(self) -> None:
        """Raise RuntimeError on another thread than that of the engine's loop."""
        if self.is_bound and threading.get_ident() != self._thread:
            raise RuntimeError(
                f"engine {self.name!r} belongs to another thread's event loop: from this one call "
                "loop.call_soon_threadsafe(...) with that loop"
            )

    def wake(self) -> None:
        """Something changed: look again what can run. From the engine's loop."""
        self._wake.set()

    def wake_threadsafe(self) -> None:
        """The same from any thread and from finalizers."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._wake.set)

    def next_order(self) -> int:
        """The next place in the one order of all that is asked for and yielded."""
        self._order += 1
        return self._order

    # ---- waiting --------------------------------------------------------------------------------

    async def wait(self, future: asyncio.Future[T], *, steps: bool = False) -> T:
        """Await something of the engine, with a heartbeat that keeps the stop button working. `steps`: for
        steps that were asked for, which a paused engine makes."""
        self.awaited.add(future)
        self._beat()
        notice = None if steps else self.loop.call_later(PAUSE_NOTICE, self.tell_paused)
        try:
            return await future
        finally:
            if notice is not None:
                notice.cancel()
            self.awaited.discard(future)

    def _beat(self) -> None:
        if not self._beating and self.awaited:
            self._beating = True
            self.loop.call_later(HEARTBEAT, _beat_again, weakref.ref(self))

    def tell_paused(self) -> None:
        """If it is paused, say so. Runs in the context of who waits, so that the words reach the right
        cell, once each; not for what no cell waits for."""
        if in_background.get():
            return
        cell = self.current_cell() if self.current_cell else None
        if self.paused and cell not in self._told_paused:
            self._told_paused.add(cell)
            print(
                f"This cell waits for engine {self.name!r}, which is paused: call resume() or step(), "
                "or press Run.",
                file=sys.stderr,
            )

    # ---- blocks ---------------------------------------------------------------------------------

    def make_block(self, name: str | None, transaction: Transaction | None) -> CacheBlock:
        """A new, empty block. Takes no memory."""
        self._next_id += 1
        taken = {record.name for record in self.records.values()}
        record = BlockRecord(self._next_id, unique_name(name or f"block{self._next_id}", taken))
        self.records[record.id] = record
        self.recorder.made(record)
        block = CacheBlock(self, record)
        self._handles[record.id] = block
        weakref.finalize(block, _drop_block, weakref.ref(self), record.id).atexit = False
        if transaction is not None:
            transaction.made.add(record.id)
        return block

    @property
    def blocks(self) -> dict[str, CacheBlock]:
        """Live blocks by name, oldest first."""
        return {
            record.name: handle
            for record in self.records.values()
            if not record.freed and (handle := self._handles.get(record.id)) is not None
        }

    def release_block(self, record: BlockRecord) -> None:
        """Free a block between two steps. Tokens that were yielded under views with it and are not
        encoded yet still read it as it was."""
        assert record.pending is None
        for other in self.scheduler.pending:
            pending = other.pending
            if pending and any(block._record is record for block in pending.view[:-1]):
                self.memory.hold(record.state)
                pending.frozen[record.id] = record.state
        self.memory.disown(record.state)
        record.freed = True
        self.records.pop(record.id, None)
        self.recorder.freed(record)

    def discard_block(self, block: CacheBlock) -> None:
        """Forget a block that was made for a request that failed before it wrote anything."""
        if block._record.state.num_tokens == 0 and not block._record.freed:
            block._record.freed = True
            self.records.pop(block.id, None)
            self.recorder.freed(block._record)

    # ---- requests -------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Put a checked request into the queue."""
        self.scheduler.add(request)
        self.wake()

    def check_ever_fits(self, encoding: Encoding) -> None:
        """Raise CacheFullError if an encoding would not fit even with only its view in memory."""
        base = self.scheduler.base_of(encoding)
        view = [visible_state(block._record, encoding.transaction) for block in encoding.view]
        if encoding.target is not None:
            view.append(encoding.target._record.state)
        need = self.memory.needs(base, len(encoding.tokens))
        error = self.memory.never_fits(view, need, self.records.values())
        if error is not None:
            raise error

    async def result(self, request: Request) -> Any:
        """Submit and await; cancelling the await cancels the request."""
        self.submit(request)
        try:
            return await self.wait(request.future)
        finally:
            self.wake()

    def cancel_request(self, request: Request) -> None:
        """Drop a request; what it took goes back between two steps."""
        request.future.cancel()
        self.wake()

    def clean(self) -> None:
        """What finalizers left for the boundary between two steps."""
        while self._released:
            stream = self._released.popleft()()
            if stream is not None:
                stream.finish("cancelled")
        while self._dropped:
            record = self.records.get(self._dropped.popleft())
            if record is not None and record.pending is None:
                self.release_block(record)

    # ---- streams --------------------------------------------------------------------------------

    def enlist(self, stream: TokenStream, task: asyncio.Task[Any] | None) -> None:
        """A stream is read for the first time: from now on it has a name and a place."""
        taken = {other.name for other in self.scheduler.streams if other.name}
        stream.name = unique_name(stream.name or coroutine_name(task), taken)
        self.scheduler.streams.append(stream)
        self.recorder.stream_begun(stream, task)

    def recent_streams(self) -> list[TokenStream]:
        """Streams that are read now and the last ones that ended, oldest first."""
        ended = [s for ref in self._ended_streams if (s := ref()) is not None]
        return sorted([*ended, *self.scheduler.streams], key=lambda stream: stream.number)

    def delist(self, stream: TokenStream) -> None:
        if stream in self.scheduler.streams:
            self.scheduler.streams.remove(stream)
            self._ended_streams.append(weakref.ref(stream))
        self.notify()

    def open_stream(self, stream: TokenStream, inputs: list[int] | None) -> Encoding:
        """Queue the input of a stream; without one, its turn to go on from kept logits."""
        record = stream.block._record
        current = record.stream
        if current is not None and current.is_read_by_current_task:
            raise ValueError(
                f"this task is still reading stream {current.name!r} into block {record.name!r}: leave "
                "its loop or cancel it before it reads another stream into the same block"
            )
        encoding = Encoding(
            name=stream.name or "stream",
            order=stream.order,
            transaction=stream.transaction,
            future=self.loop.create_future(),
            writes=(record,),
            kind="prefill",
            tokens=inputs or [],
            view=stream.view[:-1],
            target=stream.block,
            stream=stream,
        )
        if encoding.tokens:
            self.check_ever_fits(encoding)
        self.submit(encoding)
        return encoding

    def put_token(self, stream: TokenStream, token_id: int) -> None:
        """A token is yielded: it is in its block, and a row of the next step."""
        record = stream.block._record
        draft = self.memory.draft(record.state, 1)
        record.pending = PendingToken(token_id, stream, stream.view, draft, self.next_order())
        record.tokens.append(token_id)
        self.scheduler.pending.append(record)
        self.num_generated += 1

    def drop_pending(self, record: BlockRecord) -> None:
        """Take a yielded token back (its transaction is undone)."""
        pending, record.pending = record.pending, None
        assert pending is not None
        record.tokens.pop()
        self.scheduler.pending.remove(record)
        # The running step may still write there; whoever gets the memory next writes it after that.
        pending.draft.abandon()
        self.drop_frozen(pending)

    def drop_frozen(self, pending: PendingToken) -> None:
        for state in pending.frozen.values():
            self.memory.drop(state)
        pending.frozen.clear()

    def release_stream(self, stream: TokenStream) -> None:
        """The loop over a stream was left. May be called by a finalizer, on any thread."""
        if stream.ended or self.closed:
            return
        if threading.get_ident() == self._thread:
            stream.finish("cancelled")
        else:
            self._released.append(weakref.ref(stream))
            self.wake_threadsafe()

    # ---- transactions and control ---------------------------------------------------------------

    def current_transaction(self) -> Transaction | None:
        """The innermost transaction of this engine that the running task is inside of."""
        return current_transaction(self)

    async def begin_transaction(self, transaction: Transaction) -> None:
        """Wait for all blocks of a transaction at once, and give them to it."""
        await self.result(begin(self, transaction))

    @property
    def running(self) -> bool:
        """May tokens be drawn and steps be made?"""
        return self.server.running

    def notify(self) -> None:
        """Tell observers that something visible changed."""
        for observer in list(self.observers):
            try:
                observer()
            except Exception as error:
                self.loop.call_exception_handler(
                    {"message": "an observer of the engine failed", "exception": error}
                )

    def forget_pause_notice(self) -> None:
        self._told_paused.clear()

    def fail(self, error: Exception) -> None:
        """A fault of the engine's own: nobody may go on to wait for it, nor use what it left."""
        self.closed = True
        closed = EngineClosedError(f"engine {self.name!r} failed and is closed: {error!r}")
        closed.__cause__ = error
        self.server.end_all(closed)

    def close_now(self) -> None:
        """Close, waiting for the running step at most; storage is given back on return."""
        if self.closed:
            return
        self.closed = True
        self.server.end_all(EngineClosedError(f"engine {self.name!r} was closed meanwhile"))
        self.executor.shutdown(wait=True)
        self.runner.close()
        self.wake()


def _beat_again(ref: weakref.ref[Engine]) -> None:
    """The timer of the heartbeat, which must not keep an engine alive that nobody else needs."""
    engine = ref()
    if engine is not None:
        engine._beating = False
        engine._beat()


def _drop_block(ref: weakref.ref[Engine], block_id: int) -> None:
    """Finalizer of a block, on whatever thread the last reference goes."""
    engine = ref()
    if engine is not None and not engine.closed:
        engine._dropped.append(block_id)
        engine.wake_threadsafe()


def _waker(loop: asyncio.AbstractEventLoop, wake: asyncio.Event) -> Callable[[weakref.ref[Engine]], None]:
    """Called when the engine is gone: lets its task see that."""

    def wake_up(_: weakref.ref[Engine]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(wake.set)

    return wake_up
