"""One coroutine of an agent: its code as it is now, and the one task that runs it.

Knows asyncio and what the engine records of tasks; nothing of blocks, tools or other coroutines. At any
moment at most one task runs a coroutine's code. New code, a restart and a stop cancel that task once, at
its next await, and wait for its ``finally``; only then the next one starts, in the context of the cell
that defined the code, so that what it prints shows there, whoever started it.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import warnings
from collections.abc import Callable
from contextvars import Context, ContextVar
from types import TracebackType
from typing import Any, Literal

from .engine.engine import Engine, in_background
from .notebook import error_text
from .sources import Function, Source

CoroutineState = Literal["new", "running", "ending", "replacing", "done", "failed", "stopped"]

PATIENCE = 5.0
"""s that a coroutine may take to end until its cell is warned; being told again then cancels it again."""

caller: ContextVar[str] = ContextVar("asyncllm_nb_coroutine", default="")
"""The name of the agent's coroutine that the running code belongs to; "" elsewhere."""


class Code:
    """What a coroutine runs: a function, or a source that becomes one when it first starts."""

    def __init__(
        self,
        text: str,
        context: Context,
        *,
        function: Function | None = None,
        source: Source | None = None,
        namespace: dict[str, Any] | None = None,
    ) -> None:
        self.text = text
        self.context = context  # of the cell that defined it
        self.namespace = namespace  # in which the source is executed
        self._function, self._source = function, source

    @property
    def function(self) -> Function | None:
        """None as long as it is a source that has not been executed."""
        return self._function

    def build(self) -> Function:
        """The function; the first time a source is executed. Raises what that raises."""
        if self._function is None:
            assert self._source is not None and self.namespace is not None
            self._function = self.context.copy().run(self._source.build, self.namespace)
            check_function(self._function)
        return self._function


class AgentCoroutine:
    """A named coroutine of an agent.

    `state`: new (never started), running, ending (told to stop, in its ``finally``), replacing (the same,
    and starts anew then), done, failed, stopped. `result` and `error` are those of the last run.
    """

    def __init__(
        self,
        name: str,
        code: Code,
        engine: Engine,
        agent: Any,
        changed: Callable[[AgentCoroutine], None],
    ) -> None:
        self.name = name
        self.version = 1  # of its code: grows each time it is defined
        self.state: CoroutineState = "new"
        self.result: Any = None
        self.error: BaseException | None = None
        self.task_number = 0  # in the recording
        self.num_runs = 0
        self._traceback: TracebackType | None = None
        self._code = code
        self._engine = engine
        self._agent = agent
        self._changed = changed
        self._task: asyncio.Task[Any] | None = None
        self._context: Context | None = None  # of the task
        self._again = False
        self._told_at: float | None = None
        self._alarm: asyncio.TimerHandle | None = None

    # ---- its code -------------------------------------------------------------------------------

    @property
    def code(self) -> Code:
        """What runs now, or starts as soon as its predecessor has ended."""
        return self._code

    @property
    def source(self) -> str:
        """Its text; "" if none is known."""
        return self._code.text

    @property
    def alive(self) -> bool:
        """Does a task run it, perhaps its ``finally``?"""
        return self._task is not None

    @property
    def task(self) -> asyncio.Task[Any] | None:
        """The task that runs it now."""
        return self._task

    def define(self, code: Code, *, start: bool) -> None:
        """Other code from now on. A running task ends; `start`: the new code starts then, or now."""
        self._code = code
        self.version += 1
        if start or self._task is not None:
            self.end(again=start)
        else:
            self.state = "new"
            self._forget_outcome()
        self._changed(self)

    # ---- its run --------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start it, unless it runs; if it is ending, once it has ended."""
        if self._task is None:
            self._launch()
        elif self.state == "ending":
            self._again = True
            self._set("replacing")

    def end(self, *, again: bool) -> None:
        """Cancel its task at the next await, if there is one. `again`: start it then (or now)."""
        self._again = again and self._task is not None
        if self._task is not None:
            self._cancel(self._task)
            self._set("replacing" if again else "ending")
        elif again:
            self._launch()

    def _cancel(self, task: asyncio.Task[Any]) -> None:
        """Once: a second time would break off its ``finally``. Again only after PATIENCE."""
        now = self._engine.loop.time()
        if self._told_at is not None and now < self._told_at + PATIENCE:
            return
        self._told_at = now
        task.cancel()
        self._forget_alarm()
        self._alarm = self._engine.loop.call_later(PATIENCE, self._warn, context=self._code.context.copy())

    def _warn(self) -> None:
        """It has not ended. Runs in the context of the newest code, so that its cell shows the warning."""
        if self._task is None:
            return
        _, line = self._engine.recorder.tasks.where(self._task)
        at = f" It waits at {line}." if line else ""
        then = "the new one starts when it has; " if self._again else ""
        code = getattr(self._code.function, "__code__", None)
        warnings.warn_explicit(
            f"coroutine {self._full_name!r} was told to end {PATIENCE:g} s ago and has not: {then}a "
            f"`finally` that waits, or code that catches CancelledError, holds it up.{at} To cancel it "
            "again, stop it or run its cell once more",
            RuntimeWarning,
            code.co_filename if code else self._full_name,
            code.co_firstlineno if code else 1,
        )  # without a registry: it is said each time

    def _launch(self) -> None:
        assert self._task is None
        self._forget_outcome()
        self.num_runs += 1
        self._told_at = None
        context = self._code.context.copy()
        context.run(caller.set, self.name)
        context.run(in_background.set, True)
        try:
            function = self._code.build()
        except BaseException as error:
            self._failed(error, context)
            self._changed(self)
            return
        coroutine: Any = _kept_inside(function, {"agent": self._agent} if takes_agent(function) else {})
        coroutine.__qualname__ = getattr(function, "__qualname__", self.name)  # what its streams are called
        self._task = self._engine.loop.create_task(coroutine, name=self._full_name, context=context)
        self._context = context
        self.task_number = self._engine.recorder.tasks.watch(self._task, self._full_name)
        self._task.add_done_callback(self._ended)
        self._set("running")

    def _ended(self, task: asyncio.Task[Any]) -> None:
        context, self._task, self._context = self._context, None, None
        self._forget_alarm()
        again, self._again = self._again, False
        if task.cancelled():
            self.state = "stopped"
        elif (error := task.exception()) is not None:
            self._failed(error, context)
        else:
            self.state, self.result = "done", task.result()
        if again:
            if self.error is not None:  # forgotten as soon as the next one starts
                self.print_error()
            self._launch()
        else:
            self._changed(self)

    def _failed(self, error: BaseException, context: Context | None) -> None:
        place = error.__traceback__
        while place is not None and place.tb_frame.f_code is _kept_inside.__code__:
            place = place.tb_next  # a person's code begins there
        self.state, self.error, self._traceback = "failed", error, place
        self._context = context  # to print it there

    def _set(self, state: CoroutineState) -> None:
        if self.state != state:
            self.state = state
            self._changed(self)

    def _forget_outcome(self) -> None:
        self.result = self.error = self._traceback = None

    def _forget_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    # ---- what became of it ----------------------------------------------------------------------

    def own_error(self) -> BaseException:
        """What it failed with; a group that holds one error only is that error."""
        assert self.error is not None
        error = self.error.with_traceback(self._traceback)
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        return error

    def print_error(self) -> None:
        """Print what it failed with to the cell that defined the code."""
        assert self.error is not None and self._context is not None
        text = error_text(self.error.with_traceback(self._traceback))
        self._context.run(print, f"coroutine {self._full_name!r} failed\n{text}", file=sys.stderr)

    @property
    def where(self) -> str:
        """The line at which it waits for something that is not the engine's, or at which it failed, as
        people read it."""
        if self.error is not None:
            return self._engine.recorder.tasks.failed_at(self.own_error())
        task = self._task
        if task is None or any(s.asking and s.reader is task for s in self._engine.scheduler.streams):
            return ""
        return self._engine.recorder.tasks.where(task)[1]

    @property
    def _full_name(self) -> str:
        return f"{self._agent.name}.{self.name}"

    def __repr__(self) -> str:
        failure = f": {type(self.error).__name__}: {self.error}" if self.error is not None else ""
        return f"<AgentCoroutine {self._full_name!r}, version {self.version}, {self.state}{failure}>"


async def _kept_inside(function: Function, arguments: dict[str, Any]) -> Any:
    """Run `function`. From a task, what ends a process would end the event loop, and with it the kernel."""
    try:
        return await function(**arguments)
    except (SystemExit, KeyboardInterrupt) as error:
        what = f"{type(error).__name__}({error}) was raised, which would end the kernel"
        told = RuntimeError(f"{what}: `return` ends a coroutine")
        raise told.with_traceback(error.__traceback__) from None


def check_function(function: Any) -> None:
    """Raise TypeError unless an agent can run `function`."""
    name = getattr(function, "__name__", type(function).__name__)
    if inspect.isasyncgenfunction(function):
        raise TypeError(f"{name!r} yields, so nobody would run it: a coroutine of an agent has no `yield`")
    if inspect.iscoroutine(function):
        function.close()
        raise TypeError(f"pass the function {name!r} itself, without calling it")
    if not inspect.iscoroutinefunction(function):
        raise TypeError(f"a coroutine of an agent is an `async def`, not {function!r:.60}")
    required = _required(function)
    if required not in ([], ["agent"]):
        raise TypeError(
            f"coroutine {name!r} takes {', '.join(required)}, and nobody would give it that: take no "
            "parameters, or one called agent; what it needs else stands in the notebook's names"
        )


def takes_agent(function: Function) -> bool:
    """Does it want the agent as its one argument?"""
    return _required(function) == ["agent"]


def _required(function: Callable[..., Any]) -> list[str]:
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variable]
