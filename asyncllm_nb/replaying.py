"""`replay(file)`: plays a saved run in the widgets that showed it live, without a model.

Knows saved traces, the publisher and the `Replay` widget. What is not in the recording cannot be asked
for: nobody is there to measure it. A static form stands below, for the saved notebook.
"""

from __future__ import annotations

import os
from html import escape
from pathlib import Path
from typing import Any

from .engine.trace import Trace
from .export import replay_document
from .host import kernel_loop, running_loop
from .live import Picture
from .markup import code, muted, table, tail
from .publisher import Channel, Message, Publisher
from .static_form import MAX_LANES, MAX_STEPS, draw_steps
from .widgets.dashboard import Replay

TEXT = 400
"""Characters of a stream's end in the static form."""

BUNDLED, SUFFIX = Path(__file__).parent, ".trace.json.gz"
"""Where the runs are that come with the package, and how their files end."""

_shown: dict[Path, Replay] = {}
"""The replay of each file: running a cell again closes the one that it made before."""


def replay(file: str | os.PathLike[str], **options: Any) -> Replay:
    """A widget that plays the run that ``llm.trace.save(file)`` wrote; it starts by itself.

    `file` may also name a run that comes with the package: "lesson-01". `options`: as a dashboard takes
    them (panels, pin, theme). Raises ValueError for another file.
    """
    path = _find(file)
    trace = Trace.load(path)
    trace.meta = replay_document(trace)["meta"]
    widget = Replay(**options)
    publisher = Publisher(trace, on_control=_refuse, on_read=_nothing)
    loop = running_loop() or kernel_loop()
    if loop is not None:  # without one no view can ever open
        publisher.start(loop)
        # The handler keeps the publisher as long as the widget lives.
        widget.handle(publisher.receive, lambda: _show_static(trace))
    earlier = _shown.pop(path.resolve(), None)
    if earlier is not None:
        earlier.close()
    _shown[path.resolve()] = widget
    return widget


def _find(file: str | os.PathLike[str]) -> Path:
    """The path of a file, or of the bundled run of that name."""
    path = Path(file)
    bundled = BUNDLED / f"{os.fspath(file)}{SUFFIX}"
    return bundled if not path.exists() and bundled.exists() else path


def _show_static(trace: Trace) -> None:
    """What a saved notebook keeps of a replay: a closed fold with the timeline and the texts."""
    from IPython.display import publish_display_data

    html, text = draw_recording(trace)
    data = {"text/html": html, "text/plain": text}
    publish_display_data(data)  # type: ignore[no-untyped-call]


def draw_recording(trace: Trace) -> Picture:
    """The end of a recorded run: its last steps as a picture, its streams and their texts."""
    state = trace.state()
    streams = [request for request in state["requests"].values() if request["kind"] == "stream"]
    head = (
        f"A recorded run of {Path(trace.model).name}: {len(trace)} steps, {state['encoded']:,} tokens encoded"
    )
    columns = ("coroutine", "ended", "tokens", "text")
    facts = [(s["name"], s["reason"] or s["state"], str(s["tokens"]), s["text"]) for s in streams]
    rows = [[*map(escape, fact[:3]), code(tail(fact[3], TEXT))] for fact in facts]
    html = (
        f"<details><summary>{escape(head)}</summary>{_timeline(trace)}{table(columns, rows, (2,))}</details>"
    )
    return html, "\n".join([head, *(f"{name}: {text}" for name, _, _, text in facts)])


def _timeline(trace: Trace) -> str:
    steps = list(trace.steps)[-MAX_STEPS:]
    if not steps:
        return ""
    lanes = list(dict.fromkeys(row.name for step in steps for row in step.rows))[:MAX_LANES]
    raster = draw_steps(steps, lanes)
    words = (
        f"Timeline of steps {steps[0].number} to {steps[-1].number}, lanes from the top: {', '.join(lanes)}"
    )
    return f'<img src="{raster.data_uri()}" alt="{escape(words)}"><div>{muted(words)}</div>'


def _refuse(widget: Channel, message: Message) -> None:
    answer = {"type": "answer", "client": message["client"], "id": message["id"]}
    widget.send({**answer, "ok": False, "text": "this is a replay: nothing runs that could be controlled"})


def _nothing(widget: Channel, message: Message) -> None:
    """A reading that the recording does not have."""
    widget.send({"type": "reading", "client": message["client"], "id": message["id"], "records": []})
