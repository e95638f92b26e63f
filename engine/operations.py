"""Block operations: merge, append, fork, clear, free, and the start of a transaction.

Each is done whole between two steps, when it is its turn on all blocks that it concerns. Knows states
and memory; what has to be computed on tensors runs on the worker thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .batch import IDENTITY_SLOT, PAGE_TOKENS
from .blocks import EMPTY, MAX_SEGMENTS, BlockState, CacheBlock, Memory, Need, Segment
from .requests import Operation
from .transactions import Transaction, may_write, visible_state
from .views import freed_error

if TYPE_CHECKING:
    from .engine import Engine



async def perform(engine: Engine, operation: Operation) -> bool:
    """Do an operation whose turn it is and answer its asker. False if it has to wait for memory."""
    if operation.cancelled:
        engine.scheduler.remove(operation)
        return True
    freed = [block.name for block in operation.blocks if block._record.freed]
    try:
        if freed:
            raise freed_error(freed[0])
        if operation.need is not None and not _has_memory(engine, operation):
            return False
        result = await operation.apply()
    except Exception as error:
        engine.scheduler.remove(operation)
        if not operation.cancelled:
            operation.future.set_exception(error)
        return True
    engine.scheduler.remove(operation)
    if not operation.cancelled:
        operation.future.set_result(result)
    engine.notify()
    return True


def _has_memory(engine: Engine, operation: Operation) -> bool:
    assert operation.need is not None
    memory, need = engine.memory, operation.need()
    operation.waits_for_memory = not memory.fits(need)
    if operation.waits_for_memory:
        states = [block._record.state for block in operation.blocks]
        if error := memory.never_fits(states, need, engine.records.values()):
            operation.waits_for_memory = False
            raise error
    return not operation.waits_for_memory


def make_operation(
    engine: Engine,
    kind: str,
    apply: Callable[[], Any],
    *,
    changes: Sequence[CacheBlock] = (),
    reads: Sequence[CacheBlock] = (),
    need: Callable[[], Need] | None = None,
) -> Operation:
    """An operation for the task that asks, in line for the blocks that it changes and those it reads.

    Blocks that belong to a transaction of somebody else are read as they were at its start, so the
    operation does not stand in line for those.
    """
    transaction = engine.current_transaction()
    changed = {block.id: block._record for block in changes}
    read = {
        block.id: block._record
        for block in reads
        if block.id not in changed and may_write(block._record, transaction)
    }
    return Operation(
        name=kind,
        order=engine.next_order(),
        transaction=transaction,
        future=engine.loop.create_future(),
        writes=(*changed.values(), *read.values()),
        kind=kind,
        blocks=(*changes, *reads),
        apply=apply,
        need=need,
        only_read=frozenset(read),
    )


# ---- what the operations do -----------------------------------------------------------------------


def joined_segments(left: BlockState, right: BlockState) -> tuple[Segment, ...]:
    """Segments of `left` followed by those of `right`, moved behind it."""
    moved = (replace(s, offset=s.offset + left.span) for s in right.segments)
    return (*left.segments, *moved)


def joining_need(memory: Memory, left: BlockState, right: BlockState) -> Need:
    """What joining two states takes: pages if it compacts, a slot if both have a pair."""
    segments = joined_segments(left, right)
    pages = (
        -(-sum(s.length for s in segments) // PAGE_TOKENS) if len(segments) > MAX_SEGMENTS else 0
    )
    slot = left.slot != IDENTITY_SLOT and right.slot != IDENTITY_SLOT
    return Need(pages, int(slot), copies=False)


async def join(engine: Engine, left: BlockState, right: BlockState) -> BlockState:
    """A state that reads as `left` followed by `right`, owned once by whom it is made for.

    Pages are shared. With more than MAX_SEGMENTS segments all tokens are copied into one, their keys
    rotated again (in float32, one rounding).
    """
    memory = engine.memory
    memory.hold(left)  # a transaction may be undone, and let go of them, while the worker runs
    memory.hold(right)
    need = joining_need(memory, left, right)
    segments = joined_segments(left, right)
    pages = tuple(memory.pages.take() for _ in range(need.pages))
    slot = memory.slots.take() if need.slots else IDENTITY_SLOT
    compacted = (Segment(pages, sum(s.length for s in segments), 0),) if pages else None

    def compute() -> None:
        if slot:
            engine.runner.join_slots(left, right, slot)
        if compacted:
            engine.runner.compact(segments, compacted[0])

    try:
        if slot or compacted:
            await engine.server.stepper.run(compute)
        if compacted is None:
            memory.pages.own(page for segment in segments for page in segment.pages)
        if not need.slots:
            memory.slots.hold(left.slot or right.slot)
    except BaseException:
        memory.pages.disown(pages)
        memory.slots.drop(slot)
        raise
    finally:
        memory.drop(left)
        memory.drop(right)
    tokens, span = left.num_tokens + right.num_tokens, left.span + right.span
    return BlockState(compacted or segments, tokens, span, slot or left.slot or right.slot)


def _read(block: CacheBlock, reader: Transaction | None) -> tuple[BlockState, list[int]]:
    """The state of a block that `reader` sees, and its tokens."""
    state = visible_state(block._record, reader)
    return state, block._record.tokens_of(state)


def merge(engine: Engine, left: CacheBlock, right: CacheBlock, name: str | None) -> Operation:
    """A new block that reads as `left` then `right`."""
    reader = engine.current_transaction()

    async def apply() -> CacheBlock:
        (left_state, left_ids), (right_state, right_ids) = _read(left, reader), _read(right, reader)
        state = await join(engine, left_state, right_state)
        block = engine.make_block(name, reader)
        block._record.tokens.extend((*left_ids, *right_ids))
        block._record.commit(state)
        read = ((left, left_state), (right, right_state))
        engine.recorder.changed(block._record, "merge", read)
        return block

    def need() -> Need:
        return joining_need(engine.memory, _read(left, reader)[0], _read(right, reader)[0])

    return make_operation(engine, "merge", apply, reads=(left, right), need=need)


def append(engine: Engine, left: CacheBlock, right: CacheBlock) -> Operation:
    """`left` followed by `right`, into `left`."""
    reader = engine.current_transaction()

    async def apply() -> CacheBlock:
        record = left._record
        right_state, right_ids = _read(right, reader)
        old = record.state
        state = await join(engine, old, right_state)
        if record.state is not old:  # its transaction was undone while the worker ran
            engine.memory.disown(state)
            raise RuntimeError(f"the transaction that changed block {record.name!r} was undone")
        engine.memory.disown(old)
        record.tokens.extend(right_ids)
        record.commit(state)
        engine.recorder.changed(record, "append", [(right, right_state)])
        return left

    def need() -> Need:
        return joining_need(engine.memory, left._record.state, _read(right, reader)[0])

    return make_operation(engine, "append", apply, changes=(left,), reads=(right,), need=need)


def fork(engine: Engine, block: CacheBlock, name: str | None) -> Operation:
    """A new block with the same content; pages are shared until one of the two writes them."""
    reader = engine.current_transaction()

    async def apply() -> CacheBlock:
        state, ids = _read(block, reader)
        engine.memory.own(state)
        copy = engine.make_block(name or block.name, reader)
        copy._record.tokens.extend(ids)
        copy._record.commit(replace(state, version=0))
        engine.recorder.changed(copy._record, "fork", [(block, state)])
        return copy

    return make_operation(engine, "fork", apply, reads=(block,))


def clear(engine: Engine, block: CacheBlock) -> Operation:
    """`block` becomes empty."""

    async def apply() -> None:
        record = block._record
        engine.memory.disown(record.state)
        record.tokens.clear()
        record.commit(EMPTY)
        engine.recorder.changed(record, "clear")

    return make_operation(engine, "clear", apply, changes=(block,))


def free(engine: Engine, block: CacheBlock) -> Operation:
    """`block` is no more; using it is an error from now on."""

    async def apply() -> None:
        engine.release_block(block._record)

    return make_operation(engine, "free", apply, changes=(block,))


def begin(engine: Engine, transaction: Transaction) -> Operation:
    """`transaction` gets its blocks."""

    async def apply() -> None:
        transaction.begin()

    return make_operation(engine, "transaction", apply, changes=transaction.blocks)
