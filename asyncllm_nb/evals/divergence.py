"""How far next-token distributions are from those of a fresh encoding: records, summaries, tables and files.

Knows numbers and names. Knows no model; what is compared, and how, is `approximation`'s.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from .files import write_json
from .tables import Table

VARIANTS = {
    "as is": "the shared blocks",
    "recomputed": "the same with boundary='recomputed'",
    "attention": "keys and values of the shared blocks, Gated DeltaNet states of the fresh ones",
    "states": "Gated DeltaNet states of the shared blocks, keys and values of the fresh ones",
    "states recomputed": "the same with boundary='recomputed'",
    "one block": "a fresh encoding in one block: what rounding alone makes",
}
"""What is compared with a fresh encoding that has the same blocks."""


@dataclass(frozen=True)
class Divergence:
    """One scene of one problem, in one variant: over `positions` of a continuation."""

    problem: int
    scene: str
    variant: str
    positions: int
    total: float  # sum of the divergences, nats
    worst: float  # the largest, nats
    changed: int  # positions whose most probable token is another one


@dataclass(frozen=True)
class Summary:
    """The divergences of one scene and variant, over all problems."""

    problems: int
    positions: int
    mean: float  # nats, over all positions
    error: float  # standard error of the mean, from the problems' own means; NaN of one problem
    worst: float
    changed: float  # share of positions


@dataclass
class Result:
    """What was measured."""

    settings: dict[str, Any]
    runs: list[Divergence] = field(default_factory=list)
    machine: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def summary(self, scene: str, variant: str) -> Summary | None:
        """None if there is no such run."""
        runs = [run for run in self.runs if (run.scene, run.variant) == (scene, variant)]
        if not runs:
            return None
        positions = sum(run.positions for run in runs)
        means = [run.total / run.positions for run in runs]
        middle = math.fsum(means) / len(means)
        spread = math.fsum((mean - middle) ** 2 for mean in means)
        return Summary(
            problems=len(runs),
            positions=positions,
            mean=math.fsum(run.total for run in runs) / positions,
            error=math.sqrt(spread / (len(runs) - 1) / len(runs)) if len(runs) > 1 else math.nan,
            worst=max(run.worst for run in runs),
            changed=sum(run.changed for run in runs) / positions,
        )

    @property
    def scenes(self) -> list[str]:
        """Names of the scenes, in the order of their first runs."""
        return list(dict.fromkeys(run.scene for run in self.runs))

    def table(self) -> Table:
        """A line for each scene and variant."""
        columns = ("view", "compared with a fresh encoding", "mean KL", "±", "worst KL", "other token")
        rows = []
        for scene in self.scenes:
            for variant in VARIANTS:
                if found := self.summary(scene, variant):
                    numbers = (_nats(found.mean), _nats(found.error), _nats(found.worst))
                    rows.append((scene, variant, *numbers, f"{100 * found.changed:.1f} %"))
        return Table.of(columns, rows)

    def overview(self) -> Table:
        """A line for each scene: the mean divergence of each variant, and the worst in brackets."""
        variants = [name for name in VARIANTS if any(run.variant == name for run in self.runs)]
        rows = []
        for scene in self.scenes:
            found = [self.summary(scene, variant) for variant in variants]
            cells = [f"{_nats(one.mean)} ({_nats(one.worst)})" if one else "–" for one in found]
            rows.append((scene, *cells))
        return Table.of(("view", *variants), rows)

    def to_json(self, file: str | os.PathLike[str]) -> Path:
        """Write everything, with the summaries for those who read it with other tools."""
        summaries: dict[str, dict[str, Any]] = {}
        for scene in self.scenes:
            for variant in VARIANTS:
                if found := self.summary(scene, variant):
                    numbers = [None if number != number else number for number in asdict(found).values()]
                    summaries.setdefault(scene, {})[variant] = numbers
        columns = [[item.name for item in fields(kind)] for kind in (Summary, Divergence)]
        document = {
            "machine": dict(self.machine),
            "settings": self.settings,
            "variants": VARIANTS,
            "summary_columns": columns[0],
            "summaries": summaries,
            "run_columns": columns[1],
            "runs": [list(asdict(run).values()) for run in self.runs],
        }
        return write_json(file, document)

    @classmethod
    def from_json(cls, file: str | os.PathLike[str]) -> Self:
        """Read what `to_json` wrote."""
        document = json.loads(Path(file).read_text(encoding="utf-8"))
        runs = [Divergence(*run) for run in document["runs"]]
        return cls(document["settings"], runs, document.get("machine", {}))


def _nats(value: float) -> str:
    """Two digits, however small."""
    if math.isnan(value):
        return "–"
    if value >= 10:
        return f"{value:.0f}"
    return f"{value:#.2g}" if value >= 1e-3 else f"{value:.0e}"
