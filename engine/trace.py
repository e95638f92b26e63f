"""The record of every step: enough to draw a run again without the model. Knows numbers and strings.

Bounded: the oldest steps fall out. Recording costs a few small objects a step; nothing is decoded.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from .text import Codec

FORMAT = "asyncllm_nb.trace"
FORMAT_VERSION = 1
MAX_STEPS = 20_000

RowKind = Literal["decode", "prefill", "probe"]


@dataclass(frozen=True, slots=True)
class RowRecord:
    """One request's part of a step."""

    name: str
    kind: RowKind
    block: str | None  # written block; None for a probe
    view: tuple[tuple[str, int], ...]  # (block, version read), in the order of the view
    num_tokens: int
    token_ids: tuple[int, ...]
    text: str = ""  # of a saved trace; decoded when it is saved


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One forward pass: its batch, when it began (seconds since the engine was made) and its times."""

    number: int
    started: float  # s
    seconds: float  # s, on the worker thread
    rows: tuple[RowRecord, ...]
    waiting: tuple[str, ...]  # requests and streams that wait for memory
    pages_free: int
    slots_free: int
    error: str = ""


class Trace:
    """Steps in order, oldest first; `save` writes them to a file."""

    def __init__(
        self, model: str, codec: Codec | None = None, max_steps: int = MAX_STEPS
    ) -> None:
        self.model = model
        self._codec = codec
        self.steps: deque[StepRecord] = deque(maxlen=max_steps)
        self.num_steps = 0  # ever recorded

    def append(self, step: StepRecord) -> None:
        self.steps.append(step)
        self.num_steps += 1

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self.steps)

    def save(self, file: str | os.PathLike[str]) -> Path:
        """Write all recorded steps as JSON, whole or not at all. Returns the path."""
        path = Path(file)
        document = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "model": self.model,
            "steps": [self._with_texts(step) for step in self.steps],
        }
        handle, temporary = tempfile.mkstemp(dir=path.parent or ".", prefix=path.name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                json.dump(document, stream, separators=(",", ":"))
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        return path

    def _with_texts(self, step: StepRecord) -> dict[str, object]:
        """A step as a plain dictionary; texts are decoded only now."""
        plain = asdict(step)
        if self._codec is not None:
            for row in plain["rows"]:
                row["text"] = self._codec.decode_whole(row["token_ids"])
        return plain

    @staticmethod
    def load(file: str | os.PathLike[str]) -> Trace:
        """Read what `save` wrote. Raises ValueError for any other file."""
        try:
            document = json.loads(Path(file).read_text(encoding="utf-8"))
            if document["format"] != FORMAT or document["version"] != FORMAT_VERSION:
                raise KeyError("format")
            trace = Trace(document["model"])
            for step in document["steps"]:
                rows = tuple(_row(row) for row in step.pop("rows"))
                trace.append(
                    StepRecord(**{**step, "rows": rows, "waiting": tuple(step["waiting"])})
                )
        except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{file} is not a trace of version {FORMAT_VERSION}") from error
        return trace

    def __repr__(self) -> str:
        return f"<Trace of {self.model}: {self.num_steps} steps, {len(self.steps)} kept>"

    def _repr_html_(self) -> str:
        rows = sum(len(step.rows) for step in self.steps)
        return f"<b>Trace</b> {self.num_steps} steps, {len(self.steps)} kept, {rows} rows"


def _row(row: dict[str, Any]) -> RowRecord:
    view = tuple((str(name), int(version)) for name, version in row.pop("view"))
    ids = tuple(int(i) for i in row.pop("token_ids"))
    return RowRecord(view=view, token_ids=ids, **row)
