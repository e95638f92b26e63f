"""Colours, marks and HTML pieces that blocks and streams share wherever they are drawn.

Knows strings and numbers only: no engine, no IPython. What it writes has to look right in three
places: a light page, a dark page, and a notebook that JupyterLab does not trust, whose sanitizer
drops ``<svg>``, ``<style>``, ARIA attributes, ``var(...)`` and ``inherit``. So text keeps the
page's own colour, lines and grounds are half transparent greys, and colour is never the only sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

COLOURS = (
    "#0072B2",
    "#D55E00",
    "#00875F",
    "#A3539B",
    "#A87400",
    "#6A6FD8",
    "#CC3D66",
    "#767C86",
)
"""Of blocks, by id. Each has a contrast of at least 3 to white and to near-black."""

MARKS = ("●", "■", "▲", "◆", "★", "✚", "▼")
"""Shapes of blocks, by id. Colours and shapes together tell 56 neighbouring blocks apart."""

LINE = "1px solid rgba(127,127,127,0.35)"
GROUND = "rgba(127,127,127,0.18)"


def block_colour(block_id: int) -> str:
    """The colour of a block, as #RRGGBB, the same wherever it is shown."""
    return COLOURS[block_id % len(COLOURS)]


def block_mark(block_id: int) -> str:
    """The shape of a block: what tells it apart without colour."""
    return MARKS[block_id % len(MARKS)]


def block_label(block_id: int, name: str) -> str:
    """HTML of a block's mark in its colour, and its name."""
    colour, mark = block_colour(block_id), block_mark(block_id)
    sign = f'<span style="color:{colour}" title="block {block_id}">{mark}</span>'
    return f'<span style="white-space:nowrap">{sign} {escape(name)}</span>'


def muted(text: str) -> str:
    """HTML of less important text."""
    return f'<span style="opacity:0.7">{escape(text)}</span>'


def bar(share: float, colour: str) -> str:
    """HTML of a small bar that is filled by `share` (0 to 1), with the number in per cent."""
    filled = f"display:inline-block;width:{share:.1%};height:0.7em;background:{colour}"
    frame = f"display:inline-block;width:5em;height:0.7em;background:{GROUND};text-align:left"
    drawn = f'<span style="{frame}"><span style="{filled}"></span></span>'
    return f'<span style="white-space:nowrap">{drawn} {share:.1%}</span>'


def code(text: str) -> str:
    """HTML of a short piece of text, its line breaks shown as signs."""
    visible = escape(text.replace("\n", "⏎"))
    return f'<span style="font-family:monospace;white-space:pre-wrap">{visible}</span>'


def text_box(text: str, colour: str) -> str:
    """HTML of a longer text with its line breaks, at a coloured rule."""
    return f'<div style="{_box(colour)}">{escape(text) or "&nbsp;"}</div>'


def _box(colour: str) -> str:
    rule = f"border-left:4px solid {colour}"
    return f"white-space:pre-wrap;{rule};padding:2px 0 2px 10px;margin:4px 0"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[int] = ()) -> str:
    """An HTML table: `columns` are plain text, the cells of `rows` HTML. `numeric`: indices of
    columns that align right."""
    sides = ["right" if index in numeric else "left" for index in range(len(columns))]
    style = f"padding:2px 10px 2px 0;vertical-align:top;border-bottom:{LINE}"
    head = "".join(
        f'<th style="{style};text-align:{side}">{escape(column)}</th>'
        for column, side in zip(columns, sides, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<td style="{style};text-align:{side}">{cell}</td>'
            for cell, side in zip(row, sides, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    outer = "border-collapse:collapse;margin:4px 0 8px 0"
    return f'<table style="{outer}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same as aligned plain text."""
    lines = [list(columns), *(list(row) for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def tail(text: str, length: int) -> str:
    """The end of `text`, at most `length` characters, with a sign where something was left out."""
    return text if len(text) <= length else "…" + text[1 - length :]


def error_box(error: BaseException) -> str:
    """HTML of an exception, for displays that have no cell to raise it in."""
    message = escape(f"{type(error).__name__}: {error}")
    return f'<div style="{_box("#CC3D66")}"><b>Error</b> {message}</div>'
