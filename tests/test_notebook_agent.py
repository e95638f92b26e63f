"""Agents in a real kernel: where they print, cells that run again, the stop button, the panel."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import pytest
from kernel_harness import Cell, Kernel

from asyncllm_nb.testing import make_checkpoint

pytestmark = pytest.mark.kernel

PRESSES = 21

SETUP = """
import asyncio
import torch; torch.set_num_threads(1)
from asyncllm_nb import Agent, AsyncLLM
llm = AsyncLLM(FOLDER, cache_tokens=4096)
solver = Agent(llm, "solver")
prompt = await solver.block("prompt")
await llm.forward(llm.chat_prompt("Hello?"), [prompt])

async def until(condition):
    while not condition(): await asyncio.sleep(0)
"""

THINK = """
@solver.coroutine
async def think():
    print("VERSION begins")
    try:
        await solver.event("go").wait()
        print("VERSION goes")
    finally:
        print("VERSION ends")
"""


@pytest.fixture(scope="module")
def module_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_5", tokenizer=True)
    with Kernel(tmp_path_factory.mktemp("kernel")) as kernel:
        kernel.run_ok(f"FOLDER = {str(folder)!r}")
        yield kernel


@pytest.fixture
def kernel(module_kernel: Kernel) -> Iterator[Kernel]:
    """An engine with an empty agent; the engine must be whole at the end."""
    module_kernel.run_ok(SETUP)
    yield module_kernel
    module_kernel.run_ok("await solver.stop(); await llm.drain(); llm.check_integrity()")


def think(version: str) -> str:
    return THINK.replace("VERSION", version)


def printed(cell: Cell) -> str:
    """All that the cell shows as text, on either stream."""
    text = "".join(message["content"]["text"] for message in cell.of_type("stream"))
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def htmls(cell: Cell) -> list[str]:
    """The static forms in the order in which they were sent; the live widget has none."""
    return [d["data"]["text/html"] for d in cell.displays if "text/html" in d["data"]]


def test_a_coroutine_prints_to_the_cell_that_defined_it(kernel: Kernel) -> None:
    defining = kernel.run_ok(think("first"))
    starting = kernel.run_ok("solver.start(); await asyncio.sleep(0)\npass")
    restarting = kernel.run_ok("solver.restart('think'); await until(lambda: solver.running); print('mine')")
    awaiting = kernel.run_ok("solver.event('go').set(); await solver; print('over')")
    kernel.wait_for_text(defining, "first goes\nfirst ends\n")
    assert defining.text == "first begins\nfirst ends\nfirst begins\nfirst goes\nfirst ends\n"
    assert printed(starting) == "" and restarting.text == "mine\n" and awaiting.text == "over\n"


def test_running_the_cell_again_replaces_the_coroutine_and_its_output(kernel: Kernel) -> None:
    first = kernel.run_ok(think("first") + "solver.start()\npass")
    kernel.wait_for_text(first, "first begins")
    second = kernel.run_ok(think("second"))
    kernel.wait_for_text(second, "second begins")
    other = kernel.run_ok("solver.event('go').set(); await solver; print(list(solver.coroutines))")
    kernel.wait_for_text(second, "second ends")
    assert first.text == "first begins\nfirst ends\n"
    assert second.text == "second begins\nsecond goes\nsecond ends\n"
    assert other.text == "['think']\n"


def test_a_tool_prints_to_the_cell_of_its_caller(kernel: Kernel) -> None:
    kernel.run_ok("@solver.tool\ndef send(text):\n    print('sent', text)")
    defining = kernel.run_ok("@solver.coroutine\nasync def act():\n    await send('it')")
    other = kernel.run_ok("await solver.start()\nprint('over')")
    kernel.wait_for_text(defining, "sent it")
    assert printed(other) == "over\n"


def test_an_error_shows_where_it_is_awaited_and_in_the_panel(kernel: Kernel) -> None:
    defining = kernel.run_ok("@solver.coroutine\nasync def fails():\n    raise LookupError('no such thing')")
    panel = kernel.run_ok("solver")
    awaiting = kernel.run("await solver.start()")
    other = kernel.run_ok("print('other')")
    assert awaiting.error == "LookupError"
    assert (
        "no such thing"
        in kernel.run_ok("from IPython.display import HTML; HTML(solver._repr_html_())").displays[0]["data"][
            "text/html"
        ]
    )
    assert "no such thing" in htmls(awaiting)[-1], "the panel of an earlier cell is updated"
    assert "not started" in htmls(panel)[0]
    assert printed(defining) == "" and printed(other) == "other\n" and other.error == ""


def test_an_error_that_nobody_would_see_shows_in_the_cell_of_its_code(kernel: Kernel) -> None:
    defining = kernel.run_ok("@solver.coroutine\nasync def fails():\n    raise LookupError('no such thing')")
    starting = kernel.run_ok("solver.start()\nawait until(lambda: not solver.running)")
    kernel.wait_until(lambda: "no such thing" in printed(defining), cell=defining)
    assert "coroutine 'solver.fails' failed" in printed(defining) and "Cell In[" in printed(defining)
    assert printed(starting) == ""


def test_the_stop_button_leaves_the_agent_running_and_the_engine_usable(kernel: Kernel) -> None:
    kernel.run_ok("""
rounds = 0
@solver.coroutine
async def think():
    global rounds
    notes = await solver.block("notes")
    while True:
        await llm.generate("well,", [prompt, notes], max_tokens=7, temperature=1.0)
        await llm.clear(notes)
        rounds += 1
@solver.coroutine
async def wait():
    await solver.event("never").wait()
""")
    kernel.run_ok("solver.start()\npass")
    rng = random.Random(7)
    for _ in range(PRESSES):
        cell = kernel.start("print('started', flush=True)\nawait solver")
        kernel.wait_for_text(cell, "started")
        kernel.read_for(rng.uniform(0.0, 0.12))
        kernel.interrupt()
        kernel.finish(cell)
        assert cell.error in ("CancelledError", "KeyboardInterrupt"), cell.describe()
        answer = kernel.run_ok("""
before = rounds
await llm.forward("next", [prompt], logits="none")
await until(lambda: rounds > before)
print(solver)
""")
        assert answer.text == "<Agent 'solver': think running, wait running>\n"


def test_the_stop_button_works_while_nothing_happens(kernel: Kernel) -> None:
    """An idle event loop does not notice the signal by itself."""
    kernel.run_ok("@solver.coroutine\nasync def wait():\n    await solver.event('never').wait()")
    cell = kernel.start("print('started', flush=True)\nawait solver.start()")
    kernel.wait_for_text(cell, "started")
    kernel.interrupt()
    assert kernel.finish(cell, timeout=10).error in ("CancelledError", "KeyboardInterrupt")
    assert kernel.run_ok("print(solver.running)").text == "True\n"


def test_the_coroutine_magic_does_the_same_for_a_cell_body(kernel: Kernel) -> None:
    kernel.run_ok("%load_ext asyncllm_nb")
    defining = kernel.run_ok("""%%coroutine solver.think
text = '''two
  lines'''
await solver.event("go").wait()
print(text)
return 7""")
    assert kernel.run_ok("solver.event('go').set(); print(await solver.start())").text == "{'think': 7}\n"
    kernel.wait_for_text(defining, "two\n  lines\n")
    source = kernel.run_ok("print(solver.source())").text
    assert source.startswith("async def think():\n    text = '''two\n  lines'''\n    await solver.event")
    failing = kernel.run("%%coroutine solver.think\nx = 1\n1 / 0")
    assert failing.ok and kernel.run("await solver.start()").error == "ZeroDivisionError"
    kernel.run_ok("solver.start()\npass")
    kernel.wait_until(lambda: "ZeroDivisionError" in printed(failing), cell=failing)
    shown = printed(failing)
    assert "line 3" in shown and "1 / 0" in shown, "lines are those of the cell"
    for line, words in (
        ("%%coroutine solvr.think\npass", "did you mean 'solver'"),
        ("%%coroutine think\npass", "takes AGENT.NAME"),
        ("%%coroutine solver.think\nyield 1", "'think' yields"),
    ):
        wrong = kernel.run(line)
        assert wrong.error == "ValueError" and words in wrong.describe()
    assert kernel.run("%%coroutine solver.think\nx = (").error == "SyntaxError"
    assert kernel.run_ok("print(list(solver.coroutines))").text == "['think']\n"


def test_the_panel_follows_and_a_call_is_approved_from_another_cell(kernel: Kernel) -> None:
    kernel.run_ok("@solver.tool(approve=True)\ndef send(text): return text.upper()")
    kernel.run_ok("@solver.coroutine\nasync def act(): return await send('<it>')")
    starting = kernel.run_ok("solver.start()")
    widget, fold = starting.displays[:2]
    assert "application/vnd.jupyter.widget-view+json" in widget["data"]
    assert fold["data"]["text/html"].startswith("<details><summary>Last picture of agent solver, running")
    kernel.wait_until(lambda: "send waits for approval" in htmls(starting)[-1], cell=starting)
    assert "text=&#x27;&lt;it&gt;&#x27;" in htmls(starting)[-1]
    approving = kernel.finish(kernel.start("solver.pending[0].approve()", kernel.new_subshell()))
    ended = kernel.run_ok("print(await solver)")
    assert ended.text == "{'act': '<IT>'}\n"
    kernel.wait_until(
        lambda: any("✔" in html for cell in (starting, approving, ended) for html in htmls(cell))
    )


def test_making_the_engine_again_ends_the_agent_of_the_old_one(kernel: Kernel) -> None:
    kernel.run_ok(think("first") + "solver.start()\npass")
    old = kernel.run_ok("old = solver")
    kernel.run_ok(SETUP)
    cell = kernel.run_ok("await until(lambda: old.state == 'ended'); print(solver is old, solver)")
    assert cell.text == "False <Agent 'solver': no coroutines>\n" and printed(old) == ""
