"""A run as one page of HTML that plays it with its panels: no kernel, no network, nothing to install.

Knows traces as documents, and the code of the widgets as text. The page holds that code, the style sheet
and the compressed recording; a policy in it forbids it to load anything.

Readings of instruments are what makes a recording large. If a page would get too large, they are thinned
out: first heads are averaged, then attention to tokens and states are left out, the oldest first.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import tempfile
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from .engine.trace import Trace
from .widgets.bundle import bundle, style

PANELS = ("scrubber", "ledger", "streams", "agents", "views", "blocks", "timeline", "attention", "states")
LIMIT = 1_800_000
"""Bytes of a page beyond which readings are thinned out."""

Record = dict[str, Any]

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ margin: 12px; font-family: system-ui, sans-serif; }}
{style}
</style>
</head>
<body>
<noscript>This page draws a run of several coroutines with JavaScript, which is switched off.</noscript>
<main id="run"></main>
<script type="application/octet-stream" id="recording">{recording}</script>
<script type="module">
{code}
showPage(document.getElementById("run"), document.getElementById("recording"), {panels});
</script>
</body>
</html>
"""

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"


def to_html(trace: Trace, file: str | os.PathLike[str]) -> Path:
    """Write the page of `trace` to `file`, whole or not at all. Returns the path.

    1,000 steps of a few streams take less than 2 MB.
    """
    path = Path(file)
    document = replay_document(trace)
    code = bundle("page", PANELS).replace("export default async function", "async function")
    assert "</script" not in code.lower()
    head = PAGE.format(
        policy=escape(POLICY),
        title=escape(f"A run of {Path(trace.model).name}"),
        style=style(),
        recording="{recording}",
        code="{code}",
        panels=json.dumps(_panels_of(document)),
    )
    room = LIMIT - len(head) - len(code)
    page = head.replace("{recording}", _fitting(document, room), 1).replace("{code}", code, 1)
    _write_whole(path, page)
    return path


def replay_document(trace: Trace) -> dict[str, Any]:
    """What a page plays, and a replay in a notebook: the trace's document, said to be a replay."""
    document = trace.document()
    records = document["records"]
    meta = {**document["meta"], "replay": True, "records": document["first"] + len(records)}
    return {**document, "meta": meta}


def _panels_of(document: dict[str, Any]) -> list[str]:
    """All panels but those that have nothing to show."""
    meta, base = document["meta"], document["base"]
    kinds = {record["t"] for record in document["records"]}
    empty = {
        "agents": not (base.get("agents") or base.get("calls") or {"agent", "tool"} & kinds),
        "attention": "shares" not in kinds,
        "states": not meta.get("linear_layers") or not {"norms", "states"} & kinds,
    }
    return [panel for panel in PANELS if not empty.get(panel)]


def _fitting(document: dict[str, Any], room: int) -> str:
    """The recording, compressed, thinned out until it has room."""
    packed = ""
    for records in _ever_thinner(document["records"]):
        packed = _packed({**document, "records": records})
        if len(packed) <= room:
            break
    return packed


def _ever_thinner(records: list[Record]) -> Iterator[list[Record]]:
    """The records; then with averaged heads; then with ever fewer readings of single tokens and states.
    Their number never changes: views count them."""
    yield records
    records = [_averaged(r) if r["t"] in ("shares", "norms") else r for r in records]
    yield records
    large = [i for i, r in enumerate(records) if r["t"] in ("weights", "states")]
    for count in sorted({len(large) // 2, len(large) * 3 // 4, len(large)} - {0}):
        dropped = set(large[:count])
        yield [_left_out(r) if i in dropped else r for i, r in enumerate(records)]


def _averaged(record: Record) -> Record:
    """The same shares or norms, as one layer and one head: their means."""

    def average(row: Record) -> Record:
        q = bytes(round(255 * min(1.0, mean)) for mean in row["mean"])
        return {**row, "layers": 1, "heads": 1, "q": {"$base64": base64.b64encode(q).decode()}}

    return {**record, "rows": [average(row) for row in record["rows"]]}


def _left_out(record: Record) -> Record:
    return {**record, "bin": 0, "rows": []}


def _packed(document: dict[str, Any]) -> str:
    plain = json.dumps(document, separators=(",", ":")).encode()
    return base64.b64encode(gzip.compress(plain, mtime=0)).decode("ascii")


def _write_whole(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
