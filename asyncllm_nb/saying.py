"""Text from outside into a block: of a person, a file or a tool. Knows the engine.

It goes behind what the block holds, at a token boundary of whoever writes it, and is encoded under the
blocks that stand before it where a stream writes it; if none does, where one reads it. Marker strings
in it are plain text.
"""

from __future__ import annotations

from .engine.blocks import CacheBlock
from .engine.engine import Engine
from .engine.requests import Encoding
from .engine.views import check_block, check_length, check_write


def saying(engine: Engine, block: CacheBlock, text: str) -> Encoding:
    """The request that says `text`; ``await engine.result(...)`` does it.

    Raises TypeError, ValueError and CacheFullError for what can never be done.
    """
    if not isinstance(text, str):
        raise TypeError(f"what is said is text, not {type(text).__name__}")
    engine.check_usable()
    check_block(engine, block)
    check_write(engine, block)
    ids = engine.codec.encode(text, control=False)
    if not ids:
        raise ValueError("there is no text to say")
    view = (*_blocks_before(engine, block), block)
    check_length(engine, view, len(ids))
    encoding = Encoding(
        name="say",
        order=engine.next_order(),
        transaction=engine.current_transaction(),
        future=engine.loop.create_future(),
        writes=(block._record,),
        kind="prefill",
        tokens=ids,
        view=view[:-1],
        target=block,
    )
    engine.check_ever_fits(encoding)
    return encoding


def _blocks_before(engine: Engine, block: CacheBlock) -> tuple[CacheBlock, ...]:
    """The blocks before it, those alive, in the view of the latest stream that writes it, or else reads it;
    none if it stands in no stream's view."""
    views = [stream.view for stream in engine.recent_streams() if block in stream.view]
    written = [view for view in views if view[-1] is block]
    if not views:
        return ()
    view = (written or views)[-1]
    return tuple(b for b in view[: view.index(block)] if not b._record.freed)
