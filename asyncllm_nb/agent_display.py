"""What an agent looks like in a notebook: its coroutines, blocks and tool calls, as they change.

Knows an agent's public attributes. How a display is kept up to date is `live`'s, colours are `markup`'s.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from .agent_coroutines import AgentCoroutine
from .live import LiveHTML, Picture
from .markup import block_label, code, error_box, muted, table, text_table
from .tools import ToolCall

if TYPE_CHECKING:
    from .agent import Agent

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


def display_agent(agent: Agent) -> None:
    """Show `agent` as the cell's output, and keep it up to date. Showing it again replaces the earlier
    display. Raises NotImplementedError outside of a kernel: IPython then shows the repr."""
    live = LiveHTML(agent, draw_agent, kind="agent")
    if live.retired:  # as it is from the start where there is no kernel
        raise NotImplementedError("there is no kernel to show an agent in")
    live.on_retire(agent.observe(live.changed))
    live.show()


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
