"""Ways to cut the gated delta rule into programs, kernels in the interpreter: all give the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from layer_cases import assert_near
from torch import Tensor

from asyncllm_nb.kernels.gdn import gated_delta_chunk
from asyncllm_nb.kernels.gdn_chunk_triton import (
    PLAN,
    Before,
    ManyRows,
    PassPlan,
    Prepared,
    gated_delta_many_rows,
    gated_delta_two_parts,
)

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 1, 2, 24, 40

CASES = {"one": [70], "ragged": [33, 1, 0, 65], "short": [2, 3]}
"""Rows of requests. Each reads a slot of its own, and writes another one, the last but one to no slot."""

PLANS = {
    "as it is": PLAN,
    "right factor": PassPlan(is_left=False),
    "computed": PassPlan(is_stored=False),
    "right factor, computed, few rows": PassPlan(is_left=False, is_stored=False, rows=16),
    "many rows, long chunks": PassPlan(rows=64, chunk=64),
}


def requests_of(counts: Sequence[int], chunk: int) -> ManyRows:
    """Requests of so many rows, in chunks of `chunk`, and one of padding behind them."""
    starts = [sum(counts[:index]) for index in range(len(counts) + 1)]
    cuts = [range(start, start + count, chunk) for start, count in zip(starts[:-1], counts, strict=True)]
    chunks = [sum(map(len, cuts[:index])) for index in range(len(cuts) + 1)]
    unused = torch.empty(0, dtype=torch.int32)
    writes = [len(counts) + 1 + index for index in range(len(counts))]
    writes[-2:-1] = [0] * len(writes[-2:-1])

    def numbers(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return ManyRows(
        row=unused,
        windows=unused,
        request_start=numbers([*starts, starts[-1]]),
        chunk_start=numbers([*(start for cut in cuts for start in cut), starts[-1], starts[-1]]),
        request_chunk=numbers([*chunks, chunks[-1]]),
        write_slot=numbers([*writes, 0]),
        kept=unused,
    )


class Scene:
    """Random rows, pairs and states before; what the plain rule makes of them."""

    def __init__(self, counts: Sequence[int]) -> None:
        rows, requests = sum(counts), len(counts)
        query, key = (F.normalize(torch.randn(rows, KEY_HEADS, KEY_DIM), dim=-1) for _ in range(2))
        value, beta = torch.randn(rows, HEADS, VALUE_DIM), torch.rand(rows, HEADS)
        decay = -torch.rand(rows, HEADS) * torch.tensor([0.02, 2.0])
        self.counts, self.made = counts, Prepared(query, key, value, decay, beta)
        self.pairs = torch.full((2 * requests + 1, HEADS, KEY_DIM + VALUE_DIM, KEY_DIM), torch.nan)
        self.pairs[: requests + 1].normal_()
        self.read_slot = torch.tensor([*range(1, requests + 1), 0], dtype=torch.int32)
        exists = torch.tensor([*(index % 2 for index in range(1, requests + 1)), 0], dtype=torch.int32)
        state = torch.randn(requests + 1, HEADS, VALUE_DIM, KEY_DIM) * exists[:, None, None, None]
        self.before = Before(state, exists)

    def expected(self, writes: Sequence[int], has_before: bool) -> tuple[Tensor, Tensor]:
        """What rows read, and all pairs afterwards."""
        pairs, reads, start = self.pairs.clone(), [], 0
        for request, count in enumerate(self.counts):
            rows = slice(start, start := start + count)
            query, key = (
                x[rows].repeat_interleave(HEADS // KEY_HEADS, 1) for x in (self.made.query, self.made.key)
            )
            parts = (query, key, *(x[rows] for x in self.made[2:]))
            pair = pairs[request + 1]
            if count:
                read, pair = gated_delta_chunk(pair, *(x.transpose(0, 1) for x in parts))
                first, second = read.split((KEY_DIM, VALUE_DIM), -1)
                state = self.before.state[request] if has_before else torch.zeros(HEADS, VALUE_DIM, KEY_DIM)
                reads.append((torch.baddbmm(second, first, state.mT)).transpose(0, 1))
            if writes[request]:
                pairs[writes[request]] = pair
        return torch.cat(reads), pairs


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("has_before", [True, False])
def test_two_parts(case: str, plan: str, has_before: bool) -> None:
    scene, requests = Scene(CASES[case]), requests_of(CASES[case], PLANS[plan].chunk)
    expected, pairs = scene.expected(requests.write_slot.tolist(), has_before)
    before = scene.before if has_before else None
    read = gated_delta_two_parts(scene.made, scene.pairs, scene.read_slot, before, requests, PLANS[plan])
    check(read, expected, scene.pairs, pairs)


@pytest.mark.parametrize("plan", ["as it is", "many rows, long chunks"])
@pytest.mark.parametrize("case", CASES)
def test_three_parts(case: str, plan: str) -> None:
    scene, requests = Scene(CASES[case]), requests_of(CASES[case], PLANS[plan].chunk)
    expected, pairs = scene.expected(requests.write_slot.tolist(), True)
    pair = scene.pairs[scene.read_slot]
    state = scene.before.state @ pair[:, :, :KEY_DIM] + pair[:, :, KEY_DIM:]
    read = gated_delta_many_rows(scene.made, scene.pairs, scene.read_slot, state, requests, PLANS[plan])
    check(read, expected, scene.pairs, pairs)


def check(read: Tensor, expected_read: Tensor, pairs: Tensor, expected_pairs: Tensor) -> None:
    """Both agree, and nothing else was written."""
    assert_near(read, expected_read, torch.float32, "reads")
    assert torch.equal(pairs.isnan(), expected_pairs.isnan())
    assert_near(pairs.nan_to_num(), expected_pairs.nan_to_num(), torch.float32, "pairs")
