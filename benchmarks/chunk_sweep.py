"""Ways to cut the chunked gated delta rule into programs, timed: ``python -m benchmarks.chunk_sweep``.

Knows the plans of the rule's launch, one layer in the shape of Qwen3.5-9B (`gpu_pairs`), and processes that
compile. Prints a table of plans, fastest first: milliseconds, largest errors, registers. A plan that does
not compile, or not in time, is said and passed by.

    python -m benchmarks.chunk_sweep --out benchmarks/results/chunk_sweep.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asyncllm_nb.kernels import gdn_chunk_triton
from asyncllm_nb.kernels.gdn_chunk_triton import (
    PLAN,
    Before,
    ManyRows,
    PassPlan,
    Prepared,
    convolve_many_rows,
    gated_delta_many_rows,
    gated_delta_two_parts,
)

from . import gpu_pairs, gpu_steps

LENGTHS = (2048, 8192)
"""Tokens of one request. Errors are those after the first number of them."""

COMPILING, MEASURING = 45.0, 85.0
"""Seconds from the start after which nothing more is compiled, and nothing more is measured."""

Results = dict[str, Any]


class Variant(NamedTuple):
    """The rule with this many parts of X."""

    parts: int
    plan: PassPlan

    @property
    def name(self) -> str:
        """What differs from the present plan."""
        changed = [
            f"{field} {value}"
            for field, value in self.plan._asdict().items()
            if value != getattr(PLAN, field) or field in ("rows", "warps", "stages")
        ]
        return ", ".join([f"{self.parts} parts", *changed])


def variants() -> list[Variant]:
    """The present way first, then what promises most."""
    plan = partial(PassPlan, is_left=False)  # X as the right factor
    left = PassPlan
    three = [
        PLAN,
        left(stages=2),
        left(stages=1),
        left(stages=1, registers=168),
        left(stages=2, registers=168),
        left(warps=8, stages=2),
        left(prepare_warps=4),
    ]
    two = [
        plan(rows=64, warps=8, stages=2),
        plan(rows=64, warps=8, stages=3),
        plan(rows=64, warps=8, stages=1),
        plan(rows=32, stages=1),
        plan(rows=32, stages=2),
        left(rows=64, warps=4, stages=1),
        left(rows=32, stages=1),
        left(rows=32, stages=2),
        plan(rows=64, warps=8, stages=2, prepare_warps=4),
        plan(rows=32, warps=8, stages=2),
        left(rows=64, warps=4, stages=1, is_stored=False),
        left(rows=32, stages=1, is_stored=False),
        plan(rows=64, warps=8, stages=1, is_stored=False),
        plan(rows=64, warps=8, stages=2, is_stored=False),
        left(rows=128, warps=8, stages=1),
        left(rows=128, warps=8, stages=1, is_stored=False),
        left(rows=64, warps=4, stages=2),
        left(rows=32, stages=1, registers=168),
        plan(rows=32, stages=1, registers=168),
        left(rows=16, stages=1),
        left(rows=16, stages=1, registers=168),
        plan(rows=32, stages=2, chunk=16),
        plan(rows=64, warps=8, stages=3, chunk=16),
        plan(rows=64, warps=8, stages=1, chunk=64, prepare_warps=8),
        left(rows=64, warps=4, stages=1, is_stored=False, chunk=64, prepare_warps=8),
    ]
    return [Variant(3, plan) for plan in three] + [Variant(2, plan) for plan in two]


class Problem(NamedTuple):
    """One request of rows, behind nothing or behind a state."""

    made: Prepared
    requests: ManyRows
    pairs: Tensor
    empty: Tensor  # [1] int32: the slot that is read
    state: Tensor  # [1, H, d_v, d_k] zeros if it is behind nothing
    before: Before | None

    @property
    def pair(self) -> Tensor:
        """The pair that was written."""
        return self.pairs[1]

    def run(self, variant: Variant) -> Tensor:
        """What rows read, float32 [n, H, d_v]."""
        made, pairs, empty, requests, plan = self.made, self.pairs, self.empty, self.requests, variant.plan
        if variant.parts == 3:
            return gated_delta_many_rows(made, pairs, empty, self.state, requests, plan)
        return gated_delta_two_parts(made, pairs, empty, self.before, requests, plan)


def problem(layer: gpu_pairs.Layer, count: int, chunk: int, is_behind: bool) -> Problem:
    """The first `count` tokens of a layer."""
    pairs, rows = gpu_pairs.memory(2)
    requests = gpu_pairs.one_request(count, chunk)
    made = convolve_many_rows(*layer, rows, requests, gpu_pairs.SIZES)
    shape = (1, gpu_pairs.HEADS, gpu_pairs.VALUE_DIM, gpu_pairs.KEY_DIM)
    generator = torch.Generator(gpu_pairs.GPU).manual_seed(1)
    state = 0.3 * is_behind * torch.randn(shape, device=gpu_pairs.GPU, generator=generator)
    empty = torch.zeros(1, dtype=torch.int32, device=gpu_pairs.GPU)
    return Problem(made, requests, pairs, empty, state, Before(state, empty + 1) if is_behind else None)


def share(actual: Tensor, expected: Tensor) -> float:
    """The largest error, as a share of the largest number."""
    return float((actual.double() - expected.double()).abs().max() / expected.abs().max())


class Bench:
    """A layer, and what is right for it."""

    def __init__(self, lengths: Sequence[int] = LENGTHS) -> None:
        self.lengths = lengths
        self.layer = gpu_pairs.random_layer(max(lengths))
        first = gpu_pairs.Layer(self.layer.projected[: lengths[0]], *self.layer[1:])
        self.pair = gpu_pairs.as_written(first)[lengths[0]]  # float64
        present = Variant(3, PLAN)
        self.reads = [
            problem(self.layer, lengths[0], PLAN.chunk, is_behind).run(present) for is_behind in (False, True)
        ]

    def measure(self, variant: Variant) -> Results:
        """Errors, and milliseconds of the whole rule: chunks prepared, and the pass over them."""
        found: Results = {"errors": {"reads": 0.0}}
        for is_behind in (False, True):
            given = problem(self.layer, self.lengths[0], variant.plan.chunk, is_behind)
            read = given.run(variant)
            error = share(read, self.reads[is_behind])
            found["errors"]["reads"] = max(found["errors"]["reads"], error)
            ours, right = {1: given.pair}, {1: self.pair}
            found["errors"] |= gpu_pairs.errors(ours, right)["1"]
            name = f"{self.lengths[0]} behind" if is_behind else str(self.lengths[0])
            found[name] = gpu_pairs.gpu_times(partial(given.run, variant))["p50"]
        for count in self.lengths[1:]:
            given = problem(self.layer, count, variant.plan.chunk, False)
            found[str(count)] = gpu_pairs.gpu_times(partial(given.run, variant))["p50"]
        return found


# ---- compiling beside --------------------------------------------------------------------------------


def compile_all(chosen: Sequence[Variant], numbers: Sequence[int], folder: Path) -> None:
    """Compile some of the variants into the cache on disk, and write down what became of each."""
    layer = gpu_pairs.random_layer(64)
    for number in numbers:
        variant = chosen[number]
        found: Results = {}
        try:
            for is_behind in (True, False):
                problem(layer, 64, variant.plan.chunk, is_behind).run(variant)
            torch.cuda.synchronize()
            found = resources(variant)
        except Exception as error:  # the sweep goes on without it
            found["failed"] = f"{type(error).__name__}: {error}"[:300]
        part = folder / f"{number}.part"
        part.write_text(json.dumps(found), encoding="utf-8")
        part.rename(folder / f"{number}.json")


def resources(variant: Variant) -> Results:
    """Registers, spilled registers and shared memory of the pass that was compiled last; as far as this
    version of Triton tells."""
    kernel: Any = gdn_chunk_triton._pass if variant.parts == 3 else gdn_chunk_triton._pass_two_parts
    try:
        *_, compiled = kernel.device_caches[torch.cuda.current_device()][0].values()
        return {"regs": compiled.n_regs, "spills": compiled.n_spills, "shared": compiled.metadata.shared}
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}


def compiled(count: int, until: float) -> list[Results]:
    """Compile variants 0 to `count` - 1 in processes side by side. -> what became of each; nothing of them
    runs any more, since that would disturb what is measured."""
    processes = max(1, min(count, len(os.sched_getaffinity(0)) - 1))
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "benchmarks.chunk_sweep", "--folder", name, "--compile"]
        running = [
            subprocess.Popen(command + [str(number) for number in range(first, count, processes)])
            for first in range(processes)
        ]
        for process in running:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return outcomes(Path(name), count)


def outcomes(folder: Path, count: int) -> list[Results]:
    """What became of variants 0 to `count` - 1."""
    files = [folder / f"{number}.json" for number in range(count)]
    late: Results = {"failed": "not compiled in time"}
    return [json.loads(file.read_text(encoding="utf-8")) if file.exists() else late for file in files]


# ---- all of it ---------------------------------------------------------------------------------------


def sweep(
    chosen: Sequence[Variant], compilations: Sequence[Results], bench: Bench, until: float
) -> list[Results]:
    """Measure all variants that were compiled, in order."""
    rows: list[Results] = []
    for variant, compilation in zip(chosen, compilations, strict=True):
        row: Results = {"name": variant.name, **compilation}
        if time.monotonic() > until:
            row["failed"] = "no time left to measure"
        if "failed" not in row:
            try:
                row |= bench.measure(variant)
            except Exception as error:  # the sweep goes on without it
                row["failed"] = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def table(rows: Sequence[Results], lengths: Sequence[int] = LENGTHS) -> str:
    """What was measured, fastest first, in Markdown."""
    times = [str(lengths[0]), f"{lengths[0]} behind", *map(str, lengths[1:])]
    heads = [*(f"ms, {name}" for name in times), "error Â", "error B̂", "reads differ", "registers", "shared"]
    lines = ["| plan | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for row in sorted((row for row in rows if "failed" not in row), key=lambda row: row[times[0]]):
        errors = row["errors"]
        cells = [f"{row[name]:.3f}" for name in times]
        cells += [f"{errors[name]:.1e}" for name in ("a", "b", "reads")]
        cells += [f"{row.get('regs', '?')} + {row.get('spills', '?')} spilled", str(row.get("shared", "?"))]
        lines.append(f"| {row['name']} | " + " | ".join(cells) + " |")
    lines += [f"\nnot measured: {row['name']}: {row['failed']}" for row in rows if "failed" in row]
    return "\n".join(lines)


@torch.inference_mode()
def main() -> None:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="a JSON file for the numbers")
    parser.add_argument("--compile", type=int, nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    chosen = variants()
    if arguments.compile is not None:
        compile_all(chosen, arguments.compile, arguments.folder)
        return
    compilations = compiled(len(chosen), started + COMPILING)
    print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
    rows = sweep(chosen, compilations, Bench(), started + MEASURING)
    print(table(rows), flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    names = [row["name"] for row in sorted(rows, key=lambda row: row.get(str(LENGTHS[0]), 1e9))]
    layer = gpu_pairs.random_layer(LENGTHS[0])
    for variant in (chosen[0], *(variant for variant in chosen if variant.name in names[:2])):
        given = problem(layer, LENGTHS[0], variant.plan.chunk, True)
        print(f"\n{variant.name}, behind a state:", flush=True)
        for kernel in gpu_steps.kernels(partial(given.run, variant)):
            print(f"  {kernel['us']:8.1f} us x {kernel['calls']}  {kernel['name']}", flush=True)


if __name__ == "__main__":
    main()
