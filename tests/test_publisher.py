"""The publisher under simulated time: rates, back-pressure, snapshots, pages that come and go.

Time is the event loop's own and jumps to the next timer, so that seconds take milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from asyncllm_nb.engine.reducer import State, empty_state, reduce
from asyncllm_nb.engine.trace import RowRecord, StepRecord, Trace
from asyncllm_nb.publisher import PATIENCE, Message, Publisher


class JumpingSelector(selectors.SelectSelector):
    """Instead of waiting it lets time pass."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout:
            self.now += timeout
        return ready


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when nothing is ready."""

    def __init__(self) -> None:
        self._jumping = JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def simulate(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(scene())


class View:
    """A widget with pages that behave as the browser's do; each page keeps the state it can draw."""

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher
        self.pages: dict[str, Page] = {}
        self.sent: list[tuple[float, Message, list[bytes]]] = []
        self.choices: Message = {}

    def send(self, content: Message, buffers: list[bytes] | None = None) -> None:
        message = json.loads(json.dumps(content))  # what travels is JSON
        self.sent.append((asyncio.get_running_loop().time(), message, buffers or []))
        for page in list(self.pages.values()):
            page.receive(message)

    def choose(self, choices: Message) -> None:
        self.choices = choices

    def open(self, name: str, *, lag: float = 0.02, visible: bool = True) -> Page:
        page = self.pages[name] = Page(self, name, lag)
        page.say("ready")
        page.say("visible", visible=visible, panels=["streams"] if visible else [])
        return page

    def close(self, name: str) -> None:
        """Close a tab: it says nothing."""
        del self.pages[name]

    def of_type(self, kind: str) -> list[Message]:
        return [message for _, message, _ in self.sent if message["type"] == kind]

    def most_in_a_second(self) -> int:
        times = [time for time, _, _ in self.sent]
        return max((sum(t <= other < t + 1 for other in times) for t in times), default=0)


class Page:
    def __init__(self, view: View, name: str, lag: float) -> None:
        self.view, self.name, self.lag = view, name, lag
        self.state: State = empty_state()
        self.next = -1
        self.num_snapshots = 0

    def say(self, kind: str, **more: Any) -> None:
        self.view.publisher.receive(self.view, {"type": kind, "client": self.name, **more})

    def receive(self, message: Message) -> None:
        if message["type"] == "snapshot" and message["client"] == self.name:
            if message["part"] == 0:
                self.state, self.next = message["base"], message["first"]
                self.num_snapshots += 1
            self._add(message)
        elif message["type"] == "delta" and self.next >= 0:
            self._add(message)
        elif message["type"] == "who" and message["client"] == self.name:
            self.say("visible", visible=True, panels=["streams"])

    def _add(self, message: Message) -> None:
        if message["first"] > self.next:
            self.next = -1
            self.say("ready")
            return
        new = message["records"][self.next - message["first"] :]
        reduce(new, self.state)
        self.next += len(new)
        loop = asyncio.get_running_loop()
        loop.call_later(self.lag, lambda end: self.say("ack", next=end), self.next)


def make() -> tuple[Trace, Publisher]:
    trace, loop = Trace("simulated"), asyncio.get_running_loop()
    publisher = Publisher(trace, clock=loop.time)
    publisher.start(loop)
    return trace, publisher


def begin_streams(trace: Trace, count: int) -> None:
    for number in range(1, count + 1):
        trace.add("block", id=number, name=f"b{number}")
        fields = {"kind": "stream", "name": f"s{number}", "view": [number], "block": number, "task": 0}
        trace.add("request", r=number, **fields)


def step(trace: Trace, number: int, streams: int) -> None:
    """A token of each stream, and the step that encodes them."""
    for stream in range(1, streams + 1):
        trace.add("token", r=stream, id=5, x="x")
    rows = tuple(
        RowRecord(f"s{r}", "decode", f"b{r}", ((f"b{r}", number),), 1, (5,), r, (r,), number, (number + 1,))
        for r in range(1, streams + 1)
    )
    trace.append(StepRecord(number, 0.0, 0.01, rows, (), 5, 5))


async def produce(trace: Trace, publisher: Publisher, *, seconds: float, streams: int) -> None:
    begin_streams(trace, streams)
    for number in range(round(seconds * 100)):
        step(trace, number, streams)
        publisher.notice()
        await asyncio.sleep(0.01)


def settled(trace: Trace) -> State:
    return dict(json.loads(json.dumps(trace.state())))


def test_200_streams_at_100_tokens_a_second() -> None:
    """The page ends with the true picture, at a handful of messages."""

    async def scene() -> None:
        trace, publisher = make()
        views = [View(publisher) for _ in range(2)]
        pages = [view.open("page") for view in views]
        await produce(trace, publisher, seconds=1, streams=200)
        await asyncio.sleep(1)
        assert 10 < sum(view.most_in_a_second() for view in views) < 40
        expected = settled(trace)
        assert expected["requests"]["200"]["tokens"] == 100
        for page in pages:
            assert page.state == expected and page.num_snapshots == 1

    simulate(scene)


def test_many_widgets_share_a_budget() -> None:
    """However many there are, all together stay below 200 messages a second, and all end up right."""

    async def scene() -> None:
        trace, publisher = make()
        views = [View(publisher) for _ in range(40)]
        pages = [view.open("page") for view in views]
        await produce(trace, publisher, seconds=3, streams=1)
        await asyncio.sleep(1)
        assert 60 < sum(view.most_in_a_second() for view in views) < 200
        assert all(page.state == settled(trace) for page in pages)

    simulate(scene)


def test_one_widget_is_drawn_10_to_15_times_a_second() -> None:
    async def scene() -> None:
        trace, publisher = make()
        view = View(publisher)
        view.open("page")
        await produce(trace, publisher, seconds=3, streams=2)
        assert 10 <= view.most_in_a_second() <= 15

    simulate(scene)


def test_nothing_is_sent_while_nothing_is_visible() -> None:
    async def scene() -> None:
        trace, publisher = make()
        view = View(publisher)
        page = view.open("page", visible=False)
        await asyncio.sleep(0.5)
        sent = len(view.sent)
        await produce(trace, publisher, seconds=1, streams=3)
        assert len(view.sent) == sent
        page.say("visible", visible=True, panels=["streams"])
        await asyncio.sleep(1)
        assert page.state == settled(trace)

    simulate(scene)


def test_a_slow_page_is_not_buried() -> None:
    """At most two messages are on their way, and the newest state arrives all the same."""

    async def scene() -> None:
        trace, publisher = make()
        view = View(publisher)
        page = view.open("page", lag=0.5)
        await produce(trace, publisher, seconds=3, streams=3)
        assert view.most_in_a_second() <= 5
        await asyncio.sleep(2)
        assert page.state == settled(trace)

    simulate(scene)


def test_a_second_page_gets_a_snapshot_and_the_first_goes_on() -> None:
    async def scene() -> None:
        trace, publisher = make()
        view = View(publisher)
        first = view.open("first")
        await produce(trace, publisher, seconds=1, streams=3)
        second = view.open("second")
        for number in range(500, 560):
            step(trace, number, 3)
            publisher.notice()
            await asyncio.sleep(0.01)
        await asyncio.sleep(1)
        assert first.state == second.state == settled(trace)
        assert (first.num_snapshots, second.num_snapshots) == (1, 1)

    simulate(scene)


def test_a_closed_tab_holds_up_the_other_for_a_moment_only() -> None:
    async def scene() -> None:
        trace, publisher = make()
        view = View(publisher)
        stays = view.open("stays")
        view.open("goes")
        await produce(trace, publisher, seconds=0.5, streams=2)
        view.close("goes")
        await produce(trace, publisher, seconds=PATIENCE + 2, streams=2)
        await asyncio.sleep(0.5)
        assert stays.state == settled(trace)

    simulate(scene)


def test_a_page_that_was_given_up_comes_back() -> None:
    """A browser that was busy for long is asked what it shows, and gets what it missed."""

    async def scene() -> None:
        trace, publisher = make()
        view = View(publisher)
        page = view.open("page", lag=PATIENCE + 2)
        await produce(trace, publisher, seconds=PATIENCE + 1, streams=2)
        page.lag = 0.02
        await asyncio.sleep(2 * PATIENCE)
        await produce(trace, publisher, seconds=0.5, streams=2)
        await asyncio.sleep(1)
        assert view.of_type("who")
        assert page.state == settled(trace)

    simulate(scene)


def test_views_are_sent_to_while_nothing_can_be_heard_from_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an older ipykernel: what a view says arrives when the running cell has ended."""
    monkeypatch.setattr("asyncllm_nb.publisher.messages_wait", lambda on_main_thread: on_main_thread)

    async def scene() -> None:
        trace, publisher = make()
        view = View(publisher)
        page = view.open("page", lag=20 * PATIENCE)
        await produce(trace, publisher, seconds=5 * PATIENCE, streams=2)
        await asyncio.sleep(0.5)
        assert page.state == settled(trace)
        assert view.most_in_a_second() <= 5

    simulate(scene)


def test_a_long_recording_arrives_in_parts() -> None:
    async def scene() -> None:
        trace, publisher = make()
        for number in range(3_000):
            step(trace, number, 1)
        view = View(publisher)
        page = view.open("page")
        await asyncio.sleep(1)
        assert len(view.of_type("snapshot")) > 10 and page.state == settled(trace)

    simulate(scene)


def test_records_that_were_folded_before_a_page_saw_them() -> None:
    async def scene() -> None:
        loop = asyncio.get_running_loop()
        trace = Trace("bounded", max_weight=500)
        publisher = Publisher(trace, clock=loop.time)
        publisher.start(loop)
        view = View(publisher)
        page = view.open("page")
        await asyncio.sleep(0.2)
        page.say("visible", visible=False, panels=[])
        await produce(trace, publisher, seconds=4, streams=3)
        page.say("visible", visible=True, panels=["streams"])
        await asyncio.sleep(1)
        assert trace.first > 0 and page.state == settled(trace) and page.num_snapshots == 2

    simulate(scene)


def test_bytes_travel_as_buffers() -> None:
    async def scene() -> None:
        trace, publisher = make()
        view = View(publisher)
        view.open("page")
        await asyncio.sleep(0.2)
        trace.add("picture", bin=4, rows=[{"q": b"ab"}, {"q": b"cd"}])
        publisher.notice()
        await asyncio.sleep(0.5)
        (message,), (buffers,) = view.of_type("delta"), [b for _, _, b in view.sent if b]
        assert message["records"][0]["rows"] == [{"q": {"$b": 0}}, {"q": {"$b": 1}}]
        assert buffers == [b"ab", b"cd"]

    simulate(scene)


@pytest.mark.parametrize(
    ("message", "said"),
    [({"type": "nonsense"}, "nonsense"), ({"type": "control", "id": 1, "command": "x"}, "broken")],
)
def test_errors_of_callbacks_are_told_to_the_views(message: Message, said: str) -> None:
    def fail(*_: Any) -> None:
        raise LookupError("broken")

    async def scene() -> None:
        trace, loop = Trace("small"), asyncio.get_running_loop()
        publisher = Publisher(trace, on_control=fail, clock=loop.time)
        publisher.start(loop)
        view = View(publisher)
        view.open("page").say(message["type"], **{k: message[k] for k in message if k != "type"})
        await asyncio.sleep(0.2)
        assert said in view.of_type("error")[0]["text"]

    simulate(scene)


def test_a_page_that_lost_messages_gets_everything_anew() -> None:
    """Deltas that never arrive are never acknowledged; the pings of the silence that follows tell."""

    async def scene() -> None:
        trace, publisher = make()
        view = View(publisher)
        page = view.open("page")
        await asyncio.sleep(0.5)
        del view.pages["page"]  # what is sent now gets lost
        await produce(trace, publisher, seconds=1, streams=2)
        view.pages["page"] = page
        assert page.next < trace.next
        for _ in range(2):
            page.say("ping", next=page.next)
            await asyncio.sleep(2)
        assert page.state == settled(trace)
        for _ in range(3):  # all is here: no more snapshots
            page.say("ping", next=page.next)
            await asyncio.sleep(2)
        assert page.num_snapshots == 2

    simulate(scene)


def test_what_a_page_said_first_and_is_handled_last_counts_no_more() -> None:
    """ipykernel 7.3 handles messages on two threads: those sent to a subshell pass those before."""

    async def scene() -> None:
        _, publisher = make()
        page = View(publisher).open("page")
        page.say("visible", visible=True, panels=["blocks"], said=3)
        page.say("visible", visible=False, panels=[], said=2)
        await asyncio.sleep(0.2)
        assert publisher.panels == {"blocks"}
        page.say("visible", visible=False, panels=[], said=4)
        await asyncio.sleep(0.2)
        assert not publisher.panels

    simulate(scene)


def test_pings_are_answered_and_choices_kept() -> None:
    async def scene() -> None:
        _, publisher = make()
        view = View(publisher)
        page = view.open("page")
        page.say("ping", next=0)
        page.say("choose", choices={"pin": "right"})
        await asyncio.sleep(0.2)
        assert view.of_type("pong") and view.choices == {"pin": "right"}

    simulate(scene)


def test_panels_on_screen_are_told() -> None:
    async def scene() -> None:
        told: list[frozenset[str]] = []
        trace, loop = Trace("small"), asyncio.get_running_loop()
        publisher = Publisher(trace, on_watch=told.append, clock=loop.time)
        publisher.start(loop)
        view = View(publisher)
        page = view.open("page")
        await asyncio.sleep(0.2)
        page.say("visible", visible=True, panels=["streams", "attention"])
        await asyncio.sleep(0.2)
        page.say("visible", visible=False, panels=[])
        await asyncio.sleep(0.2)
        assert told == [{"streams"}, {"streams", "attention"}, set()]
        publisher.detach(view)
        assert publisher.panels == frozenset()

    simulate(scene)
