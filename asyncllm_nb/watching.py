"""Widgets on an engine: one publisher and one set of controls each, and the widgets that are shown again.

Knows the engine, its publisher and the widget classes. What widgets draw is theirs.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

from .controls import Controls, kernel_note
from .engine.engine import Engine
from .host import kernel_loop, running_loop
from .looking import Looking
from .publisher import Channel, Publisher
from .static_form import StaticForm
from .widgets.base import Message, Widget

_watches: weakref.WeakKeyDictionary[Engine, Watch] = weakref.WeakKeyDictionary()


class Watch:
    """What an engine's widgets share."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self.publisher = Publisher(
            engine.trace,
            before_tick=self._look,
            on_control=self._control,
            on_read=self._read,
            on_watch=self._watched,
        )
        self._controls = Controls(engine)
        engine.trace.meta["kernel_note"] = kernel_note()
        self._looking = Looking(engine)
        self._static = StaticForm(engine)
        self._tasks: set[asyncio.Task[None]] = set()  # the loop holds tasks only weakly
        engine.observers += (self.publisher.notice, self._static.notice)
        publisher = self.publisher
        engine.recorder.tasks.shows_errors = lambda: "streams" in publisher.panels
        engine.recorder.tasks.shows_agents = lambda: "agents" in publisher.panels
        self._shown: dict[type[Widget], Widget] = {}

    def attach(self, widget: Widget, on_show: Callable[[], None] | None = None) -> None:
        """Send `widget` what happens, and do what its views ask for. `on_show`: what to do after it was
        shown, instead of showing the engine's static form."""
        loop = running_loop() or kernel_loop()
        if loop is not None:  # without one no view can ever open
            self.publisher.start(loop)
            widget.handle(self.publisher.receive, on_show or self._static.show)

    def widget(self, kind: type[Widget], **options: Any) -> Widget:
        """The engine's widget of a class: made when first asked for, and the same from then on, so that
        running a cell again makes no second one. Raises as the class does."""
        shown = self._shown.get(kind)
        if shown is None or shown.comm is None or options.get("panels", shown.panels) != shown.panels:
            if shown is not None:
                self.publisher.detach(shown)
                shown.close()
            shown = self._shown[kind] = kind(**options)
            self.attach(shown)
        else:
            shown.update(**options)
        return shown

    def _look(self) -> None:
        engine = self._engine()
        if engine is not None and not engine.closed:
            engine.recorder.look()

    def _control(self, widget: Channel, message: Message) -> None:
        self._controls.do(message, lambda ok, text: self.publisher.answer(widget, message, ok, text))

    def _watched(self, panels: frozenset[str]) -> None:
        """Panels came on screen or left it, or something else was chosen in one."""
        choices = [widget.choices for widget in self.publisher.widgets if isinstance(widget, Widget)]
        self._looking.watched(panels, choices)

    def _read(self, widget: Channel, message: Message) -> None:
        task = asyncio.get_running_loop().create_task(
            self._send_reading(widget, message), name="asyncllm_nb reading"
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_reading(self, widget: Channel, message: Message) -> None:
        try:
            record = await self._looking.read(message)
        except Exception as error:  # there is no cell to raise it in: views show it
            widget.send({"type": "error", "text": f"{type(error).__name__}: {error}"})
            record = None
        self.publisher.send_reading(widget, message, record)


def watch(engine: Engine) -> Watch:
    """The watch of an engine, made when first asked for."""
    if engine not in _watches:
        _watches[engine] = Watch(engine)
    return _watches[engine]
