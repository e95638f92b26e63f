"""Readings of instruments as records: quantised to a byte, so that a run of thousands of steps stays small.

Knows arrays and plain records (`widgets/protocol.js` lists what is in them). Shares and norms lie
between 0 and 1 and are drawn in a few hundred colours: a byte each is what the eye can use. Averages
over layers and heads, which are drawn as lines, are numbers of four decimals.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .measuring import Floats, Halves, PartReading
from .trace import RowRecord

DETAIL_BYTES = 4096
"""Shares (or norms) of a step that are recorded head by head; with more, heads are averaged first."""

MARK_BYTES = 4 * 2**20
"""Attention to tokens and states that one mark adds to the recording, at most, each."""


@dataclass(frozen=True, slots=True)
class StepReading:
    """What was measured at one step: a reading for each of its rows, in the order of its record."""

    step: int
    rows: tuple[RowRecord, ...]
    parts: tuple[PartReading, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def part(self, name: str) -> PartReading | None:
        """The reading of the row that stream or request `name` had, if it had one."""
        return next((part for row, part in self.named() if row.name == name), None)

    def named(self) -> Iterator[tuple[RowRecord, PartReading]]:
        return zip(self.rows, self.parts, strict=True)

    @property
    def layers(self) -> list[int]:
        """Layers whose states were measured."""
        return sorted({layer for part in self.parts for layer in part.states})


Fields = dict[str, Any]


def shares_fields(reading: StepReading, detail: int = DETAIL_BYTES) -> Fields | None:
    """Of a record "shares": per row the share of attention of each block. None if none was measured."""
    return _tables(reading, [part.shares for part in reading.parts], detail)


def norms_fields(reading: StepReading, detail: int = DETAIL_BYTES) -> Fields | None:
    """Of a record "norms": per row how much of the past each block lets through."""
    return _tables(reading, [part.norms for part in reading.parts], detail)


def weights_fields(reading: StepReading) -> Fields | None:
    """Of a record "weights": per row the attention to each token, in each layer and head."""
    rows = [
        {"r": row.request, "lengths": list(part.lengths), **_weights(part.weights)}
        for row, part in reading.named()
        if part.weights is not None
    ]
    return _record(reading, rows) if rows else None


def states_fields(reading: StepReading, layer: int) -> Fields | None:
    """Of a record "states": per row the blocks' parts of the state of one layer."""
    rows = [
        {"r": row.request, **state_bytes(part.states[layer])}
        for row, part in reading.named()
        if layer in part.states
    ]
    return {**_record(reading, rows), "layer": layer} if rows else None


def state_bytes(state: Floats) -> Fields:
    """[B, H, d_v, d_k] as signed bytes: 127 is `peak` of the head, its largest element in any block."""
    peak = np.abs(state).max(axis=(0, 2, 3))  # [H]
    scale = np.where(peak > 0, peak, 1)[None, :, None, None]
    q = np.rint(state / scale * 127).astype(np.int8)
    return {"shape": list(state.shape), "peak": [_short(p) for p in peak], "q": q.tobytes()}


def _weights(weights: Halves) -> Fields:
    """[L_a, H, tokens] as bytes: 255 is `peak` of the layer and head."""
    exact = weights.astype(np.float32)
    peak = exact.max(axis=-1)  # [L_a, H]
    q = np.rint(exact / np.where(peak > 0, peak, 1)[..., None] * 255).astype(np.uint8)
    layers, heads, _ = weights.shape
    return {
        "layers": layers,
        "heads": heads,
        "peak": [_short(p) for p in peak.flatten()],
        "q": q.tobytes(),
    }


def _tables(reading: StepReading, tables: list[Floats | None], detail: int) -> Fields | None:
    """[layers, blocks, heads] of each row as bytes, and its mean per block."""
    size = sum(table.size for table in tables if table is not None)
    rows = [
        {"r": row.request, **_table(table if size <= detail else table.mean(-1, keepdims=True))}
        for row, table in zip(reading.rows, tables, strict=True)
        if table is not None
    ]
    return _record(reading, rows) if rows else None


def _record(reading: StepReading, rows: list[Fields]) -> Fields:
    """`bin`: that the record holds bytes, and how many."""
    return {"n": reading.step, "bin": sum(len(row["q"]) for row in rows), "rows": rows}


def _table(table: npt.NDArray[np.floating[Any]]) -> Fields:
    layers, _, heads = table.shape
    q = np.rint(table.clip(0, 1) * 255).astype(np.uint8)
    mean = [_short(share) for share in table.mean(axis=(0, 2))]
    return {"layers": layers, "heads": heads, "mean": mean, "q": q.tobytes()}


def _short(value: np.floating[Any] | float) -> float:
    """Four significant digits: what a record has room for."""
    return float(f"{float(value):.4g}")
