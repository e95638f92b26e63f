"""What came out of the sharded-input test: per problem, as a table, as JSON and as a curve. Knows numbers
and strings; no model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from typing import Any

from .files import write_json
from .protocol import ROUTINGS, Routing
from .scoring import OUTCOMES, Outcome
from .statistics import Share, mean
from .tables import Table

FORMAT = "asyncllm_nb.evals.sharded"
VERSION = 1


@dataclass(frozen=True)
class Run:
    """One problem under one condition. `k`: tokens that the thinker had made when the correction came; None
    for "never".

    outcome: what the answer counts as. taken_up: is the thinking's own conclusion the answer after?
    arrived: did the correction come before the thinking had ended? ended: did it end by itself?
    passes, first_word, first_answer: forward passes with a row of this run since the problem was encoded,
    until the last word, the writer's first word, and the first one of its answer was drawn.
    """

    case: str
    routing: Routing
    k: int | None
    outcome: Outcome
    taken_up: bool
    arrived: bool
    ended: bool
    tokens: int  # of the thinking
    passes: int
    first_word: int | None
    first_answer: int | None
    answer: str

    @property
    def key(self) -> tuple[str, Routing, int | None]:
        """What tells it from the others of a result."""
        return self.case, self.routing, self.k


COLUMNS = tuple(f.name for f in fields(Run))


@dataclass
class Result:
    """All runs of an evaluation, the settings that they were made with, and, if it is known, the machine."""

    settings: Mapping[str, Any]
    runs: list[Run] = field(default_factory=list)
    machine: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def ks(self) -> list[int]:
        """When the correction came, ascending; "never" aside."""
        return sorted({run.k for run in self.runs if run.k is not None})

    @property
    def routings(self) -> list[Routing]:
        """In the usual order; "never" aside."""
        found = {run.routing for run in self.runs}
        return [routing for routing in ROUTINGS if routing in found]

    def of(self, routing: Routing, k: int | None) -> list[Run]:
        """The runs of one condition. "never" is the same for every routing."""
        routing = "never" if k is None else routing
        return [run for run in self.runs if run.routing == routing and run.k == k]

    def share(self, routing: Routing, k: int | None, outcome: Outcome = "after") -> Share:
        """How many of the runs of one condition had this outcome."""
        runs = self.of(routing, k)
        return Share(sum(run.outcome == outcome for run in runs), len(runs))

    def taken_up(self, routing: Routing, k: int | None) -> Share:
        """In how many of them the thinking itself came to the answer after the correction."""
        runs = self.of(routing, k)
        return Share(sum(run.taken_up for run in runs), len(runs))

    # ---- shown ----------------------------------------------------------------------------------

    def conditions(self) -> list[tuple[Routing, int | None]]:
        """Routing by routing, k ascending; the control last."""
        found = [(routing, k) for routing in self.routings for k in self.ks if self.of(routing, k)]
        return [*found, *([("never", None)] if self.of("never", None) else [])]  # type: ignore[list-item]

    def table(self) -> Table:
        """A row for each condition: what the answers were, and what the thinking made of the correction.

        after, before, neither, unfinished: shares of the answers. taken up: the thinking's own conclusion is
        the answer after. arrived: the correction came before the thinking had ended.
        """
        columns = ["routing", "k", "runs", "after (95 %)", *OUTCOMES[1:], "taken up (95 %)", "arrived"]
        rows = []
        for routing, k in self.conditions():
            runs = self.of(routing, k)
            others = [str(self.share(routing, k, outcome)).split(" (")[0] for outcome in OUTCOMES[1:]]
            arrived = Share(sum(run.arrived for run in runs), len(runs))
            rows.append(
                [
                    routing if k is not None else "–",
                    "never" if k is None else str(k),
                    str(len(runs)),
                    str(self.share(routing, k)),
                    *others,
                    str(self.taken_up(routing, k)),
                    str(arrived).split(" (")[0],
                ]
            )
        return Table.of(columns, rows)

    def work_table(self) -> Table:
        """A row for each condition: means of the thinking's tokens, of forward passes and of delays."""
        columns = ["routing", "k", "tokens thought", "forward passes", "to first word", "to answer"]
        rows = []
        for routing, k in self.conditions():
            runs = self.of(routing, k)
            means = [
                mean([run.tokens for run in runs]),
                mean([run.passes for run in runs]),
                mean([run.first_word for run in runs if run.first_word is not None]),
                mean([run.first_answer for run in runs if run.first_answer is not None]),
            ]
            name = routing if k is not None else "–"
            rows.append([name, "never" if k is None else str(k), *(f"{value:.1f}" for value in means)])
        return Table.of(columns, rows)

    def plot(self) -> Any:
        """The share of answers after the correction, over k, one curve a routing, as a plotly figure.

        Bars are Wilson's 95 % intervals. "never" is the control: there the answer before is the right one,
        and its share is drawn beside.
        """
        import plotly.graph_objects as go

        control = self.share("never", None).of > 0
        places = [str(k) for k in self.ks] + (["never"] if control else [])
        figure = go.Figure()
        curves = (
            ("before the thinking", "circle", 14, 5),
            ("behind the thinking so far", "square", 10, 3),
            ("to the writer only", "diamond", 6, 1.5),
        )  # each thinner than the one below it, for they often lie on one another
        for routing, (name, symbol, size, width) in zip(ROUTINGS, curves, strict=True):
            if routing in self.routings:
                ks: list[int | None] = [*self.ks, *([None] if control else [])]
                shares = [self.share(routing, k) for k in ks]
                curve = _curve(go, name, symbol, places, shares, "lines+markers")
                curve.update(marker_size=size, line_width=width, error_y_thickness=width / 2)
                figure.add_trace(curve)
        if control:
            right = [self.share("never", None, "before")]
            name = "nowhere: the answer before"
            figure.add_trace(_curve(go, name, "x", ["never"], right, "markers"))
        figure.update_layout(
            xaxis={"title": "tokens thought when the correction came", "type": "category"},
            yaxis={"title": "answers after the correction", "tickformat": ".0%", "range": [-0.02, 1.02]},
            legend_title="where the correction went",
            margin={"t": 30},
            template="none",
        )
        figure.update_xaxes(categoryorder="array", categoryarray=places)
        return figure

    def __repr__(self) -> str:
        return f"<Result of {len(self.runs)} runs, {len(self.conditions())} conditions>"

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    # ---- files ----------------------------------------------------------------------------------

    def document(self) -> dict[str, Any]:
        """All of it, as JSON knows it."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "machine": dict(self.machine),
            "settings": dict(self.settings),
            "columns": list(COLUMNS),
            "runs": [list(astuple(run)) for run in self.runs],
        }

    @staticmethod
    def of_document(document: Any) -> Result:
        """What `document` gave. Raises ValueError for anything else."""
        try:
            if document["format"] != FORMAT or document["version"] != VERSION:
                raise KeyError("format")
            names = document["columns"]
            runs = [Run(**dict(zip(names, row, strict=True))) for row in document["runs"]]
            return Result(document["settings"], runs, document.get("machine", {}))
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is no result of the sharded-input test, version {VERSION}") from error

    def to_json(self, file: str | os.PathLike[str]) -> Path:
        """Write all of it, whole or not at all. Returns the path."""
        return write_json(file, self.document())

    @staticmethod
    def from_json(file: str | os.PathLike[str]) -> Result:
        """Read what `to_json` wrote. Raises ValueError for any other file."""
        try:
            return Result.of_document(json.loads(Path(file).read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{file} cannot be read: {error}") from error


def differing(result: Result, other: Result) -> dict[tuple[Routing, int | None], list[str]]:
    """For each condition that both have, the problems whose outcomes differ.

    Raises ValueError if a condition has other problems in one than in the other.
    """
    found = {}
    for routing, k in result.conditions():
        here, there = (_outcomes(r.of(routing, k)) for r in (result, other))
        if not there:
            continue
        if here.keys() != there.keys():
            raise ValueError(f"the results have different problems at {routing}, k={k}")
        found[routing, k] = [case for case, outcome in here.items() if there[case] != outcome]
    return found


def _outcomes(runs: Iterable[Run]) -> dict[str, Outcome]:
    return {run.case: run.outcome for run in runs}


def _curve(go: Any, name: str, symbol: str, x: Sequence[str], shares: Sequence[Share], mode: str) -> Any:
    values = [share.value for share in shares]
    bars = [share.interval for share in shares]
    return go.Scatter(
        name=name,
        x=x,
        y=values,
        mode=mode,
        marker={"symbol": symbol, "size": 9},
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [high - value for (_, high), value in zip(bars, values, strict=True)],
            "arrayminus": [value - low for (low, _), value in zip(bars, values, strict=True)],
        },
        text=[str(share) for share in shares],
        hovertemplate="%{x}: %{text}<extra>%{fullData.name}</extra>",
    )
