"""`dashboard(llm)`: a live table of an engine's blocks and streams.

Knows the plain dictionary that ``llm.snapshot()`` returns, and that ``llm.observe`` calls back
after each change. Knows nothing of the engine itself.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any, Protocol, runtime_checkable

from .live import LiveHTML, Picture
from .markup import bar, block_colour, block_label, code, muted, table, tail, text_table

INTERVAL = 0.15  # s between two pictures; each decodes the ends of all blocks

BLOCK_TAIL, STREAM_TAIL = 240, 90
"""Characters of a text's end in a row."""

Snapshot = dict[str, Any]


@runtime_checkable
class Observable(Protocol):
    """What is shown: an `AsyncLLM`, or anything that can be looked at like one."""

    def snapshot(self) -> Snapshot: ...

    def observe(self, callback: Callable[[], None]) -> Callable[[], None]: ...


def dashboard(llm: Observable) -> None:
    """Show the blocks and streams of `llm` as the cell's output, and keep them up to date.

    Showing it again, or running the cell again, replaces the earlier one. A saved notebook keeps
    the last picture. Outside a notebook it does nothing.
    """
    live = LiveHTML(llm, _draw_dashboard, kind="dashboard", interval=INTERVAL)
    if not live.retired:  # as it is from the start where there is no kernel
        live.on_retire(llm.observe(live.changed))
        live.show()


def _draw_dashboard(llm: Observable) -> Picture:
    return draw_snapshot(llm.snapshot())


def draw_snapshot(snapshot: Snapshot) -> Picture:
    """The picture of a snapshot: a line about the engine, a table of blocks, a table of streams."""
    html = blocks_html(snapshot)
    if snapshot["streams"]:
        marks = {b["name"]: block_label(b["id"], b["name"]) for b in snapshot["blocks"]}
        rows = [_stream_row(stream, marks) for stream in snapshot["streams"]]
        html += table(STREAM_COLUMNS, rows, numeric=(2,))
    return html, _plain(snapshot)


def blocks_html(snapshot: Snapshot) -> str:
    """HTML of the line about the engine and of the table of blocks: an engine's ``_repr_html_``."""
    html = f"<div>{_head(snapshot)}</div>"
    if snapshot["blocks"]:
        rows = [_block_row(block, snapshot["pools"]) for block in snapshot["blocks"]]
        html += table(BLOCK_COLUMNS, rows, numeric=(1, 2, 3))
    return html


def _head(snapshot: Snapshot) -> str:
    facts = muted(f"· {snapshot['model']} · {' · '.join(_facts(snapshot))}")
    return f"<b>{escape(snapshot['name'])}</b> {facts}"


def _facts(snapshot: Snapshot) -> list[str]:
    pools = snapshot["pools"]
    used = pools["pages_total"] - pools["pages_free"]
    facts = [
        _state(snapshot),
        f"step {snapshot['step']}",
        f"{used} of {pools['pages_total']} pages ({pools['page_tokens']} tokens each)",
    ]
    if slots := pools["slots_total"]:
        facts.append(f"{slots - pools['slots_free']} of {slots} slots")
    if snapshot.get("waiting"):
        facts.append(f"queued: {', '.join(snapshot['waiting'])}")
    return facts


def _state(snapshot: Snapshot) -> str:
    if snapshot["closed"]:
        return "closed"
    if snapshot["paused"]:
        return "paused"
    busy = any(stream["state"] in ("queued", "running") for stream in snapshot["streams"])
    return "running" if busy or snapshot.get("waiting") else "idle"


BLOCK_COLUMNS = (
    "block",
    "tokens",
    "span",
    "version",
    "written by",
    "read by",
    "of the pool",
    "end of its text",
)


def _block_row(block: Snapshot, pools: Snapshot) -> list[str]:
    share = block["pages"] / max(pools["pages_total"], 1)
    return [
        block_label(block["id"], block["name"]),
        str(block["tokens"]),
        str(block["span"]),
        str(block["version"]),
        escape(block["writer"] or ""),
        escape(", ".join(block["readers"])),
        bar(share, block_colour(block["id"])),
        code(tail(block["text"], BLOCK_TAIL)),
    ]


STREAM_COLUMNS = ("stream", "state", "tokens", "view", "end of its text")


def _stream_row(stream: Snapshot, marks: dict[str, str]) -> list[str]:
    view = " → ".join(marks.get(name, escape(name)) for name in stream["view"])
    return [
        escape(stream["name"] or ""),
        escape(_how(stream)),
        str(stream["tokens"]),
        view,
        code(tail(stream["text"], STREAM_TAIL)),
    ]


def _how(stream: Snapshot) -> str:
    """A stream's state in words, and why it waits or how it ended."""
    words = {"body": "in its loop", "waiting": "waits", "new": "not read yet"}
    state = words.get(stream["state"], stream["state"])
    return f"{state}: {stream['reason']}" if stream["reason"] else str(state)


def _plain(snapshot: Snapshot) -> str:
    blocks = [
        [block["name"], str(block["tokens"]), str(block["version"]), block["writer"] or ""]
        for block in snapshot["blocks"]
    ]
    streams = [
        [stream["name"] or "", _how(stream), str(stream["tokens"]), ", ".join(stream["view"])]
        for stream in snapshot["streams"]
    ]
    parts = [f"{snapshot['name']}: {', '.join(_facts(snapshot))}"]
    if blocks:
        parts.append(text_table(("block", "tokens", "version", "written by"), blocks))
    if streams:
        parts.append(text_table(("stream", "state", "tokens", "view"), streams))
    return "\n\n".join(parts)
