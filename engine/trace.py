"""The recording of a run: enough to draw any moment of it without the model. Knows numbers and strings.

A recording is a list of small records, oldest first; `widgets/protocol.js` lists their types and
`reducer` says what they mean. Who makes them is `recording`. It is bounded: the oldest records are
folded into the state that the rest starts from. Recording costs a few small objects a step; texts of
prefilled tokens are decoded when somebody looks.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .ledger import Ledger
from .pieces import TokenTexts
from .reducer import Record, State, apply, empty_state, reduce
from .text import Codec

FORMAT = "asyncllm_nb.trace"
FORMAT_VERSION = 2
GZIP = b"\x1f\x8b"
"""How a compressed file begins."""
MAX_STEPS = 10_000
MAX_WEIGHT = 500_000
"""A record weighs 1, and 1 more for each token of a step; beyond this the oldest are folded."""

RowKind = Literal["decode", "prefill", "probe"]
Ran = Literal["graph", "eager", ""]
"""How a step ran on a GPU: as recorded CUDA graphs, or kernel by kernel. Empty on a CPU."""


@dataclass(slots=True)  # not frozen: setting fields of frozen ones costs more than all the rest of a row
class RowRecord:
    """One request's part of a step. Nothing changes once the step is recorded."""

    name: str
    kind: RowKind
    block: str | None  # written block; None for a probe
    view: tuple[tuple[str, int], ...]  # (block, version read), in the order of the view
    num_tokens: int
    token_ids: tuple[int, ...]
    request: int = 0  # number of the stream (> 0), or of another request (< 0)
    view_ids: tuple[int, ...] = ()  # ids of the view's blocks
    context: int = 0  # tokens that it reads and that were encoded before
    commit: tuple[Any, ...] | None = None  # see `Commit`


Commit = tuple[int] | tuple[int, int, tuple[int, ...]] | tuple[()]
"""What a row's commit made of the written block: its version; if its pages changed, also how many of the
old ones it kept and the new ones behind them. () for a probe, None for a row that did not commit."""


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
    recorded: float = 0.0  # s, when its results were committed
    encoded: int = 0  # the ledger after it
    resent: int = 0
    ran: Ran = ""


class Trace:
    """Records in order, oldest first; `save` writes them to a file."""

    def __init__(
        self,
        model: str,
        codec: Codec | None = None,
        max_steps: int = MAX_STEPS,
        max_weight: int = MAX_WEIGHT,
    ) -> None:
        self.model = model
        self.meta: dict[str, Any] = {"name": model, "model": model}
        self.steps: deque[StepRecord] = deque()
        self.num_steps = 0  # ever recorded
        self.first = 0  # number of the oldest record that is kept
        self.base: State = empty_state()  # the state before it
        self.ledger = Ledger()
        self.token_texts = TokenTexts(codec)
        self.export: Callable[[Trace, Path], Path] | None = None  # how it becomes a page of HTML
        self._records: list[Record | StepRecord] = []
        self._folded = 0  # leading records of the list that are folded and not deleted yet
        self._weight = 0
        self._max_steps, self._max_weight = max_steps, max_weight
        self._began = time.perf_counter()

    # ---- recording ------------------------------------------------------------------------------

    def now(self) -> float:
        """Seconds since the engine was made."""
        return time.perf_counter() - self._began

    def add(self, kind: str, /, **fields: Any) -> None:
        """Record something that is no step. Values: what JSON knows, and bytes."""
        record = {"t": kind, "at": round(self.now(), 4), **fields}
        self._push(record, _weight(record) if "bin" in fields else 1)

    def append(self, step: StepRecord) -> None:
        """Record a step."""
        self.steps.append(step)
        self.num_steps += 1
        self._push(step, _weight(step))

    def _push(self, record: Record | StepRecord, weight: int) -> None:
        self._records.append(record)
        self._weight += weight
        while self._weight > self._max_weight or len(self.steps) > self._max_steps:
            self._fold()

    def _fold(self) -> None:
        """The oldest record becomes part of the base."""
        record = self._records[self._folded]
        apply(self.base, self._plain(record))
        self._weight -= _weight(record)
        if isinstance(record, StepRecord):
            self.steps.popleft()
        self.first += 1
        self._folded += 1
        if self._folded > 4096:  # deleting at the front of a list moves all the rest
            del self._records[: self._folded]
            self._folded = 0

    # ---- reading --------------------------------------------------------------------------------

    @property
    def next(self) -> int:
        """The number that the next record gets."""
        return self.first + len(self._records) - self._folded

    def plain(self, start: int, stop: int | None = None) -> list[Record]:
        """Records `start` to `stop` (None: all there are) as JSON knows them; bytes stay bytes."""
        return [self._plain(record) for record in self._kept(start, stop)]

    def plain_parts(self, start: int, stop: int, size: int) -> Iterator[list[Record]]:
        """The same in parts of `size` records. Recording may go on between two parts."""
        kept = self._kept(start, stop)
        for at in range(0, len(kept), size):
            yield [self._plain(record) for record in kept[at : at + size]]

    def _kept(self, start: int, stop: int | None) -> list[Record | StepRecord]:
        offset = self._folded - self.first
        stop = self.next if stop is None else min(stop, self.next)
        return self._records[max(start, self.first) + offset : stop + offset]

    def base_copy(self) -> State:
        """A copy of the base: it changes when records are folded."""
        copy: State = json.loads(json.dumps(self.base))
        return copy

    def state(self) -> State:
        """The state after all records."""
        return reduce(self.plain(self.first), self.base_copy())

    def _plain(self, record: Record | StepRecord) -> Record:
        return record if isinstance(record, dict) else self._plain_step(record)

    def _plain_step(self, step: StepRecord) -> Record:
        plain: Record = {
            "t": "step",
            "at": round(step.recorded, 4),
            "n": step.number,
            "b": round(step.started, 4),
            "s": round(step.seconds, 5),
            "rows": [self._plain_row(row) for row in step.rows],
            "wait": list(step.waiting),
            "pages": step.pages_free,
            "slots": step.slots_free,
            "err": step.error,
            "encoded": step.encoded,
            "resent": step.resent,
        }
        if step.ran:
            plain["ran"] = step.ran
        return plain

    def _plain_row(self, row: RowRecord) -> Record:
        plain: Record = {
            "r": row.request,
            "k": row.kind,
            "b": row.view_ids[-1] if row.block is not None and row.view_ids else None,
            "n": row.num_tokens,
            "m": row.context,
            "v": [version for _, version in row.view],
            "i": list(row.token_ids),
            "x": self.token_texts.of(row.token_ids),
        }
        if row.commit is not None:
            plain["c"] = [list(c) if isinstance(c, tuple) else c for c in row.commit]
        return plain

    # ---- files ----------------------------------------------------------------------------------

    def document(self) -> dict[str, Any]:
        """All that `save` writes: bytes as base64."""
        records = self.plain(self.first)
        return {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "model": self.model,
            "meta": self.meta,
            "first": self.first,
            "base": self.base,
            "records": [_without_bytes(r) if r.get("bin") else r for r in records],
        }

    def save(self, file: str | os.PathLike[str]) -> Path:
        """Write the recording as JSON, whole or not at all; compressed if the name ends in ".gz".
        Returns the path."""
        path = Path(file)
        data = json.dumps(self.document(), separators=(",", ":")).encode()
        if path.suffix == ".gz":
            data = gzip.compress(data, mtime=0)
        unfinished = path.with_name(f".{path.name}.part")
        try:
            unfinished.write_bytes(data)
            os.replace(unfinished, path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        return path

    def to_html(self, file: str | os.PathLike[str]) -> Path:
        """Write one page that plays the run with its panels, without a kernel or a network. Returns the
        path. Raises RuntimeError outside of `AsyncLLM`, which knows how pages are drawn."""
        if self.export is None:
            raise RuntimeError(
                "this trace belongs to no AsyncLLM: use asyncllm_nb.export.to_html(trace, file)"
            )
        return self.export(self, Path(file))

    @staticmethod
    def load(file: str | os.PathLike[str]) -> Trace:
        """Read what `save` wrote. Raises ValueError for any other file."""
        try:
            data = Path(file).read_bytes()
            document = json.loads(gzip.decompress(data) if data.startswith(GZIP) else data)
            if document["format"] != FORMAT or document["version"] != FORMAT_VERSION:
                raise KeyError("format")
            return Trace._of(document)
        except (KeyError, TypeError, ValueError, EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{file} is not a trace of version {FORMAT_VERSION}") from error

    @staticmethod
    def _of(document: dict[str, Any]) -> Trace:
        trace = Trace(document["model"])
        trace.meta, trace.first, trace.base = (document[k] for k in ("meta", "first", "base"))
        names = _Names(trace.base)
        for record in document["records"]:
            names.learn(record)
            if record["t"] == "step":
                trace.steps.append(names.step(record))
            trace._records.append(_with_bytes(record))
        trace.num_steps = len(trace.steps)
        return trace

    # ---- shown ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self.steps)

    def __repr__(self) -> str:
        return f"<Trace of {self.model}: {self.num_steps} steps, {len(self.steps)} kept>"

    def _repr_html_(self) -> str:
        rows = sum(len(step.rows) for step in self.steps)
        return f"<b>Trace</b> {self.num_steps} steps, {len(self.steps)} kept, {rows} rows"


class _Names:
    """Turns plain steps back into step records: they name blocks and requests by number only."""

    def __init__(self, base: State) -> None:
        self._blocks = {b["id"]: b["name"] for b in base["blocks"].values()}
        self._requests = {r["r"]: r for r in base["requests"].values()}

    def learn(self, record: Record) -> None:
        if record["t"] == "block":
            self._blocks[record["id"]] = record["name"]
        elif record["t"] == "request":
            self._requests[record["r"]] = record

    def step(self, e: Record) -> StepRecord:
        return StepRecord(
            number=e["n"],
            started=e["b"],
            seconds=e["s"],
            rows=tuple(self._row(row) for row in e["rows"]),
            waiting=tuple(e["wait"]),
            pages_free=e["pages"],
            slots_free=e["slots"],
            error=e["err"],
            recorded=e["at"],
            encoded=e["encoded"],
            resent=e["resent"],
            ran=e.get("ran", ""),
        )

    def _row(self, row: Record) -> RowRecord:
        unknown = {"name": "?", "view": [0] * len(row["v"])}  # ended before the oldest record
        request = self._requests.get(row["r"], unknown)
        ids = tuple(request["view"])
        names = [self._blocks.get(number, f"block{number}") for number in ids]
        commit = row.get("c")
        return RowRecord(
            name=request["name"],
            kind=row["k"],
            block=None if row["b"] is None else self._blocks.get(row["b"], f"block{row['b']}"),
            view=tuple(zip(names, row["v"], strict=True)),
            num_tokens=row["n"],
            token_ids=tuple(row["i"]),
            request=row["r"],
            view_ids=ids,
            context=row["m"],
            commit=None if commit is None else tuple(commit),
        )


def _weight(record: Record | StepRecord) -> int:
    if isinstance(record, StepRecord):
        return 1 + sum([row.num_tokens for row in record.rows])
    return 1 + (record.get("bin") or 0) // 64


def _without_bytes(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return {"$base64": base64.b64encode(value).decode("ascii")}
    if isinstance(value, dict):
        return {key: _without_bytes(inner) for key, inner in value.items()}
    return [_without_bytes(inner) for inner in value] if isinstance(value, list | tuple) else value


def _with_bytes(value: Any) -> Any:
    if isinstance(value, dict):
        if "$base64" in value:
            return base64.b64decode(value["$base64"])
        return {key: _with_bytes(inner) for key, inner in value.items()}
    return [_with_bytes(inner) for inner in value] if isinstance(value, list) else value
