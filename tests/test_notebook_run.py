"""`run` in the cells of a real kernel: nothing gets lost, and the stop button hits nobody else."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator

import pytest
from kernel_harness import Kernel

pytestmark = pytest.mark.kernel

SETUP = """
import asyncio, signal, threading
from asyncllm_nb.run import run

received = []

def on_open(comm, message):
    comm.on_msg(lambda message: received.append(message["content"]["data"]["n"]))

get_ipython().kernel.comm_manager.register_target("toy", on_open)

loop = asyncio.get_running_loop()
released = asyncio.Event()
loop.add_signal_handler(signal.SIGUSR1, released.set)

async def wait_for_release():
    print("waiting", flush=True)
    await released.wait()
    released.clear()

async def double(number):
    await asyncio.sleep(0)
    return 2 * number

async def forever():
    print("forever", flush=True)
    await asyncio.Event().wait()

ticks = 0

async def tick():
    global ticks
    while True:
        ticks += 1
        sum(range(20_000))  # most signals arrive in here
        await asyncio.sleep(0.001)

async def tick_twice():
    seen = ticks
    while ticks < seen + 2:
        await asyncio.sleep(0)
"""


@pytest.fixture(scope="module")
def module_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with Kernel(tmp_path_factory.mktemp("kernel")) as kernel:
        kernel.run_ok(SETUP)
        yield kernel


@pytest.fixture
def kernel(module_kernel: Kernel) -> Iterator[Kernel]:
    """One kernel for all tests here; each must leave it usable."""
    yield module_kernel
    assert module_kernel.run_ok("print(run(double(5)))").text == "10\n"


def release(kernel: Kernel) -> None:
    kernel.signal(signal.SIGUSR1)


def test_outputs_appear_in_the_cell_that_called_run(kernel: Kernel) -> None:
    cell = kernel.run_ok("async def show():\n    print('one'); display(2)\nrun(show())")
    assert cell.text == "one\n"
    assert [display["data"]["text/plain"] for display in cell.displays] == ["2"]


def test_outputs_of_a_background_task_appear_in_its_own_cell(kernel: Kernel) -> None:
    first = kernel.run_ok(
        "async def later(): await gate.wait(); print('x')\n"
        "gate = asyncio.Event(); task = asyncio.create_task(later())"
    )
    second = kernel.run_ok("gate.set(); run(double(1)); run(asyncio.sleep(0))")
    kernel.wait_for_text(first, "x")
    assert second.text == ""


def test_neither_the_next_cell_nor_a_comm_message_gets_lost(kernel: Kernel) -> None:
    """Both arrive while the loop runs nested; a subshell's answer proves that they have arrived."""
    subshell = kernel.new_subshell()
    for number in range(3):
        comm_id = f"comm-{number}"
        kernel.open_comm("toy", comm_id)
        waiting = kernel.start("run(wait_for_release()); print('released')")
        kernel.wait_for_text(waiting, "waiting")
        message = kernel.send_comm(comm_id, {"n": number})
        following = kernel.start(f"print('next', {number})")
        second_message = kernel.send_comm(comm_id, {"n": number + 100})
        kernel.finish(kernel.start("1", subshell))
        release(kernel)
        assert kernel.finish(waiting).text == "waiting\nreleased\n"
        assert kernel.finish(following).text == f"next {number}\n"
        kernel.wait_until(lambda: message.idle and second_message.idle)  # noqa: B023
    assert kernel.run_ok("print(received)").text == "[0, 100, 1, 101, 2, 102]\n"


def test_background_tasks_go_on_while_run_waits(kernel: Kernel) -> None:
    kernel.run_ok("ticking = asyncio.create_task(tick()); run(tick_twice())")
    kernel.run_ok("ticking.cancel()")


def test_run_inside_an_async_cell(kernel: Kernel) -> None:
    assert kernel.run_ok("await asyncio.sleep(0); print(run(double(4)))").text == "8\n"


def test_run_inside_run(kernel: Kernel) -> None:
    cell = kernel.run_ok("async def outer(): return run(double(3))\nprint(run(outer()))")
    assert cell.text == "6\n"


def test_run_in_a_subshell_uses_the_loop_of_the_kernel(kernel: Kernel) -> None:
    code = "async def here(): return threading.current_thread() is threading.main_thread()\n"
    cell = kernel.finish(kernel.start(code + "print(run(here()))", kernel.new_subshell()))
    assert cell.text == "True\n", cell.describe()


def test_sigint_while_run_waits(kernel: Kernel) -> None:
    cell = kernel.start("run(forever())")
    kernel.wait_for_text(cell, "forever")
    kernel.interrupt()
    assert kernel.finish(cell).error == "KeyboardInterrupt", cell.describe()


def test_sigint_while_an_async_cell_calls_run(kernel: Kernel) -> None:
    cell = kernel.start("await asyncio.sleep(0); run(forever())")
    kernel.wait_for_text(cell, "forever")
    kernel.interrupt()
    assert kernel.finish(cell).error == "CancelledError", cell.describe()


def test_sigint_leaves_run_in_the_background_of_an_idle_kernel_alone(kernel: Kernel) -> None:
    """An ignored signal stays ignored; KeyboardInterrupt in that task would end the kernel."""
    code = "async def behind(): run(wait_for_release()); print('survived')\n"
    cell = kernel.run_ok(code + "task = asyncio.create_task(behind())")
    kernel.wait_for_text(cell, "waiting")
    kernel.interrupt()
    release(kernel)
    kernel.wait_for_text(cell, "survived")


def test_sigint_at_random_moments_in_and_around_run(kernel: Kernel) -> None:
    """The cell is stopped or has ended; the next request succeeds; the neighbour task lives.

    When the signal hits ipykernel itself, after the cell's end, the cell goes idle without a reply.
    """
    rng = random.Random(11)
    kernel.run_ok("ticking = asyncio.create_task(tick())")
    ends = set()
    for number in range(50):
        cell = kernel.start("run(asyncio.sleep(0.02))")
        kernel.read_for(rng.uniform(0.0, 0.03))
        kernel.interrupt()
        kernel.wait_until(lambda: cell.idle, cell=cell)  # noqa: B023
        ends.add(cell.error)
        following = kernel.run_ok(f"run(tick_twice()); print(run(double({number})))")
        assert following.text == f"{2 * number}\n"
    assert ends <= {"", "KeyboardInterrupt"} and "KeyboardInterrupt" in ends
    assert kernel.run_ok("print(ticking.done()); ticking.cancel()").text == "False\n"
