"""An agent's coroutines together: defined, started, stopped and waited for by name.

Knows coroutines (`agent_coroutines`) and what the trace records of them; no blocks and no tools. What
waits here is woken by each change of a coroutine, and by a timer that keeps the stop button working.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from .agent_coroutines import AgentCoroutine, Code
from .engine.engine import PAUSE_NOTICE, Engine
from .inputs import known_name

HEARTBEAT = 0.1  # s; an idle event loop would not notice the notebook's stop button


class Group:
    """The coroutines of `agent`. `changed` is called after each change of one; `is_seen`: does a panel
    show what they fail with?"""

    def __init__(
        self,
        agent: Any,
        engine: Engine,
        changed: Callable[[], None],
        is_seen: Callable[[], bool],
    ) -> None:
        self.by_name: dict[str, AgentCoroutine] = {}
        self._agent = agent
        self._engine = engine
        self._notify = changed
        self._is_seen = is_seen
        self._leaving: dict[str, AgentCoroutine] = {}  # removed, and not ended yet
        self._changes: set[asyncio.Future[None]] = set()  # of those who wait for one
        self._num_waiting = 0  # tasks that wait for the result
        self._earlier: dict[str, int] = {}  # whose run, which one, failed before this run of the agent

    # ---- which there are ------------------------------------------------------------------------

    def named(self, names: Iterable[str]) -> list[AgentCoroutine]:
        """Those of `names`, or all. Raises ValueError with the nearest name."""
        what = "coroutine of this agent"
        return [self.by_name[known_name(name, self.by_name, what)] for name in names or self.by_name]

    def define(self, name: str, code: Code) -> AgentCoroutine:
        """The coroutine of that name has this code from now on; while others run, it starts."""
        self._engine.check_open()
        self._engine.check_thread()
        running = self.running
        known = self.by_name.get(name) or self._leaving.pop(name, None)
        if known is not None:
            self.by_name[name] = known
            known.define(code, start=running)
            return known
        made = self.by_name[name] = AgentCoroutine(name, code, self._engine, self._agent, self._changed)
        self._changed(made)
        if running:
            made.begin()
        return made

    def remove(self, name: str) -> AgentCoroutine:
        """Stop a coroutine and forget it. One that is defined anew meanwhile waits until it has ended."""
        (coroutine,) = self.named([name])
        coroutine.end(again=False)
        if coroutine.alive:
            self._leaving[name] = coroutine
        del self.by_name[name]
        self._record(coroutine, "removed")
        self._notify()
        return coroutine

    # ---- what they do ---------------------------------------------------------------------------

    def start(self, coroutines: list[AgentCoroutine]) -> None:
        """Start those that do not run. What cannot be made into a function raises before any starts."""
        for coroutine in coroutines:
            coroutine.code.build()
        self._begin_run()
        for coroutine in coroutines:
            coroutine.begin()

    def restart(self, coroutine: AgentCoroutine) -> None:
        """Start it anew, once what runs of it has ended. Raises what executing its source raises."""
        coroutine.code.build()
        self._begin_run()
        coroutine.end(again=True)

    def _begin_run(self) -> None:
        """If all have ended, what has failed so far is not what the next result is about."""
        if not self.alive:
            self._earlier = {c.name: c.num_runs for c in self.by_name.values() if c.state == "failed"}

    @property
    def running(self) -> bool:
        """Does one run that was not told to stop?"""
        return any(c.state in ("running", "replacing") for c in self.by_name.values())

    @property
    def alive(self) -> bool:
        """Does a task run one, perhaps its ``finally``?"""
        return any(c.alive for c in self.by_name.values())

    def _failed(self) -> list[AgentCoroutine]:
        """Those whose last run ended with an error, in this run of the agent."""
        failed = [c for c in self.by_name.values() if c.state == "failed"]
        return [c for c in failed if self._earlier.get(c.name) != c.num_runs]

    async def result(self) -> dict[str, Any]:
        """Wait until all have ended or one has failed: {name: what it returned}, stopped ones left out.
        Raises the error of one, or a group of several errors."""
        if any(c.task is asyncio.current_task() for c in self.by_name.values()):
            raise RuntimeError(
                f"a coroutine of agent {self._agent.name!r} awaits the agent, and so itself: it would "
                "never end; await what it needs through an event or a queue"
            )
        self._num_waiting += 1
        saying = asyncio.ensure_future(self._say_if_paused())
        try:
            await self.until(lambda: self._failed() or not self.alive)
        finally:
            self._num_waiting -= 1
            saying.cancel()
        errors = [coroutine.own_error() for coroutine in self._failed()]
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise BaseExceptionGroup(f"coroutines of agent {self._agent.name!r} failed", errors)
        return {name: c.result for name, c in self.by_name.items() if c.state == "done"}

    async def _say_if_paused(self) -> None:
        """The cell that waits here should not wonder why nothing happens."""
        while True:
            await asyncio.sleep(PAUSE_NOTICE)
            self._engine.tell_paused()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until `condition` holds; it is looked at after each change of a coroutine."""
        loop = asyncio.get_running_loop()
        while not condition():
            change: asyncio.Future[None] = loop.create_future()
            self._changes.add(change)
            try:
                while not change.done():
                    await asyncio.wait([change], timeout=HEARTBEAT)
            finally:
                self._changes.discard(change)

    def _changed(self, coroutine: AgentCoroutine) -> None:
        if self.by_name.get(coroutine.name) is coroutine:
            self._record(coroutine, coroutine.state)
        elif not coroutine.alive:
            self._leaving.pop(coroutine.name, None)
        if coroutine.state == "failed" and not (self._num_waiting or self._is_seen()):
            coroutine.print_error()
        for change in self._changes:
            if not change.done():
                change.set_result(None)
        self._notify()

    def _record(self, coroutine: AgentCoroutine, state: str) -> None:
        error = coroutine.error
        self._engine.trace.add(
            "agent",
            a=self._agent.name,
            name=coroutine.name,
            state=state,
            version=coroutine.version,
            k=coroutine.task_number,
            error=f"{type(error).__name__}: {error}" if error is not None else "",
        )
