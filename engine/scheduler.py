"""Who may run when: the order of writes, admission to memory, and the policy that forms a batch.

Knows requests, streams and blocks; no tensors and no model. Everything here runs between two steps, on
the engine's loop.

Order. Each block has a queue of the writes asked for. A request runs when it is the first of those that
can run on every block that it stands in line for, when no token that was yielded before it was asked for
is still to be encoded on a block that it sees, and when there is memory for it. A stream holds nothing
between two tokens; only a second stream into the same block waits for the first one's end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .blocks import EMPTY, BlockRecord, BlockState, Draft, Memory, PendingToken
from .requests import Encoding, Operation, Request
from .streams import TokenStream
from .transactions import Transaction, may_write, visible_state

MIN_CHUNK = 16
"""Tokens below which a chunk of prefill is not worth a place in a batch, unless it is the rest."""


@dataclass(slots=True)
class Chunk:
    """The next `count` tokens of an encoding."""

    encoding: Encoding
    count: int


@dataclass(slots=True)
class StepPlan:
    """What one step runs: yielded tokens to encode, one row each, then chunks of prefill."""

    decodes: list[PendingToken] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.decodes or self.chunks)


def plan_step(scheduler: Scheduler, max_batch_tokens: int) -> StepPlan:
    """The policy. Yielded tokens first, the longest waiting ones if they are too many (some room is
    left for prefill even then); the rest of the batch is shared out among prefills, least recently
    served first, so that a long one never starves a short one."""
    if retry := scheduler.failed_to_retry():
        return StepPlan([retry])
    encodings = sorted(scheduler.runnable_encodings(), key=lambda e: (e.served, e.order))
    room_for_decodes = max_batch_tokens - (
        min(MIN_CHUNK, max_batch_tokens // 2) if encodings else 0
    )
    pending = sorted(scheduler.runnable_pending(), key=lambda p: p.order)
    decodes = pending[: max(1, room_for_decodes)]
    room = max_batch_tokens - len(decodes)
    encodings = encodings[: max(1, room // MIN_CHUNK)] if room > 0 else []
    counts = share_out(room, [encoding.num_left for encoding in encodings])
    chunks = [Chunk(e, count) for e, count in zip(encodings, counts, strict=True) if count]
    return StepPlan(decodes, chunks)


def share_out(room: int, wants: Sequence[int]) -> list[int]:
    """Equal shares of `room`; what one does not want goes to the others.

    >>> share_out(100, [10, 400, 400])
    [10, 45, 45]
    """
    given = [0] * len(wants)
    open_ = [i for i, want in enumerate(wants) if want > 0]
    while room > 0 and open_:
        share = max(1, room // len(open_))
        for i in open_:
            part = min(share, wants[i] - given[i], room)
            given[i] += part
            room -= part
        open_ = [i for i in open_ if given[i] < wants[i]]
    return given


class Scheduler:
    """All that is asked for and not done yet."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.operations: deque[Operation] = deque()
        self.encodings: deque[Encoding] = deque()
        self.streams: list[TokenStream] = []  # being read, not ended
        self.pending: list[BlockRecord] = []  # blocks with a yielded token to encode
        self._newest = 0  # order of the request that was added last

    # ---- the queue ------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        self._newest = request.order
        for record in request.writes:
            record.writes.append(request)
        if isinstance(request, Operation):
            self.operations.append(request)
        else:
            assert isinstance(request, Encoding)
            self.encodings.append(request)
        if request.transaction is not None:
            request.transaction.requests.add(request)

    def remove(self, request: Request) -> None:
        """The request is done, failed or cancelled."""
        for record in request.writes:
            record.writes.remove(request)
        if isinstance(request, Operation):
            self.operations.remove(request)
        else:
            assert isinstance(request, Encoding)
            self.encodings.remove(request)
        if request.transaction is not None:
            request.transaction.requests.discard(request)

    @property
    def requests(self) -> list[Operation | Encoding]:
        return [*self.operations, *self.encodings]

    def is_idle_for(self, transaction: Transaction | None) -> bool:
        """Nothing queued, no token left to encode, nobody asks. For somebody inside a transaction those
        aside who wait for its end."""
        if self.runnable_pending():
            return False
        requests = list(self.requests)
        streams = [stream for stream in self.streams if stream.asking]
        if transaction is not None:
            requests = [request for request in requests if not self._is_held_up(request)]
            streams = [s for s in streams if may_write(s.block._record, s.transaction)]
        return not (requests or streams)

    # ---- order ----------------------------------------------------------------------------------

    def is_first(self, request: Request, record: BlockRecord) -> bool:
        """Is `request` the first in line for `record`, of those that could run at all?"""
        for write in record.writes:
            if write is request:
                return True
            if self._can_be_passed(write, record):
                continue
            if request.transaction is not None and self._is_held_up(write):
                continue
            return False
        raise AssertionError("the request does not stand in this line")

    def _can_be_passed(self, write: Request, record: BlockRecord) -> bool:
        """On this block: a second stream waits for the first one's end, and whoever is outside of the
        transaction that has the block for its end, without holding others up."""
        second = write.opens_stream is not None and record.stream is not None
        return second or self._waits_for_owner(write, record)

    def _is_held_up(self, write: Request) -> bool:
        """Does it wait, itself or behind others, for the end of a transaction? Nobody inside of one may
        wait for that, since then it might never end."""
        for record in write.writes:
            if self._waits_for_owner(write, record):
                return True
            for earlier in record.writes:
                if earlier is write:
                    break
                if self._is_held_up(earlier):
                    return True
        return False

    @staticmethod
    def _waits_for_owner(request: Request, record: BlockRecord) -> bool:
        """Must it wait until a transaction gives the block back? Not to read it as it was."""
        return request.changes(record) and not may_write(record, request.transaction)

    def next_operation(self, no_memory: set[int]) -> Operation | None:
        """The first operation that can be done now; `no_memory`: orders of those just tried in vain."""
        for operation in self.operations:
            if operation.order not in no_memory and (
                operation.cancelled or self._is_ready(operation)
            ):
                return operation
        return None

    def _is_ready(self, operation: Operation) -> bool:
        return all(self._is_at_rest(record, operation) for record in operation.writes)

    def _is_at_rest(self, record: BlockRecord, operation: Operation) -> bool:
        """Is it the operation's turn on this block, with every yielded token encoded?"""
        if not may_write(record, operation.transaction):
            return not operation.changes(record)  # it reads the block as at the transaction's start
        return (
            record.pending is None
            and self.is_first(operation, record)
            and not self._is_read_by_last_token(record, operation)
        )

    def _is_read_by_last_token(self, record: BlockRecord, operation: Operation) -> bool:
        """Does the last token of a stream that has ended still have to be encoded under this block?
        What comes after a stream's end must not change what the stream wrote."""
        return any(
            pending.stream.ended
            and pending.order < operation.order
            and any(block._record is record for block in pending.view[:-1])
            for pending in self.runnable_pending()
        )

    def is_due(self, encoding: Encoding) -> bool:
        """May it start, memory aside? A stream that no live task is reading gives way here."""
        if encoding.target is not None:
            record = encoding.target._record
            if not may_write(record, encoding.transaction):
                return False
            if encoding.stream is not None and record.stream is not None:
                if record.stream.has_reader or record.stream.asking:
                    return False
                record.stream.finish("cancelled")
            if record.pending is not None or not self.is_first(encoding, record):
                return False
        return not any(self._must_be_encoded(block._record, encoding) for block in encoding.view)

    @staticmethod
    def _must_be_encoded(record: BlockRecord, reader: Request) -> bool:
        """Does the block have a token that the reader must see and that is not encoded yet?"""
        pending = record.pending
        return (
            pending is not None
            and pending.order < reader.order
            and may_write(record, reader.transaction)
        )

    # ---- memory ---------------------------------------------------------------------------------

    def runnable_encodings(self) -> list[Encoding]:
        """Started ones, and those that start now. The oldest is admitted first; a younger one passes it
        only when otherwise nothing at all could run."""
        running = [e for e in self.encodings if e.started]
        idle = not running and not self.pending
        blocked = False
        for encoding in [e for e in self.encodings if not e.started]:
            encoding.waits_for_memory = False
            skip = encoding.started or encoding.cancelled or not encoding.tokens
            if skip or not self.is_due(encoding):
                continue
            group = encoding.siblings or (encoding,)
            if (not blocked or (idle and not running)) and self._admit(group):
                running += group
            else:
                blocked = True
                for member in group:
                    member.waits_for_memory = True
        return running

    def _admit(self, group: Sequence[Encoding]) -> bool:
        """Take memory for all of the group and let them read one snapshot; or take nothing."""
        drafts: list[Draft] = []
        first = group[0]
        states = tuple(visible_state(b._record, first.transaction) for b in first.view)
        for encoding in group:
            base = self.base_of(encoding)
            if not self.memory.fits(self.memory.needs(base, len(encoding.tokens))):
                for draft in drafts:
                    draft.abandon()
                return False
            drafts.append(self.memory.draft(base, len(encoding.tokens)))
        for encoding, draft in zip(group, drafts, strict=True):
            encoding.draft, encoding.snapshot, encoding.waits_for_memory = draft, states, False
            for state in states:
                self.memory.hold(state)
        return True

    @staticmethod
    def base_of(encoding: Encoding) -> BlockState:
        """The state that an encoding writes behind."""
        if encoding.target is None or encoding.replaces:
            return EMPTY
        return encoding.target._record.state

    def runnable_pending(self) -> list[PendingToken]:
        """Yielded tokens to encode, those whose step failed aside."""
        return [r.pending for r in self.pending if r.pending and not r.pending.failure]

    def failed_to_retry(self) -> PendingToken | None:
        """A token whose step failed, if something was asked for since. It is tried alone, so that it
        cannot make others fail."""
        for record in self.pending:
            pending = record.pending
            if pending and pending.failure and pending.failed_at < self._newest:
                return pending
        return None

    def failure_before(self, request: Request) -> Exception | None:
        """Why a request can never run: a token that it needs encoded has failed again."""
        records = [block._record for block in request.reads]
        for pending in (record.pending for record in (*request.writes, *records)):
            if pending and pending.failure and pending.order < request.order <= pending.failed_at:
                return pending.failure
        return None

    def memory_waiters(self) -> Iterator[Operation | Encoding | TokenStream]:
        """Who waits for pages or a slot."""
        yield from (r for r in self.requests if r.waits_for_memory)
        yield from (s for s in self.streams if s.waits_for_memory)

    def youngest_waiter(self) -> Operation | Encoding | TokenStream | None:
        """Who is told that the memory is full when nothing can run."""
        return max(self.memory_waiters(), key=lambda waiter: waiter.order, default=None)
