"""The sweep over plans of the chunked rule, kernels in the interpreter: what it measures, and its table."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from asyncllm_nb.kernels.gdn_chunk_triton import PLAN, PassPlan
from asyncllm_nb.kernels.gdn_triton import LayerSizes
from benchmarks import gpu_pairs
from benchmarks.chunk_sweep import Bench, Variant, sweep, table, variants

SIZES = LayerSizes(key_heads=1, value_heads=2, key_dim=16, value_dim=24)
LENGTHS = (37, 70)


def test_plans_are_measured_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails to compile or to run is said, and the others are measured, with errors of float32."""
    queries = SIZES.key_heads * SIZES.key_dim
    patched = {
        "GPU": torch.device("cpu"),
        "COUNTS": LENGTHS,
        "SIZES": SIZES,
        "KEY_HEADS": SIZES.key_heads,
        "HEADS": SIZES.value_heads,
        "KEY_DIM": SIZES.key_dim,
        "VALUE_DIM": SIZES.value_dim,
        "QUERIES": queries,
        "CHANNELS": 2 * queries + SIZES.value_heads * SIZES.value_dim,
        "gpu_times": lambda run: {"p50": float(run().isfinite().all())},
    }
    for name, value in patched.items():
        monkeypatch.setattr(gpu_pairs, name, value)
    chosen = [
        Variant(3, PLAN),
        Variant(2, PassPlan(is_left=False)),
        Variant(2, PassPlan(chunk=16)),
        Variant(2, PassPlan(rows=3)),
        Variant(3, PassPlan(warps=8)),
    ]
    compilations: list[dict[str, Any]] = [
        {"regs": 7, "spills": 0, "shared": 9},
        {},
        {},
        {},
        {"failed": "not compiled"},
    ]
    rows = sweep(chosen, compilations, Bench(LENGTHS), time.monotonic() + 1000)
    assert ["failed" in row for row in rows] == [False, False, False, True, True]
    for row in rows[:3]:
        assert [row["37"], row["37 behind"], row["70"]] == [1.0] * 3
        assert max(row["errors"].values()) < 2e-6
    lines = table(rows, LENGTHS).split("\n")
    assert sum(line.startswith("| ") for line in lines) == 4
    assert sum(line.startswith("not measured: ") for line in lines) == 2
    assert all("no time" in row["failed"] for row in sweep(chosen[:1], [{}], Bench(LENGTHS), 0.0))


def test_plans_have_names_of_their_own() -> None:
    names = [variant.name for variant in variants()]
    assert len(set(names)) == len(names)
    assert variants()[0] == Variant(3, PLAN)
