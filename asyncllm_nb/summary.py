"""A run at a glance: throughput, latency and pool use, as a plotly figure and as a table.

Knows step records and plotly, which it loads when a figure is drawn. Knows no engine. The figure is for
afterwards: what follows a run live is the dashboard.

A saved notebook that is opened or exported without plotly's renderer shows the table instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from .engine.trace import StepRecord
from .markup import COLOURS, muted, table, text_table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

BINS = 60
"""Intervals of time that throughput is counted in, at most."""

KINDS = {"decode": "generated", "prefill": "read in", "probe": "probed"}
"""What a row's tokens are called, by its kind."""

MILLISECONDS = 1000.0


@dataclass(frozen=True)
class RunSummary:
    """What the steps of a run amount to. `pages` and `slots` are the sizes of the pools, if known.

    As a cell's last expression it shows the figure; `figure` is that figure, to be changed at will.
    """

    steps: tuple[StepRecord, ...]
    pages: int = 0
    slots: int = 0

    @property
    def good(self) -> list[StepRecord]:
        """Steps that did not fail."""
        return [step for step in self.steps if not step.error]

    @property
    def seconds(self) -> float:
        """From the beginning of the first step to the end of the last, s."""
        if not self.steps:
            return 0.0
        return self.steps[-1].started + self.steps[-1].seconds - self.steps[0].started

    def tokens(self, kind: str) -> int:
        """Tokens of all rows of a kind: decode, prefill or probe."""
        return sum(row.num_tokens for step in self.good for row in step.rows if row.kind == kind)

    @property
    def step_times(self) -> list[float]:
        """Of each step, s."""
        return [step.seconds for step in self.good]

    @property
    def token_gaps(self) -> list[float]:
        """Between the ends of two consecutive steps that encoded a token of the same stream, s."""
        last: dict[str, float] = {}
        gaps = []
        for step in self.good:
            end = step.started + step.seconds
            for row in step.rows:
                if row.kind == "decode":
                    if row.name in last:
                        gaps.append(end - last[row.name])
                    last[row.name] = end
        return gaps

    def facts(self) -> list[tuple[str, str]]:
        """The run in words and numbers."""
        failed = len(self.steps) - len(self.good)
        rate = self.tokens("decode") / self.seconds if self.seconds else 0.0
        facts = [
            ("steps", f"{len(self.steps):,}" + (f", {failed} of them failed" if failed else "")),
            ("time", f"{self.seconds:.2f} s"),
            *((f"tokens {word}", f"{self.tokens(kind):,}") for kind, word in KINDS.items()),
            ("tokens generated per second", f"{rate:.1f}"),
            ("a step takes", _spread(self.step_times)),
            ("between two tokens of a stream", _spread(self.token_gaps)),
        ]
        for name, size, free in self._pools():
            used = f"{max((size - f for f in free), default=0):,} of {size:,}"
            facts.append((f"{name} in use, at most", used))
        return facts

    def _pools(self) -> list[tuple[str, int, list[int]]]:
        """Name, size and free numbers of each pool whose size is known."""
        pools = [
            ("pages", self.pages, [step.pages_free for step in self.steps]),
            ("slots", self.slots, [step.slots_free for step in self.steps]),
        ]
        return [pool for pool in pools if pool[1]]

    @cached_property
    def figure(self) -> Figure:
        """Three plots over the same time: tokens per second, milliseconds, share of the pools in use."""
        from plotly.subplots import make_subplots

        titles = ("tokens per second", "milliseconds", "in use")
        figure = make_subplots(rows=3, cols=1, shared_xaxes=True, vertical_spacing=0.08)
        for row, (title, traces) in enumerate(
            zip(titles, (self._throughput(), self._latency(), self._use()), strict=True), start=1
        ):
            for trace in traces:
                figure.add_trace(trace, row=row, col=1)
            figure.update_yaxes(title_text=title, rangemode="tozero", row=row, col=1)
        figure.update_yaxes(tickformat=".0%", row=3, col=1)
        figure.update_xaxes(title_text="seconds since the engine was made", row=3, col=1)
        figure.update_layout(height=540, margin={"t": 20, "r": 10, "b": 40, "l": 60}, bargap=0.05)
        figure.update_layout(barmode="stack", hovermode="x unified", legend={"orientation": "h"})
        return figure

    def _throughput(self) -> list[Any]:
        from plotly.graph_objects import Bar

        edges = self._edges()
        if edges is None:
            return []
        centres, width = (edges[:-1] + edges[1:]) / 2, edges[1] - edges[0]
        ends = [step.started + step.seconds for step in self.good]
        bars = []
        for (kind, word), colour in zip(KINDS.items(), COLOURS, strict=False):
            counts = [sum(r.num_tokens for r in step.rows if r.kind == kind) for step in self.good]
            rates, _ = np.histogram(ends, edges, weights=counts)
            if rates.any():
                bars.append(Bar(x=centres, y=rates / width, name=word, marker_color=colour))
        return bars

    def _edges(self) -> np.ndarray[Any, np.dtype[np.float64]] | None:
        """Borders of the intervals that throughput is counted in."""
        if not self.good or self.seconds <= 0:
            return None
        first = self.steps[0].started
        return np.linspace(first, first + self.seconds, min(BINS, len(self.steps)) + 1)

    def _latency(self) -> list[Any]:
        from plotly.graph_objects import Scatter

        return [
            Scatter(
                x=[step.started for step in self.good],
                y=[seconds * MILLISECONDS for seconds in self.step_times],
                mode="markers",
                marker={"size": 4, "color": COLOURS[3]},
                name="a step",
            )
        ]

    def _use(self) -> list[Any]:
        from plotly.graph_objects import Scatter

        started = [step.started for step in self.steps]
        return [
            Scatter(
                x=started,
                y=[1 - number / size for number in free],
                mode="lines",
                line={"shape": "hv", "color": colour, "dash": dash},
                name=name,
            )
            for (name, size, free), colour, dash in zip(
                self._pools(), COLOURS[4:], ("solid", "dot"), strict=False
            )
        ]

    def __repr__(self) -> str:
        return f"<RunSummary of {len(self.steps)} steps in {self.seconds:.2f} s>"

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        """The figure for hosts that draw plotly's, the table for all others, and plain text."""
        facts = self.facts()
        html = table(("the run", ""), [[muted(name), value] for name, value in facts])
        return {
            "application/vnd.plotly.v1+json": json.loads(self.figure.to_json()),
            "text/html": html,
            "text/plain": text_table(("the run", ""), facts),
        }


def summarise(steps: Iterable[StepRecord], *, pages: int = 0, slots: int = 0) -> RunSummary:
    """What `steps` amount to; `pages` and `slots`: sizes of the pools, for their use."""
    return RunSummary(tuple(steps), pages, slots)


def _spread(seconds: Sequence[float]) -> str:
    """Median and 95th percentile of times in s, in ms."""
    if not seconds:
        return "–"
    middle, most = np.percentile(seconds, [50, 95]) * MILLISECONDS
    return f"{middle:.1f} ms, 95 % within {most:.1f} ms"
