"""An agent's tools by name, and the calls of them that a person should see.

Knows tools and, of the engine, its trace; what a call goes through is `tools`'. Each change of a call is
recorded, so that the timeline and a replay show what waited, and for whom.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

from .agent_coroutines import caller
from .engine.trace import Trace
from .tools import Gate, Policy, Tool, ToolCall

CALLS_KEPT = 64
"""Calls that have ended and are still shown."""


class Toolbox:
    """The tools of the agent called `agent`. `notify` is called after each change."""

    def __init__(self, agent: str, trace: Trace, notify: Callable[[], None]) -> None:
        self._agent = agent
        self._trace = trace
        self._notify = notify
        self.tools: dict[str, Tool] = {}
        self.calls: deque[ToolCall] = deque()
        self._numbers = itertools.count(1)

    def add(
        self,
        function: Callable[..., Any],
        *,
        approve: bool | Policy | None,
        gate: Gate | None,
        timeout: float | None,
    ) -> Tool:
        """A tool; one of the same name is replaced, and calls of it go on as they began."""
        tool = Tool(
            function, approve=approve, gate=gate, timeout=timeout, begin=self._begin, changed=self._changed
        )
        self.tools[tool.name] = tool
        self._notify()
        return tool

    def _begin(self, tool: Tool, arguments: str) -> ToolCall:
        call = ToolCall(tool, next(self._numbers), caller.get(), arguments)
        ended = [one for one in self.calls if one.ended]
        for one in ended[: max(0, len(ended) - CALLS_KEPT + 1)]:
            self.calls.remove(one)
        self.calls.append(call)
        return call

    def _changed(self, call: ToolCall) -> None:
        self._trace.add(
            "tool",
            a=self._agent,
            c=call.number,
            name=call.name,
            by=call.caller,
            args=call.arguments,
            state=call.state,
            reason=call.reason,
        )
        self._notify()
