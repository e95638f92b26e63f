"""What is asked of the engine and not done yet: encodings and block operations.

Knows blocks and futures. Knows no tensors but the logits that it hands back; when a request runs is
decided in `scheduler`, what it does in `runner` and `operations`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from .blocks import BlockRecord, BlockState, CacheBlock, Draft, Need

if TYPE_CHECKING:
    from .streams import TokenStream
    from .transactions import Transaction

LogitsMode = Literal["last", "all", "none"]


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """Common to all: its place in the order, who asks, and the future that its asker awaits."""

    name: str
    order: int
    transaction: Transaction | None
    future: asyncio.Future[Any]
    writes: tuple[BlockRecord, ...]  # the blocks that it stands in line for
    waits_for_memory: bool = False

    @property
    def cancelled(self) -> bool:
        return self.future.done()

    @property
    def opens_stream(self) -> TokenStream | None:
        return None

    @property
    def reads(self) -> tuple[CacheBlock, ...]:
        """Blocks that it reads and does not stand in line for."""
        return ()

    def changes(self, record: BlockRecord) -> bool:
        """Does it write this block, of those that it stands in line for?"""
        return True


@dataclass(slots=True, eq=False, kw_only=True)
class Operation(Request):
    """A merge, append, fork, clear, free or the start of a transaction: done whole, between two steps."""

    kind: str
    blocks: tuple[CacheBlock, ...]  # all that it reads or writes, in line for or not
    apply: Callable[[], Awaitable[Any]]  # does it, and gives the asker's result
    need: Callable[[], Need] | None = None  # the memory that `apply` takes
    only_read: frozenset[int] = frozenset()  # ids of blocks that it stands in line for just to read

    def changes(self, record: BlockRecord) -> bool:
        return record.id not in self.only_read


@dataclass(slots=True, eq=False, kw_only=True)
class Encoding(Request):
    """Tokens to encode under a view: a forward, the input of a stream, a replacement or a probe.

    It reads one snapshot of the view, taken with its first chunk, and commits once, with its last.
    """

    kind: Literal["prefill", "probe"]
    tokens: list[int]
    view: tuple[CacheBlock, ...]  # blocks before the written one
    target: CacheBlock | None  # None: what is encoded is thrown away
    replaces: bool = False
    logits_mode: LogitsMode = "last"
    last_rows: int = 1  # for "last": how many of the last rows (a probe's choices need several)
    stream: TokenStream | None = None
    siblings: tuple[Encoding, ...] = ()  # probes that must read the same snapshot start together

    snapshot: tuple[BlockState, ...] | None = None
    draft: Draft | None = None
    num_done: int = 0
    served: int = 0  # number of the last step that had a chunk of it
    number: int = 0  # in the recording, from its first chunk on; a stream has its own
    logits: list[Tensor] = field(default_factory=list)

    @property
    def num_left(self) -> int:
        return len(self.tokens) - self.num_done

    @property
    def started(self) -> bool:
        return self.snapshot is not None

    @property
    def opens_stream(self) -> TokenStream | None:
        return self.stream

    @property
    def reads(self) -> tuple[CacheBlock, ...]:
        return self.view

    @property
    def wanted_from(self) -> int:
        """Index of the first row whose logits are wanted; the last is always, to be kept with the block."""
        return 0 if self.logits_mode == "all" else len(self.tokens) - self.last_rows
