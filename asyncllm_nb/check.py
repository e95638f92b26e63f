"""`check()`: what this notebook runs on, what works in it, and what to do about the rest.

Knows versions, hosts and their limits. Judging is done by small functions of plain facts; torch and
IPython are asked only where facts are gathered.
"""

from __future__ import annotations

import asyncio
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib import metadata
from typing import Literal

from packaging.requirements import Requirement
from packaging.version import Version

from .host import host_name, kernel_loop, running_loop, shell
from .markup import muted, table, text_table

State = Literal["ok", "note", "problem"]

DISTRIBUTION = "asyncllm-nb"
OLDEST_PYTHON = (3, 11)

PACKAGES = (
    "torch",
    "transformers",
    "ipykernel",
    "ipywidgets",
    "anywidget",
    "jupyterlab",
    "nest-asyncio2",
    "triton",
)
ONLY_FOR_GPUS = ("triton",)
"""Builds of torch for a GPU bring it; elsewhere it is not missed."""

SIGNS: dict[State, str] = {"ok": "✓", "note": "●", "problem": "✗"}
SIGN_COLOURS: dict[State, str] = {"ok": "#00875F", "note": "#A87400", "problem": "#CC3D66"}


@dataclass(frozen=True)
class Line:
    """One thing that was looked at. `fix`: what to do, where something can be done."""

    topic: str
    state: State
    text: str
    fix: str = ""


@dataclass(frozen=True)
class Report:
    """What `check` found, line by line."""

    lines: tuple[Line, ...]

    @property
    def ok(self) -> bool:
        """Is nothing a problem? Notes are none."""
        return all(line.state != "problem" for line in self.lines)

    def __repr__(self) -> str:
        rows = [
            [SIGNS[line.state], line.topic, line.text + (f"  -> {line.fix}" if line.fix else "")]
            for line in self.lines
        ]
        return text_table(("", "asyncllm_nb", self._summary()), rows)

    def _repr_html_(self) -> str:
        rows = [
            [_sign_html(line.state), escape(line.topic), escape(line.text), escape(line.fix)]
            for line in self.lines
        ]
        return table(("", "asyncllm_nb", self._summary(), "what to do"), rows)

    def _summary(self) -> str:
        problems = sum(line.state == "problem" for line in self.lines)
        return "all well" if not problems else f"{problems} problem{'s' * (problems > 1)}"


def check() -> Report:
    """Look at Python, packages, device, kernel and host: what works here, and what to do if not.

    As a cell's last expression it shows as a table. Loads torch.
    """
    return Report(tuple(_lines()))


def _lines() -> Iterator[Line]:
    yield python_line(sys.version_info[:3], platform.platform())
    yield from package_lines()
    yield from device_lines()
    yield host_line()
    if kernel_loop() is not None:
        yield controls_line(Version(metadata.version("ipykernel")), host_name())
    yield loop_line(running_loop())
    yield nesting_line(hasattr(asyncio, "_nest_patched"), hasattr(asyncio, "_nest_asyncio2"))


# ---- Python and packages ------------------------------------------------------------------------


def python_line(version: tuple[int, ...], system: str) -> Line:
    """Is Python new enough?"""
    text = f"{'.'.join(map(str, version))} on {system}"
    if version >= OLDEST_PYTHON:
        return Line("Python", "ok", text)
    oldest = ".".join(map(str, OLDEST_PYTHON))
    return Line("Python", "problem", text, f"make an environment with Python {oldest} or newer")


def package_lines() -> Iterator[Line]:
    """Versions that matter, against what this package asks for."""
    needed = requirements(_declared())
    for name in PACKAGES:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = None
        yield package_line(name, version, needed.get(name))


def _declared() -> list[str]:
    try:
        return metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # used from a folder, without an installation
        return []


def requirements(declared: Iterable[str]) -> dict[str, Requirement]:
    """The requirements of this system by name, without those of extras."""
    parsed = [Requirement(line) for line in declared]
    environment = {"extra": ""}
    return {r.name: r for r in parsed if r.marker is None or r.marker.evaluate(environment)}


def package_line(name: str, version: str | None, needed: Requirement | None) -> Line:
    """Is a package there, and new enough?"""
    if version is None and (needed is None or name in ONLY_FOR_GPUS):
        return Line(name, "ok", "not installed; not needed without an NVIDIA GPU")
    fix = f'%pip install -U "{name}{needed.specifier}", then restart the kernel' if needed else ""
    if version is None:
        return Line(name, "problem", "not installed", fix)
    if needed is not None and not needed.specifier.contains(version, prereleases=True):
        return Line(name, "problem", f"{version}, but {needed.specifier} is needed", fix)
    return Line(name, "ok", version)


# ---- device -------------------------------------------------------------------------------------


def device_lines() -> Iterator[Line]:
    """The devices that torch sees, and their memory."""
    try:
        import torch

        from .engine.build import free_memory
    except ImportError as error:
        yield Line("device", "problem", f"torch cannot be loaded: {error}", "install torch again")
        return
    threads, cores = torch.get_num_threads(), os.cpu_count()
    memory = f"{gigabytes(free_memory(torch.device('cpu')))} free"
    yield Line("CPU", "ok", f"{cores} cores, torch uses {threads} threads, {memory}")
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield Line("GPU", "ok", f"{name}, {gigabytes(free)} of {gigabytes(total)} free")
    if not torch.cuda.is_available():
        yield no_gpu_line(torch.version.cuda)


def no_gpu_line(cuda_build: str | None) -> Line:
    """No GPU: nothing is wrong with that, unless there is one that torch cannot use."""
    if cuda_build is None:
        return Line("GPU", "ok", "none, and torch is a build for the CPU, as the small models want")
    fix = "if this machine has an NVIDIA GPU: nvidia-smi says whether its driver works"
    return Line("GPU", "note", f"none that torch (for CUDA {cuda_build}) can use", fix)


def gigabytes(count: int) -> str:
    """Bytes in GB."""
    return f"{count / 1e9:.1f} GB"


# ---- kernel -------------------------------------------------------------------------------------


def host_line() -> Line:
    """Where outputs are shown."""
    name = host_name()
    if kernel_loop() is not None:
        return Line("host", "ok", name)
    what = "top-level await works; dashboards do not" if shell() is not None else "use run(...)"
    return Line("host", "note", f"{name}: {what}", "for live displays open a notebook: jupyter lab")


NEWER_KERNEL = (
    "start coroutines with asyncio.create_task(...) and let the cell end; or "
    '%pip install -U "ipykernel>=7.4" and restart the kernel'
)


def controls_line(ipykernel: Version, host: str) -> Line:
    """Do buttons of widgets act while a cell awaits? It depends on ipykernel and on the host."""
    topic = "controls"
    if ipykernel >= Version("7.4"):
        text = "act at once while a cell awaits; while a cell computes they wait for it"
        return Line(topic, "ok", text)
    if ipykernel >= Version("7.0") and host == "JupyterLab or Notebook":
        text = "act at once while a cell runs, in JupyterLab 4.4 and newer"
        return Line(topic, "ok", text)
    if ipykernel >= Version("6.31"):
        text = f"wait until the running cell ends, even if it only awaits (ipykernel {ipykernel})"
        return Line(topic, "note", text, NEWER_KERNEL)
    return Line(topic, "problem", f"ipykernel {ipykernel} was never tried", NEWER_KERNEL)


def loop_line(loop: asyncio.AbstractEventLoop | None) -> Line:
    """Is the running loop one that `run` can wait in?"""
    if loop is None:
        return Line("event loop", "ok", "none runs here; run(...) makes one")
    name = f"{type(loop).__module__}.{type(loop).__name__}"
    if isinstance(loop, asyncio.BaseEventLoop):
        return Line("event loop", "ok", name)
    return Line("event loop", "note", f"{name}: run(...) cannot wait in it", "write await ...")


def nesting_line(patched: bool, by_successor: bool) -> Line:
    """Was asyncio patched, and by whom?"""
    topic = "nested loops"
    if not patched:
        return Line(topic, "ok", "asyncio is as Python made it; run(...) will patch it if called")
    if by_successor:
        return Line(topic, "ok", "patched by nest-asyncio2, as run(...) needs it")
    text = "patched by the original nest_asyncio, which loses cells and messages of widgets"
    fix = "take nest_asyncio.apply() out and restart the kernel; await works without it"
    return Line(topic, "problem", text, fix)


def _sign_html(state: State) -> str:
    words: Sequence[str] = () if state == "ok" else (state,)
    sign = f'<span style="color:{SIGN_COLOURS[state]}">{SIGNS[state]}</span>'
    return " ".join([sign, *map(muted, words)])
