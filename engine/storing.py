"""Blocks apart from their engine: what some of them hold at one moment, and new blocks that hold the same.

Knows pages, slots, states and where their tensors lie. Knows no files. Pages and slots that blocks share
are copied once, and are shared again afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .batch import IDENTITY_SLOT, PAGE_TOKENS
from .blocks import BlockRecord, BlockState, CacheBlock, KeptLogits, Need, Segment
from .errors import EngineClosedError
from .operations import make_operation
from .scheduler import StepPlan
from .stored import OF_PAGES, Stored, StoredBlock, check, pools
from .transactions import Transaction, may_write, visible_state
from .views import check_block, freed_error

if TYPE_CHECKING:
    from .engine import Engine

# ---- from blocks ------------------------------------------------------------------------------------


async def store(engine: Engine, blocks: Sequence[CacheBlock]) -> Stored:
    """Copy what `blocks` hold, all at one moment between two steps.

    That is what is committed then, every yielded token included: those that are not encoded yet are
    encoded first, by a step made for that, also while the engine is paused. Streams go on; what was
    asked for and is not done is no part of it. Whoever is outside of a transaction gets its blocks as
    they were at its start.

    Raises ValueError for a block that occurs twice, is freed, or belongs to another engine.
    """
    engine.check_usable()
    for block in blocks:
        check_block(engine, block)
    if len(set(blocks)) < len(blocks):
        raise ValueError(f"name each block once, not {[block.name for block in blocks]}")
    reader = engine.current_transaction()

    async def apply() -> Stored:
        records = [block._record for block in blocks]
        if freed := [record.name for record in records if record.freed]:
            raise freed_error(freed[0])
        await _encode_yielded(engine, records, reader)
        states = [visible_state(record, reader) for record in records]
        layout = _Layout(engine, records, states)
        for state in states:
            engine.memory.hold(state)
        try:
            return await engine.server.stepper.run(layout.copy)
        finally:
            for state in states:
                engine.memory.drop(state)

    stored: Stored = await engine.result(make_operation(engine, "save", apply))
    return stored


async def _encode_yielded(
    engine: Engine, records: Sequence[BlockRecord], reader: Transaction | None
) -> None:
    """Encode the tokens that were yielded into these blocks. One whose step has failed is tried again,
    alone, so that it makes no other fail."""
    while waiting := [(r, r.pending) for r in records if r.pending and may_write(r, reader)]:
        failed = [one for one in waiting if one[1].failure]
        group = failed[:1] or waiting[: engine.max_batch_tokens]
        await engine.server.stepper.step(StepPlan([pending for _, pending in group]))
        if engine.closed:
            raise EngineClosedError(f"engine {engine.name!r} was closed meanwhile")
        record, pending = group[0]
        if len(group) == 1 and record.pending is pending and pending.failure:
            raise pending.failure


class _Layout:
    """Which pages and slots some states take, by the numbers that they get."""

    def __init__(
        self, engine: Engine, records: Sequence[BlockRecord], states: Sequence[BlockState]
    ) -> None:
        self._runner = engine.runner
        self._filled: dict[int, int] = {}  # page of the pool -> how many of its places are read
        slots: dict[int, None] = {}
        for state in states:
            for segment in state.segments:
                for index, page in enumerate(segment.pages):
                    used = min(PAGE_TOKENS, segment.length - index * PAGE_TOKENS)
                    self._filled[page] = max(used, self._filled.get(page, 0))
            if state.slot != IDENTITY_SLOT:
                slots[state.slot] = None
        self._slots = list(slots)
        pages = {page: number for number, page in enumerate(self._filled, 1)}
        numbers = {slot: number for number, slot in enumerate(slots, 1)}
        ids = {record.id for record in records}
        self._blocks = [
            StoredBlock(
                record.id,
                record.name,
                tuple(record.tokens_of(state)),
                renumbered(state, pages, numbers, _kept_within(engine, state.kept, ids)),
            )
            for record, state in zip(records, states, strict=True)
        ]

    @torch.inference_mode()
    def copy(self) -> Stored:
        """Copy to the CPU. Runs on the worker thread."""
        cache, device = self._runner.cache, self._runner.device
        tensors: dict[str, Tensor] = {}
        if self._filled:
            pages = torch.tensor(list(self._filled), device=device)
            filled = torch.tensor(list(self._filled.values()))
            unread = torch.arange(PAGE_TOKENS) >= filled[:, None]  # [P, PAGE_TOKENS]
            for name, pool in pools(cache, of_pages=True):
                tensors[name] = _selected(pool, 1, pages)
                tensors[name].masked_fill_(unread[:, :, None], 0)  # nobody's, or not committed
        if self._slots:
            places = self._runner.places(self._slots)
            for name, pool in pools(cache, of_pages=False):
                tensors[name] = _selected(pool, 0, places)
        return Stored(self._blocks_on_cpu(), tensors)

    def _blocks_on_cpu(self) -> tuple[StoredBlock, ...]:
        """The blocks with copies of their kept logits; forks keep one copy together."""
        rows: dict[int, Tensor] = {}
        blocks = []
        for block in self._blocks:
            kept = block.state.kept
            if kept is not None:
                row = rows.get(id(kept.logits))
                if row is None:
                    row = rows[id(kept.logits)] = kept.logits.to("cpu", copy=True)
                block = replace(block, state=replace(block.state, kept=replace(kept, logits=row)))
            blocks.append(block)
        return tuple(blocks)


def _kept_within(engine: Engine, kept: KeptLogits | None, ids: set[int]) -> KeptLogits | None:
    """Kept logits that name only blocks of `ids`, if they still say something: blocks that were empty
    then and are now count for nothing, and without any other one nobody can go on from them."""
    if kept is None:
        return None
    records = engine.records
    empty = {i for i in kept.view if i in records and not records[i].state.num_tokens} - kept.filled
    view = tuple(i for i in kept.view if i in ids or i not in empty)
    return replace(kept, view=view) if ids.issuperset(view) else None


# ---- to blocks --------------------------------------------------------------------------------------


async def restore(engine: Engine, stored: Stored) -> list[CacheBlock]:
    """New blocks that hold what was stored, in its order. Names that live blocks have get ``·2`` added.

    All of them or none: raises ValueError if this engine cannot hold what was stored, and CacheFullError
    if its pools are too small, before anything has changed. What could fit waits for memory.
    """
    engine.check_usable()
    check(stored, engine.runner.cache, engine.config)
    memory, reader = engine.memory, engine.current_transaction()

    async def apply() -> list[CacheBlock]:
        pages = [memory.pages.take() for _ in range(stored.num_pages)]
        slots = [memory.slots.take() for _ in range(stored.num_slots)]
        try:
            await engine.server.stepper.run(lambda: _write(engine, stored, pages, slots))
            return _make_blocks(engine, stored, pages, slots, reader)
        finally:  # the blocks own now what is theirs
            memory.pages.disown(pages)
            for slot in slots:
                memory.slots.drop(slot)

    need = Need(stored.num_pages, stored.num_slots, copies=False)
    operation = make_operation(engine, "load", apply, need=lambda: need)
    blocks: list[CacheBlock] = await engine.result(operation)
    return blocks


@torch.inference_mode()
def _write(engine: Engine, stored: Stored, pages: Sequence[int], slots: Sequence[int]) -> None:
    """Copy what is stored to `pages` and `slots` of the pools. Runs on the worker thread."""
    runner = engine.runner
    page_places = torch.tensor(pages, device=runner.device)
    slot_places = runner.places(slots)
    for name, values in stored.tensors.items():
        axis, places = (1, page_places) if name in OF_PAGES else (0, slot_places)
        for layer, part in zip(getattr(runner.cache, name), values, strict=True):
            layer.index_copy_(axis, places, part.to(runner.device))


def _make_blocks(
    engine: Engine,
    stored: Stored,
    pages: Sequence[int],
    slots: Sequence[int],
    transaction: Transaction | None,
) -> list[CacheBlock]:
    """Blocks of the stored ones' content, each with its version."""
    blocks = [engine.make_block(block.name, transaction) for block in stored.blocks]
    ids = {old.id: new.id for old, new in zip(stored.blocks, blocks, strict=True)}
    page_numbers, slot_numbers = dict(enumerate(pages, 1)), dict(enumerate(slots, 1))
    logits: dict[int, Tensor] = {}
    for old, new in zip(stored.blocks, blocks, strict=True):
        kept, record = old.state.kept, new._record
        if kept is not None:
            row = logits.setdefault(id(kept.logits), kept.logits.to(engine.runner.device))
            view = tuple(ids[i] for i in kept.view)
            kept = KeptLogits(view, frozenset(ids[i] for i in kept.filled), row)
        state = renumbered(old.state, page_numbers, slot_numbers, kept)
        if state.version:
            engine.memory.own(state)
            record.tokens.extend(old.tokens)
            record.state = replace(record.state, version=state.version - 1)
            record.commit(state)
            engine.recorder.changed(record, "load", texts=engine.trace.token_texts.of(old.tokens))
    return blocks


# ---- numbers and tensors ----------------------------------------------------------------------------


def renumbered(
    state: BlockState, pages: Mapping[int, int], slots: Mapping[int, int], kept: KeptLogits | None
) -> BlockState:
    """`state` with other numbers of pages and slots, and with `kept`."""
    segments = tuple(
        Segment(tuple(pages[page] for page in segment.pages), segment.length, segment.offset)
        for segment in state.segments
    )
    slot = slots[state.slot] if state.slot != IDENTITY_SLOT else IDENTITY_SLOT
    return replace(state, segments=segments, slot=slot, kept=kept)


def _selected(pool: Tensor, axis: int, places: Tensor) -> Tensor:
    """`places` of an axis of each layer, on the CPU. Layer by layer: a GPU may have no room for all."""
    shape = (*pool.shape[: axis + 1], len(places), *pool.shape[axis + 2 :])
    copy = torch.empty(shape, dtype=pool.dtype)
    for target, layer in zip(copy, pool, strict=True):
        target.copy_(layer.index_select(axis, places))
    return copy
