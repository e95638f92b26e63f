"""What a person asks for in a view: pause, step, speed, cancel, say, mark. Knows the engine.

All of it runs on the engine's loop, at once or as a task of its own; none of it waits for the cell that
runs. A command that cannot be done raises, and the view that asked shows why.
"""

from __future__ import annotations

import asyncio
import sys
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

from .engine import control
from .engine.blocks import CacheBlock
from .engine.engine import Engine
from .engine.requests import Encoding
from .engine.views import check_length

Message = dict[str, Any]
Answer = Callable[[bool, str], None]


class Controls:
    """Does commands for one engine and says what became of them.

    Commands: ``run``, ``pause``, ``step`` (n), ``speed`` (interval, s), ``cancel`` (task), ``say`` (block,
    text), ``mark`` (step, note).
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
    """Text of a person: markers in it are plain text. It goes behind what the block holds, under the
    blocks that the block's last writer reads."""
    block = _block(engine, int(message["block"]))
    text = str(message["text"])
    ids = engine.codec.encode(text, control=False)
    if not ids:
        raise ValueError("there is no text to say")
    view = (*_blocks_before(engine, block), block)
    check_length(engine, view, len(ids))
    encoding = Encoding(
        name="say",
        order=engine.next_order(),
        transaction=None,
        future=engine.loop.create_future(),
        writes=(block._record,),
        kind="prefill",
        tokens=ids,
        view=view[:-1],
        target=block,
    )
    engine.check_ever_fits(encoding)
    await engine.result(encoding)
    return f"{len(ids)} tokens in {block.name}"


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
}


def _block(engine: Engine, number: int) -> CacheBlock:
    for block in engine.blocks.values():
        if block.id == number:
            return block
    raise ValueError(f"block {number} was freed")


def _blocks_before(engine: Engine, block: CacheBlock) -> tuple[CacheBlock, ...]:
    """What is read when a person's text is encoded: the blocks before it in the view of the stream
    that writes it, those alive; none if no stream does."""
    writers = [stream for stream in engine.recent_streams() if stream.block is block]
    if not writers:
        return ()
    return tuple(b for b in writers[-1].view[:-1] if not b._record.freed)
