"""Runs the checks part by part, two at a time, and says how long each took: `make test` in Python.

Knows the parts, their files and their time budgets. Knows nothing about what a test does.

    python tests/run_parts.py                 every part that has tests
    python tests/run_parts.py engine types    these parts
    python tests/run_parts.py --list          the parts and their files
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"

COUNTED = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")


@dataclass(frozen=True)
class Part:
    """A command, or the pytest files that `patterns` (below tests/) match; `rest`: all others."""

    name: str
    minutes: float  # the budget on two cores; going over it is said, and does not fail
    patterns: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    rest: bool = False  # whatever stands in tests/ itself and in no other part
    alone: bool = False  # measures time: nothing else runs beside it

    def files(self) -> list[Path]:
        """The test files of this part, none for a command."""
        found = {path for pattern in self.patterns for path in TESTS.glob(pattern)}
        if self.rest:
            others = [part for part in PARTS if not part.rest]
            found |= set(TESTS.glob("test_*.py")).difference(*(part.files() for part in others))
        return sorted(found)

    def argv(self) -> list[str]:
        """What to execute."""
        if self.command:
            return [sys.executable, "-m", *self.command]
        files = [str(path.relative_to(ROOT)) for path in self.files()]
        return [sys.executable, "-m", "pytest", "--durations=5", "--durations-min=5", *files]


PARTS = (
    Part("lint", 0.5, command=("ruff", "check", ".")),
    Part("types", 2, command=("mypy",)),
    Part("engine", 6, rest=True),
    Part(
        "repository",
        2,
        (
            "test_gguf_checkpoint.py",
            "test_layers.py",
            "test_models.py",
            "test_packaging.py",
            "test_run_parts.py",
        ),
    ),
    Part(
        "evaluations",
        6,
        ("test_approximation.py", "test_evals*.py", "test_task*.py", "test_tiny*.py", "test_training.py"),
    ),
    Part("hybrid", 3, ("test_exact*.py", "test_programs.py")),
    Part(
        "agents",
        6,
        (
            "test_agent*.py",
            "test_diagram.py",
            "test_sandbox.py",
            "test_seccomp.py",
            "test_self_editing.py",
            "test_tools.py",
        ),
    ),
    Part("lessons", 6, ("test_lessons*.py", "test_readme.py")),
    Part("interpreter", 4, ("interpreter/test_*.py",)),
    Part(
        "notebook",
        4,
        (
            "test_check.py",
            "test_dashboard.py",
            "test_display.py",
            "test_notebook*.py",
            "test_run.py",
        ),
        alone=True,
    ),
    Part("browser", 8, ("browser/test_*.py",), alone=True),
    Part("gpu", 10, ("gpu/test_*.py",), alone=True),
)


@dataclass(frozen=True)
class Result:
    """How one part ended: its output, exit status, seconds, and pytest's counts."""

    part: Part
    output: str
    status: int
    seconds: float

    @property
    def counts(self) -> Counter[str]:
        """Tests by outcome, read from pytest's last line; empty for other commands."""
        return Counter() if self.part.command else count_outcomes(self.output)

    @property
    def summary(self) -> str:
        """pytest's closing line, or the last one that another command printed."""
        lines = [closing_line(self.output), *self.output.split("\n")[::-1]]
        return next(filter(None, lines), f"exit status {self.status}")


def closing_line(output: str) -> str:
    """pytest's summary, such as "2 failed, 5 passed in 0.31s"; empty if it printed none."""
    lines = re.findall(r"^[= ]*(.+ in [\d.]+s(?: \([\d:]+\))?)[= ]*$", output, re.MULTILINE)
    return lines[-1] if lines else ""


def count_outcomes(output: str) -> Counter[str]:
    """Tests by outcome, from pytest's closing line."""
    counts: Counter[str] = Counter()
    for number, word in re.findall(r"(\d+) (\w+)", closing_line(output)):
        name = "error" if word == "errors" else word
        if name in COUNTED:
            counts[name] += int(number)
    return counts


def run(part: Part) -> Result:
    """Executes one part with one thread to each process, and waits for it."""
    print(f"{part.name}: started", flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    begin = time.monotonic()
    done = subprocess.run(
        part.argv(),
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    result = Result(part, done.stdout, done.returncode, time.monotonic() - begin)
    rule = "-" * 20
    head = f"{rule} {part.name}, {result.seconds:.0f} s {rule}"
    print(f"\n{head}\n{done.stdout}\n", end="", flush=True)  # one write: two threads print here
    return result


def run_all(parts: Sequence[Part]) -> Iterator[Result]:
    """Two parts at a time; those that measure time afterwards, one by one."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        yield from pool.map(run, [part for part in parts if not part.alone])
    yield from map(run, [part for part in parts if part.alone])


def report(results: Sequence[Result]) -> str:
    """A line for each part, then the totals on a line of their own."""
    lines = []
    total: Counter[str] = Counter()
    for result in results:
        total += result.counts
        over = "  OVER ITS BUDGET" if result.seconds > 60 * result.part.minutes else ""
        lines.append(
            f"{result.part.name:<12}{'ok' if result.status == 0 else 'FAILED':<8}"
            f"{result.seconds:6.0f} s of {60 * result.part.minutes:4.0f}   {result.summary}{over}"
        )
    failed = total["failed"] + total["error"] + total["xpassed"]
    skipped = total["skipped"] + total["xfailed"]
    return "\n".join([*lines, f"{total['passed']} passed, {failed} failed, {skipped} skipped"])


def chosen(names: Sequence[str]) -> list[Part]:
    """The parts with these names, or all that have something to run.

    Raises:
        SystemExit: there is no part of that name, or it has no tests yet.
    """
    runnable = {part.name: part for part in PARTS if part.command or part.files()}
    unknown = [name for name in names if name not in runnable]
    if unknown:
        sys.exit(f"no part {', '.join(unknown)} with tests; there are: {', '.join(runnable)}")
    return [runnable[name] for name in names or runnable]


def main() -> int:
    """Returns 0 if every part passed."""
    parser = argparse.ArgumentParser(description="Runs the checks part by part.")
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--list", action="store_true", help="print the parts and their files")
    arguments = parser.parse_args()
    parts = chosen(arguments.parts)
    if arguments.list:
        for part in parts:
            print(f"{part.name}: {' '.join(part.argv()[2:])}")
        return 0
    results = list(run_all(parts))
    print(report(results), flush=True)
    return 0 if all(result.status == 0 for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
