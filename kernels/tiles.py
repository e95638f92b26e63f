"""A step's plan of attention: which rows read which tiles of tokens, in batches of one shape.

Knows page lists, lengths and rows as integers; no keys and no model. Made on the host, once per
step, and used by every layer.

A *segment* is a run of pages that all rows of one request read. A *tile* is a piece of a segment,
at most WIDE tokens. Tiles with the same pages are one tile, whoever reads them. An *item* is a tile
with at most GROUP rows that read it; items of one shape form a *bucket*, which is a few batched
matrix products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Integers = npt.NDArray[np.int64]

NARROW, WIDE = 64, 256
"""Tokens in a tile for requests of few and of many rows: a short tile wastes less on short blocks,
a long one merges fewer partial results."""

MANY_ROWS = 16
"""Requests with at least this many rows read wide tiles."""

HIDDEN = -1e30
"""Next to this a score is nothing. Finite: padding rows see nothing and must not be NaN."""

GROUP = 256
"""Rows that read a tile together, at most."""


@dataclass(frozen=True)
class Bucket:
    """I items of one shape: G queries look at W tokens each."""

    queries: Tensor  # [I * G] index of a query (a row turned for a segment); padding is 0
    tokens: Tensor  # [H_kv * I * W] where the tiles' tokens lie, for one head after another, in a
    #                 pool [H_kv * pages * page_tokens]; a token of page 0 behind the end of a tile
    hidden: Tensor  # [I, G, 1, W] float32, to add to scores: HIDDEN at what a query must not see, else 0


@dataclass(frozen=True)
class AttentionPlan:
    """N rows; Q queries, one for each row and segment that it reads; P partial results to merge."""

    num_rows: int
    num_blocks: int  # blocks of the longest view
    query_rows: Tensor  # [Q] which row
    query_positions: Tensor  # [3, Q] by which positions it is turned
    buckets: tuple[Bucket, ...]
    partial_rows: Tensor  # [P] the row of each partial result, bucket after bucket; padding is N
    partial_blocks: Tensor  # [P] the index of its block in the row's view


def plan_attention(
    *,
    positions: Tensor,
    row_start: Tensor,
    segment_start: Tensor,
    segment_page_start: Tensor,
    pages: Tensor,
    segment_length: Tensor,
    segment_shift: Tensor,
    segment_block: Tensor,
    pool: tuple[int, int, int],
) -> AttentionPlan:
    """Plan a step of R requests and S segments, described by flat int64 tensors on any device.

    Request r has rows row_start[r] : row_start[r + 1] of N and reads segments segment_start[r] :
    segment_start[r + 1]. Segment s has segment_length[s] tokens, in pages[segment_page_start[s] :
    segment_page_start[s + 1]]; it belongs to block segment_block[s] of the view, and queries are
    turned for it by their row's `positions` [3, N] plus segment_shift[s]. The last segment of a
    request ends with its own rows and is read causally. `pool` is the shape of the pools of keys
    and values: H_kv, pages, page_tokens.
    """
    segments = _describe(*map(_host, (row_start, segment_start, segment_length, segment_block)))
    tiles = _cut(segments, _host(segment_page_start), _host(pages), page_tokens=pool[-1])
    partials = _pair(segments, tiles, _groups(tiles, positions.shape[1]))
    layouts = [_Layout(tiles, partials, shape, pool) for shape in np.unique(partials.shape)]
    device, num_rows = positions.device, positions.shape[1]

    def joined(values: Integers, padding: int) -> Tensor:
        return _to(np.concatenate([layout.padded(values, padding) for layout in layouts]), device)

    query_rows = _to(_runs(segments.first_row, segments.rows), device)
    shift = _to(np.repeat(_host(segment_shift), segments.rows), device)
    return AttentionPlan(
        num_rows=num_rows,
        num_blocks=int(segments.block.max()) + 1,
        query_rows=query_rows,
        query_positions=positions.index_select(1, query_rows) + shift,
        buckets=tuple(layout.bucket(device) for layout in layouts),
        partial_rows=joined(partials.row, num_rows),
        partial_blocks=joined(partials.block, 0),
    )


class _Segments(NamedTuple):
    """What the host knows of S segments; each an array [S]."""

    length: Integers  # tokens to read
    block: Integers  # index of its block in the view
    rows: Integers  # rows that read it
    first_row: Integers  # ... starting at this one
    first_query: Integers  # ... as queries starting at this one
    seen_by_first: Integers  # row i sees min(length, seen_by_first + i) tokens


class _Tiles(NamedTuple):
    """T pieces of segments; each an array [T]."""

    segment: Integers
    start: Integers  # first token, counted in the segment
    width: Integers  # NARROW or WIDE
    pages: Integers  # [T, WIDE / page_tokens] padded with 0


class _Partials(NamedTuple):
    """P pairs of a tile and a query that reads it, item after item; each an array [P]."""

    tile: Integers
    query: Integers
    row: Integers
    block: Integers
    seen: Integers  # tokens of the tile that the query sees
    item: Integers  # pairs of one item share pages
    place: Integers  # 0, 1, ... within the item
    shape: Integers  # of the item: width * 2 * GROUP + group


def _describe(row_start: Integers, segment_start: Integers, length: Integers, block: Integers) -> _Segments:
    request = np.repeat(np.arange(len(segment_start) - 1), np.diff(segment_start))
    rows = np.diff(row_start)[request]
    own = np.zeros(len(length), dtype=bool)
    own[segment_start[1:] - 1] = True
    return _Segments(
        length=length,
        block=block,
        rows=rows,
        first_row=row_start[request],
        first_query=np.cumsum(rows) - rows,
        seen_by_first=np.where(own, length - rows + 1, length),
    )


def _cut(segments: _Segments, page_start: Integers, pages: Integers, page_tokens: int) -> _Tiles:
    """Cut every segment into tiles; a wide request's last tile is narrow where that is enough."""
    step = np.where(segments.rows >= MANY_ROWS, WIDE, NARROW)
    count = -(-segments.length // step)
    segment = np.repeat(np.arange(len(count)), count)
    start = _runs(np.zeros_like(count), count) * step[segment]
    tokens = np.minimum(segments.length[segment] - start, step[segment])
    width = np.where(tokens <= NARROW, NARROW, WIDE)
    page = np.arange(WIDE // page_tokens)
    first = page_start[segment] + start // page_tokens
    used = page * page_tokens < tokens[:, None]
    tile_pages = np.where(used, pages[np.where(used, first[:, None] + page, 0)], 0)
    return _Tiles(segment, start, width, tile_pages)


def _groups(tiles: _Tiles, num_rows: int) -> Integers:
    """A number for each tile, the same for tiles of one width and the same pages. [T]

    A single row keeps its tiles apart, even where it reads the same pages twice (a block and its
    fork): then each item has one query, and nothing has to be merged.
    """
    if num_rows == 1:
        return np.arange(len(tiles.start))
    keys = np.column_stack([tiles.width, tiles.pages])
    return np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)


def _pair(segments: _Segments, tiles: _Tiles, groups: Integers) -> _Partials:
    """Each tile with the rows that see any of its tokens; `groups` [T] are cut into items."""
    first = np.maximum(tiles.start - segments.seen_by_first[tiles.segment] + 1, 0)
    count = segments.rows[tiles.segment] - first
    tile = np.repeat(np.arange(len(count)), count)
    index = _runs(first, count)  # of the row within its request
    order = np.argsort(groups[tile], kind="stable")
    tile, index = tile[order], index[order]
    segment = tiles.segment[tile]
    seen = np.minimum(segments.seen_by_first[segment] + index, segments.length[segment])
    readers = np.bincount(groups[tile])
    place = _runs(np.zeros_like(readers), readers)
    item = np.cumsum(place % GROUP == 0) - 1
    group = 1 << np.ceil(np.log2(np.bincount(item))).astype(np.int64)
    return _Partials(
        tile=tile,
        query=segments.first_query[segment] + index,
        row=segments.first_row[segment] + index,
        block=segments.block[segment],
        seen=np.minimum(seen - tiles.start[tile], tiles.width[tile]),
        item=item,
        place=place % GROUP,
        shape=tiles.width[tile] * 2 * GROUP + group[item],
    )


class _Layout:
    """The items of one shape, laid out as matrices [items, group] with padding."""

    def __init__(self, tiles: _Tiles, partials: _Partials, shape: int, pool: tuple[int, int, int]) -> None:
        width, group = divmod(int(shape), 2 * GROUP)
        heads, num_pages, page_tokens = pool
        self._chosen = np.flatnonzero(partials.shape == shape)
        items, item = np.unique(partials.item[self._chosen], return_inverse=True)
        self._size = len(items) * group
        self._place = item * group + partials.place[self._chosen]
        tile = np.zeros(len(items), dtype=np.int64)
        tile[item] = partials.tile[self._chosen]
        seen = self.padded(partials.seen, 0).reshape(len(items), group)
        token = np.arange(width)
        pages = tiles.pages[tile, : width // page_tokens]
        tokens = (pages[:, :, None] * page_tokens + np.arange(page_tokens)).reshape(-1, width)
        tokens = np.where(token < seen.max(1, keepdims=True), tokens, 0)
        head = np.arange(heads)[:, None, None] * num_pages * page_tokens
        self._queries = self.padded(partials.query, 0)
        self._tokens = (head + tokens).reshape(-1)
        hidden = np.where(token >= seen[:, :, None], np.float32(HIDDEN), np.float32(0))
        self._hidden = hidden[:, :, None]

    def padded(self, values: Integers, padding: int) -> Integers:
        """`values` [P] of these items' partials, `padding` where an item has fewer than others."""
        matrix = np.full(self._size, padding, dtype=np.int64)
        matrix[self._place] = values[self._chosen]
        return matrix

    def bucket(self, device: torch.device) -> Bucket:
        arrays = (self._queries, self._tokens, self._hidden)
        return Bucket(*(_to(array, device) for array in arrays))


def _runs(first: Integers, count: Integers) -> Integers:
    """first[0], first[0] + 1, ... (count[0] numbers), then the same for first[1], and so on."""
    start = np.cumsum(count) - count
    numbers: Integers = np.arange(count.sum()) + np.repeat(first - start, count)
    return numbers


def _host(tensor: Tensor) -> Integers:
    numbers: Integers = tensor.cpu().numpy()
    return numbers


def _to(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
