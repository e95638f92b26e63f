"""`run` in a script: one loop for ever, misuse, the stop signal at chosen and at random moments.

In a kernel it is tested in test_notebook_kernel.py, because nesting patches asyncio for the whole
process.
"""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from types import FrameType
from typing import Any

import pytest

from asyncllm_nb.run import run

run_module = sys.modules[run.__module__]  # the package's attribute of that name is the function


async def double(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


async def loop_of_call() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


@pytest.fixture(autouse=True)
def signal_handler_is_restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


def test_run_returns_the_result() -> None:
    assert run(double(21)) == 42


def test_run_raises_what_the_coroutine_raises() -> None:
    async def fail() -> None:
        raise LookupError("in the coroutine")

    with pytest.raises(LookupError, match="in the coroutine"):
        run(fail())


def test_run_uses_one_loop_for_all_calls() -> None:
    assert run(loop_of_call()) is run(loop_of_call())


def test_run_leaves_tasks_alive_between_calls() -> None:
    async def spawn() -> asyncio.Task[int]:
        return asyncio.create_task(double(4))

    task = run(spawn())
    assert run(task) == 8


def test_run_takes_any_awaitable() -> None:
    class Answer:
        def __await__(self) -> Generator[Any, None, int]:
            yield from asyncio.sleep(0).__await__()
            return 7

    assert run(Answer()) == 7


def test_run_names_the_task_after_the_coroutine() -> None:
    async def name() -> str:
        return repr(asyncio.current_task())

    assert "name() running" in run(name())


async def numbers() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("argument", "fix"),
    [
        (double, r"run\(double\(\)\)"),
        (numbers(), "async for"),
        (None, "got NoneType"),
        ("double(1)", "got str"),
    ],
)
def test_run_of_no_coroutine_names_the_fix(argument: object, fix: str) -> None:
    with pytest.raises(TypeError, match=fix):
        run(argument)  # type: ignore[arg-type]


def in_thread(call: Callable[[], object]) -> BaseException | None:
    """What `call` raises in another thread."""
    errors: list[BaseException] = []

    def target() -> None:
        try:
            call()
        except BaseException as error:  # handed to the test
            errors.append(error)

    thread = threading.Thread(target=target, name="helper")
    thread.start()
    thread.join()
    return errors[0] if errors else None


def test_run_in_a_thread_without_a_loop_names_the_fix() -> None:
    error = in_thread(lambda: run(double(1)))
    assert isinstance(error, RuntimeError)
    assert "helper" in str(error) and "run_coroutine_threadsafe" in str(error)


class ForeignLoop(asyncio.AbstractEventLoop):
    """A loop that cannot be nested, as uvloop's."""


def test_run_in_a_foreign_loop_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "running_loop", ForeignLoop)
    with pytest.raises(RuntimeError, match="ForeignLoop.*await"):
        run(double(1))


async def test_run_refuses_the_original_nest_asyncio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "_nest_patched", True, raising=False)
    with pytest.raises(RuntimeError, match="nest-asyncio2"):
        run(double(1))


# The stop signal


def test_sigint_cancels_the_coroutine_and_raises_in_the_caller() -> None:
    ended: list[str] = []

    async def wait() -> None:
        signal.raise_signal(signal.SIGINT)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    with pytest.raises(KeyboardInterrupt):
        run(wait())
    assert ended == ["cancelled"]
    assert run(double(3)) == 6


def test_sigint_cancels_an_awaitable_that_is_no_coroutine() -> None:
    future: asyncio.Future[None] = run(new_future())
    run_module._process_loop().call_soon(signal.raise_signal, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(future)


async def new_future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


def test_a_coroutine_may_finish_in_spite_of_sigint() -> None:
    async def persist() -> str:
        signal.raise_signal(signal.SIGINT)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "saved"
        return "not reached"

    assert run(persist()) == "saved"


def test_sigint_after_the_last_await_is_not_lost() -> None:
    async def finish() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _: signal.raise_signal(signal.SIGINT))

    with pytest.raises(KeyboardInterrupt):
        run(finish())


def test_a_second_sigint_interrupts_a_coroutine_that_does_not_await() -> None:
    reached: list[str] = []

    async def compute() -> None:
        signal.raise_signal(signal.SIGINT)
        reached.append("after the first")
        signal.raise_signal(signal.SIGINT)
        reached.append("after the second")

    with pytest.raises(KeyboardInterrupt):
        run(compute())
    assert reached == ["after the first"]


def test_a_second_sigint_spares_the_other_tasks() -> None:
    """Both signals arrive inside another task, where KeyboardInterrupt would kill it."""

    async def neighbour(waiting: asyncio.Event) -> str:
        await waiting.wait()
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(0)
        return "alive"

    async def wait(waiting: asyncio.Event) -> None:
        waiting.set()
        await asyncio.Event().wait()

    waiting = run(new_event())
    task = run(spawn(neighbour(waiting)))
    with pytest.raises(KeyboardInterrupt):
        run(wait(waiting))
    assert run(task) == "alive"


async def new_event() -> asyncio.Event:
    return asyncio.Event()


async def spawn(coroutine: Awaitable[str]) -> asyncio.Task[str]:
    async def body() -> str:
        return await coroutine

    return asyncio.create_task(body())


def test_sigint_at_random_moments_spares_the_other_tasks() -> None:
    rng = random.Random(5)

    async def tick(stop: asyncio.Event) -> str:
        while not stop.is_set():
            sum(range(20_000))  # most signals arrive in here
            await asyncio.sleep(0)
        return "alive"

    async def forever() -> None:
        while True:
            await asyncio.sleep(0)

    stop = run(new_event())
    ticking = run(spawn(tick(stop)))
    # An alarm of the system: a thread would get to send its signal only while the loop sleeps.
    previous = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        for _ in range(50):
            with pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0001, 0.004))
                run(forever())
    finally:
        signal.signal(signal.SIGALRM, previous)
    stop.set()
    assert run(ticking) == "alive"


def test_a_handler_of_the_script_stays() -> None:
    received: list[int] = []

    def handler(signum: int, frame: FrameType | None) -> None:
        received.append(signum)

    async def interrupted() -> str:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(0)
        return "undisturbed"

    previous = signal.signal(signal.SIGINT, handler)
    try:
        assert run(interrupted()) == "undisturbed"
    finally:
        signal.signal(signal.SIGINT, previous)
    assert received == [signal.SIGINT]


SCRIPT = """
import asyncio
from asyncllm_nb.run import run

async def background():
    try:
        await asyncio.Event().wait()
    finally:
        print("closed", flush=True)

async def start():
    global task
    task = asyncio.create_task(background())
    await asyncio.sleep(0)

run(start())
print("end of script", flush=True)
"""


def test_the_end_of_a_script_ends_its_tasks_in_order() -> None:
    script = [sys.executable, "-W", "error", "-c", SCRIPT]
    result = subprocess.run(script, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.split("\n") == ["end of script", "closed", ""]
    assert result.stderr == ""


NESTED_SCRIPT = """
import asyncio, signal
from asyncllm_nb.run import run

async def inner():
    signal.raise_signal(signal.SIGINT)
    try:
        await asyncio.Event().wait()
    finally:
        print("inner ended", flush=True)

async def main():
    try:
        run(inner())
    except asyncio.CancelledError:
        print("main cancelled", flush=True)
        raise

try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("stopped", flush=True)
"""


def test_sigint_inside_asyncio_run_stops_both() -> None:
    script = [sys.executable, "-c", NESTED_SCRIPT]
    result = subprocess.run(script, capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout.split("\n") == ["inner ended", "main cancelled", "stopped", ""]
    assert result.stderr == ""
