"""What all widgets have in common: their code, their few traits, and messages to and from a source.

Knows anywidget. Knows nothing of engines: a *source* is whatever has ``attach(widget)``; it calls
`Widget.handle` to get what views say, and ``widget.send(message, buffers)`` to tell them something.
`protocol.js` lists the messages. Data and controls never travel as synchronised traits: those go dead
when they are first touched while a cell waits.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import anywidget
import traitlets

from .bundle import bundle, style

Message = dict[str, Any]
Handler = Callable[["Widget", Message], None]

THEMES = ("auto", "light", "dark")
PINS = ("", "right", "bottom")


class Source(Protocol):
    """What a widget shows."""

    def attach(self, widget: Widget) -> None:
        """Take the widget in: answer its views and send it what happens."""


class Widget(anywidget.AnyWidget):
    """A live picture of a source. `panels` says which parts it has, in order.

    Parameters
    ----------
    source: what is shown, such as an `AsyncLLM`; None shows nothing until one attaches it.
    pin: "right" or "bottom" keeps it at that edge of the window while the notebook scrolls.
    theme: "auto" follows the page; "light" or "dark".

    Raises TypeError for other keywords and ValueError for other values.
    """

    PANELS: ClassVar[tuple[str, ...]] = ()
    """Names of its panels; each has a file of that name, which registers it."""

    _esm = traitlets.Unicode().tag(sync=True)
    _css = traitlets.Unicode().tag(sync=True)
    panels = traitlets.List(traitlets.Unicode()).tag(sync=True)
    pin = traitlets.Unicode("").tag(sync=True)
    theme = traitlets.Unicode("auto").tag(sync=True)
    choices = traitlets.Dict().tag(sync=True)  # zoom, pin, typed text: what views keep for the next one

    def __init__(self, source: Source | None = None, **options: Any) -> None:
        options = {"panels": list(self.PANELS), **options}
        check_options(type(self).__name__, options, self.PANELS)
        code = {"_esm": bundle("entry", tuple(options["panels"])), "_css": style()}
        self._handler: Handler | None = None
        self._on_show: Callable[[], None] | None = None
        super().__init__(**code, **options)
        self.on_msg(self._receive)
        if source is not None:
            source.attach(self)

    # ---- for its source -------------------------------------------------------------------------

    def handle(self, handler: Handler, on_show: Callable[[], None] | None = None) -> None:
        """Call ``handler(widget, message)`` for each message of a view, on whatever thread it comes;
        ``on_show()`` after the widget was shown as a cell's output."""
        self._handler, self._on_show = handler, on_show

    def choose(self, choices: Message) -> None:
        """Keep what a view chose for views that open later."""
        self.choices = choices

    def update(self, **options: Any) -> None:
        """Change options of a widget that is shown already; views opened from now on have them."""
        check_options(type(self).__name__, options, self.PANELS)
        for name, value in options.items():
            setattr(self, name, value)
        if "pin" in options:  # asked for anew: stronger than what was chosen in a view before
            self.choices = {**self.choices, "pin": options["pin"]}

    def close(self) -> None:
        """End all its views and give its memory back, that of its layout too."""
        layout = self.layout
        super().close()
        if layout is not None:
            layout.close()

    def _receive(self, _: Any, message: Message, buffers: Sequence[memoryview]) -> None:
        if self._handler is None:
            return
        try:
            self._handler(self, message)
        except Exception as error:  # a message has no cell to raise it in: views show it
            self.send({"type": "error", "text": f"{type(error).__name__}: {error}"})

    # ---- shown ----------------------------------------------------------------------------------

    def _ipython_display_(self, **_: Any) -> None:
        from IPython.display import publish_display_data

        found = self._repr_mimebundle_() or {"text/plain": f"{self!r}, closed"}
        data, metadata = found if isinstance(found, tuple) else (found, {})
        publish_display_data(data, metadata)  # type: ignore[no-untyped-call]
        if self._on_show is not None:
            self._on_show()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {', '.join(self.panels) or 'nothing'}>"


def check_options(what: str, options: Message, panels: Sequence[str]) -> None:
    """Raise TypeError for an unknown keyword, with the nearest known one, ValueError for a wrong value."""
    known = ("panels", "pin", "theme", "choices")
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known[:3], 1)
            hint = f": did you mean {near[0]!r}?" if near else f"; it takes {', '.join(known[:3])}"
            raise TypeError(f"{what} has no option {name!r}{hint}")
    for name, values in (("pin", PINS), ("theme", THEMES)):
        if options.get(name, values[0]) not in values:
            allowed = ", ".join(map(repr, values))
            raise ValueError(f"{what}: {name} is one of {allowed}, not {options[name]!r}")
    unknown = [name for name in options.get("panels", ()) if name not in panels]
    if unknown:
        near = difflib.get_close_matches(unknown[0], panels, 1)
        hint = f": did you mean {near[0]!r}?" if near else f"; it has {', '.join(panels)}"
        raise ValueError(f"{what} has no panel {unknown[0]!r}{hint}")
