"""Checks of what a caller passes: views, blocks and where to write. Raises before anything changes.

Knows blocks and transactions; the order of rules is that of the messages: what it is, whose it is, how
it is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .blocks import CacheBlock
from .continuing import view_span

if TYPE_CHECKING:
    from .engine import Engine

NO_KEPT_LOGITS = (
    "give at least one token: there are no logits to go on from. They are kept with the block that holds "
    "the view's last token, if that was encoded under the same blocks; not after merge, append or clear"
)


def freed_error(name: str) -> ValueError:
    return ValueError(f"block {name!r} was freed; make another with create_block()")


def check_block(engine: Engine, block: Any, what: str = "a block") -> CacheBlock:
    """`block` if it is a live block of `engine`. Raises TypeError or ValueError that names the fix."""
    if isinstance(block, CacheBlock):
        owner = block._engine()
        if owner is not engine:
            if owner is None or owner.closed:
                raise ValueError(
                    f"block {block.name!r} belongs to an engine that was closed: run the cell that makes "
                    f"the engine{owner.made_in if owner else ''} again, then the one that makes its blocks"
                )
            raise ValueError(
                f"block {block.name!r} belongs to another engine: blocks hold one model's memory; make it "
                "again with this engine's create_block()"
            )
        if block._record.freed:
            raise freed_error(block.name)
        return block
    if inspect.isawaitable(block):
        if inspect.iscoroutine(block):
            block.close()  # it will never run: no second warning about that
        raise TypeError(f"{what} is expected, not a coroutine: did you forget await?")
    raise TypeError(f"{what} is expected, not {type(block).__name__}: {block!r:.60}")


def check_view(
    engine: Engine, cache_view: Any, write_to: Any, *, writes: bool = True
) -> tuple[CacheBlock, ...]:
    """The blocks of a view, the written one last. Empty if a new block is to be written alone.

    `cache_view`: None, a block (a view of one), or a sequence of distinct blocks.
    """
    if cache_view is None:
        blocks: list[CacheBlock] = []
    elif isinstance(cache_view, CacheBlock) or inspect.isawaitable(cache_view):
        blocks = [check_block(engine, cache_view)]
    elif isinstance(cache_view, Iterable) and not isinstance(cache_view, str | bytes):
        blocks = [check_block(engine, b, "a view holds blocks: a block") for b in cache_view]
        if not blocks and write_to is None:
            raise ValueError("cache_view is empty: name the blocks to read, or leave it out for a new block")
    else:
        raise TypeError(f"cache_view takes a list of blocks, not {type(cache_view).__name__}")
    names = [block.name for block in blocks]
    for block in blocks:
        if blocks.count(block) > 1:
            raise ValueError(
                f"block {block.name!r} occurs twice in the view {names}: a view reads each block once; use "
                "fork() for a copy"
            )
    if write_to is not None:
        target = check_block(engine, write_to, "write_to: a block")
        if target in blocks and blocks[-1] is not target:
            raise ValueError(
                f"write_to={target.name!r} is not the last block of the view {names}: new tokens go behind "
                "everything that they read; move it to the end"
            )
        if target not in blocks:
            blocks.append(target)
    if blocks and writes:
        check_write(engine, blocks[-1])
    return tuple(blocks)


def check_write(engine: Engine, block: CacheBlock) -> None:
    """Raise ValueError if the running task is inside a transaction that may not write `block`."""
    transaction = engine.current_transaction()
    if transaction is not None:
        transaction.check_write(block)


def check_length(engine: Engine, view: Sequence[CacheBlock], num_tokens: int) -> None:
    """Raise ValueError if a view and `num_tokens` more are longer than the model's positions."""
    length = view_span(view, engine.current_transaction()) + num_tokens
    if length > engine.max_positions:
        names = [block.name for block in view]
        raise ValueError(
            f"the view {names} would take {length} positions, and the model has {engine.max_positions}: "
            "leave blocks out, or clear or shorten some"
        )
