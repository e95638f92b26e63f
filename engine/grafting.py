"""A block with the keys and values of one block and the Gated DeltaNet transitions of another.

For measuring what each of the two memories contributes where two encodings of the same tokens differ. Knows
states and operations. No stream or forward makes such a block.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from .blocks import CacheBlock
from .operations import make_operation
from .transactions import visible_state

if TYPE_CHECKING:
    from .engine import Engine


async def graft(
    engine: Engine, attention: CacheBlock, states: CacheBlock, name: str | None = None
) -> CacheBlock:
    """A new block: `attention`'s keys and values, `states`' transitions and convolution rows. Copies nothing.

    Raises ValueError unless both hold the same tokens, and for a model that has only one of the two memories.
    """
    if not engine.config.is_hybrid:
        raise ValueError(
            f"a {engine.config.family} model has no Gated DeltaNet layers: there is nothing to put together"
        )
    reader = engine.current_transaction()

    async def apply() -> CacheBlock:
        sources = [(block, visible_state(block._record, reader)) for block in (attention, states)]
        ids, others = (block._record.tokens_of(state) for block, state in sources)
        if ids != others:
            raise ValueError(
                f"blocks {attention.name!r} and {states.name!r} hold different tokens: encode the same ones"
            )
        pages, slot = (state for _, state in sources)
        mixed = replace(pages, slot=slot.slot, kept=None, version=0)
        engine.memory.own(mixed)
        block = engine.make_block(name or attention.name, reader)
        block._record.tokens.extend(ids)
        block._record.commit(mixed)
        engine.recorder.changed(block._record, "fork", sources[:1])
        return block

    made: CacheBlock = await engine.result(
        make_operation(engine, "graft", apply, reads=(attention, states))
    )
    return made
