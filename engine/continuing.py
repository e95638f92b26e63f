"""What a stream without input goes on from, and how long a view is. Knows views and states.

The logits after a block's last token are kept with the block (a fork shares them). They are those of a
view's last token only if it was encoded under the same blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from .blocks import BlockState, CacheBlock, KeptLogits
from .transactions import Transaction, may_write, visible_state

if TYPE_CHECKING:
    from .engine import Engine


def view_span(view: Sequence[CacheBlock], reader: Transaction | None) -> int:
    """Positions that a view takes, tokens to be encoded included."""
    return sum(
        visible_state(block._record, reader).span + (1 if block._record.pending else 0) for block in view
    )


def keep(
    view: Sequence[CacheBlock], states: Sequence[BlockState], logits: Tensor
) -> KeptLogits:
    """Logits [vocab] to keep with a block that was encoded behind `view`, whose states were these."""
    filled = (b.id for b, state in zip(view, states, strict=True) if state.num_tokens)
    return KeptLogits(tuple(block.id for block in view), frozenset(filled), logits)


def kept_logits(engine: Engine, view: Sequence[CacheBlock], reader: Transaction | None) -> KeptLogits | None:
    """The logits after the last token of a view, if it was encoded under the same blocks (those
    that are empty now aside)."""
    states = {block.id: visible_state(block._record, reader) for block in view}
    filled = [block.id for block in view if states[block.id].num_tokens]
    if not filled:
        return None
    kept = states[filled[-1]].kept
    if kept is None:
        return None
    empty = {record.id for record in engine.records.values() if not record.state.num_tokens}
    if [i for i in kept.view if i not in empty] != filled[:-1] or not kept.filled.isdisjoint(empty):
        return None
    return kept


def may_go_on(engine: Engine, view: Sequence[CacheBlock], reader: Transaction | None) -> bool:
    """Could a stream without input go on after the last token of `view`? Known for sure only when
    no write is queued; then True, and it is looked at again when the stream's turn comes."""
    if any(block._record.writes for block in view):
        return True
    filled = [block._record for block in view if block._record.num_tokens]
    pending = filled[-1].pending if filled else None
    if pending is not None and may_write(filled[-1], reader):
        before = [block.id for block in pending.view[:-1] if block._record.num_tokens]
        return before == [record.id for record in filled[:-1]]
    return kept_logits(engine, view, reader) is not None
