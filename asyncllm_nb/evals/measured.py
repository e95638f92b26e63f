"""Observations of runs, by pattern and way, kept in a file and shown as a table. Knows numbers and text."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .files import read_json, write_json
from .statistics import Share, mean
from .tables import Table

FORMAT = "asyncllm_nb.evals.patterns_io"
VERSION = 1

Numbers = Mapping[str, list[float]]


@dataclass(frozen=True)
class Measured:
    """One problem in one way: for each measure, what was observed. Yes is 1 and no is 0."""

    pattern: str
    way: str
    problem: int
    numbers: Numbers


@dataclass
class Measures:
    """All that was observed, and the settings.

    shares: the measures whose observations are yes or no; of the others the mean is shown.
    """

    settings: dict[str, Any]
    shares: frozenset[str]
    runs: list[Measured] = field(default_factory=list)
    machine: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def of(self, pattern: str, way: str, measure: str) -> list[float]:
        """All observations of a measure, in the order of the problems."""
        runs = [run for run in self.runs if (run.pattern, run.way) == (pattern, way)]
        return [x for run in sorted(runs, key=lambda run: run.problem) for x in run.numbers.get(measure, [])]

    def share(self, pattern: str, way: str, measure: str) -> Share:
        """How many of them are 1."""
        seen = self.of(pattern, way, measure)
        return Share(sum(x == 1 for x in seen), len(seen))

    def table(self, pattern: str) -> Table:
        """A row for each way of one pattern."""
        runs = [run for run in self.runs if run.pattern == pattern]
        measures = list(dict.fromkeys(name for run in runs for name in run.numbers))
        rows = []
        for way in dict.fromkeys(run.way for run in runs):
            cells = [self._cell(pattern, way, measure) for measure in measures]
            rows.append([way, str(sum(run.way == way for run in runs)), *cells])
        return Table.of(["way", "problems", *measures], rows)

    def _cell(self, pattern: str, way: str, measure: str) -> str:
        if measure in self.shares:
            return str(self.share(pattern, way, measure))
        seen = self.of(pattern, way, measure)
        return f"{mean(seen):.1f}" if seen else "–"

    def to_json(self, file: str | os.PathLike[str]) -> Path:
        """Write all of it, whole or not at all. Returns the path."""
        runs = [[run.pattern, run.way, run.problem, dict(run.numbers)] for run in self.runs]
        return write_json(
            file,
            {
                "format": FORMAT,
                "version": VERSION,
                "machine": dict(self.machine),
                "settings": self.settings,
                "shares": sorted(self.shares),
                "runs": runs,
            },
        )

    @staticmethod
    def from_json(file: str | os.PathLike[str]) -> Measures:
        """Read what `to_json` wrote. Raises ValueError for any other file."""

        def build(document: Any) -> Measures:
            runs = [Measured(*run) for run in document["runs"]]
            shares = frozenset(document["shares"])
            return Measures(document["settings"], shares, runs, document.get("machine", {}))

        return read_json(file, FORMAT, VERSION, build, f"holds no measures of patterns, version {VERSION}")

    def __repr__(self) -> str:
        return f"<Measures of {', '.join(dict.fromkeys(run.pattern for run in self.runs))}>"
