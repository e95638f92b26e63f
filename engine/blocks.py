"""Cache blocks: what one holds at a moment (`BlockState`), its record in the engine, its public handle.

Knows pages and slots as numbers, and the rules of growth and copy-on-write. Knows no tensors of keys,
no scheduler; who may write when is decided in `scheduler`.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from html import escape
from typing import TYPE_CHECKING

from torch import Tensor

from .batch import CONV_ROWS, IDENTITY_SLOT, PAGE_TOKENS
from .errors import CacheFullError
from .pools import PagePool, Pool

if TYPE_CHECKING:
    from .engine import Engine
    from .requests import Request
    from .streams import TokenStream
    from .transactions import Transaction

MAX_SEGMENTS = 8
"""A merge or append that would leave more segments than this compacts them into one."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of pages whose keys are rotated at positions counted from the segment's first token."""

    pages: tuple[int, ...]
    length: int  # tokens; the last page may be partly filled
    offset: int  # position, in the block, of its first token

    @property
    def room(self) -> int:
        """Tokens that still fit into the last page."""
        return len(self.pages) * PAGE_TOKENS - self.length


@dataclass(frozen=True, slots=True)
class KeptLogits:
    """The logits after a block's last token, and the blocks before it (ids, in order) it was encoded
    under."""

    view: tuple[int, ...]
    filled: frozenset[int]  # those of them that held tokens then
    logits: Tensor  # [vocab] float32


@dataclass(frozen=True, slots=True)
class BlockState:
    """All that readers of a block see. Immutable: a write makes a new one, a commit swaps it in."""

    segments: tuple[Segment, ...] = ()
    num_tokens: int = 0
    span: int = 0
    slot: int = IDENTITY_SLOT
    kept: KeptLogits | None = None
    version: int = 0

    @property
    def pages(self) -> tuple[int, ...]:
        """Page numbers of all segments, in order (a page may occur twice, after appending itself)."""
        return tuple(page for segment in self.segments for page in segment.pages)

    @property
    def num_rows(self) -> int:
        """How many of its last raw convolution rows it has."""
        return min(CONV_ROWS, self.num_tokens)


EMPTY = BlockState()


class Memory:
    """The two pools, and what whole states do to them."""

    def __init__(self, num_pages: int, num_slots: int, is_hybrid: bool) -> None:
        self.pages = PagePool(num_pages)
        self.slots = Pool(num_slots if is_hybrid else 0, "slot")
        self.is_hybrid = is_hybrid

    def hold(self, state: BlockState) -> None:
        """Keep what `state` reads alive without owning it."""
        for page in state.pages:
            self.pages.hold(page)
        self.slots.hold(state.slot)

    def drop(self, state: BlockState) -> None:
        """Undo `hold`."""
        for page in state.pages:
            self.pages.drop(page)
        self.slots.drop(state.slot)

    def own(self, state: BlockState) -> None:
        """A block takes `state` as its own."""
        self.pages.own(state.pages)
        self.slots.hold(state.slot)

    def disown(self, state: BlockState) -> None:
        """A block lets go of `state`."""
        self.pages.disown(state.pages)
        self.slots.drop(state.slot)

    def needs(self, base: BlockState, num_tokens: int) -> Need:
        """What writing `num_tokens` behind `base` takes."""
        slots = 1 if self.is_hybrid else 0
        if not base.segments:
            return Need(-(-num_tokens // PAGE_TOKENS), slots, copies=False)
        last = base.segments[-1]
        copies = bool(last.room) and self.pages.owners[last.pages[-1]] > 1
        pages = -(-max(0, num_tokens - last.room) // PAGE_TOKENS)
        return Need(pages + copies, slots, copies)

    def fits(self, need: Need) -> bool:
        return need.pages <= self.pages.num_free and need.slots <= self.slots.num_free

    def never_fits(
        self, view: Iterable[BlockState], need: Need, records: Iterable[BlockRecord]
    ) -> CacheFullError | None:
        """The error if `need` would not fit even with nothing but the blocks of the view in memory."""
        view = tuple(view)
        pages = len({page for state in view for page in state.pages})
        slots = len({state.slot for state in view if state.slot})
        if pages + need.pages <= self.pages.size and slots + need.slots <= self.slots.size:
            return None
        what = f"{need.pages} pages" + (f" and {need.slots} slot(s)" if need.slots else "")
        return self.full(f"{what} beside the {pages} pages of the view", records)

    def full(self, needed: str, records: Iterable[BlockRecord]) -> CacheFullError:
        """The error that says what was needed, what is free and which blocks hold most."""
        largest = sorted(records, key=lambda r: len(r.state.pages), reverse=True)[:3]
        holders = [f"{r.name!r} ({len(r.state.pages)} pages)" for r in largest if r.state.pages]
        slots = f" and {self.slots.num_free} of {self.slots.size} slots" if self.is_hybrid else ""
        return CacheFullError(
            f"the cache is full: needed {needed}; free {self.pages.num_free} of {self.pages.size} pages "
            f"of {PAGE_TOKENS} tokens{slots}; most is held by {', '.join(holders) or 'no block'}. Free or "
            f"clear blocks, or make the engine with more cache_tokens"
            + (" or max_blocks" if self.is_hybrid else "")
        )

    def draft(self, base: BlockState, num_tokens: int) -> Draft:
        """Take the memory for a write of `num_tokens` behind `base`; the caller has checked `fits`."""
        need = self.needs(base, num_tokens)
        taken = [self.pages.take() for _ in range(need.pages)]
        slot = self.slots.take() if need.slots else IDENTITY_SLOT
        if not base.segments:
            first = Segment(tuple(taken), num_tokens, base.span)
            return Draft(base, (first,), num_tokens, slot, tuple(taken), None, self)
        last = base.segments[-1]
        kept, copy = last.pages, None
        if need.copies:
            copy = (last.pages[-1], taken[0])
            kept = last.pages[:-1]
        grown = replace(last, pages=kept + tuple(taken), length=last.length + num_tokens)
        segments = (*base.segments[:-1], grown)
        return Draft(base, segments, num_tokens, slot, tuple(taken), copy, self)


@dataclass(frozen=True, slots=True)
class Need:
    """Pages and slots that a write takes; `copies`: one page is for a copy of a shared, partly filled one."""

    pages: int
    slots: int
    copies: bool


@dataclass(slots=True)
class Draft:
    """Memory taken for a write that is not committed yet. Ends by `commit` or `abandon`, once."""

    base: BlockState
    segments: tuple[Segment, ...]
    num_tokens: int
    slot: int
    taken: tuple[int, ...]
    copy: tuple[int, int] | None  # (from, to) pages, done by the first step that writes the draft
    memory: Memory

    def commit(self, kept: KeptLogits | None) -> BlockState:
        """The state after the write. The draft's pages and slot belong to the block from now on; what
        the block no longer has of its base is let go."""
        memory = self.memory
        if self.copy:
            memory.pages.disown([self.copy[0]])
        if memory.is_hybrid:
            memory.slots.drop(self.base.slot)
        base = self.base
        return BlockState(
            self.segments,
            base.num_tokens + self.num_tokens,
            base.span + self.num_tokens,
            self.slot,
            kept,
        )

    def abandon(self) -> None:
        """Give the memory back; the block stays as it was."""
        self.memory.pages.disown(self.taken)
        self.memory.slots.drop(self.slot)


@dataclass(slots=True, eq=False)
class PendingToken:
    """A token that was yielded but is not encoded yet: a row of the next step."""

    token_id: int
    stream: TokenStream
    view: tuple[CacheBlock, ...]
    draft: Draft
    order: int  # when it was yielded; requests asked for later wait until it is encoded
    frozen: dict[int, BlockState] = field(default_factory=dict)  # blocks freed since, as they were
    failure: Exception | None = None  # why its step failed; it is tried again, alone, when …
    failed_at: int = 0  # … a request comes that was asked for later than this


@dataclass(slots=True, eq=False)
class BlockRecord:
    """The engine's side of a block. Everything here changes on the engine's loop only."""

    id: int
    name: str
    state: BlockState = EMPTY
    tokens: list[int] = field(default_factory=list)  # of the state, and the pending one
    pending: PendingToken | None = None
    stream: TokenStream | None = (
        None  # the stream that writes it between its first token and its end
    )
    writes: deque[Request] = field(default_factory=deque)  # asked for and not done, in order
    owner: Transaction | None = None
    freed: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def span(self) -> int:
        return self.state.span + (1 if self.pending else 0)

    def tokens_of(self, state: BlockState) -> list[int]:
        """Ids of the tokens of a state of this block: its current one, or one that is held by an open
        transaction."""
        if self.owner is not None and state.version != self.state.version:
            return self.owner.saved_tokens(self, state)
        return self.tokens[: state.num_tokens]

    def commit(self, state: BlockState) -> None:
        """Swap in a new state: the one place where a block's version grows."""
        self.state = replace(state, version=self.state.version + 1)


class CacheBlock:
    """An append-only run of tokens and what the model's layers remember of them.

    Made by `create_block`, `forward`, `merge_blocks` or `fork`; freed by `free_block`, or when the last
    Python reference is gone. Using a freed block raises ``ValueError``.
    """

    __slots__ = ("__weakref__", "_codec", "_engine", "_record")

    def __init__(self, engine: Engine, record: BlockRecord) -> None:
        self._engine = weakref.ref(engine)
        self._codec = engine.codec
        self._record = record

    @property
    def name(self) -> str:
        """The name it is shown by; unique among the engine's live blocks."""
        return self._record.name

    @property
    def id(self) -> int:
        """A number that no other block of this engine ever has."""
        return self._record.id

    @property
    def num_tokens(self) -> int:
        """Tokens in it, counting one that was yielded and is encoded by the next step."""
        return self._checked().num_tokens

    @property
    def span(self) -> int:
        """How many positions it takes in a view."""
        return self._checked().span

    @property
    def version(self) -> int:
        """Grows by one with each committed change; never goes back."""
        return self._checked().state.version

    @property
    def token_ids(self) -> list[int]:
        """A copy of its tokens' ids."""
        return list(self._checked().tokens)

    @property
    def text(self) -> str:
        """Its tokens decoded, marker tokens shown ('' without a tokenizer). Bytes that form no character
        yet are held back while a stream may still add to them."""
        record = self._checked()
        return self._codec.decode(record.tokens, final=record.stream is None)

    def _checked(self) -> BlockRecord:
        if self._record.freed:
            raise ValueError(f"block {self.name!r} was freed; make another with create_block()")
        return self._record

    def __repr__(self) -> str:
        record = self._record
        if record.freed:
            return f"<CacheBlock {record.name!r} freed>"
        return f"<CacheBlock {record.name!r} {record.num_tokens} tokens, version {record.state.version}>"

    def _repr_html_(self) -> str:
        engine = self._engine()
        show = engine.show_html if engine else None
        return show(self) if show else f"<code>{escape(repr(self))}</code>"
