"""The ledger: tokens that were encoded, and tokens that passing text instead would have encoded.

Knows rows of steps, as the trace records them.

What is counted as passing text: every writer has a cache of its own, as if it talked to a server of its
own. A writer is whoever writes one block; probes of one view are one writer that writes nothing. When
a row runs, its writer's cache must hold the text of the row's whole view. If the blocks before the written
one are the versions that its last row read, and the written block holds just what this writer has put
there, the cache is still right, and only the row's tokens are encoded. In any other case (somebody else
has added a token to a block that it reads; it writes for the first time; its block was merged, appended
to, cleared or rolled back) what precedes has changed, and the whole view is encoded again, with the row's
tokens behind it.

That is generous to passing text in that nobody loses a cache for want of memory, and strict in that no
prefix of a changed text is kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .trace import RowRecord

WRITERS_KEPT = 4096
"""Caches that are remembered; older ones count as lost."""


@dataclass(slots=True)
class _Cache:
    """What one writer's cache holds: versions of the blocks before, and the end of its own."""

    ids: tuple[int, ...]  # of the blocks of the view
    before: tuple[tuple[str, int], ...]  # their names and versions, without the written one
    version: int  # of the written block
    length: int  # tokens of the whole text


class Ledger:
    """Running totals over rows, in the order in which they ran."""

    def __init__(self) -> None:
        self.encoded = 0
        self.resent = 0
        self._caches: dict[tuple[int, ...], _Cache] = {}

    def count(self, rows: Iterable[RowRecord]) -> None:
        """Add the rows of a step that went well."""
        for row in rows:
            self.encoded += row.num_tokens
            self.resent += self._cost(row)

    def _cost(self, row: RowRecord) -> int:
        ids, view = row.view_ids, row.view
        is_probe = row.block is None
        before, own = (view, 0) if is_probe else (view[:-1], view[-1][1])
        writer = (-1, *ids) if is_probe else ids[-1:]
        length = row.context + row.num_tokens
        cache = self._caches.get(writer)
        if cache is None:
            cache = self._remember(writer)
        right = cache.before == before and cache.ids == ids
        if not is_probe:
            right = right and cache.version == own and cache.length == row.context
        cache.ids, cache.before, cache.length = ids, before, length
        cache.version = row.commit[0] if row.commit else own
        return row.num_tokens if right else length

    def _remember(self, writer: tuple[int, ...]) -> _Cache:
        """An empty cache for a new writer."""
        if len(self._caches) == WRITERS_KEPT:
            del self._caches[next(iter(self._caches))]
        cache = self._caches[writer] = _Cache((), (), -1, -1)
        return cache
