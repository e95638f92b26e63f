"""Tools: real Python functions that a coroutine calls while the model goes on, and what holds them back.

Knows asyncio and threads; no engine and no agent. A call goes through its gate (an event that somebody
sets when it is time), then its approval (a person's, or a policy's), then it runs: a plain function in
a thread, an async one where it is called. Whatever becomes of a call, `changed` is told.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from functools import update_wrapper
from typing import Any, Literal, Protocol

from .engine.errors import AsyncLLMError

CallState = Literal["gate", "asking", "running", "done", "failed", "denied", "timeout", "cancelled"]
Policy = Callable[["ToolCall"], "bool | Awaitable[bool]"]

ARGUMENT_LENGTH = 200
"""Characters of one argument that are shown."""


class ToolDenied(AsyncLLMError):
    """A tool was not called: a person or a policy said no, and why."""


class Gate(Protocol):
    """What holds calls back until it is set; an `asyncio.Event` is one."""

    async def wait(self) -> Any: ...


class ToolCall:
    """One call of a tool. What it does before and after is in `state`:

    gate (waits for its gate), asking (waits for approval), running, done, failed, denied, timeout,
    cancelled (its coroutine was). `approve` and `deny` may be called from any thread.
    """

    def __init__(self, tool: Tool, number: int, caller: str, arguments: str) -> None:
        self.tool = tool
        self.number = number
        self.caller = caller  # the coroutine that calls; "" for a cell
        self.arguments = arguments  # as text
        self.state: CallState = "gate" if tool.gate else "asking" if tool.approve else "running"
        self.reason = ""  # why it was denied, or how it failed
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self.approved: bool | None = None  # None: nobody has decided
        self.decided: asyncio.Future[None] = self._loop.create_future()

    @property
    def name(self) -> str:
        return self.tool.name

    @property
    def waits(self) -> bool:
        """For its gate or for approval: it can still be denied."""
        return self.state in ("gate", "asking")

    @property
    def ended(self) -> bool:
        """Is it neither waiting nor running?"""
        return self.state not in ("gate", "asking", "running")

    def approve(self) -> None:
        """Let it run (once its gate is open). Any thread. Raises ValueError if nobody asks, or too late."""
        if self.tool.approve is None:
            raise ValueError(f"{self} waits for its gate and for nobody's approval: set the gate's event")
        self._decide(True, "")

    def deny(self, reason: str = "denied") -> None:
        """Keep it from running; its caller gets `ToolDenied` with `reason`. Any thread. Raises ValueError
        if it is too late."""
        if not isinstance(reason, str):
            raise TypeError(f"the reason is text, not {type(reason).__name__}")
        self._decide(False, reason)

    def _decide(self, approved: bool, reason: str) -> None:
        with self._lock:
            if self.approved is not None or not self.waits:
                raise ValueError(f"{self} is past deciding: {self._past}")
            self.approved, self.reason = approved, reason
        self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        if not self.decided.done():
            self.decided.set_result(None)

    def enter(self) -> None:
        """From here on it runs, and nobody can deny it any more. Raises ToolDenied if somebody has."""
        with self._lock:  # another thread may be denying it just now
            if self.approved is False:
                raise ToolDenied(f"{self}: {self.reason}")
            self.state = "running"

    @property
    def _past(self) -> str:
        if self.waits:
            return "it was approved" if self.approved else f"it was denied ({self.reason})"
        return self.state

    def __str__(self) -> str:
        return f"call {self.number}, {self.name}({self.arguments})"

    def __repr__(self) -> str:
        by = f" by {self.caller!r}" if self.caller else ""
        reason = f": {self.reason}" if self.reason else ""
        return f"<ToolCall {self.number} {self.name}({self.arguments}){by}, {self.state}{reason}>"


class Tool:
    """A function that coroutines call with ``await``; what `Agent.tool` makes of it."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        approve: bool | Policy | None,
        gate: Gate | None,
        timeout: float | None,
        begin: Callable[[Tool, str], ToolCall],
        changed: Callable[[ToolCall], None],
    ) -> None:
        check_tool(function, approve, gate, timeout)
        self.function = function
        self.name = function.__name__
        self.approve: Literal[True] | Policy | None = approve or None
        self.gate = gate
        self.timeout = timeout
        self._signature = inspect.signature(function)
        self._begin, self._changed = begin, changed
        update_wrapper(self, function)

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it: through gate and approval, then in a thread.

        Raises ToolDenied, TimeoutError (`timeout` s, waiting included), or what the function raises. A
        function that runs in a thread cannot be stopped: after a timeout or a cancellation its thread
        goes on to its end, and what it returns is dropped.
        """
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}{self._signature}: {error}") from None
        call = self._begin(self, ", ".join(_shown(key, value) for key, value in bound.arguments.items()))
        if call.waits:
            self._changed(call)
        try:
            async with asyncio.timeout(self.timeout) as limit:
                await self._wait_until_it_may_run(call)
                self._changed(call)
                result = await self._run(bound)
        except BaseException as error:
            self._fail(call, error, timed_out=limit.expired())
            if call.state == "timeout":
                raise TimeoutError(f"{call}: {call.reason}") from error
            raise
        self._set(call, "done")
        return result

    async def _wait_until_it_may_run(self, call: ToolCall) -> None:
        """Gate, then approval. Raises ToolDenied."""
        if self.gate is not None:
            await _first(self.gate.wait(), call.decided)
            if call.approved:  # before the gate was open, perhaps
                await self.gate.wait()
        if self.approve is not None and call.approved is None:
            self._set(call, "asking")
            if self.approve is not True:
                await self._ask(self.approve, call)
            await call.decided
        call.enter()

    async def _ask(self, policy: Policy, call: ToolCall) -> None:
        """A policy decides, unless somebody does before it answers."""
        answer = policy(call)
        if inspect.isawaitable(answer):
            answer = await _first(answer, call.decided)
        if call.approved is None:
            if not isinstance(answer, bool):
                raise TypeError(f"the policy of tool {self.name!r} answers True or False, not {answer!r:.60}")
            if answer:
                call.approve()
            else:
                call.deny("its policy said no")

    async def _run(self, bound: inspect.BoundArguments) -> Any:
        if inspect.iscoroutinefunction(self.function):
            return await self.function(*bound.args, **bound.kwargs)
        return await asyncio.to_thread(self.function, *bound.args, **bound.kwargs)

    def _set(self, call: ToolCall, state: CallState) -> None:
        if call.state != state:
            call.state = state
            self._changed(call)

    def _fail(self, call: ToolCall, error: BaseException, *, timed_out: bool) -> None:
        if timed_out:
            call.reason = f"after {self.timeout:g} s, while {_while(call)}"
            self._set(call, "timeout")
        elif isinstance(error, asyncio.CancelledError):
            self._set(call, "cancelled")
        elif isinstance(error, ToolDenied) and call.waits:
            self._set(call, "denied")
        else:
            call.reason = f"{type(error).__name__}: {error}"
            self._set(call, "failed")

    def __repr__(self) -> str:
        asks = "a person" if self.approve is True else "a policy" if self.approve else ""
        facts = [
            f"{self._signature}",
            "behind a gate" if self.gate is not None else "",
            f"asks {asks}" if asks else "",
            f"within {self.timeout:g} s" if self.timeout is not None else "",
        ]
        return f"<Tool {self.name}{', '.join(fact for fact in facts if fact)}>"


async def _first(awaitable: Awaitable[Any], other: asyncio.Future[Any]) -> Any:
    """What `awaitable` gives; None, with it cancelled, if `other` is done first."""
    task = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait({task, other}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()


def check_tool(function: Any, approve: Any, gate: Any, timeout: Any) -> None:
    """Raise TypeError or ValueError for what makes no tool."""
    if not callable(function) or inspect.isclass(function):
        raise TypeError(f"a tool is a function, not {function!r:.60}")
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise TypeError(f"tool {function.__name__!r} yields: return the whole result instead")
    if approve is not None and not isinstance(approve, bool) and not callable(approve):
        raise TypeError(
            "approve is True (ask a person), a function of the call that answers True or False, or None, "
            f"not {approve!r:.60}"
        )
    if gate is not None and not inspect.iscoroutinefunction(getattr(gate, "wait", None)):
        raise TypeError(f"gate is an event: agent.event(name) or an asyncio.Event, not {gate!r:.60}")
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float)):
        raise TypeError(f"timeout is a number of seconds, not {timeout!r:.60}")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout is a positive number of seconds, not {timeout}")


def _while(call: ToolCall) -> str:
    waits = {"gate": "its gate was closed", "asking": "nobody had approved it"}
    return waits.get(call.state, "it ran")


def _shown(name: str, value: Any) -> str:
    text = repr(value)
    if len(text) > ARGUMENT_LENGTH:
        text = f"{text[: ARGUMENT_LENGTH - 1]}…"
    return f"{name}={text}"
