"""What a measurement ran on: date, processor, memory, load, threads and versions. Knows the system."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import __version__

PACKAGES = ("torch", "transformers", "numpy", "tokenizers")


def describe(processes: int = 1) -> dict[str, Any]:
    """As it is now; `load` is the system's average over the last minute, `threads` those of each process."""
    import torch

    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "load": round(os.getloadavg()[0], 1),
        **({"processes": processes, "threads": 1} if processes > 1 else {"threads": torch.get_num_threads()}),
        "system": f"{platform.system()} {platform.release()}",
        "versions": {"python": platform.python_version(), "asyncllm-nb": __version__, **_versions()},
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # copied to where Python finds it, not installed
            continue
    return found


def _memory_gib() -> float:
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return round(pages * size / 2**30, 1)


def _field(file: str, name: str) -> str:
    """The first value of `name` in a file of "name : value" lines; empty where there is none."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    values = [line.partition(":")[2].strip() for line in lines if line.startswith(name)]
    return values[0] if values else ""
