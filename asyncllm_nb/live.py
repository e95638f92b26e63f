"""`LiveHTML`: a display in the notebook that follows an object, and stays right when it is saved.

Knows IPython's display messages and asyncio. Knows nothing of what is drawn: a function turns the
object into HTML and plain text. Outside a kernel nothing here does anything.

What shows it live is also its static form: the display's own output is updated, so a saved notebook
holds the last picture. Two facts about executing notebooks without a browser (nbclient) shape the
code: an update that is sent on behalf of an earlier cell than the current one is dropped, and so is
one that is sent between two cells. Hence updates are sent on behalf of the current cell, and at the
end of each cell the last picture is sent once more.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import weakref
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any, Generic, TypeVar

from .host import kernel_loop, running_loop, shell
from .markup import error_box, muted

S = TypeVar("S")

Picture = tuple[str, str]
"""What is shown: HTML, and the same as plain text."""

INTERVAL = 0.1  # s between two updates

_current: weakref.WeakKeyDictionary[Any, dict[str, LiveHTML[Any]]] = weakref.WeakKeyDictionary()
"""The display of each object, by kind: showing it again retires the earlier one."""

_unrecorded: dict[LiveHTML[Any], None] = {}
"""Displays that changed or were updated since the last cell ended, in that order (a set has none)."""

_numbers = itertools.count(1)


class LiveHTML(Generic[S]):
    """One display of `source`, drawn by `draw` and updated at most every `interval` seconds.

    The source is held weakly. The latest state wins and the last one is always drawn. An exception
    of `draw` is shown in the display. One display per source and `kind`: showing it again (the cell
    ran again) retires the earlier one.
    """

    def __init__(
        self,
        source: S,
        draw: Callable[[S], Picture],
        *,
        kind: str,
        interval: float = INTERVAL,
    ) -> None:
        self._source = weakref.ref(source)
        self._draw = draw
        self._kind = kind
        self._interval = interval
        self._display_id = f"asyncllm_nb-{os.getpid()}-{next(_numbers)}"
        self._picture: Picture = ("", "")
        self._loop = kernel_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._last_sent = float("-inf")
        self._on_retire: list[Callable[[], None]] = []
        self.retired = self._loop is None

    # ---- what its owner calls -------------------------------------------------------------------

    def show(self) -> None:
        """Show the source as the next output of the running cell."""
        source, loop = self._source(), self._loop
        if source is None or loop is None:
            return
        displays = _current.setdefault(source, {})
        if earlier := displays.get(self._kind):
            earlier.retire("Goes on in a newer display of the same.")
        displays[self._kind] = self
        shell().events.register("post_run_cell", _record)  # once, however often it is asked
        self._picture = self._drawn()
        self._publish(update=False)

    def changed(self) -> None:
        """The source has changed: draw it soon. Cheap; from any thread."""
        if self._loop is None or self.retired or self._timer is not None:
            return
        if running_loop() is self._loop:
            self._schedule()
        else:
            self._loop.call_soon_threadsafe(self._schedule)

    def on_retire(self, callback: Callable[[], None]) -> None:
        """Call `callback` when this display is retired: stop telling it about changes."""
        self._on_retire.append(callback)

    def retire(self, note: str = "") -> None:
        """Draw a last time, with a note below, and follow the source no longer."""
        if self.retired:
            return
        self.flush()
        self.retired = True
        if note:
            self._picture = (f"{self._picture[0]}{muted(note)}", f"{self._picture[1]}\n{note}")
            self._publish(update=True)
        for callback in self._on_retire:
            callback()

    def flush(self) -> None:
        """Draw now. From the loop's thread."""
        if self._timer is not None:
            self._timer.cancel()
        self._update()

    # ---- drawing --------------------------------------------------------------------------------

    def _schedule(self) -> None:
        loop = self._loop
        if loop is None or self.retired or self._timer is not None:
            return
        _unrecorded[self] = None
        delay = max(self._last_sent + self._interval - loop.time(), 0.0)
        self._timer = loop.call_later(delay, self._update)

    def _update(self) -> None:
        self._timer = None
        if self.retired:
            return
        if self._source() is not None:  # otherwise the last picture stays
            self._picture = self._drawn()
        self._publish(update=True)

    def _drawn(self) -> Picture:
        source = self._source()
        assert source is not None
        try:
            return self._draw(source)
        except Exception as error:  # a callback has no cell to raise it in: show it here
            return error_box(error), f"{type(error).__name__}: {error}"

    def _publish(self, *, update: bool) -> None:
        assert self._loop is not None
        self._last_sent = self._loop.time()
        # In an empty context a message belongs to the current cell, not to the one that caused it.
        context = Context() if update else copy_context()
        try:
            context.run(_send, self._picture, self._display_id, update)
        except Exception:  # the kernel shuts down, or its output is broken: nowhere to show it
            logging.getLogger(__name__).exception("cannot update display %s", self._display_id)
            self.retired = True
        else:
            _unrecorded[self] = None

    def record(self) -> None:
        """Send the newest picture on behalf of the cell that ends now."""
        if self._timer is not None:
            self.flush()
        else:
            self._publish(update=True)


def _send(picture: Picture, display_id: str, update: bool) -> None:
    from IPython.display import publish_display_data

    html, text = picture
    data = {"text/html": html, "text/plain": text}
    transient = {"display_id": display_id}
    publish_display_data(data, transient=transient, update=update)  # type: ignore[no-untyped-call]


def _record(_: object = None) -> None:
    """The end of a cell."""
    for display in list(_unrecorded):
        display.record()
    _unrecorded.clear()
