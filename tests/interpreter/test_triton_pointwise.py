"""Small fused kernels in Triton's interpreter, float32: norms, gates, angles, work items."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncllm_nb.kernels import activation, norm
from asyncllm_nb.kernels.items import plan_items
from asyncllm_nb.kernels.pointwise_triton import add_and_norm, silu_and_multiply
from asyncllm_nb.kernels.rotary import Rotary
from asyncllm_nb.kernels.rotary_triton import angles


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("width", [7, 64, 100])
@pytest.mark.parametrize("adds", [False, True])
def test_add_and_norm(rows: int, width: int, adds: bool) -> None:
    hidden, added, weight = torch.randn(rows, width), torch.randn(rows, width), torch.randn(width)
    total = hidden + added if adds else hidden.clone()
    out = add_and_norm(hidden, added if adds else None, weight, 1e-6)
    torch.testing.assert_close(hidden, total)
    torch.testing.assert_close(out, norm.rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize("shape", [(1, 7), (5, 1100)])
def test_silu_and_multiply(shape: tuple[int, int]) -> None:
    gate_up = torch.randn(shape[0], 2 * shape[1])
    torch.testing.assert_close(silu_and_multiply(gate_up), activation.silu_and_multiply(gate_up))


@pytest.mark.parametrize("mapped", [False, True])
def test_angles(mapped: bool) -> None:
    """Far positions of three axes lose nothing."""
    rotary = Rotary(10_000.0 ** -(torch.arange(11) / 11), torch.arange(11) % 3, 24, 1.3)
    positions = torch.randint(0, 260_000, (3, 19))
    rows, shift = torch.randint(0, 19, (37,)), torch.randint(-500, 500, (37,))
    wanted = positions[:, rows] + shift if mapped else positions
    maps = (rows.int(), shift.int()) if mapped else ()
    actual = angles(positions.int(), rotary, *maps)
    expected = rotary.to_positions(wanted)
    torch.testing.assert_close(actual.cos, expected.cos[:, 0, :11])
    torch.testing.assert_close(actual.sin, expected.sin[:, 0, 11:22])


@pytest.mark.parametrize("max_entries", [None, 40])
@pytest.mark.parametrize("seed", range(4))
def test_plan_items_covers_every_pair_once(seed: int, max_entries: int | None) -> None:
    """Each row sees each token that it should in exactly one entry; no item has too many entries."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(1, 5, 6)
    segments = rng.integers(1, 4, 6)
    length = rng.integers(1, 700, segments.sum())
    own = np.cumsum(segments) - 1
    length[own] = np.maximum(length[own], rows)
    pages = -(-length // 16)
    start = np.append(0, np.cumsum(pages))
    numbers = rng.permutation(2000)[: start[-1]] + 1
    first = np.append(0, np.cumsum(segments))
    shared = [s for s in first[:-1] if s not in own]  # the first segments of some views are one
    for segment in shared[1:]:
        length[segment] = min(length[segment], length[shared[0]])
        used = -(-length[segment] // 16)
        numbers[start[segment] : start[segment] + used] = numbers[start[shared[0]] : start[shared[0]] + used]
    plan = plan_items(
        row_start=np.append(0, np.cumsum(rows)),
        segment_start=first,
        segment_page_start=start,
        pages=numbers,
        segment_length=length,
        segment_shift=np.arange(len(length)),
        segment_block=np.arange(len(length)),
        page_tokens=16,
        kv_heads=2,
        group=3,
        processors=4,
        max_entries=max_entries,
    )
    seen: dict[tuple[int, int], list[int]] = {}
    for page, begin, end, entry, count in plan.items.tolist():
        assert 0 < count <= 3
        for e in range(entry, entry + count):
            tokens = [plan.pages[page + t // 16] * 16 + t % 16 for t in range(begin, end)]
            visible = tokens[: max(0, plan.entry_seen[e] - begin)]
            seen.setdefault((plan.entry_row[e], plan.entry_block[e]), []).extend(visible)
    row = 0
    for request, count in enumerate(rows):
        for index in range(count):
            for segment in range(first[request], first[request + 1]):
                sees = length[segment] - (count - 1 - index if segment == own[request] else 0)
                expected = [numbers[start[segment] + t // 16] * 16 + t % 16 for t in range(sees)]
                assert sorted(seen.pop((row, segment), [])) == sorted(expected)
            row += 1
    assert not any(seen.values())
    merged = plan.entry_row[plan.row_entry]
    assert merged.tolist() == np.repeat(np.arange(row), np.diff(plan.row_start)).tolist()
