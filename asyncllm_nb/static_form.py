"""What is left of a dashboard in a saved notebook: a closed fold with the last picture and tables.

Knows the engine's snapshot and the last steps of its trace. It is the second output of the cell that
shows the dashboard: it needs no kernel, no network and no saved widget state, and its updates do not
touch what a person types into the live one. How a display is kept up to date is `live`'s.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from .dashboard import draw_snapshot
from .engine.trace import RowRecord, StepRecord
from .host import kernel_loop
from .live import LiveHTML, Picture
from .markup import COLOURS, block_label, muted
from .widgets.picture import Raster

if TYPE_CHECKING:
    from .engine.engine import Engine

INTERVAL = 10.0  # s from one update to the next while the engine runs
SETTLE = 0.4  # s of rest after which a pause or an end is drawn

WIDTH, LANE, MAX_LANES = 900, 10, 16  # px of the picture, px and number of its lanes
MAX_STEPS = 300
GREY, RED = len(COLOURS) + 1, len(COLOURS) + 2


class StaticForm:
    """Keeps the static form of an engine's dashboard up to date once it is shown."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self._live: LiveHTML[Engine] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._drawn = -1  # records that the last picture at rest had

    def show(self) -> None:
        """Show it as the next output of the running cell."""
        engine = self._engine()
        if engine is not None:
            live = LiveHTML(engine, draw_static, kind="static", interval=INTERVAL)
            if not live.retired:
                self._live = live
                live.show()

    def notice(self) -> None:
        """Something has changed. On the engine's loop."""
        loop = kernel_loop()
        if self._live is None or loop is None:
            return
        self._live.changed()
        if self._timer is None and self._is_at_rest():
            self._timer = loop.call_later(SETTLE, self._settled)

    def _is_at_rest(self) -> bool:
        engine = self._engine()
        if engine is None:
            return False
        return engine.paused or engine.closed or not (engine.scheduler.streams or engine.scheduler.requests)

    def _settled(self) -> None:
        self._timer = None
        engine = self._engine()
        if engine is None or self._live is None or self._live.retired or not self._is_at_rest():
            return
        if engine.trace.next != self._drawn:
            self._drawn = engine.trace.next
            self._live.flush()


def draw_static(engine: Engine) -> Picture:
    """A closed fold: the line about the engine, the picture of its last steps, tables."""
    from .snapshots import snapshot  # loads torch, which a replay does without

    shown = snapshot(engine)
    tables, text = draw_snapshot(shown)
    ledger = engine.trace.ledger
    facts = f"{ledger.encoded:,} tokens encoded; {ledger.resent:,} if text were passed instead"
    steps = list(engine.trace.steps)[-MAX_STEPS:]
    head = f"Last picture of {shown['name']}, step {shown['step']} · {facts}"
    html = f"<details><summary>{escape(head)}</summary>{_picture(engine, steps)}{tables}</details>"
    return html, f"{head}\n{text}"


def _picture(engine: Engine, steps: Sequence[StepRecord]) -> str:
    if not steps:
        return ""
    lanes = _lanes(steps)
    raster = draw_steps(steps, lanes)
    words = f"Timeline of steps {steps[0].number} to {steps[-1].number}: {', '.join(lanes)}"
    size = f'width="{raster.width}" height="{raster.height}"'
    image = f'<img src="{raster.data_uri()}" alt="{escape(words)}" {size}>'
    marks = {record.id: block_label(record.id, record.name) for record in engine.records.values()}
    written = {row.view_ids[-1] for step in steps for row in step.rows if row.block and row.view_ids}
    legend = " · ".join(marks[number] for number in sorted(written) if number in marks)
    return f"<div>{image}</div><div>{muted('lanes, from the top: ' + ', '.join(lanes))} {legend}</div>"


def _lanes(steps: Sequence[StepRecord]) -> list[str]:
    """Names of requests in the order in which they appear."""
    names = dict.fromkeys(row.name for step in steps for row in step.rows)
    return list(names)[:MAX_LANES]


def draw_steps(steps: Sequence[StepRecord], lanes: Sequence[str]) -> Raster:
    """One column per step, one lane per name: a full cell for a chunk of prefill, a bar for a decode."""
    raster = Raster(WIDTH, max(1, len(lanes)) * LANE, [*COLOURS, "#8A8F96", "#CC3D66"])
    column = min(12.0, WIDTH / max(1, len(steps)))
    for index, step in enumerate(steps):
        if step.error:
            raster.fill(index * column, 0, column, raster.height, RED)
        for row in step.rows:
            if row.name in lanes:
                _fill_row(raster, row, index * column, lanes.index(row.name) * LANE, column)
    return raster


def _fill_row(raster: Raster, row: RowRecord, x: float, y: int, column: float) -> None:
    colour = row.view_ids[-1] % len(COLOURS) + 1 if row.block and row.view_ids else GREY
    width = max(1.0, column - (column > 3))
    if row.kind == "decode":
        raster.fill(x, y + LANE * 0.3, width, LANE * 0.4, colour)
    else:
        raster.fill(x, y + 1, width, LANE - 2, colour)
