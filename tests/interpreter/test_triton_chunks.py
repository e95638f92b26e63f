"""The gated delta rule in chunks, kernels in the interpreter, against the plain rule."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from layer_cases import assert_near
from torch import Tensor

from asyncllm_nb.kernels.gdn import gated_delta_chunk
from asyncllm_nb.kernels.gdn_chunk_triton import CHUNK, Before, ManyRows, Prepared, gated_delta_many_rows

KEY_HEADS, HEADS = 1, 2

CASES = {
    "one": ([70], 24, 40),
    "ragged": ([33, 1, 0, 65, 32], 24, 40),
    "short": ([2, 3], 24, 40),
    "several programs": ([2, 35], 72, 130),
}
"""Rows of requests, d_k and d_v. Each reads a slot of its own, and writes another one, the last but one to
no slot. Of the requests of a case, every other one has something before it, if any has."""


def requests_of(counts: Sequence[int]) -> ManyRows:
    """Requests of so many rows, and one of padding behind them."""
    starts = [sum(counts[:index]) for index in range(len(counts) + 1)]
    cuts = [range(start, start + count, CHUNK) for start, count in zip(starts[:-1], counts, strict=True)]
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

    def __init__(self, counts: Sequence[int], key_dim: int, value_dim: int) -> None:
        rows, requests = sum(counts), len(counts)
        query, key = (F.normalize(torch.randn(rows, KEY_HEADS, key_dim), dim=-1) for _ in range(2))
        value, beta = torch.randn(rows, HEADS, value_dim), torch.rand(rows, HEADS)
        decay = -torch.rand(rows, HEADS) * torch.tensor([0.02, 2.0])
        self.counts, self.made = counts, Prepared(query, key, value, decay, beta)
        self.pairs = torch.full((2 * requests + 1, HEADS, key_dim + value_dim, key_dim), torch.nan)
        self.pairs[: requests + 1].normal_()
        self.read_slot = torch.tensor([*range(1, requests + 1), 0], dtype=torch.int32)
        blocks = torch.tensor([*(3 * (index % 2) for index in range(1, requests + 1)), 0], dtype=torch.int32)
        state = torch.randn(requests + 1, HEADS, value_dim, key_dim)
        state[blocks == 0] = torch.nan  # is not read
        self.before = Before(state, blocks)

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
                key_dim = key.shape[-1]
                read, pair = gated_delta_chunk(pair, *(x.transpose(0, 1) for x in parts))
                upper, lower = read[..., :key_dim], read[..., key_dim:]
                if has_before and self.before.blocks[request]:
                    lower = lower + upper @ self.before.state[request].mT
                reads.append(lower.transpose(0, 1))
            if writes[request]:
                pairs[writes[request]] = pair
        return torch.cat(reads), pairs


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("has_before", [True, False])
def test_chunks(case: str, has_before: bool) -> None:
    counts, *dims = CASES[case]
    scene, requests = Scene(counts, *dims), requests_of(counts)
    expected, pairs = scene.expected(requests.write_slot.tolist(), has_before)
    before = scene.before if has_before else None
    read = gated_delta_many_rows(scene.made, scene.pairs, scene.read_slot, before, requests)
    assert_near(read, expected, torch.float32, "reads")
    assert torch.equal(scene.pairs.isnan(), pairs.isnan()), "written elsewhere"
    assert_near(scene.pairs.nan_to_num(), pairs.nan_to_num(), torch.float32, "pairs")
