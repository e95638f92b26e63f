"""The engine's task: what happens between two steps, and who is told when nothing is left to do.

Knows the engine's parts and drives them. What may run is decided in `scheduler`; a step itself, from
its batch to its commit, is `stepping`.
"""

from __future__ import annotations

import asyncio
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .awaiting import awaits_any
from .continuing import kept_logits
from .errors import CacheFullError, EngineClosedError
from .operations import perform
from .requests import Encoding
from .scheduler import StepPlan, plan_step
from .stepping import Stepper
from .streams import TokenStream
from .transactions import Transaction, may_write
from .views import NO_KEPT_LOGITS, freed_error

if TYPE_CHECKING:
    from .engine import Engine

MIN_TURNS, MAX_TURNS = 4, 32
"""Turns of the event loop between two steps. A widget's message needs 4 to be handled; consumers that
got a token have up to MAX_TURNS to ask for the next before a batch is formed without them."""


@dataclass(slots=True, eq=False)
class StepCall:
    """A call of ``step(n)``: how many steps are left to make, and how many were made."""

    left: int
    future: asyncio.Future[int]
    made: int = 0
    was_idle: bool = False  # nothing could run in the last round


@dataclass(slots=True, eq=False)
class Drain:
    """A call of ``drain()``, and the transaction that it was made inside of."""

    transaction: Transaction | None
    future: asyncio.Future[None]


class Server:
    """The engine's loop. Holds nothing that outlives a step but counters and who waits for them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self.stepper = Stepper(engine)
        self.step_calls: list[StepCall] = []
        self.drains: list[Drain] = []
        self._boundaries: list[asyncio.Future[None]] = []
        self._last_step = float("-inf")  # when the last step began, by the loop's clock

    @property
    def engine(self) -> Engine:
        engine = self._engine()
        assert engine is not None
        return engine

    @property
    def running(self) -> bool:
        """May tokens be drawn and steps be made?"""
        return not self.engine.paused or bool(self.step_calls)

    # ---- the loop -------------------------------------------------------------------------------

    @staticmethod
    async def serve(ref: weakref.ref[Engine], wake: asyncio.Event) -> None:
        """The engine's task. Holds the engine weakly while there is nothing to do."""
        while True:
            wake.clear()
            engine = ref()
            if engine is None or engine.closed:
                return
            try:
                busy = await engine.server.round()
            except Exception as error:
                engine.fail(error)
                raise
            del engine
            if not busy:
                await wake.wait()

    async def round(self) -> bool:
        """Everything between two steps, and a step if there is one. False when nothing was to do."""
        engine = self.engine
        self._boundary()
        busy = await self._do_operations()
        if engine.closed:
            return False
        self._end_broken()
        self._refresh_streams()
        if self.running:
            busy |= await self._draw_kept()
            if called := self._call_consumers():
                await self._turns(called)
                return True
            if self._is_early():
                return False
            if plan := plan_step(engine.scheduler, engine.max_batch_tokens):
                self._last_step = engine.loop.time()
                await self._step(plan)
                return True
            if not busy and (self._relieve_memory() or self._is_first_idle_round()):
                await self._turns([])
                return True
        if not busy:
            self._settle()
            engine.recorder.look()
        return busy

    def _is_early(self) -> bool:
        """Is it too early for the next step, at the speed that is set? Looks again in time."""
        engine = self.engine
        left = self._last_step + engine.step_interval - engine.loop.time()
        if left > 0 and not self.step_calls:
            engine.loop.call_later(left, engine.wake)
            return True
        return False

    async def _step(self, plan: StepPlan) -> None:
        """One forward pass, and turns for those who get something from it."""
        call = self.step_calls[0] if self.step_calls else None
        made = await self.stepper.step(plan)
        if self.engine.closed:
            return
        self._boundary()
        self._refresh_streams()
        await self._turns(self._call_consumers())
        if made and call in self.step_calls:
            assert call is not None
            self._count_step(call)

    def _count_step(self, call: StepCall) -> None:
        call.left, call.made, call.was_idle = call.left - 1, call.made + 1, False
        if call.left == 0 or call.future.done():
            self.step_calls.remove(call)
            if not call.future.done():
                call.future.set_result(call.made)

    def _boundary(self) -> None:
        """No step runs now: give back what waited for that, and tell who waited for it."""
        engine = self.engine
        engine.clean()
        for encoding in [e for e in engine.scheduler.encodings if e.cancelled]:
            self.stepper.drop(encoding)
        boundaries, self._boundaries = self._boundaries, []
        for future in boundaries:
            if not future.done():
                future.set_result(None)

    async def between_steps(self) -> None:
        """Return when no step runs that was formed before this call."""
        future: asyncio.Future[None] = self.engine.loop.create_future()
        self._boundaries.append(future)
        self.engine.wake()
        await self.engine.wait(future)

    async def _turns(self, called: list[TokenStream]) -> None:
        """Let woken coroutines ask again before the next batch is formed; but not for ever."""
        for turn in range(MAX_TURNS):
            await asyncio.sleep(0)
            if turn + 1 >= MIN_TURNS and all(stream.ended or stream.asking for stream in called):
                return

    def _is_first_idle_round(self) -> bool:
        """A call of ``step`` finds nothing to do: tasks that were just started get a chance to ask."""
        first = [call for call in self.step_calls if not call.was_idle]
        for call in first:
            call.was_idle = True
        return bool(first)

    def _settle(self) -> None:
        """Nothing can run: tell those who wait for just that."""
        calls, self.step_calls = self.step_calls, []
        for call in calls:
            if not call.future.done():
                call.future.set_result(call.made)
        for drain in list(self.drains):
            if self.engine.scheduler.is_idle_for(drain.transaction):
                self.drains.remove(drain)
                if not drain.future.done():
                    drain.future.set_result(None)

    def end_all(self, error: EngineClosedError) -> None:
        """The engine closes: streams end, everybody who waits gets `error`."""
        engine = self.engine
        for stream in list(engine.scheduler.streams):
            stream.finish("cancelled")
        futures: list[asyncio.Future[Any]] = [
            *(request.future for request in engine.scheduler.requests),
            *(call.future for call in self.step_calls),
            *(drain.future for drain in self.drains),
        ]
        for future in futures:
            if not future.done():
                future.set_exception(error)
                future.exception()  # nobody may be waiting any more; that is no news
        for boundary in self._boundaries:
            if not boundary.done():
                boundary.set_result(None)
        engine.trace.add("close")
        engine.notify()

    # ---- before a step --------------------------------------------------------------------------

    async def _do_operations(self) -> bool:
        """Merges, forks, frees and the like that can be done now, in order."""
        engine, busy = self.engine, False
        no_memory: set[int] = set()
        while not engine.closed and (operation := engine.scheduler.next_operation(no_memory)):
            if await perform(engine, operation):
                busy = True
            else:
                no_memory.add(operation.order)
        return busy

    def _end_broken(self) -> None:
        """Whoever reads a block that was freed, or that holds a token that cannot be encoded, gets an
        error. Clearing or freeing such a block drops the token."""
        engine = self.engine
        for request in engine.scheduler.requests:
            failure = engine.scheduler.failure_before(request)
            if failure is None or request.cancelled:
                continue
            if isinstance(request, Encoding):
                self.stepper.fail(request, failure)
            elif request.kind in ("clear", "free"):
                for record in request.writes:
                    if record.pending is not None:
                        engine.drop_pending(record)
                engine.wake()
            else:
                engine.scheduler.remove(request)
                request.future.set_exception(failure)
        for encoding in list(engine.scheduler.encodings):
            targets = (encoding.target,) if encoding.target else ()
            freed = [b.name for b in (*encoding.view, *targets) if b._record.freed]
            if freed and not encoding.started:
                self.stepper.fail(encoding, freed_error(freed[0]))
        for stream in list(engine.scheduler.streams):
            freed = [block.name for block in stream.view if block._record.freed]
            if freed:
                stream.fail(freed_error(freed[0]))

    def _refresh_streams(self) -> None:
        """A stream whose block others wrote since goes on from the logits kept with its view's last
        token, if that was encoded under the same blocks, else from those of its own last token."""
        engine = self.engine
        for stream in list(engine.scheduler.streams):
            if stream.is_stale and may_write(stream.block._record, stream.transaction):
                kept = kept_logits(engine, stream.view, stream.transaction)
                stream.go_on(kept.logits if kept else None)

    async def _draw_kept(self) -> bool:
        """Draw for streams that go on from kept logits: no forward pass is needed for those."""
        engine = self.engine
        self._open_without_input()
        streams = [stream for stream in engine.scheduler.streams if stream.wants_draw]
        if not streams:
            return False
        draws = [stream.next_draw() for stream in streams]
        versions = [stream.block._record.state.version for stream in streams]
        tokens = await self.stepper.run(lambda: engine.runner.draw(draws))
        for stream, token, version in zip(streams, tokens, versions, strict=True):
            if stream.block._record.state.version == version and not stream.ended:
                stream.take_draw(token)
        return True

    def _open_without_input(self) -> None:
        """Streams with no input go on from kept logits when it is their turn."""
        engine = self.engine
        for encoding in [e for e in engine.scheduler.encodings if not e.tokens]:
            stream = encoding.stream
            assert stream is not None, "only a stream may have no input"
            if encoding.cancelled or not engine.scheduler.is_due(encoding):
                continue
            kept = kept_logits(engine, stream.view, stream.transaction)
            if kept is None:
                self.stepper.fail(encoding, ValueError(NO_KEPT_LOGITS))
                continue
            engine.scheduler.remove(encoding)
            encoding.future.set_result(None)
            stream.opened(kept.logits, self.stepper.num_steps, None)

    def _call_consumers(self) -> list[TokenStream]:
        """Wake consumers that can take a token; note which ones wait for memory."""
        engine, called = self.engine, []
        for stream in list(engine.scheduler.streams):
            ready = stream.asking and stream.has_draw and stream.may_sample()
            stream.waits_for_memory = ready and not stream.fits
            if stream.waits_for_memory and (error := self._never_fits(stream)):
                stream.fail(error)
            elif ready and not stream.waits_for_memory:
                stream.call_consumer()
                called.append(stream)
        return called

    def _never_fits(self, stream: TokenStream) -> CacheFullError | None:
        """The error if one more token would not fit even with nothing else in memory."""
        engine = self.engine
        states = [block._record.state for block in stream.view]
        need = engine.memory.needs(stream.block._record.state, 1)
        return engine.memory.never_fits(states, need, engine.records.values())

    def _relieve_memory(self) -> bool:
        """Nothing can run. If that is for want of memory, and no consumer is busy with a token (it may
        still free something), the youngest waiter gets an error."""
        engine = self.engine
        waiter = engine.scheduler.youngest_waiter()
        if waiter is None or any(self._is_busy(stream) for stream in engine.scheduler.streams):
            return False
        error = engine.memory.full(
            "more than is free, and nothing can run that would free it", engine.records.values()
        )
        if isinstance(waiter, TokenStream):
            waiter.fail(error)
        elif isinstance(waiter, Encoding):
            self.stepper.fail(waiter, error)
        else:
            engine.scheduler.remove(waiter)
            waiter.future.set_exception(error)
        return True

    def _is_busy(self, stream: TokenStream) -> bool:
        """Its consumer has a token and does not, in its loop body, wait for this engine itself."""
        reader = stream.reader
        return stream.in_body and reader is not None and not awaits_any(reader, self.engine.awaited)
