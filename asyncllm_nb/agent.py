"""`Agent`: named coroutines over one engine that a person defines, redefines and stops cell by cell.

Knows the engine and what agents keep by name: coroutines (`agent_group`), tools (`toolbox`), blocks,
events and queues (`shared`). How a coroutine is replaced is not known here, nor how an agent is drawn.

What a file of an agent is made of, for whoever writes and reads one:

    agent.name
    agent.coroutines          {name: AgentCoroutine}: .source (its text), .version
    agent.blocks              {name: CacheBlock}, the live ones, by the agent's names for them
    agent.events, .queues     {name: Event}, {name: Queue}: held, and not stored
    agent.define(name, source, namespace)    code from text; executed when it first starts, not before
    agent.adopt(name, block)                 from now on ``await agent.block(name)`` gives this block
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Generator
from contextvars import copy_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from . import agent_files
from .agent_coroutines import AgentCoroutine, Code, check_function
from .agent_group import Group
from .doing import Doing
from .engine.blocks import CacheBlock
from .host import running_loop
from .inputs import known_keywords
from .saying import saying
from .shared import Shared
from .sources import Source, source_of
from .toolbox import Toolbox
from .tools import Gate, Policy, Tool, ToolCall

if TYPE_CHECKING:
    from .llm import AsyncLLM

F = TypeVar("F", bound=Callable[..., Coroutine[Any, Any, Any]])


class Agent:
    """Coroutines that share blocks of one engine. The same `llm` and `name` give the same agent again.

    ::

        agent = Agent(llm, "solver")

        @agent.coroutine
        async def think():
            notes = await agent.block("notes")
            await llm.generate("So,", [notes], max_tokens=100)

        agent.start()
        results = await agent        # {"think": None}

    It runs from `start` until all its coroutines have ended. Meanwhile, running a cell with a coroutine
    again replaces that coroutine, and a new one starts at once; blocks stay as they are.
    """

    name: str
    llm: AsyncLLM

    def __new__(cls, llm: AsyncLLM, name: str) -> Self:
        from .llm import AsyncLLM

        if not isinstance(llm, AsyncLLM):
            raise TypeError(f"an agent needs an AsyncLLM, not {type(llm).__name__}")
        if not isinstance(name, str):
            raise TypeError(f"an agent's name is a string, not {name!r:.60}")
        if not name:
            raise ValueError("an agent's name is not empty")
        llm._engine.check_open()
        known = llm._agents.get(name)
        if known is None:
            known = llm._agents[name] = super().__new__(cls)
            known._make(llm, name)
        if not isinstance(known, cls):
            raise TypeError(f"agent {name!r} is a {type(known).__name__}: take another name")
        return known

    def _make(self, llm: AsyncLLM, name: str) -> None:
        self.name = name
        self.llm = llm
        self._engine = llm._engine
        self._group = Group(self, self._engine, self._notify, self._is_shown)
        self._shared = Shared(llm, self._notify)
        self._toolbox = Toolbox(name, llm.trace, self._notify)
        self._observers: list[Callable[[], None]] = []
        self._engine.observers.append(self._look_at_engine)

    # ---- coroutines -----------------------------------------------------------------------------

    def coroutine(self, function: F | None = None) -> F:
        """Decorator: `function`, an ``async def`` without parameters (or with one called ``agent``), is
        the coroutine of that name from now on.

        While the agent runs it starts at once; one of the same name that runs is cancelled at its next
        await, and the new one starts when the old one's ``finally`` has ended. Tasks that it starts by
        itself are its own to end, as asyncio.TaskGroup does. Raises TypeError for what cannot run.
        """
        if function is None:  # it has no options
            raise TypeError("write @agent.coroutine above the async def, without brackets")
        return self.add(function)

    def add(self, function: F, *, name: str | None = None, source: str | None = None) -> F:
        """What `coroutine` does, with a `name` other than the function's, and a `source` to show."""
        check_function(function)
        name = name if name is not None else getattr(function, "__name__", "")
        if not name:
            raise ValueError(f"{function!r:.60} has no name: add it with name=...")
        text = source_of(function) if source is None else source
        self._group.define(name, Code(text, copy_context(), function=function))
        return function

    def define(
        self, name: str, source: str, namespace: dict[str, Any], *, file: str | None = None
    ) -> AgentCoroutine:
        """What `coroutine` does, from text: ``async def name(): …``. It is checked now and executed in
        `namespace` when it first starts. `file`: what tracebacks call it.

        Raises SyntaxError or ValueError; if the agent runs, also what executing it raises.
        """
        known = self._group.by_name.get(name)
        version = known.version + 1 if known else 1
        parsed = Source.parse(name, source, file or f"<{self.name}.{name} {version}>")
        code = Code(parsed.text, copy_context(), source=parsed, namespace=namespace)
        if self.running:
            code.build()  # raises before anything that runs is replaced
        return self._group.define(name, code)

    def remove(self, name: str) -> Doing[None]:
        """Stop a coroutine and forget it, as when a cell gives it another name."""
        self._check_here()
        coroutine = self._group.remove(name)
        return Doing(self._group.until(lambda: not coroutine.alive), f"{self.name}: {name} is removed")

    # ---- running --------------------------------------------------------------------------------

    def start(self, *names: str) -> Self:
        """Start the coroutines (or those named) that do not run now, the ones that have ended anew.

        One that is ending starts when it has ended. Raises what a source raises that is executed now,
        before anything starts.
        """
        self._engine.check_usable()
        wanted = self._group.named(names)
        if not wanted:
            raise ValueError(
                f"agent {self.name!r} has no coroutine: put @agent.coroutine above an async def first"
            )
        self._group.start(wanted)
        return self

    def stop(self, *names: str) -> Doing[None]:
        """Cancel all coroutines (or those named) at their next await. ``await agent.stop()`` returns when
        they have ended, their ``finally`` included."""
        self._check_here()
        stopped = self._group.named(names)
        for coroutine in stopped:
            coroutine.end(again=False)
        ended = self._group.until(lambda: not any(c.alive and c.state == "ending" for c in stopped))
        return Doing(ended, f"{self.name}: {', '.join(names) or 'all coroutines'} told to stop")

    def restart(self, name: str) -> Self:
        """Start a coroutine anew, once what runs of it has ended; blocks stay as they are."""
        self._engine.check_usable()
        (coroutine,) = self._group.named([name])
        self._group.restart(coroutine)
        return self

    def _check_here(self) -> None:
        """Raise RuntimeError where nothing of the agent can be ended: outside of the engine's thread, or
        where no loop runs."""
        self._engine.check_thread()
        if running_loop() is None:
            raise RuntimeError("no event loop runs here: do this in a coroutine or a notebook cell")

    @property
    def running(self) -> bool:
        """Does a coroutine run that was not told to stop?"""
        return self._group.running

    @property
    def state(self) -> str:
        """new, running, ending (coroutines that were stopped have not ended) or ended."""
        states = {coroutine.state for coroutine in self._group.by_name.values()}
        if self.running:
            return "running"
        return "ending" if self._group.alive else "new" if states <= {"new"} else "ended"

    def __await__(self) -> Generator[Any, None, dict[str, Any]]:
        """Wait until all coroutines have ended: {name: what it returned}. A stopped one is left out.

        Cancelling the wait, as the stop button does, leaves the agent running. When coroutines have
        failed, raises that error, or an ExceptionGroup of several, at once; the others go on. Errors of an
        earlier run, before the agent was started again, are not raised again.
        """
        return self._finish().__await__()

    async def _finish(self) -> dict[str, Any]:
        self._engine.check_usable()
        if self.state == "new":
            raise RuntimeError(f"agent {self.name!r} has not been started: call start() before awaiting it")
        return await self._group.result()

    # ---- what coroutines share ------------------------------------------------------------------

    async def block(self, name: str) -> CacheBlock:
        """The agent's block of this name: made when first asked for, and the same one from then on
        (until it is freed)."""
        return await self._shared.block(name)

    def adopt(self, name: str, block: CacheBlock) -> CacheBlock:
        """Call `block` the agent's block of this name. Raises ValueError if there is another one."""
        return self._shared.adopt(name, block)

    def event(self, name: str) -> asyncio.Event:
        """The agent's event of this name: the same one each time, so that a cell that runs again strands
        nobody who waits for it."""
        return self._shared.event(name)

    @known_keywords
    def queue(self, name: str, maxsize: int = 0) -> asyncio.Queue[Any]:
        """The agent's queue of this name: the same one each time. `maxsize`: of a new one, 0: no limit."""
        return self._shared.queue(name, maxsize)

    @known_keywords
    def say(self, text: str, *, to: CacheBlock | str) -> Doing[int]:
        """Put `text` from outside into a block (or the agent's block of that name), at a token boundary
        of whoever writes it; markers in it are plain text. Awaited, gives its number of tokens.

        Raises ValueError or TypeError at once for what cannot be said.
        """
        block = self._shared.find(to)
        request = saying(self._engine, block, text)
        self._engine.submit(request)
        return Doing(self._said(request), f"{len(request.tokens)} tokens to {block.name}")

    async def _said(self, request: Any) -> int:
        await self._engine.wait(request.future)
        return len(request.tokens)

    @overload
    def tool(self, function: Callable[..., Any], /) -> Tool: ...

    @overload
    def tool(
        self,
        *,
        approve: bool | Policy | None = None,
        gate: Gate | str | None = None,
        timeout: float | None = None,
    ) -> Callable[[Callable[..., Any]], Tool]: ...

    @known_keywords  # type: ignore[misc]  # mypy holds that it loses the positional parameter's default
    def tool(
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        approve: bool | Policy | None = None,
        gate: Gate | str | None = None,
        timeout: float | None = None,
    ) -> Tool | Callable[[Callable[..., Any]], Tool]:
        """Decorator: a real function that coroutines call with ``await``; it runs in a thread.

        approve: True: a person approves each call (`pending`); a function of the call that answers True
            or False, perhaps async; None: nobody is asked.
        gate: an event (or the name of one of the agent's) that is waited for first.
        timeout: s for a call as a whole, waiting included.

        A call raises ToolDenied, TimeoutError, or what the function raises.
        """

        def make(function: Callable[..., Any]) -> Tool:
            event = self.event(gate) if isinstance(gate, str) else gate
            return self._toolbox.add(function, approve=approve, gate=event, timeout=timeout)

        return make if function is None else make(function)

    # ---- files ----------------------------------------------------------------------------------

    @known_keywords
    async def save(self, file: str | os.PathLike[str]) -> Path:
        """Write the code of the coroutines and all that the blocks hold into one file. Returns its path.

        The blocks are taken as they are at one moment between two steps; the agent may run meanwhile.
        Where a coroutine is just now, its events, queues and tools are not saved: a warning names them.

        Raises ValueError, with the reason, for a coroutine whose source is not known.
        """
        return await agent_files.save(self, file)

    @classmethod
    @known_keywords
    async def load(
        cls, file: str | os.PathLike[str], llm: AsyncLLM, namespace: dict[str, Any] | None = None
    ) -> Self:
        """The agent that `save` wrote, in an engine of the same model: its blocks hold what they held.

        Runs no code of the file. It prints the source, and the names that `namespace` (usually
        ``globals()``; None: those of ``__main__``) lacks; `start` executes the source in `namespace`.
        An agent of that name that does not run becomes the one of the file.

        Raises ValueError for a damaged file, one of another model, and an agent that runs, and
        CacheFullError if the blocks cannot fit; nothing has changed then.
        """
        return await agent_files.load(cls, file, llm, namespace)

    def become(
        self, sources: dict[str, str], blocks: dict[str, CacheBlock], namespace: dict[str, Any]
    ) -> None:
        """Have this code and these blocks from now on, and none that it had. For one that does not run."""
        assert not self._group.alive
        for name in self._group.by_name.keys() - sources:
            self._group.remove(name)
        self._shared.become(blocks)
        for name, source in sources.items():
            self.define(name, source, namespace)

    # ---- looking --------------------------------------------------------------------------------

    @property
    def coroutines(self) -> dict[str, AgentCoroutine]:
        """All coroutines by name, in the order of their first definition. A copy."""
        return dict(self._group.by_name)

    @property
    def blocks(self) -> dict[str, CacheBlock]:
        """The live blocks by the agent's names for them. A copy."""
        return self._shared.blocks

    @property
    def events(self) -> dict[str, asyncio.Event]:
        """The events that were asked for, by name. A copy."""
        return dict(self._shared.events)

    @property
    def queues(self) -> dict[str, asyncio.Queue[Any]]:
        """The queues that were asked for, by name. A copy."""
        return dict(self._shared.queues)

    @property
    def tools(self) -> dict[str, Tool]:
        """All tools by name. A copy."""
        return dict(self._toolbox.tools)

    @property
    def calls(self) -> list[ToolCall]:
        """Calls of tools, oldest first: all that go on, and the last that have ended."""
        return list(self._toolbox.calls)

    @property
    def pending(self) -> list[ToolCall]:
        """Calls that wait for their gate or for approval, and that nobody has decided:
        ``agent.pending[0].approve()``, ``.deny("why not")``, from any thread."""
        return [call for call in self._toolbox.calls if call.waits and call.approved is None]

    def source(self, name: str | None = None) -> str:
        """The code of every coroutine (or of one) as it runs now."""
        coroutines = self._group.named([name] if name is not None else [])
        return "\n\n".join(c.source or f"# {c.name}: its source is not known\n" for c in coroutines)

    def observe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback()` after each change of a coroutine, tool call or block name; it must be quick.

        Returns a function that ends it.
        """
        self._observers.append(callback)

        def unsubscribe() -> None:
            if callback in self._observers:
                self._observers.remove(callback)

        return unsubscribe

    def _is_shown(self) -> bool:
        """Does a panel show what a coroutine fails with?"""
        tasks = self._engine.recorder.tasks
        return bool(self._observers) or tasks.shows_errors() or tasks.shows_agents()

    def _notify(self) -> None:
        for observer in list(self._observers):
            try:
                observer()
            except Exception as error:  # its fault stops no coroutine
                loop = running_loop()
                if loop is None:
                    raise
                loop.call_exception_handler(
                    {"message": f"an observer of agent {self.name!r} failed", "exception": error}
                )
        self._engine.notify()

    def _look_at_engine(self) -> None:
        """Without its engine an agent cannot go on: its coroutines end, wherever they wait."""
        if self._engine.closed and self.running:
            for coroutine in self._group.by_name.values():
                coroutine.end(again=False)

    def __repr__(self) -> str:
        states = ", ".join(f"{c.name} {c.state}" for c in self._group.by_name.values())
        return f"<Agent {self.name!r}: {states or 'no coroutines'}>"

    def _repr_html_(self) -> str:
        from .agent_display import draw_agent

        return draw_agent(self)[0]

    def _ipython_display_(self) -> None:
        """As a cell's last expression an agent shows its panel, which follows it."""
        from .agent_display import display_agent

        display_agent(self)
