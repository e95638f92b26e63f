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

    before: tuple[tuple[int, int], ...]  # (block, version)
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
        read = tuple(zip(row.view_ids, (version for _, version in row.view), strict=True))
        is_probe = row.block is None
        before, own = (read, 0) if is_probe else (read[:-1], read[-1][1])
        writer = (-1, *row.view_ids) if is_probe else row.view_ids[-1:]
        cache = self._caches.pop(writer, None)
        length = row.context + row.num_tokens
        right = cache is not None and cache.before == before
        if right and not is_probe:
            assert cache is not None
            right = (cache.version, cache.length) == (own, row.context)
        version = row.commit[0] if row.commit else own
        self._caches[writer] = _Cache(before, version, length)
        if len(self._caches) > WRITERS_KEPT:
            del self._caches[next(iter(self._caches))]
        return row.num_tokens if right else length
