"""What an agent looks like in a notebook: its panel, and the static form that a saved notebook keeps.

Knows an agent's public attributes. What the panel draws is `widgets/agents.js`'s; how a display is kept up
to date is `live`'s, colours are `markup`'s.
"""

from __future__ import annotations

import asyncio
import weakref
from html import escape
from typing import TYPE_CHECKING

from .agent_coroutines import AgentCoroutine
from .host import kernel_loop
from .live import LiveHTML, Picture
from .markup import block_label, code, error_box, muted, table, text_table
from .tools import ToolCall

if TYPE_CHECKING:
    from .agent import Agent
    from .widgets.base import Widget

INTERVAL = 10.0  # s from one update of the static form to the next while the agent runs
SETTLE = 0.4  # s after which an end, a failure or a call that waits is drawn

MARKS = {
    "running": ("●", "#00875F"),
    "replacing": ("◐", "#A87400"),
    "ending": ("◐", "#A87400"),
    "failed": ("✖", "#CC3D66"),
    "done": ("✔", "#767C86"),
    "gate": ("◐", "#A87400"),
    "asking": ("?", "#D55E00"),
    "denied": ("✖", "#CC3D66"),
    "timeout": ("✖", "#CC3D66"),
}
"""Sign and colour of a state; the others have none."""

WORDS = {
    "new": "not started",
    "ending": "told to stop",
    "replacing": "starts anew when it has ended",
    "gate": "waits for its gate",
    "asking": "waits for approval",
    "timeout": "timed out",
}
"""States that people read in other words."""

CALLS_SHOWN = 12
RESULT_LENGTH = 80

_widgets: weakref.WeakKeyDictionary[Agent, Widget] = weakref.WeakKeyDictionary()
"""The panel of each agent that was shown: showing it again opens another view of the same."""


def display_agent(agent: Agent) -> None:
    """Show `agent` as the cell's output: its panel, and below it the static form, which replaces an earlier
    one. Raises NotImplementedError outside of a kernel: IPython then shows the repr."""
    if kernel_loop() is None:
        raise NotImplementedError("there is no kernel to show an agent in")
    agent_widget(agent)._ipython_display_()


def agent_widget(agent: Agent) -> Widget:
    """The panel of `agent` alone, made when first asked for."""
    from .watching import watch  # loads the notebook's libraries
    from .widgets.dashboard import Agents

    widget = _widgets.get(agent)
    if widget is None or widget.comm is None:
        form = StaticAgent(agent)
        widget = _widgets[agent] = Agents(choices={"agents.agent": agent.name})
        watch(agent.llm._engine).attach(widget, form.show)
    return widget


class StaticAgent:
    """The static form of an agent: a closed fold. Holds the agent weakly, as widgets live on."""

    def __init__(self, agent: Agent) -> None:
        self._agent = weakref.ref(agent)
        self._live: LiveHTML[Agent] | None = None  # the newest
        self._timer: asyncio.TimerHandle | None = None

    def show(self) -> None:
        """Show it as the next output of the running cell, and keep it up to date."""
        agent = self._agent()
        if agent is not None:
            live = LiveHTML(agent, draw_static_agent, kind="agent", interval=INTERVAL)
            if self._live is None:
                agent.observe(self._changed)
            self._live = live
            live.show()

    def _changed(self) -> None:
        loop = kernel_loop()
        assert self._live is not None
        self._live.changed()
        if self._timer is None and loop is not None and self._is_worth_a_picture():
            self._timer = loop.call_later(SETTLE, self._settled)

    def _is_worth_a_picture(self) -> bool:
        """Is it at rest, or does something of it want a person's attention?"""
        agent = self._agent()
        if agent is None:
            return False
        failed = any(c.state == "failed" for c in agent.coroutines.values())
        return failed or not agent.running or bool(agent.pending)

    def _settled(self) -> None:
        self._timer = None
        if self._live is not None and not self._live.retired and self._is_worth_a_picture():
            self._live.flush()


def draw_static_agent(agent: Agent) -> Picture:
    """`draw_agent` in a closed fold, whose title names what failed and what waits."""
    html, text = draw_agent(agent)
    failed = [f"{c.name} failed: {c.error}" for c in agent.coroutines.values() if c.state == "failed"]
    waiting = [f"{call.name} {_words(call.state)}" for call in agent.pending]
    head = "; ".join([f"Last picture of agent {agent.name}, {agent.state}", *failed, *waiting])
    return f"<details><summary>{escape(head)}</summary>{html}</details>", f"{head}\n{text}"


def draw_agent(agent: Agent) -> Picture:
    """An agent's state, a table of its coroutines and their errors, its blocks, its last tool calls."""
    coroutines = list(agent.coroutines.values())
    blocks = agent.blocks
    calls = agent.calls[-CALLS_SHOWN:]
    html = f"<div><b>{escape(agent.name)}</b> {muted(f'· agent · {agent.state}')}</div>"
    text = f"{agent.name}: agent, {agent.state}"
    if coroutines:
        columns = ("coroutine", "state", "version", "where it waits or failed, what it gave")
        rows = [[c.name, _words(c.state), str(c.version), _fact(c)] for c in coroutines]
        html += table(
            columns,
            [
                [escape(n), _sign(c.state) + escape(s), v, code(f)]
                for c, (n, s, v, f) in zip(coroutines, rows, strict=True)
            ],
            numeric=(2,),
        )
        text += f"\n\n{text_table(columns, rows)}"
    for coroutine in coroutines:
        if coroutine.error is not None:
            error = coroutine.own_error()
            html += f"<div>{escape(coroutine.name)}</div>{error_box(error)}"
            text += f"\n\n{coroutine.name} failed with {type(error).__name__}: {error}"
    if blocks:
        labels = [f"{block_label(b.id, n)} {muted(f'{b.num_tokens} tokens')}" for n, b in blocks.items()]
        html += f"<div>{muted('blocks')} {' · '.join(labels)}</div>"
        text += "\n\nblocks: " + ", ".join(f"{n} {b.num_tokens} tokens" for n, b in blocks.items())
    if calls:
        columns = ("call", "by", "state", "")
        rows = [[f"{c.name}({c.arguments})", c.caller, _words(c.state), c.reason] for c in calls]
        html += table(columns, [_call_row(c) for c in calls])
        text += f"\n\n{text_table(columns, rows)}"
    return html, text


def _call_row(call: ToolCall) -> list[str]:
    state = _sign(call.state) + escape(_words(call.state))
    return [code(f"{call.name}({call.arguments})"), escape(call.caller), state, escape(call.reason)]


def _fact(coroutine: AgentCoroutine) -> str:
    """Where it waits or failed, or what it returned."""
    if coroutine.state == "done":
        return _cut(repr(coroutine.result)) if coroutine.result is not None else ""
    return coroutine.where


def _words(state: str) -> str:
    return WORDS.get(state, state)


def _sign(state: str) -> str:
    if state not in MARKS:
        return ""
    sign, colour = MARKS[state]
    return f'<span style="color:{colour}">{sign}</span> '


def _cut(text: str) -> str:
    return text if len(text) <= RESULT_LENGTH else f"{text[: RESULT_LENGTH - 1]}…"
