"""An engine in a real kernel: background agents, the stop button at any moment, cells run again."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from kernel_harness import Cell, Kernel

from asyncllm_nb.testing import make_checkpoint

pytestmark = pytest.mark.kernel

PRESSES = 50

SETUP = """
import asyncio, gc, weakref
import torch; torch.set_num_threads(1)
from asyncllm_nb import AsyncLLM
from asyncllm_nb.run import run

llm = AsyncLLM(FOLDER, cache_tokens=4096)
prompt, notes = await llm.create_blocks("prompt", "notes")
await llm.forward(llm.chat_prompt("Hello?"), [prompt])
round_made = asyncio.Event()

async def agent():
    while True:
        await llm.clear(notes)
        await llm.generate("well,", [prompt, notes], max_tokens=7, temperature=1.0)
        round_made.set()

async def talk():
    reply = await llm.create_block("reply")
    async for token in llm.generate("so", [prompt, notes, reply], max_tokens=200, temperature=1.0):
        pass

async def request():
    '''What has to work after anything.'''
    output = await llm.forward("next, please", [prompt], logits="none")
    await llm.clear(prompt)
    await llm.forward(llm.chat_prompt("Hello?"), [prompt], logits="none")
    return output.block.num_tokens
"""

REQUEST = """
round_made.clear()
print(await request(), working.done())
await round_made.wait()
"""


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def module_kernel(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kernel]:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), request.param, tokenizer=True)
    with Kernel(tmp_path_factory.mktemp("kernel")) as kernel:
        kernel.run_ok(f"FOLDER = {str(folder)!r}")
        yield kernel


@pytest.fixture
def kernel(module_kernel: Kernel) -> Iterator[Kernel]:
    """One engine with an agent in the background; it must be whole at the end."""
    module_kernel.run_ok(SETUP + "working = asyncio.create_task(agent())")
    yield module_kernel
    module_kernel.run_ok("working.cancel(); await asyncio.wait([working]); await llm.drain()")
    cell = module_kernel.run_ok("llm.check_integrity(); print(llm.stats()['streams'])")
    assert cell.text == "0\n"


def press_often(kernel: Kernel, code: str, longest: float, before: str = "") -> set[str]:
    """Press the stop button at random moments of a cell; each time the next request succeeds.

    Returns the errors that the cells showed.
    """
    rng = random.Random(23)
    errors = set()
    for _ in range(PRESSES):
        cell = kernel.start("print('started', flush=True)\n" + code)
        kernel.read_for(rng.uniform(0.0, longest))
        press(kernel, cell)
        errors.add(cell.error)
        answers(kernel, before)
    return errors


def press(kernel: Kernel, cell: Cell) -> None:
    """Press the stop button and see the cell end. (Not its reply: that is lost if the signal comes in
    the last lines of ipykernel itself.)"""
    has_started = "started" in cell.text
    kernel.interrupt()
    while not has_started and not cell.idle:  # a press before the cell began does nothing
        kernel.read_for(0.1)
        kernel.interrupt()
    kernel.wait_until(lambda: cell.idle, cell=cell)


def answers(kernel: Kernel, before: str = "") -> None:
    """The next request succeeds, and the agent in the background goes on."""
    cell = kernel.run_ok(before + REQUEST)
    assert cell.text.split()[-1] == "False", cell.describe()


def test_sigint_while_a_cell_awaits_a_stream(kernel: Kernel) -> None:
    errors = press_often(kernel, "await talk()", longest=0.08)
    assert "CancelledError" in errors and errors <= {"", "CancelledError", "KeyboardInterrupt"}


def test_sigint_while_run_waits_for_a_stream(kernel: Kernel) -> None:
    errors = press_often(kernel, "run(talk())", longest=0.08)
    assert "KeyboardInterrupt" in errors and errors <= {"", "KeyboardInterrupt"}


def test_sigint_while_a_cell_waits_for_a_paused_engine(kernel: Kernel) -> None:
    code = "llm.pause(); await talk()"
    errors = press_often(kernel, code, longest=0.06, before="llm.resume()\n")
    assert "CancelledError" in errors and errors <= {"", "CancelledError", "KeyboardInterrupt"}


def test_sigint_while_the_kernel_is_idle(kernel: Kernel) -> None:
    rng = random.Random(29)
    for _ in range(PRESSES):
        kernel.read_for(rng.uniform(0.0, 0.05))
        kernel.interrupt()
        answers(kernel)


def test_background_agents_run_beside_cells(kernel: Kernel) -> None:
    cell = kernel.run_ok(
        "round_made.clear(); await asyncio.gather(talk(), talk())\nprint(round_made.is_set(), working.done())"
    )
    assert cell.text == "True False\n"


def test_waiting_for_a_paused_engine_is_said_once(kernel: Kernel) -> None:
    kernel.run_ok("working.cancel(); await asyncio.wait([working])")
    cell = kernel.start("llm.pause()\nawait llm.forward('x', [prompt])")
    kernel.wait_until(lambda: "paused" in cell.describe(), cell=cell)
    kernel.interrupt()
    kernel.finish(cell)
    said = [m["content"]["text"] for m in cell.of_type("stream")]
    assert len(said) == 1 and "resume()" in said[0]
    kernel.run_ok("llm.resume()")


def test_making_the_engine_again_leaves_one(kernel: Kernel) -> None:
    kernel.run_ok("working.cancel(); await asyncio.wait([working]); engines = []; storages = []")
    for _ in range(5):
        cell = kernel.run_ok(
            SETUP + "engines.append(weakref.ref(llm._engine))\n"
            "storages.append(llm._engine.runner.cache.keys.untyped_storage())\n"
            "handle = prompt\n"
        )
        assert "Closed the earlier engine" in cell.text
    cell = kernel.run_ok(
        "del handle\n"
        "while any(ref() for ref in engines[:-1]): gc.collect(); await asyncio.sleep(0)\n"
        "print([storage.nbytes() > 0 for storage in storages])\n"
        "stats = llm.stats(); print(stats['blocks'], stats['pages'] - stats['pages_free'] > 0)\n"
        "working = asyncio.create_task(agent())"
    )
    assert cell.text == "[False, False, False, False, True]\n2 True\n", cell.describe()


def test_a_handle_of_a_closed_engine_names_the_cell_to_run(kernel: Kernel) -> None:
    kernel.run_ok("earlier = llm; working.cancel(); await asyncio.wait([working])")
    kernel.run_ok(SETUP + "working = asyncio.create_task(agent())")
    cell = kernel.run("await earlier.create_block()")
    assert cell.error == "EngineClosedError" and "run the cell that makes it (In [" in cell.describe()
    kernel.run_ok("del earlier")
