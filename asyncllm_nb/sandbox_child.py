"""The child process of the sandbox: locks itself in, then runs the one coroutine that it is sent.

Runs as ``python -I -S`` in an empty folder, with an empty environment and no open file but the pipe to
its parent. Knows the standard library, `seccomp` and the proxies of the model. The order is the point:
everything that the code inside may use is imported and opened first, then the process gives up every
other right for good, and only then it reads the code.

What stands below `restrict` keeps honest code working where a file would be needed (imports,
tracebacks). None of it is a guard: the filter of the kernel is.
"""

from __future__ import annotations

import asyncio
import importlib
import io
import linecache
import os
import selectors
import sys
import traceback
from typing import Any

from . import seccomp
from .sandbox_llm import LLM, OFFERED, READY_MADE
from .sandbox_pipe import Wire
from .sandbox_wire import CHILD_BYTES, Message

LATE = ("_strptime",)
"""What Python itself imports only when it is used."""

PRINT_CHARACTERS = 8_000
TRACE_CHARACTERS = 2_000
NICENESS = 5
"""Added to the child's, so that a busy loop inside does not take the notebook's turn."""


class Prints(io.TextIOBase):
    """Standard output and error of the code inside: sent to the parent."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def write(self, text: str) -> int:
        for start in range(0, len(text), PRINT_CHARACTERS):
            self._wire.send(print=text[start : start + PRINT_CHARACTERS])
        return len(text)

    def writable(self) -> bool:
        return True


class Inside:
    """The coroutine and its loop."""

    def __init__(self) -> None:
        # poll needs no descriptor of its own, and the loop starts no thread.
        self.loop = asyncio.SelectorEventLoop(selectors.PollSelector())
        asyncio.set_event_loop(self.loop)
        self.wire = Wire(self.loop, self._take)
        self._start: asyncio.Future[Message] = self.loop.create_future()
        self._task: asyncio.Task[Any] | None = None
        self.loop.add_reader(0, self.wire.receive)

    def _take(self, message: Message) -> None:
        if "start" in message and not self._start.done():
            self._start.set_result(message["start"])
        elif "cancel" in message and self._task is not None:
            self._task.cancel()

    async def run(self) -> None:
        """Wait for the code, run it, and say how it ended."""
        start = await self._start
        self._task = asyncio.ensure_future(self._call(start))
        try:
            result = await self._task
            self.wire.send(returned=result)
        except asyncio.CancelledError:
            self.wire.send(raised="CancelledError", text="", trace="")
        except BaseException as error:
            self._tell(error, start["name"])

    async def _call(self, start: Message) -> Any:
        name, source = start["name"], start["source"]
        file = f"<{name}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        llm = LLM(self.wire)
        given: dict[str, Any] = {"llm": llm, **start["inputs"]}
        given.update((called, llm.known_block(number, called)) for number, called in start["blocks"])
        modules = {module: sys.modules[module] for module in READY_MADE}
        namespace = {"__name__": "__coroutine__", **modules, **given}
        exec(compile(source, file, "exec"), namespace)
        function = namespace[name]
        parameters = function.__code__.co_varnames[: function.__code__.co_argcount]
        return await function(**{key: given[key] for key in parameters if key in given})

    def _tell(self, error: BaseException, name: str) -> None:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == f"<{name}>"]
        trace = "".join(traceback.format_list(frames))[-TRACE_CHARACTERS:]
        kind, text = type(error).__name__, str(error)[:TRACE_CHARACTERS]
        del error, frames  # with them goes what a MemoryError was about
        self.wire.send(raised=kind[:100], text=text, trace=trace)


def restrict(memory_bytes: int, cpu_seconds: int) -> None:
    """Lock this process in. Raises OSError or ValueError with the reason why it cannot be."""
    os.nice(NICENESS)
    seccomp.limit(memory_bytes, cpu_seconds)
    seccomp.lock_in()


def make_do(wire: Wire) -> None:
    """What needs a file fails with an error that says so, instead of ending the process."""
    sys.meta_path.clear()  # an import of what is not loaded is a ModuleNotFoundError
    sys.path.clear()
    linecache.checkcache = lambda filename=None: None
    linecache.updatecache = lambda filename, module_globals=None: []
    sys.stdin = None  # input() raises RuntimeError
    sys.stdout = sys.stderr = Prints(wire)


def main() -> None:
    """Run with: the parent's process id, the limits of memory (bytes) and of CPU time (seconds)."""
    parent, memory_bytes, cpu_seconds = (int(word) for word in sys.argv[1:4])
    for module in (*OFFERED, *LATE):
        importlib.import_module(module)
    inside = Inside()
    try:
        seccomp.end_with_parent(parent)
        restrict(memory_bytes, cpu_seconds)
    except (OSError, ValueError) as error:
        inside.wire.send(unavailable=str(error)[: CHILD_BYTES // 8])
        os._exit(3)
    make_do(inside.wire)
    inside.wire.send(ready=True)
    try:
        try:
            inside.loop.run_until_complete(inside.run())
        except BaseException as error:  # SystemExit and KeyboardInterrupt go through a loop
            inside.wire.send(raised=type(error).__name__[:100], text="", trace="")
        # The parent ends this process when it has read the answer. Ending before that, with answers to
        # calls unread, would break the pipe before the parent has read it to its end.
        while os.read(0, 2**16):
            pass
    finally:
        os._exit(0)  # no interpreter shutdown: it would need system calls that are closed by now
