"""The block diagram of a run: who reads which blocks, in order, and writes which, drawn from live views.

Knows the recording of an engine (its steps), its live blocks and streams, and agents' blocks. The picture
is an SVG image in an ``<img>``: JupyterLab drops a bare ``<svg>`` in a notebook that it does not trust. An
image cannot know the page's theme, so all its text stands in filled shapes that look right on both.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from .markup import block_colour, block_mark, muted

if TYPE_CHECKING:
    from .agent import Agent
    from .llm import AsyncLLM

GREY = "#59636E"
"""Of the labels of rows; white text on it has a contrast of 6."""

SIZE, HIGH, APART, ROW = 13, 26, 8, 38  # px: of the text, of a shape, between shapes, from row to row
LETTER = 8.2  # px; wide enough for the fonts that browsers take


@dataclass(frozen=True)
class Row:
    """Who reads, what, and whether it writes the last block. Blocks are (id, name)."""

    name: str
    view: tuple[tuple[int, str], ...]
    writes: bool

    @property
    def words(self) -> str:
        """The row as people read it."""
        names = [name for _, name in self.view]
        if not self.writes:
            return f"{self.name} reads {', '.join(names)} and writes nothing"
        read = f"reads {', '.join(names[:-1])} and " if names[1:] else ""
        return f"{self.name} {read}writes {names[-1]}"


@dataclass(frozen=True)
class Diagram:
    """Views as rows, in the order in which they were first seen. As a cell's last expression it is drawn."""

    title: str
    rows: tuple[Row, ...]

    @property
    def text(self) -> str:
        """What the picture shows, in words."""
        return "\n".join(row.words for row in self.rows) or "no view has been read yet"

    @property
    def svg(self) -> str:
        """The picture, as the text of an SVG file."""
        return _draw(self.rows)

    def __repr__(self) -> str:
        return f"{self.title}\n{self.text}"

    def _repr_html_(self) -> str:
        if not self.rows:
            return f"<div><b>{escape(self.title)}</b> {muted(self.text)}</div>"
        data = base64.b64encode(self.svg.encode()).decode("ascii")
        words = escape(self.text.replace("\n", "; "))
        image = f'<img src="data:image/svg+xml;base64,{data}" alt="{words}" style="max-width:100%">'
        legend = "each row reads its blocks from left to right, and writes the one with a frame around it"
        return f"<div><b>{escape(self.title)}</b></div><div>{image}</div><div>{muted(legend)}</div>"


def diagram(shown: AsyncLLM | Agent) -> Diagram:
    """The block diagram of an engine, or of the blocks of an agent, as its views are now.

    Each coroutine's stream is a row with the view that it has (or had last); so is each probe, forward and
    replace, by its kind. Views with a freed block are left out.

    Raises TypeError for anything else.
    """
    from .agent import Agent
    from .llm import AsyncLLM

    if isinstance(shown, Agent):
        mine = {block.id for block in shown.blocks.values()}
        return Diagram(f"Blocks of agent {shown.name}", _rows(shown.llm, mine))
    if isinstance(shown, AsyncLLM):
        return Diagram(f"Blocks of {shown._engine.name}", _rows(shown, None))
    raise TypeError(f"diagram draws an AsyncLLM or an Agent, not {type(shown).__name__}")


def _rows(llm: AsyncLLM, mine: set[int] | None) -> tuple[Row, ...]:
    """Rows of live views. `mine`: ids of the blocks whose writers, or last blocks, count; None: all."""
    found: dict[Any, Row] = {}
    live = {block.id: block.name for block in llm.blocks.values()}

    def see(name: str, streams: bool, ids: Sequence[int], writes: bool) -> None:
        if not ids or (mine is not None and ids[-1] not in mine):
            return
        # A stream's view is its newest; other requests are nobody's, and told apart by their views.
        key = name if streams else (name, tuple(ids))
        found[key] = Row(name, tuple((number, live.get(number, "")) for number in ids), writes)

    for step in llm.trace.steps:
        for row in step.rows:
            see(row.name, row.request > 0, row.view_ids, row.block is not None)
    for stream in llm._engine.scheduler.streams:  # those that have not run yet, too
        see(stream.name or "stream", True, stream.view_ids, True)
    return tuple(row for row in found.values() if all(number in live for number, _ in row.view))


def _draw(rows: Iterable[Row]) -> str:
    rows = list(rows)
    left = max((_width(row.name) for row in rows), default=0.0) + 3 * APART
    shapes: list[str] = []
    right = left
    for index, row in enumerate(rows):
        x, y = left, index * ROW + (ROW - HIGH) / 2
        shapes.append(_shape(0, y, row.name, GREY, HIGH / 2))
        for place, (number, name) in enumerate(row.view):
            written = row.writes and place == len(row.view) - 1
            label = f"{block_mark(number)} {name}"
            x += 4 * written
            shapes.append(_shape(x, y, label, block_colour(number), 3))
            if written:
                frame = f'x="{x - 4:g}" y="{y - 4:g}" width="{_width(label) + 8:g}" height="{HIGH + 8}"'
                colour = block_colour(number)
                shapes.append(f'<rect {frame} rx="6" fill="none" stroke="{colour}" stroke-width="2"/>')
            x += _width(label) + APART
        right = max(right, x)
    size = f'width="{right:g}" height="{len(rows) * ROW}" viewBox="0 0 {right:g} {len(rows) * ROW}"'
    font = f'font-family="system-ui, sans-serif" font-size="{SIZE}" font-weight="600"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>{"".join(shapes)}</svg>'


def _shape(x: float, y: float, label: str, colour: str, corner: float) -> str:
    width = _width(label)
    box = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{HIGH}" rx="{corner:g}" fill="{colour}"/>'
    place = f'x="{x + width / 2:g}" y="{y + HIGH / 2 + SIZE * 0.36:g}" text-anchor="middle"'
    return f'{box}<text {place} fill="#FFFFFF">{escape(label)}</text>'


def _width(label: str) -> float:
    return round(len(label) * LETTER + 16, 1)
