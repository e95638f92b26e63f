"""What a person asks for in a view: pause, step, speed, cancel, say, mark, and what agents are told.

Knows the engine and its agents.

All of it runs on the engine's loop, at once or as a task of its own; none of it waits for the cell that
runs. A command that cannot be done raises, and the view that asked shows why.
"""

from __future__ import annotations

import asyncio
import sys
import weakref
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from .engine import control
from .engine.blocks import CacheBlock
from .engine.engine import Engine
from .inputs import known_name
from .saying import saying
from .tools import ToolCall

if TYPE_CHECKING:
    from .agent import Agent

Message = dict[str, Any]
Answer = Callable[[bool, str], None]


class Controls:
    """Does commands for one engine and says what became of them.

    Commands: ``run``, ``pause``, ``step`` (n), ``speed`` (interval, s), ``cancel`` (task), ``say`` (block,
    text), ``mark`` (step, note); of an agent (its name): ``approve`` (agent, call), ``deny`` (agent, call,
    reason), ``start_agent`` and ``stop_agent`` (agent; coroutine or all), ``restart_coroutine`` (agent,
    coroutine).
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self._tasks: set[asyncio.Task[None]] = set()  # the loop holds tasks only weakly

    def do(self, message: Message, answer: Answer) -> None:
        """Do what a view asks for; ``answer(ok, text)`` is called once, when it is done or impossible."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._do(message, answer), name="asyncllm_nb control")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _do(self, message: Message, answer: Answer) -> None:
        command = str(message.get("command"))
        engine = self._engine()
        if engine is None:
            answer(False, "the engine is gone: run the cell that makes it again")
            return
        try:
            known = COMMANDS.get(command)
            if known is None:
                raise ValueError(f"no command {command!r}; there are {', '.join(COMMANDS)}")
            engine.check_usable()
            text = await known(engine, message)
        except Exception as error:
            engine.trace.add("control", what=command, ok=False, answer=str(error))
            answer(False, f"{type(error).__name__}: {error}")
        else:
            engine.trace.add("control", what=command, ok=True, answer=text)
            answer(True, text)
        engine.notify()


async def _run(engine: Engine, _: Message) -> str:
    control.resume(engine)
    return "runs"


async def _pause(engine: Engine, _: Message) -> str:
    control.pause(engine)
    return f"paused after step {engine.server.stepper.num_steps}"


async def _step(engine: Engine, message: Message) -> str:
    made = await control.step(engine, int(message.get("n", 1)))
    return f"{made} step{'' if made == 1 else 's'} made" if made else "nothing can run"


async def _speed(engine: Engine, message: Message) -> str:
    interval = float(message["interval"])
    control.set_speed(engine, interval)
    return f"a step every {interval:g} s at most" if interval else "full speed"


async def _cancel(engine: Engine, message: Message) -> str:
    number = int(message["task"])
    task = engine.recorder.tasks.task(number)
    if task is None or task.done():
        raise ValueError(f"coroutine {number} has ended already")
    task.cancel()
    await asyncio.wait([task], timeout=5)  # it may refuse, or clean up for long
    if not task.done():
        raise RuntimeError("it was told to stop, and goes on")
    return "cancelled"


async def _say(engine: Engine, message: Message) -> str:
    block = _block(engine, int(message["block"]))
    encoding = saying(engine, block, str(message["text"]))
    await engine.result(encoding)
    return f"{len(encoding.tokens)} tokens in {block.name}"


async def _approve(engine: Engine, message: Message) -> str:
    call = _call(engine, message)
    call.approve()
    return f"{call} is approved"


async def _deny(engine: Engine, message: Message) -> str:
    call = _call(engine, message)
    call.deny(str(message.get("reason") or "denied"))
    return f"{call} is denied"


async def _start(engine: Engine, message: Message) -> str:
    _agent(engine, message).start(*_coroutines(message))
    return f"{message.get('coroutine') or 'all'} started"


async def _stop(engine: Engine, message: Message) -> str:
    agent = _agent(engine, message)
    stopping = agent.stop(*_coroutines(message))
    try:
        await asyncio.wait_for(stopping, timeout=5)
    except TimeoutError:
        raise RuntimeError("told to stop, and goes on: its cell shows where it waits") from None
    return f"{message.get('coroutine') or 'all'} stopped"


async def _restart(engine: Engine, message: Message) -> str:
    _agent(engine, message).restart(str(message["coroutine"]))
    return f"{message['coroutine']} starts anew"


async def _mark(engine: Engine, message: Message) -> str:
    step = int(message["step"])
    engine.trace.add("mark", n=step, note=str(message.get("note", "")))
    kept = engine.instruments.mark(step)
    return f"step {step} marked" + (", with its readings" if kept else "")


def kernel_note() -> str:
    """When this kernel acts on buttons while a cell runs: what a person should know whose click waits.
    "" outside of a kernel."""
    module = sys.modules.get("ipykernel")
    if module is None:
        return ""
    version: str = module.__version__
    major, minor = (int(part) for part in version.split(".")[:2])
    if major < 7:
        when = "only when the running cell has ended: start coroutines with create_task and let the cell end"
    elif (major, minor) < (7, 4):
        when = (
            "during a running cell only with JupyterLab's setting commsOverSubshells, which is on unless "
            "somebody has changed it; otherwise when the cell has ended"
        )
    else:
        when = "while a cell awaits; one that computes without giving way may hold them up to its end"
    return f"ipykernel {version} acts on buttons {when}."


COMMANDS: dict[str, Callable[[Engine, Message], Awaitable[str]]] = {
    "run": _run,
    "pause": _pause,
    "step": _step,
    "speed": _speed,
    "cancel": _cancel,
    "say": _say,
    "mark": _mark,
    "approve": _approve,
    "deny": _deny,
    "start_agent": _start,
    "stop_agent": _stop,
    "restart_coroutine": _restart,
}


def _agent(engine: Engine, message: Message) -> Agent:
    agent: Agent = engine.agents[known_name(message["agent"], engine.agents, "agent of this engine")]
    return agent


def _coroutines(message: Message) -> list[str]:
    """The coroutine that is meant; empty for all."""
    return [str(message["coroutine"])] if message.get("coroutine") else []


def _call(engine: Engine, message: Message) -> ToolCall:
    number = int(message["call"])
    for call in _agent(engine, message).calls:
        if call.number == number:
            return call
    raise ValueError(f"call {number} has ended long ago")


def _block(engine: Engine, number: int) -> CacheBlock:
    for block in engine.blocks.values():
        if block.id == number:
            return block
    raise ValueError(f"block {number} was freed")
