"""A step's plan of attention for the fused kernels: which rows read which stretch of which pages.

Knows page lists, lengths and rows as integers, on the host. No keys and no model.

An *entry* is a row that reads a stretch of a segment: it makes one partial result. An *item* is a
stretch with at most `group` entries: a program loads its keys and values once for all of them.
Segments with the same pages are one, whoever reads them, so what many rows share is loaded for all
of them together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

TILE = 64
"""Tokens in the shortest stretch; stretches are whole numbers of it."""

WAVES = 4
"""Programs per multiprocessor that the stretches are cut for, about."""


class AttentionItems(NamedTuple):
    """I items, E entries, N rows, P pages. All int64."""

    items: Integers  # [I, 5]: where in `pages` its segment begins, first token, end, first entry,
    #                  number of entries; tokens are counted in the segment
    pages: Integers  # [P]
    entry_row: Integers  # [E]
    entry_shift: Integers  # [E] what is added to the row's position to turn its query
    entry_seen: Integers  # [E] the row sees this many tokens of the segment
    entry_block: Integers  # [E] index of the segment's block in the row's view
    row_start: Integers  # [N + 1] row n merges entries row_entry[row_start[n] : row_start[n + 1]]
    row_entry: Integers  # [E]


class _Readers(NamedTuple):
    """Pairs of a row and a segment that it reads, pairs of one distinct segment together."""

    distinct: Integers  # number of the distinct segment
    segment: Integers
    row: Integers
    seen: Integers


class _Groups(NamedTuple):
    """Runs of at most `group` readers of one distinct segment."""

    distinct: Integers
    first: Integers  # first reader
    size: Integers
    longest: Integers  # tokens that the reader sees that sees most


def plan_items(
    *,
    row_start: Integers,
    segment_start: Integers,
    segment_page_start: Integers,
    pages: Integers,
    segment_length: Integers,
    segment_shift: Integers,
    segment_block: Integers,
    page_tokens: int,
    kv_heads: int,
    group: int,
    processors: int,
    max_entries: int | None = None,
) -> AttentionItems:
    """Plan a step of R requests and S segments; the arrays are those of `tiles.plan_attention`.

    `group`: most entries of an item. `processors`: multiprocessors to keep busy. Stretches grow until
    there are no more than `max_entries` entries, or until they cannot grow.
    """
    used = -(-segment_length // page_tokens)
    distinct, first_page = _distinct(pages, segment_page_start, used)
    readers = _readers(row_start, segment_start, segment_length, distinct)
    groups = _groups(readers, group)
    tiles = -(-groups.longest // TILE)
    stretch = max(1, -(-int(tiles.sum()) * kv_heads // (WAVES * processors)))
    while max_entries is not None and stretch < tiles.max():
        if int((-(-tiles // stretch) * groups.size).sum()) <= max_entries:
            break
        stretch *= 2
    count = -(-tiles // stretch)  # of stretches, and so of items, of each group
    item = np.repeat(np.arange(len(count)), count)  # group of each item
    begin = runs(np.zeros_like(count), count) * stretch * TILE
    entries = groups.size[item]
    reader = runs(groups.first[item], entries)
    items = np.column_stack(
        (
            first_page[groups.distinct[item]],
            begin,
            np.minimum(begin + stretch * TILE, groups.longest[item]),
            np.cumsum(entries) - entries,
            entries,
        )
    )
    row, segment = readers.row[reader], readers.segment[reader]
    merged = np.bincount(row, minlength=int(row_start[-1]))
    return AttentionItems(
        items=items,
        pages=pages,
        entry_row=row,
        entry_shift=segment_shift[segment],
        entry_seen=readers.seen[reader],
        entry_block=segment_block[segment],
        row_start=np.concatenate(([0], np.cumsum(merged))),
        row_entry=np.argsort(row, kind="stable"),
    )


def _distinct(pages: Integers, page_start: Integers, used: Integers) -> tuple[Integers, Integers]:
    """The number of each segment's distinct segment, and where each of those begins in `pages`."""
    numbers: dict[bytes, int] = {}
    first: list[int] = []
    distinct = []
    for start, count in zip(page_start.tolist(), used.tolist(), strict=False):
        key = pages[start : start + count].tobytes()
        number = numbers.setdefault(key, len(first))
        if number == len(first):
            first.append(start)
        distinct.append(number)
    return np.array(distinct), np.array(first)


def _readers(row_start: Integers, segment_start: Integers, length: Integers, distinct: Integers) -> _Readers:
    rows = np.diff(row_start)
    request = np.repeat(np.arange(len(rows)), np.diff(segment_start))
    own = np.zeros(len(length), dtype=bool)
    own[segment_start[1:] - 1] = True
    count = rows[request]
    segment = np.repeat(np.arange(len(length)), count)
    index = runs(np.zeros_like(count), count)  # of the row within its request
    seen = np.where(own, length - count + 1, length)[segment] + np.where(own[segment], index, 0)
    readers = _Readers(distinct[segment], segment, row_start[request[segment]] + index, seen)
    order = np.argsort(readers.distinct, kind="stable")
    return _Readers(*(column[order] for column in readers))


def _groups(readers: _Readers, size: int) -> _Groups:
    count = np.bincount(readers.distinct)
    parts = -(-count // size)
    distinct = np.repeat(np.arange(len(count)), parts)
    offset = runs(np.zeros_like(parts), parts) * size
    first = (np.cumsum(count) - count)[distinct] + offset
    taken = np.minimum(count[distinct] - offset, size)
    return _Groups(distinct, first, taken, np.maximum.reduceat(readers.seen, first))


def runs(first: Integers, count: Integers) -> Integers:
    """first[0], first[0] + 1, ... (count[0] numbers), then the same for first[1], and so on."""
    start = np.cumsum(count) - count
    numbers: Integers = np.arange(count.sum()) + np.repeat(first - start, count)
    return numbers
