"""One step: from a plan to a batch, the forward pass on the worker thread, and the commit.

Knows requests, parts and states. A step commits whole or not at all; what a cancelled or failed request
took goes back, and its block stays as it was.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from .blocks import BlockState, Draft, PendingToken
from .continuing import keep
from .layout import Part
from .recording import commit_of
from .requests import Encoding
from .runner import Draw, StepResult
from .scheduler import Chunk, StepPlan
from .trace import Commit, RowRecord
from .transactions import visible_state

if TYPE_CHECKING:
    from .engine import Engine

T = TypeVar("T")


class Stepper:
    """Runs plans. Counts steps and rows; everything else it touches belongs to the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self.num_steps = 0
        self.num_encoded = 0  # rows (tokens) ever run through the model
        self.in_step = False

    @property
    def engine(self) -> Engine:
        engine = self._engine()
        assert engine is not None
        return engine

    async def run(self, function: Callable[[], T]) -> T:
        """Run `function` on the worker thread. If this task is cancelled meanwhile, the worker is
        waited for: nothing may run beside what comes next."""
        work = self.engine.executor.submit(function)
        self.in_step = True
        try:
            return await asyncio.shield(asyncio.wrap_future(work))
        except asyncio.CancelledError:
            work.exception()
            raise
        finally:
            self.in_step = False

    async def step(self, plan: StepPlan) -> bool:
        """Make one step. False if it failed or the engine was closed meanwhile."""
        engine = self.engine
        parts = [self._decode_part(pending) for pending in plan.decodes]
        parts += [self._chunk_part(chunk) for chunk in plan.chunks]
        recorder = engine.recorder
        decodes = zip(plan.decodes, parts, strict=False)  # the parts of decodes come first
        rows = [recorder.decode_row(pending, part.view) for pending, part in decodes]
        rows += [recorder.chunk_row(chunk) for chunk in plan.chunks]
        draws: list[Draw | None] = [None if p.stream.ended else p.stream.next_draw() for p in plan.decodes]
        draws += [self._chunk_draw(chunk) for chunk in plan.chunks]
        started = engine.trace.now()
        wanted = engine.instruments.wanted()
        try:
            result = await self.run(lambda: engine.runner.step(parts, draws, wanted))
        except BaseException as error:
            self._fail_step(plan, error)
            recorder.step(self.num_steps + 1, started, 0.0, rows, repr(error))
            engine.notify()
            if not isinstance(error, Exception):
                raise
            return False
        if engine.closed:
            return False
        self.num_steps += 1
        self.num_encoded += sum(len(part.token_ids) for part in parts)
        commits = self._commit(plan, result)
        for row, commit in zip(rows, commits, strict=True):
            row.commit = commit
        recorder.step(self.num_steps, started, result.seconds, rows, ran=result.ran)
        engine.notify()
        if wanted is not None:
            self._report(rows, result)
        return True

    # ---- parts ----------------------------------------------------------------------------------

    def _decode_states(self, pending: PendingToken) -> tuple[BlockState, ...]:
        return tuple(
            pending.frozen.get(block.id) or visible_state(block._record, pending.stream.transaction)
            for block in pending.view[:-1]
        )

    def _decode_part(self, pending: PendingToken) -> Part:
        return Part(self._decode_states(pending), pending.draft, 0, [pending.token_id], 0)

    @staticmethod
    def _chunk_part(chunk: Chunk) -> Part:
        encoding = chunk.encoding
        assert encoding.snapshot is not None and encoding.draft is not None
        start = encoding.num_done
        tokens = encoding.tokens[start : start + chunk.count]
        wanted = min(max(encoding.wanted_from - start, 0), chunk.count)
        return Part(encoding.snapshot, encoding.draft, start, tokens, wanted)

    @staticmethod
    def _chunk_draw(chunk: Chunk) -> Draw | None:
        stream = chunk.encoding.stream
        last = chunk.count == chunk.encoding.num_left
        return stream.next_draw() if last and stream is not None else None

    # ---- commit ---------------------------------------------------------------------------------

    def _commit(self, plan: StepPlan, result: StepResult) -> list[Commit | None]:
        """Commit what can be; for each row, what became of its block."""
        index = 0
        commits: list[Commit | None] = []
        for pending in plan.decodes:
            logits, drawn = result.logits[index][-1], result.drawn[index]
            commits.append(self._commit_token(pending, logits, drawn))
            index += 1
        for chunk in plan.chunks:
            encoding = chunk.encoding
            encoding.num_done += chunk.count
            encoding.logits.append(result.logits[index])
            done = not encoding.num_left and not encoding.cancelled  # a cancelled one: at the boundary
            commits.append(self._finish(encoding, result.drawn[index]) if done else None)
            index += 1
        return commits

    def _commit_token(
        self, pending: PendingToken, logits: Tensor, drawn: tuple[int, float] | None
    ) -> Commit | None:
        record = pending.view[-1]._record
        if record.pending is not pending:
            return None  # taken back while the step ran; its memory goes back at the boundary
        engine = self.engine
        if logits.untyped_storage().nbytes() > logits.nbytes:
            logits = logits.clone()  # not to keep a whole step's logits for this row
        kept = keep(pending.view[:-1], self._decode_states(pending), logits)
        record.pending = None
        engine.scheduler.pending.remove(record)
        record.commit(pending.draft.commit(kept))
        engine.drop_frozen(pending)
        if not pending.stream.ended:
            pending.stream.advanced(kept.logits, self.num_steps, drawn)
        return commit_of(pending.draft, record.state.version)

    def _finish(self, encoding: Encoding, drawn: tuple[int, float] | None) -> Commit:
        """The last chunk is done: commit, and answer."""
        engine = self.engine
        logits = torch.cat(encoding.logits)
        assert encoding.draft is not None and encoding.snapshot is not None
        kept_row = logits[-1].clone()
        commit: Commit = ()
        if encoding.target is None:
            encoding.draft.abandon()
        else:
            record = encoding.target._record
            state = encoding.draft.commit(keep(encoding.view, encoding.snapshot, kept_row))
            if encoding.replaces:
                engine.memory.disown(record.state)
                record.tokens.clear()
            record.tokens.extend(encoding.tokens)
            record.commit(state)
            commit = commit_of(encoding.draft, record.state.version)
        self._let_go(encoding)
        encoding.future.set_result(logits)
        if encoding.stream is not None:
            encoding.stream.opened(kept_row, self.num_steps, drawn)
        return commit

    # ---- what does not commit -------------------------------------------------------------------

    def _let_go(self, encoding: Encoding) -> None:
        for state in encoding.snapshot or ():
            self.engine.memory.drop(state)
        encoding.snapshot, encoding.draft = None, None
        self.engine.scheduler.remove(encoding)

    def drop(self, encoding: Encoding) -> None:
        """Forget an encoding; what it took goes back. Only between two steps."""
        if encoding.draft is not None:
            encoding.draft.abandon()
        self._let_go(encoding)
        self.engine.recorder.dropped(encoding)

    def fail(self, encoding: Encoding, error: BaseException) -> None:
        """Drop an encoding and tell its asker why. Only between two steps."""
        self.drop(encoding)
        for sibling in encoding.siblings:
            if sibling is not encoding and not sibling.future.done():
                sibling.future.cancel()
        stream = encoding.stream
        if not encoding.future.done():
            if stream is None:
                encoding.future.set_exception(error)
            else:
                encoding.future.cancel()
        if stream is not None:
            stream.fail(error)

    def _fail_step(self, plan: StepPlan, error: BaseException) -> None:
        """Nothing of the step is committed. Its requests fail; tokens that were yielded stay in their
        blocks, and are tried again when something else is asked for."""
        if not isinstance(error, Exception):
            error = RuntimeError("the engine's task was cancelled while the step ran")
        for chunk in plan.chunks:
            self.fail(chunk.encoding, error)
        for pending in plan.decodes:
            pending.failure, pending.failed_at = error, self.engine.next_order()
            pending.stream.fail(error)

    # ---- what others look at ---------------------------------------------------------------------

    def _report(self, rows: list[RowRecord], result: StepResult) -> None:
        instruments = self.engine.instruments
        if isinstance(result.readings, Exception):
            instruments.failed(result.readings)
        else:
            instruments.take(self.num_steps, rows, result.readings, result.measuring)

    def drafts(self) -> Iterator[Draft]:
        """Memory taken for writes that are not committed."""
        scheduler = self.engine.scheduler
        yield from (r.pending.draft for r in scheduler.pending if r.pending)
        yield from (e.draft for e in scheduler.encodings if e.draft)

    def held_states(self) -> Iterator[BlockState]:
        """States that are held by readers, once per holder."""
        scheduler = self.engine.scheduler
        for record in scheduler.pending:
            if record.pending:
                yield from record.pending.frozen.values()
        for encoding in scheduler.encodings:
            yield from encoding.snapshot or ()
        for transaction in self.engine.transactions:
            yield from transaction.saved_states()
        yield from self.engine.instruments.held
