"""`replay(file)`: plays a saved run in the widgets that showed it live, without a model.

Knows saved traces, the publisher and the `Replay` widget. What is not in the recording cannot be asked
for: nobody is there to measure it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .engine.trace import Trace
from .export import replay_document
from .host import kernel_loop, running_loop
from .publisher import Channel, Message, Publisher
from .widgets.dashboard import Replay

_shown: dict[Path, Replay] = {}
"""The replay of each file: running a cell again closes the one that it made before."""


def replay(file: str | os.PathLike[str], **options: Any) -> Replay:
    """A widget that plays the run that ``llm.trace.save(file)`` wrote; it starts by itself.

    `options`: as a dashboard takes them (panels, pin, theme). Raises ValueError for another file.
    """
    path = Path(file)
    trace = Trace.load(path)
    trace.meta = replay_document(trace)["meta"]
    widget = Replay(**options)
    publisher = Publisher(trace, on_control=_refuse, on_read=_nothing)
    loop = running_loop() or kernel_loop()
    if loop is not None:  # without one no view can ever open
        publisher.start(loop)
        widget.handle(publisher.receive)  # keeps the publisher as long as the widget
    earlier = _shown.pop(path.resolve(), None)
    if earlier is not None:
        earlier.close()
    _shown[path.resolve()] = widget
    return widget


def _refuse(widget: Channel, message: Message) -> None:
    answer = {"type": "answer", "client": message["client"], "id": message["id"]}
    widget.send({**answer, "ok": False, "text": "this is a replay: nothing runs that could be controlled"})


def _nothing(widget: Channel, message: Message) -> None:
    """A reading that the recording does not have."""
    widget.send({"type": "reading", "client": message["client"], "id": message["id"], "records": []})
