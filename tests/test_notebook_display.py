"""`LiveHTML`, dashboards, shown streams in a real kernel, and what an executed notebook keeps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from kernel_harness import Cell, Kernel
from nbclient import NotebookClient

from asyncllm_nb.testing import make_checkpoint

pytestmark = pytest.mark.kernel

SETUP = """
import asyncio, gc, threading
from asyncllm_nb.live import LiveHTML

class Source:
    value = 0

def draw(source):
    return f"<b>value {source.value}</b>", f"value {source.value}"

source = Source()

async def count(live, last):
    for _ in range(last):
        source.value += 1
        live.changed()
        await asyncio.sleep(0)
"""


@pytest.fixture(scope="module")
def module_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with Kernel(tmp_path_factory.mktemp("kernel")) as kernel:
        kernel.run_ok(SETUP)
        yield kernel


@pytest.fixture
def kernel(module_kernel: Kernel) -> Kernel:
    module_kernel.run_ok("source = Source()")
    return module_kernel


def texts(cell: Cell) -> list[str]:
    """What the cell displayed and updated, as plain text, in order."""
    return [display["data"]["text/plain"] for display in cell.displays]


def test_show_displays_html_and_text_under_an_id(kernel: Kernel) -> None:
    cell = kernel.run_ok("live = LiveHTML(source, draw, kind='k'); live.show()")
    first, last = cell.displays
    assert first["data"] == {"text/html": "<b>value 0</b>", "text/plain": "value 0"}
    assert first["transient"]["display_id"] == last["transient"]["display_id"]
    assert [m["msg_type"] for m in cell.messages if "display" in m["msg_type"]] == [
        "display_data",
        "update_display_data",
    ]


def test_changes_are_coalesced_and_the_last_one_is_shown(kernel: Kernel) -> None:
    cell = kernel.run_ok(
        "live = LiveHTML(source, draw, kind='k', interval=30.0); live.show()\nawait count(live, 500)"
    )
    # The first picture, and the last at the end of the cell; the interval is never over.
    assert texts(cell) == ["value 0", "value 500"]


def test_updates_come_while_the_cell_runs(kernel: Kernel) -> None:
    code = """
live = LiveHTML(source, draw, kind='k', interval=0.01); live.show()
while source.value < 1_000_000 and not seen.is_set():
    source.value += 1; live.changed(); await asyncio.sleep(0)
"""
    kernel.run_ok("seen = asyncio.Event()")
    subshell = kernel.new_subshell()
    cell = kernel.start(code)
    kernel.wait_until(lambda: len(cell.displays) > 5, cell=cell)
    kernel.finish(kernel.start("seen.set()", subshell))
    values = [int(text.split()[1]) for text in texts(kernel.finish(cell))]
    assert values == sorted(values) and values[0] == 0 and values[3] > 0


def test_changes_by_an_earlier_cells_task_belong_to_the_current_cell(kernel: Kernel) -> None:
    first = kernel.run_ok(
        "live = LiveHTML(source, draw, kind='k', interval=0.01); live.show()\n"
        "gate = asyncio.Event()\n"
        "async def later(): await gate.wait(); source.value = 41; live.changed()\n"
        "task = asyncio.create_task(later())"
    )
    second = kernel.run_ok(
        "gate.set(); await task\nwhile live._picture[1] != 'value 41': await asyncio.sleep(0)"
    )
    assert texts(second) == ["value 41", "value 41"]  # at once, and at the end of the cell
    assert "value 41" not in texts(first)


def test_a_change_in_another_thread_is_drawn_on_the_loop(kernel: Kernel) -> None:
    cell = kernel.run_ok(
        "drawn_by = set()\n"
        "def draw_here(source): drawn_by.add(threading.current_thread()); return draw(source)\n"
        "live = LiveHTML(source, draw_here, kind='k'); live.show(); source.value = 7\n"
        "await asyncio.to_thread(live.changed)\n"
        "await asyncio.sleep(0); live.flush()\n"
        "print(drawn_by == {threading.main_thread()})"
    )
    assert cell.text == "True\n" and texts(cell)[-1] == "value 7"


def test_an_error_of_draw_is_shown_in_the_display(kernel: Kernel) -> None:
    cell = kernel.run_ok(
        "def fail(source): raise LookupError('<not> found')\n"
        "live = LiveHTML(source, fail, kind='k'); live.show(); live.changed(); live.flush()"
    )
    assert "LookupError: &lt;not&gt; found" in cell.displays[-1]["data"]["text/html"]
    assert cell.of_type("error") == []


def test_the_source_is_held_weakly_and_its_last_picture_stays(kernel: Kernel) -> None:
    cell = kernel.run_ok(
        "import weakref\n"
        "other = Source(); other.value = 5; gone = weakref.ref(other)\n"
        "live = LiveHTML(other, draw, kind='k'); live.show(); del other; gc.collect()\n"
        "print(gone() is None); live.changed(); live.flush()"
    )
    assert cell.text == "True\n" and set(texts(cell)) == {"value 5"}


def test_running_the_cell_again_50_times_leaves_one_display(kernel: Kernel) -> None:
    for number in range(50):
        kernel.run_ok(f"live = LiveHTML(source, draw, kind='k'); live.show(); source.value = {number}")
    cell = kernel.run_ok(
        "gc.collect()\n"
        "found = [o for o in gc.get_objects() if type(o) is LiveHTML]\n"
        "from asyncllm_nb import live as module\n"
        "callbacks = get_ipython().events.callbacks['post_run_cell']\n"
        "print(len(found), len(module._unrecorded), callbacks.count(module._record))"
    )
    assert cell.text == "1 0 1\n"


def test_showing_again_retires_the_earlier_display(kernel: Kernel) -> None:
    kernel.run_ok("live = LiveHTML(source, draw, kind='k'); live.show()")
    cell = kernel.run_ok(
        "again = LiveHTML(source, draw, kind='k'); again.show(); print(live.retired)\n"
        "source.value = 9; live.changed(); again.changed()"
    )
    assert cell.text == "True\n"
    assert [text.partition("\n")[0] for text in texts(cell)][-1] == "value 9"
    assert any("newer display" in text for text in texts(cell))
    other_kind = kernel.run_ok("other = LiveHTML(source, draw, kind='other'); other.show()")
    assert kernel.run_ok("print(again.retired)").text == "False\n", other_kind.describe()


# What an executed notebook keeps


def executed(cells: list[str], folder: Path) -> nbformat.NotebookNode:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(folder)}})
    result: nbformat.NotebookNode = client.execute()
    return result


def html_of(cell: nbformat.NotebookNode) -> list[str]:
    return [o["data"]["text/html"] for o in cell.outputs if "text/html" in o.get("data", {})]


def test_an_executed_notebook_holds_the_last_picture(tmp_path: Path) -> None:
    """The display is in cell 1; changes happen in the background, between and in later cells."""
    notebook = executed(
        [
            SETUP + "live = LiveHTML(source, draw, kind='k', interval=0.01); live.show()",
            "task = asyncio.create_task(count(live, 300))",
            "pass",
            "await task",
            "source.value += 1; live.changed()",
        ],
        tmp_path,
    )
    assert html_of(notebook.cells[0]) == ["<b>value 301</b>"]
    assert all(not html_of(cell) for cell in notebook.cells[1:])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama", tokenizer=True)


def test_dashboard_and_stream_in_an_executed_notebook(checkpoint: Path, tmp_path: Path) -> None:
    notebook = executed(
        [
            "import torch; torch.set_num_threads(1)\n"
            "from asyncllm_nb import AsyncLLM\n"
            f"llm = AsyncLLM({str(checkpoint)!r})\n"
            "(block,) = await llm.create_blocks('notes')\n"
            "from asyncllm_nb.dashboard import dashboard; dashboard(llm)",
            "llm.generate('abc', [block], max_tokens=20, stop='never this')",
            "await llm.drain()",
            "llm",
            "block",
        ],
        tmp_path,
    )
    board, stream, _, engine, shown_block = (" ".join(html_of(cell)) for cell in notebook.cells)
    assert "notes" in board and re.search(">23<", board), board
    assert "cell 2" in stream and "20 tokens" in stream and "length" in stream
    assert "notes" in engine and ">23<" in engine
    assert "notes" in shown_block and "23 tokens" in shown_block


def test_an_error_of_a_shown_stream_is_shown_there(checkpoint: Path, tmp_path: Path) -> None:
    notebook = executed(
        [
            "from asyncllm_nb import AsyncLLM\n"
            f"llm = AsyncLLM({str(checkpoint)!r})\n"
            "one, two = await llm.create_blocks('one', 'two')\n"
            "await llm.forward('a', [one]); llm.pause()",
            "llm.generate('abc', [one, two], max_tokens=20)",
            "await llm.free_block(one); llm.resume(); await llm.drain()",
        ],
        tmp_path,
    )
    (shown,) = html_of(notebook.cells[1])
    assert "Error" in shown and "freed" in shown and "one" in shown
