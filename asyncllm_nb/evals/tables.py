"""A table that shows in a terminal, in a notebook and in a page of Markdown. Knows strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from .. import markup


@dataclass(frozen=True)
class Table:
    """``print(table)`` is plain text; as a cell's last expression it is HTML."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @staticmethod
    def of(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
        return Table(tuple(columns), tuple(map(tuple, rows)))

    def __str__(self) -> str:
        return markup.text_table(self.columns, self.rows)

    def __repr__(self) -> str:
        return f"<Table of {len(self.rows)} rows: {', '.join(self.columns)}>"

    def _repr_html_(self) -> str:
        return markup.table(self.columns, [[escape(cell) for cell in row] for row in self.rows])

    def markdown(self) -> str:
        """The table as Markdown."""
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
