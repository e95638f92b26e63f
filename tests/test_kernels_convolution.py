"""`convolve_through_view` against an ordinary causal convolution over the joined rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm_nb.kernels.convolution import convolve_through_view, plan_convolution

CHANNELS = 10


def reference(history: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """silu of the depthwise convolution of `rows`, with `history` [3, C] before them."""
    joined = torch.cat((history, rows)).t()[None]
    return F.silu(F.conv1d(joined, weight.t()[:, None], groups=CHANNELS))[0].t()


@pytest.mark.parametrize("counts", [[1], [2], [3], [40], [1, 5, 2, 1, 3]], ids=str)
def test_convolve_through_view(counts: list[int]) -> None:
    """The three rows before each request lie anywhere in the pool; the last three are kept."""
    requests, total = len(counts), sum(counts)
    pool = torch.full((30, 3, CHANNELS), torch.nan)
    pool[0] = 0
    pool[1:12] = torch.randn(11, 3, CHANNELS)
    rows, weight = torch.randn(total, CHANNELS), torch.randn(4, CHANNELS)
    history = torch.randint(0, 36, (requests, 3))
    write = torch.arange(20, 20 + requests)
    row_start = torch.tensor([0, *counts]).cumsum(0)
    kept_new, kept_old = torch.full((requests, 3), -1), torch.full((requests, 3), -7)
    for r, count in enumerate(counts):
        for j in range(3):
            if j >= 3 - count:
                kept_new[r, j] = int(row_start[r + 1]) - 3 + j
            else:
                kept_old[r, j] = history[r, j + count]
    flat = pool.flatten(0, 1).clone()
    plan = plan_convolution(row_start, total, history, kept_new, kept_old)
    out = convolve_through_view(rows, weight, pool, write, plan)
    for r in range(requests):
        mine = rows[row_start[r] : row_start[r + 1]]
        expected = reference(flat[history[r]], mine, weight)
        torch.testing.assert_close(out[row_start[r] : row_start[r + 1]], expected)
        kept = torch.cat((flat[history[r]], mine))[-3:]
        torch.testing.assert_close(pool[write[r]], kept, rtol=0, atol=0)
    torch.testing.assert_close(pool[:20], flat.view(30, 3, -1)[:20], rtol=0, atol=0, equal_nan=True)


def test_convolve_through_view_of_bfloat16_rows() -> None:
    """Products and sums are float32; what is kept is what came in."""
    pool = torch.randn(4, 3, CHANNELS).bfloat16()
    rows, weight = torch.randn(7, CHANNELS).bfloat16(), torch.randn(4, CHANNELS)
    history = torch.tensor([[3, 4, 5]])
    nothing = torch.full((1, 3), -1)
    plan = plan_convolution(torch.tensor([0, 7]), 7, history, torch.tensor([[4, 5, 6]]), nothing)
    out = convolve_through_view(rows, weight, pool, torch.tensor([2]), plan)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, reference(pool[1].float(), rows.float(), weight))
    torch.testing.assert_close(pool[2], rows[4:], rtol=0, atol=0)
