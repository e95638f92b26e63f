"""The publisher: sends an engine's recording to the widgets that show it, at a pace that they keep.

Knows the trace as plain records, widgets by `send`, and the messages that `widgets/protocol.js` lists.
All of it runs on the engine's loop; what views say arrives on any thread and is moved there first.

One task per engine sends to all its widgets. Each tick it sends a widget the records that are new since
its last one: the browser falls behind by whole ticks, never by a queue of messages. Nothing is sent to a
widget without a view on screen, nor before its views have acknowledged the one but last message. The
time between two ticks grows with the number of widgets, so that all of them together stay well below
what a notebook server lets through.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from .engine.trace import Trace
from .host import messages_wait

Message = dict[str, Any]

INTERVAL = 0.08  # s between two messages to a widget, at least
MAX_RATE = 120  # messages a second to all widgets of a kernel
PART = 400  # records in one message of a snapshot, or of a delta that catches up
UNACKNOWLEDGED = 2  # messages on their way to a view
PATIENCE = 3.0  # s without an acknowledgement until a view counts as gone (a closed tab says nothing)
UNHEARD_INTERVAL, UNHEARD_PATIENCE = 0.25, 600.0
"""The same two where nothing is heard from views while a cell runs: they are sent to all the same."""


class Channel(Protocol):
    """What the publisher needs of a widget."""

    def send(self, content: Message, buffers: list[bytes] | None = None) -> None: ...

    def choose(self, choices: Message) -> None: ...


@dataclass(slots=True)
class Client:
    """A page that has opened a widget."""

    visible: bool = False
    panels: tuple[str, ...] = ()
    acknowledged: int = 0  # records that it has
    heard: float = 0.0  # when it last said something
    stuck_at: int = -1  # what it had at its last ping
    said: dict[str, int] = field(default_factory=dict)  # number of its last message of each type

    def is_old(self, message: Message) -> bool:
        """Was a later message of the same type handled before? While a cell runs, some kernels keep what
        a page says first and handle at once what it says next, on another thread."""
        number = message.get("said", 0)
        if number < self.said.get(message["type"], 0):
            return True
        self.said[message["type"]] = number
        return False


@dataclass(slots=True)
class Showing:
    """One widget: how far its views are, and which pages have it open."""

    sent: int  # records before this number were sent to all its views
    clients: dict[str, Client] = field(default_factory=dict)
    snapshots: list[str] = field(default_factory=list)  # clients that wait for one
    ends: list[int] = field(default_factory=list)  # `sent` after each message not acknowledged yet

    @property
    def visible(self) -> bool:
        return any(client.visible for client in self.clients.values())

    def forget_gone(self, now: float, patience: float) -> None:
        """Pages that are shown something and never answer are closed."""
        for name, client in list(self.clients.items()):
            if client.acknowledged < self.sent and now - client.heard > patience:
                del self.clients[name]

    def is_behind(self) -> bool:
        """Have its visible views too much on the way to them?"""
        waiting = [c.acknowledged for c in self.clients.values() if c.visible]
        slowest = min(waiting, default=self.sent)
        self.ends = [end for end in self.ends if end > slowest]
        return len(self.ends) >= UNACKNOWLEDGED


_busy: weakref.WeakSet[Publisher] = weakref.WeakSet()
"""Publishers that had something to send in their last tick: they share the budget of messages."""


class Publisher:
    """Sends one engine's trace to its widgets. `loop`: the engine's, once there is one.

    on_control(widget, message): does what a view asks for; it answers by `answer`.
    on_read(widget, message): finds a reading that a view asks for; it answers by `send_reading`.
    on_watch(panels): called when the panels on screen, or what is chosen in one, have changed.
    """

    def __init__(
        self,
        trace: Trace,
        *,
        before_tick: Callable[[], None] = lambda: None,
        on_control: Callable[[Channel, Message], None] = lambda widget, message: None,
        on_read: Callable[[Channel, Message], None] = lambda widget, message: None,
        on_watch: Callable[[frozenset[str]], None] = lambda panels: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trace = trace
        self._before_tick, self._on_control, self._on_watch = before_tick, on_control, on_watch
        self._on_read = on_read
        self._clock = clock
        self._widgets: weakref.WeakKeyDictionary[Channel, Showing] = weakref.WeakKeyDictionary()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._panels: frozenset[str] = frozenset()
        self._plain: dict[int, list[Message]] = {}  # of this tick: widgets mostly get the same records
        self._unheard = False  # do views' messages wait until the running cell has ended?
        self.num_messages = 0  # ever sent

    # ---- what widgets call, on any thread -------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Use `loop` from now on."""
        self._loop = loop

    def receive(self, widget: Channel, message: Message) -> None:
        """A view says something. Any thread."""
        assert self._loop is not None, "widgets are attached on the engine's loop"
        self._unheard = messages_wait(threading.current_thread() is threading.main_thread())
        self._loop.call_soon_threadsafe(self._handle, widget, message)

    def detach(self, widget: Channel) -> None:
        """Send `widget` nothing any more. On the loop."""
        self._widgets.pop(widget, None)
        self._watch()

    # ---- on the loop ----------------------------------------------------------------------------

    def notice(self) -> None:
        """There may be new records. Cheap."""
        self._news.set()

    def answer(self, widget: Channel, message: Message, ok: bool, text: str = "") -> None:
        """Tell a view what became of its control `message`."""
        answer = {"type": "answer", "client": message["client"], "id": message["id"]}
        self._send(widget, {**answer, "ok": ok, "text": text})

    def send_reading(self, widget: Channel, message: Message, record: Message | None) -> None:
        """Send a view the record that it asked for; None: there is no such reading."""
        answer = {"type": "reading", "client": message["client"], "id": message["id"]}
        self._send_records(widget, answer, [] if record is None else [record])

    @property
    def widgets(self) -> list[Channel]:
        """The widgets that are sent to."""
        return list(self._widgets)

    @property
    def panels(self) -> frozenset[str]:
        """Names of the panels that are on screen somewhere."""
        return self._panels

    def _handle(self, widget: Channel, message: Message) -> None:
        try:
            self._act(widget, message)
        except Exception as error:  # there is no cell to raise it in: views show it
            self._send(widget, {"type": "error", "text": f"{type(error).__name__}: {error}"})

    def _act(self, widget: Channel, message: Message) -> None:
        showing = self._widgets.setdefault(widget, Showing(self._trace.next))
        client = showing.clients.get(message["client"])
        if client is None:
            client = showing.clients[message["client"]] = Client(acknowledged=showing.sent)
            if message["type"] not in ("ready", "visible"):  # was silent for so long that it was forgotten
                self._send(widget, {"type": "who", "client": message["client"]})
        client.heard = self._clock()
        match message["type"]:
            case "ready":
                if message["client"] not in showing.snapshots:
                    showing.snapshots.append(message["client"])
            case "ack":
                client.acknowledged = max(client.acknowledged, int(message["next"]))
            case "visible" | "choose" if client.is_old(message):
                pass
            case "visible":
                client.visible = bool(message["visible"])
                client.panels = tuple(message.get("panels", ()))
                self._watch()
            case "ping":
                self._send(widget, {"type": "pong"})
                self._repair(showing, message["client"], client, int(message["next"]))
            case "choose":
                widget.choose(message["choices"])
                self._on_watch(self._panels)
            case "read":
                self._on_read(widget, message)
            case "control":
                self._on_control(widget, message)
            case other:
                raise ValueError(f"a view said {other!r}, which this version does not know")
        self._news.set()
        self._ensure_task()

    @staticmethod
    def _repair(showing: Showing, name: str, client: Client, has: int) -> None:
        """A page that had the same at two pings, and less than it was sent, has lost a message: without
        its acknowledgement nothing more would be sent. It gets everything anew."""
        if has == client.stuck_at and has < showing.sent and name not in showing.snapshots:
            showing.snapshots.append(name)
        client.stuck_at = has

    def _watch(self) -> None:
        shown = (c for showing in self._widgets.values() for c in showing.clients.values())
        panels = frozenset(panel for client in shown if client.visible for panel in client.panels)
        if panels != self._panels:
            self._panels = panels
            self._on_watch(panels)

    # ---- the task -------------------------------------------------------------------------------

    def _ensure_task(self) -> None:
        if self._task is None or self._task.done():
            assert self._loop is not None
            self._task = self._loop.create_task(self._publish(), name="asyncllm_nb publisher")

    async def _publish(self) -> None:
        """Runs while a widget has a page open."""
        try:
            while any(showing.clients for showing in self._widgets.values()):
                await self._wait_for_news()
                await self._tick()
                await asyncio.sleep(self._pause())
        finally:
            _busy.discard(self)

    async def _tick(self) -> None:
        """Send each widget what is new to it."""
        self._before_tick()
        before, now = self.num_messages, self._clock()
        for widget, showing in list(self._widgets.items()):
            try:
                await self._serve(widget, showing)
            except Exception as error:
                self._send(widget, {"type": "error", "text": f"{type(error).__name__}: {error}"})
            showing.forget_gone(now, UNHEARD_PATIENCE if self._unheard else PATIENCE)
        self._plain.clear()
        self._watch()
        (_busy.add if self.num_messages > before else _busy.discard)(self)

    async def _wait_for_news(self) -> None:
        """Until there may be something to send; what coroutines do is looked at in any case while
        somebody sees it."""
        timeout = 0.25 if self._panels else None
        try:
            await asyncio.wait_for(self._news.wait(), timeout)
        except TimeoutError:
            pass
        self._news.clear()

    def _pause(self) -> float:
        showings = (showing for publisher in _busy for showing in publisher._widgets.values())
        num_widgets = sum(showing.visible for showing in showings)
        return max(UNHEARD_INTERVAL if self._unheard else INTERVAL, num_widgets / MAX_RATE)

    async def _serve(self, widget: Channel, showing: Showing) -> None:
        while showing.snapshots:
            name = showing.snapshots.pop(0)
            await self._send_snapshot(widget, showing, name)
            if name in showing.clients:
                showing.clients[name].stuck_at = -1
        if not showing.visible:
            return
        if showing.is_behind() and not self._unheard:
            self._news.set()  # look again after the pause
            return
        if showing.sent < self._trace.next:
            self._send_delta(widget, showing)

    async def _send_snapshot(self, widget: Channel, showing: Showing, client: str) -> None:
        """All records up to what every view of this widget has been sent."""
        trace = self._trace
        if showing.sent < trace.first:  # nobody has looked for long
            showing.sent = trace.next
        first, end = trace.first, showing.sent
        parts = max(1, -(-(end - first) // PART))
        head: Message = {"meta": trace.meta, "base": trace.base_copy()}
        contents = iter(trace.plain_parts(first, end, PART))
        for part in range(parts):
            message = {"type": "snapshot", "client": client, "part": part, "parts": parts, **head}
            message["first"] = first + part * PART
            self._send_records(widget, message, next(contents, []))
            head = {}
            await asyncio.sleep(0)

    def _send_delta(self, widget: Channel, showing: Showing) -> None:
        trace = self._trace
        first = max(showing.sent, trace.first)  # a view that lacks the records between asks anew
        if first not in self._plain:
            self._plain[first] = trace.plain(first, first + 4 * PART)
        records = self._plain[first]
        self._send_records(widget, {"type": "delta", "first": first}, records)
        showing.sent = first + len(records)
        showing.ends.append(showing.sent)

    def _send_records(self, widget: Channel, message: Message, records: list[Message]) -> None:
        buffers: list[bytes] = []
        plain = [_move_bytes(r, buffers) if r.get("bin") else r for r in records]
        self._send(widget, {**message, "records": plain}, buffers)

    def _send(self, widget: Channel, message: Message, buffers: list[bytes] | None = None) -> None:
        self.num_messages += 1
        widget.send(message, buffers or None)


def _move_bytes(value: Any, buffers: list[bytes]) -> Any:
    """`value` with each bytes in it moved to the end of `buffers`."""
    if isinstance(value, bytes | bytearray | memoryview):
        buffers.append(bytes(value))
        return {"$b": len(buffers) - 1}
    if isinstance(value, dict):
        return {key: _move_bytes(inner, buffers) for key, inner in value.items()}
    return [_move_bytes(inner, buffers) for inner in value] if isinstance(value, list | tuple) else value
