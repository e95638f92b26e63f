"""`attention_over_view` and its plan against the literal reference, over random views."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from asyncllm_nb.kernels.attention import attention_over_view, attention_over_view_reference
from asyncllm_nb.kernels.tiles import AttentionPlan, plan_attention

HEADS, KV_HEADS, DIM, PAGE, PAGES = 6, 3, 20, 16, 400
SCALE = 0.3


@dataclass
class Segment:
    pages: list[int]
    length: int
    shift: int
    block: int


@dataclass
class View:
    """One request: its segments, the last of which ends with its own `rows`."""

    segments: list[Segment]
    rows: int


class Pools:
    """Keys and values that are NaN wherever no segment holds a token."""

    def __init__(self, seed: int) -> None:
        self.keys = torch.full((KV_HEADS, PAGES, PAGE, DIM), torch.nan)
        self.values = torch.full((KV_HEADS, PAGES, PAGE, DIM), torch.nan)
        self.keys[:, 0] = self.values[:, 0] = 0
        self.free = random.Random(seed).sample(range(1, PAGES), PAGES - 1)

    def filled(self, length: int) -> list[int]:
        """Pages that hold `length` tokens."""
        pages = [self.free.pop() for _ in range(-(-length // PAGE))]
        for index in range(length):
            page, offset = pages[index // PAGE], index % PAGE
            self.keys[:, page, offset] = torch.randn(KV_HEADS, DIM)
            self.values[:, page, offset] = torch.randn(KV_HEADS, DIM)
        return pages

    def read(self, pool: Tensor, pages: list[int], length: int) -> Tensor:
        return pool[:, pages].flatten(1, 2)[:, :length]


def plan_of(views: list[View]) -> AttentionPlan:
    segments = [segment for view in views for segment in view.segments]
    num_rows = sum(view.rows for view in views)
    return plan_attention(
        positions=torch.arange(num_rows).expand(3, -1),
        row_start=starts([view.rows for view in views]),
        segment_start=starts([len(view.segments) for view in views]),
        segment_page_start=starts([len(segment.pages) for segment in segments]),
        pages=torch.tensor([page for segment in segments for page in segment.pages]),
        segment_length=torch.tensor([segment.length for segment in segments]),
        segment_shift=torch.tensor([segment.shift for segment in segments]),
        segment_block=torch.tensor([segment.block for segment in segments]),
        pool=(KV_HEADS, PAGES, PAGE),
    )


def starts(counts: list[int]) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0)


def check(pools: Pools, views: list[View]) -> AttentionPlan:
    """Attention and shares of all rows against the reference, row by row."""
    plan = plan_of(views)
    queries = torch.randn(len(plan.query_rows), HEADS, DIM)
    shares: list[Tensor] = []
    out = attention_over_view(queries, pools.keys, pools.values, plan, SCALE, shares)
    row = query = 0
    for view in views:
        for i in range(view.rows):
            *others, own = view.segments
            seen = [segment.length for segment in others] + [own.length - view.rows + i + 1]
            read = list(zip(view.segments, seen, strict=True))
            expected, share = attention_over_view_reference(
                [queries[query + i + view.rows * s] for s in range(len(read))],
                [pools.read(pools.keys, segment.pages, length) for segment, length in read],
                [pools.read(pools.values, segment.pages, length) for segment, length in read],
                SCALE,
            )
            torch.testing.assert_close(out[row], expected, rtol=1e-5, atol=1e-5)
            blocks = torch.zeros(plan.num_blocks, HEADS)
            blocks.index_add_(0, torch.tensor([s.block for s in view.segments]), share)
            torch.testing.assert_close(shares[0][row], blocks, rtol=1e-5, atol=1e-5)
            row += 1
        query += view.rows * len(view.segments)
    assert out.shape == (row, HEADS, DIM) and shares[0].shape[0] == row
    return plan


@pytest.mark.parametrize("seed", range(8))
def test_attention_over_view(seed: int) -> None:
    """Requests of few and of many rows, with shared segments, forks and prefixes of one another."""
    rng = random.Random(seed)
    pools = Pools(seed)
    shared = [(pools.filled(length), length) for length in (1, 16, 63, 64, 65, 300)]
    stem, branch = pools.filled(160), pools.filled(16)
    forks = [(stem, 160), (stem[:9] + branch, 150), (stem, 100), (stem[:2], 17)]
    views = []
    for _ in range(rng.randint(1, 7)):
        rows = rng.choice([1, 1, 2, 15, 16, 40])
        chosen = rng.sample(shared + forks, rng.randint(0, 5))
        own = rows + rng.choice([0, 1, 15, 100, 250])
        parts = [*chosen, (pools.filled(own), own)]
        segments = [
            Segment(pages, length, rng.randint(0, 99), block // 2)
            for block, (pages, length) in enumerate(parts)
        ]
        views.append(View(segments, rows))
    check(pools, views)


def test_attention_over_view_of_one_row_that_reads_a_block_and_its_fork() -> None:
    pools = Pools(0)
    pages = pools.filled(70)
    own = Segment(pools.filled(3), 3, 0, 2)
    view = View([Segment(pages, 70, 3, 0), Segment(pages, 70, 73, 1), own], 1)
    check(pools, [view])


def test_attention_over_view_of_more_rows_than_a_group() -> None:
    pools = Pools(1)
    prompt = Segment(pools.filled(90), 90, 0, 0)
    views = [View([prompt, Segment(pools.filled(140), 140, 0, 1)], 140) for _ in range(2)]
    check(pools, views)


def test_attention_over_view_while_a_reader_sees_less_than_the_writer() -> None:
    """A page that is being filled: each row sees its own number of tokens."""
    pools = Pools(2)
    pages = pools.filled(21)
    writer = View([Segment(pages, 21, 0, 0)], 4)
    reader = View([Segment(pages, 17, 0, 0), Segment(pools.filled(2), 2, 0, 1)], 1)
    check(pools, [reader, writer])


def test_plan_attention_reads_a_shared_segment_once() -> None:
    pools = Pools(3)
    prompt = Segment(pools.filled(64), 64, 0, 0)
    views = [View([prompt, Segment(pools.filled(5), 5, 0, 1)], 1) for _ in range(8)]
    plan = check(pools, views)
    shapes = sorted(tuple(bucket.hidden.shape) for bucket in plan.buckets)
    assert shapes == [(1, 8, 1, 64), (8, 1, 1, 64)]


def test_plan_attention_turns_queries_by_position_and_shift() -> None:
    plan = plan_of([View([Segment([1], 4, 70, 0), Segment([2], 5, -2, 1)], 3)])
    assert plan.query_rows.tolist() == [0, 1, 2, 0, 1, 2]
    assert plan.query_positions.tolist() == [[70, 71, 72, -2, -1, 0]] * 3


def test_attention_over_view_of_bfloat16_pools() -> None:
    """Scores and sums are float32, whatever the pools hold."""
    pools = Pools(4)
    pools.keys, pools.values = pools.keys.bfloat16(), pools.values.bfloat16()
    view = View([Segment(pools.filled(200), 200, 0, 0), Segment(pools.filled(9), 9, 0, 1)], 2)
    check(pools, [view])
