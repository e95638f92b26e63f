"""Measures one H200: ``python -m benchmarks.h200 [part ...]``. Qwen3.5-9B shape, random bf16 weights.

Knows what is measured and in which order; how stands in the modules beside it. Prints a table, and writes
all numbers as JSON: a part that is run again replaces its numbers.

    python -m benchmarks.h200                              everything, 8 minutes or so
    python -m benchmarks.h200 steps users                  these parts
    python -m benchmarks.h200 --out benchmarks/results/h200.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from . import agents, gpu_steps, mixed_steps

COROUTINES = (1, 4, 8, 16, 32)
STEP_TARGET_MS = {1: 5.5, 4: 6.0, 8: 6.5, 16: 7.5, 32: 9.0}
RATE_TARGET = {1: 180, 4: 660, 8: 1230, 16: 2130, 32: 3550}
PREFILL = (512, 2048, 4096, 8192, 16384)
MIXED_STREAMS, MIXED_TOKENS = (0, 8, 32), (8, 30, 90)
Results = dict[str, Any]
Part = Callable[[Results], Coroutine[Any, Any, Any]]


async def ceilings(_: Results) -> Any:
    """What the GPU itself does."""
    return gpu_steps.ceilings()


async def steps(results: Results) -> Any:
    """Decode steps on the GPU alone: recorded, not recorded, share of the floor."""
    bandwidth = results.get("ceilings", {}).get("copy_tb_s") or gpu_steps.ceilings()["copy_tb_s"]
    found = {}
    with agents.random_engine(max_blocks=110, cache_tokens=120_000) as llm:
        for count in COROUTINES:
            views = await agents.views_of(llm, count)
            found[str(count)] = gpu_steps.measure(llm._engine, views, bandwidth)
            print(f"steps {count}: {found[str(count)]['recorded_ms']}", flush=True)
        await llm.close()
    return found


async def users(_: Results) -> Any:
    """Tokens per second through `generate`, start-up, first token."""
    found: Results = {}
    begin = time.perf_counter()
    with agents.random_engine(max_blocks=110, cache_tokens=120_000) as llm:
        found["start_s"] = time.perf_counter() - begin
        block = await llm.create_block()
        begin = time.perf_counter()
        await llm.generate(agents.tokens(32), [block], max_tokens=1)
        found["first_token_cold_s"] = time.perf_counter() - begin
        block = await llm.create_block()
        begin = time.perf_counter()
        await llm.generate(agents.tokens(32), [block], max_tokens=1)
        found["first_token_warm_s"] = time.perf_counter() - begin
        found["decode"] = {}
        for count in COROUTINES:
            await agents.decode(llm, count, 16)
            found["decode"][str(count)] = await agents.decode(llm, count, 64)
            print(f"users {count}: {found['decode'][str(count)]}", flush=True)
        found["memory"] = agents.memory(llm)
        await llm.close()
    torch.cuda.synchronize()
    found["allocated_after_close_gb"] = torch.cuda.memory_allocated() / 1e9
    return found


async def sampled(_: Results) -> Any:
    """Tokens per second of streams at temperature 0.7 beside greedy ones: with the filters that are
    usual, and with none. Random weights give flat distributions, which is the worst case without."""
    kinds: dict[str, Results] = {
        "greedy": {},
        "filtered": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
        "unfiltered": {"temperature": 0.7},
    }
    found: Results = {}
    with agents.random_engine(max_blocks=110, cache_tokens=120_000) as llm:
        for count in COROUTINES:
            found[str(count)] = {}
            for kind, options in kinds.items():
                await agents.decode(llm, count, 8, **options)
                found[str(count)][kind] = await agents.decode(llm, count, 64, **options)
            print(f"sampled {count}: {found[str(count)]}", flush=True)
        await llm.close()
    return found


async def prefill(results: Results) -> Any:
    """Tokens per second of one forward, and latencies while a long one and decodes run."""
    rate = results.get("ceilings", {}).get("matrix_tflop_s") or gpu_steps.ceilings()["matrix_tflop_s"]
    with agents.random_engine(max_blocks=60, cache_tokens=200_000) as llm:
        found: Results = {"prefill": await agents.prefill(llm, PREFILL, rate)}
        found["mixed"] = await agents.mixed(llm)
        await llm.close()
    return found


async def mixed(_: Results) -> Any:
    """Steps that encode a few tokens beside decodes: recorded against launched, in turns."""
    with agents.random_engine(max_blocks=110, cache_tokens=120_000) as llm:
        found = await mixed_steps.measure_all(llm, MIXED_STREAMS, MIXED_TOKENS)
        await llm.close()
    return found


async def transformers(_: Results) -> Any:
    """The same shape in transformers."""
    from . import beside

    return beside.decode_steps(32, 4096)


PARTS: dict[str, Part] = {
    "ceilings": ceilings,
    "steps": steps,
    "users": users,
    "sampled": sampled,
    "prefill": prefill,
    "mixed": mixed,
    "transformers": transformers,
}


def table(results: Results) -> str:
    """Targets beside what was reached, in Markdown."""
    lines = ["| coroutines | " + " | ".join(map(str, COROUTINES)) + " |", "|---" * 6 + "|"]

    def row(name: str, value: Callable[[int], str]) -> None:
        lines.append(f"| {name} | " + " | ".join(value(count) for count in COROUTINES) + " |")

    row("decode step, ms, target", lambda n: f"≤ {STEP_TARGET_MS[n]}")
    if "steps" in results:
        step = results["steps"]
        row("recorded, p50 (p95)", lambda n: "{p50:.2f} ({p95:.2f})".format(**step[str(n)]["recorded_ms"]))
        row("not recorded, p50", lambda n: f"{step[str(n)]['unrecorded_ms']['p50']:.2f}")
        row("floor by bandwidth", lambda n: f"{step[str(n)]['floor_ms']:.2f}")
        row("share of the floor", lambda n: f"{step[str(n)]['share_of_floor']:.0%}")
    row("tokens/s, target", lambda n: f"≥ {RATE_TARGET[n]}")
    if "users" in results:
        decode = results["users"]["decode"]
        row("through `generate`", lambda n: f"{decode[str(n)]['tokens_per_s']:.0f}")
        row("between two tokens, ms, p50", lambda n: f"{decode[str(n)]['gap_ms_p50']:.2f}")
        row("... p95", lambda n: f"{decode[str(n)]['gap_ms_p95']:.2f}")
    if "sampled" in results:

        def rate(kind: str, n: int) -> str:
            return f"{results['sampled'][str(n)][kind]['tokens_per_s']:.0f}"

        for kind in ("filtered", "unfiltered"):
            row(f"at temperature 0.7, {kind}, tokens/s", partial(rate, kind))
    if "transformers" in results:
        beside = results["transformers"]["decode"]
        row("transformers, tokens/s", lambda n: f"{beside[str(n)]['tokens_per_s']:.0f}")
    if "mixed" in results:
        lines += ["", mixed_steps.table(results["mixed"])]
    return "\n".join(lines)


def describe() -> Results:
    """What is measured on: date, GPU, versions."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "gpu": torch.cuda.get_device_name(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        **{name: version(name) for name in ("torch", "triton", "transformers")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200.json"))
    arguments = parser.parse_args()
    chosen = arguments.parts or list(PARTS)
    if len(chosen) > 1:  # each in a process of its own: a profiler, once loaded, slows launches down
        for name in chosen:
            command = [sys.executable, "-m", "benchmarks.h200", name, "--out", str(arguments.out)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        results: Results = json.loads(arguments.out.read_text())
    else:
        results = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
        results["machine"] = describe()
        results[chosen[0]] = asyncio.run(PARTS[chosen[0]](results))
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
