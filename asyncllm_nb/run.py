"""`run(coro)`: wait for a coroutine in synchronous code, in a notebook's cell and in a script.

Knows asyncio, signals and, once it is needed, nest-asyncio2. Knows nothing about engines or models.

Where it is called decides how it waits:

- no loop is running (a script): one loop that lives as long as the process, because whatever bound
  itself to the loop of its first await must find the same loop again at the next call;
- inside a running loop (a cell): that loop goes on, nested, so that background tasks do, too;
- in another thread of a kernel (a subshell, a worker): the coroutine runs on the kernel's loop and
  the thread waits.

While it waits, the stop button (SIGINT) cancels the coroutine. It never raises KeyboardInterrupt in
whichever task happens to be running: that task would be somebody else's.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import inspect
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine
from types import FrameType, TracebackType
from typing import Any, TypeVar

from .host import kernel_loop, running_loop, shell

T = TypeVar("T")

WAKE_SECONDS = 0.1
"""How often a waiting loop looks up. A signal that arrives just before the loop falls asleep, or in
another thread, wakes nothing by itself."""


def run(coro: Awaitable[T]) -> T:
    """Wait for `coro` (a coroutine or anything that can be awaited) and return its result.

    In a cell, prints and displays of the coroutine appear in that cell; messages from widgets are
    handled after it. Prefer `await` where it can be written: it needs no nested loop. From a thread
    of a kernel the result is waited for while the kernel's own thread runs it, so that thread must
    not in turn be blocked by waiting for this one.

    Raises KeyboardInterrupt when the stop button cancelled the coroutine. Where the caller is
    itself inside a task (an async cell), it gets CancelledError, as its other awaits do. A
    coroutine that is stuck in synchronous code of its own is interrupted there by pressing a second
    time.

    Raises TypeError if `coro` cannot be awaited and RuntimeError where waiting is impossible: in a
    thread without a kernel, in a loop that cannot be nested (uvloop), or after the original
    `nest_asyncio` was applied, which loses cells on current kernels.
    """
    __tracebackhide__ = True  # IPython: a traceback shows the cell and the coroutine, not this
    _require_awaitable(coro)
    try:
        running, kernel = running_loop(), kernel_loop()
        in_main_thread = threading.current_thread() is threading.main_thread()
        if kernel is not None and running is not kernel and not in_main_thread:
            return asyncio.run_coroutine_threadsafe(_as_coroutine(coro), kernel).result()
        if running is not None:
            _make_reentrant(running)
            return _drive(running, coro, nested=True)
        if not in_main_thread:
            raise RuntimeError(
                f"run() was called in the thread {threading.current_thread().name!r}, where no"
                " event loop runs; call it in the main thread, or hand the coroutine to the loop"
                " there: asyncio.run_coroutine_threadsafe(coro, loop).result()"
            )
        return _drive(_script_loop(), coro, nested=False)
    finally:
        if inspect.iscoroutine(coro) and inspect.getcoroutinestate(coro) == inspect.CORO_CREATED:
            coro.close()  # it never started: spare the reader a "was never awaited" on top


def _require_awaitable(coro: object) -> None:
    if inspect.isawaitable(coro):
        return
    if inspect.iscoroutinefunction(coro):
        name = getattr(coro, "__name__", "it")
        raise TypeError(f"run() takes a coroutine, not the function that makes it: run({name}())")
    if inspect.isasyncgen(coro):
        raise TypeError(
            "run() takes a coroutine, not an async generator: put the `async for` that reads it"
            " into an `async def` function and run that"
        )
    raise TypeError(
        f"run() takes a coroutine, as an `async def` function returns it; got {type(coro).__name__}"
    )


async def _await(awaitable: Awaitable[T]) -> T:
    return await awaitable


def _as_coroutine(awaitable: Awaitable[T]) -> Coroutine[Any, Any, T]:
    # Coroutines stay themselves: what they start is named after them, not after a wrapper.
    return awaitable if inspect.iscoroutine(awaitable) else _await(awaitable)


def _script_loop() -> asyncio.AbstractEventLoop:
    """The loop for code outside any loop. In IPython's terminal the one that runs an `await` typed
    at its prompt, otherwise our own."""
    if shell() is None:
        return _process_loop()
    from IPython.core.async_helpers import get_asyncio_loop

    loop: asyncio.AbstractEventLoop = get_asyncio_loop()  # type: ignore[no-untyped-call]
    return loop


@functools.cache
def _process_loop() -> asyncio.AbstractEventLoop:
    runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
    atexit.register(runner.close)  # cancels what is still there, so that its `finally` blocks run
    return runner.get_loop()


def _make_reentrant(loop: asyncio.AbstractEventLoop) -> None:
    """Patch asyncio so that `loop`, which is running, can be run inside one of its callbacks."""
    if not isinstance(loop, asyncio.BaseEventLoop):
        raise RuntimeError(
            f"run() cannot wait inside a running loop of type {type(loop).__module__}."
            f"{type(loop).__name__}; write `await ...` instead, or use asyncio's own loop"
        )
    if hasattr(asyncio, "_nest_patched") and not hasattr(asyncio, "_nest_asyncio2"):
        raise RuntimeError(
            "the original nest_asyncio is applied in this process; on current kernels it loses the"
            " next cell and widget events. Restart the kernel without nest_asyncio.apply(): run()"
            " brings its maintained successor, nest-asyncio2. Or write `await ...` instead"
        )
    import nest_asyncio2  # type: ignore[import-untyped]

    nest_asyncio2.apply(loop, run_close_loop=True)


def _drive(loop: asyncio.AbstractEventLoop, awaitable: Awaitable[T], *, nested: bool) -> T:
    __tracebackhide__ = True
    with _InterruptCancels(loop, nested) as interrupt:
        task = loop.create_task(_as_coroutine(awaitable))
        interrupt.watch(task)
        try:
            result = loop.run_until_complete(task)
        except asyncio.CancelledError:
            if interrupt.pressed and interrupt.caller_expects_keyboard_interrupt:
                raise KeyboardInterrupt from None
            raise
        except KeyboardInterrupt:
            if task.done() and not task.cancelled():
                task.exception()  # it is this one: mark it as seen
            raise
        finally:
            task.cancel()  # still running only if somebody stopped the loop
    if interrupt.came_too_late and interrupt.caller_expects_keyboard_interrupt:
        raise KeyboardInterrupt
    return result


_Handler = Callable[[int, FrameType | None], Any]


class _InterruptCancels:
    """While entered, SIGINT cancels the watched task, wherever in the loop the signal arrives.

    It takes over Python's own handler; nested in a running loop also the handler of whoever runs
    that loop (an async cell, asyncio.run). That one is told when the waiting is over, not at once:
    it would cancel the very task that is calling `run` and cannot notice before `run` returns.
    Other handlers stay: ignored signals (a task in the background of an idle kernel) and those that
    a script installed for itself.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, nested: bool) -> None:
        self.pressed = 0
        self.came_too_late = False
        self._loop = loop
        self._nested = nested
        self._task: asyncio.Task[Any] | None = None
        self._previous: _Handler | None = None

    @property
    def caller_expects_keyboard_interrupt(self) -> bool:
        return self._previous is signal.default_int_handler

    def watch(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        if self.pressed:  # between entering and here
            task.cancel()

    def __enter__(self) -> _InterruptCancels:
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGINT)
            ours = previous is signal.default_int_handler or (self._nested and callable(previous))
            if ours and callable(previous):
                self._previous = previous
                signal.signal(signal.SIGINT, self._on_sigint)
        self._wake_again()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        if self._previous is None or not self._installed():
            return  # not ours to restore; or somebody has replaced it meanwhile, and theirs stays
        signal.signal(signal.SIGINT, self._previous)
        if self.pressed and not self.caller_expects_keyboard_interrupt:
            self._previous(signal.SIGINT, None)

    def _installed(self) -> bool:
        return signal.getsignal(signal.SIGINT) == self._on_sigint

    def _wake_again(self) -> None:
        self._timer = self._loop.call_later(WAKE_SECONDS, self._wake_again)

    def _on_sigint(self, signum: int, frame: FrameType | None) -> None:
        self.pressed += 1
        task = self._task
        if task is not None:
            if self.pressed > 1 and self._executes(task):
                raise KeyboardInterrupt  # in the coroutine itself, which does not get to an await
            if not task.cancel():
                self.came_too_late = True
        self._loop.call_soon_threadsafe(_nothing)  # wakes a loop that sleeps in select()

    def _executes(self, task: asyncio.Task[Any]) -> bool:
        """Whether the code that the signal interrupted is the task's own (no other loop inside)."""
        running = getattr(task.get_coro(), "cr_running", False)
        return self._installed() and self.caller_expects_keyboard_interrupt and bool(running)


def _nothing() -> None:
    pass
