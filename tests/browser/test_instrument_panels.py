"""Attention and states, live: measured while they are on screen, asked for where that is not recorded.

The panels are pinned, so that they stay on the screen whatever cell runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from browser.board import Board
from browser.conftest import notebooks
from browser.harness import Lab, Notebook

ENGINE = """
from asyncllm_nb import AsyncLLM
llm = AsyncLLM(MODEL, cache_tokens=2048, max_blocks=16)
rules, notes, answer = await llm.create_blocks("rules", "notes", "answer")
await llm.forward("Be brief.", [rules])
await llm.forward("The hive is full.", [rules, notes])
llm.dashboard("attention", "states", "scrubber", pin="right")
"""

GENERATE = """
import asyncio
markers = range(256, 263)
await llm.generate(" Bees?", [rules, notes, answer], max_tokens=12, forbid=markers, name="answering")
await llm.drain()
"""

WATCHED = "import asyncio\nwhile not llm.instruments.watched.norms: await asyncio.sleep(0)"
UNWATCHED = "import asyncio\nwhile llm.instruments.watched.norms: await asyncio.sleep(0)"


class Looked:
    """A notebook that has generated 12 tokens with both panels on the screen."""

    def __init__(self, notebook: Notebook) -> None:
        self.notebook, self.board = notebook, Board(notebook.page)

    def kernel(self, expression: str) -> object:
        return json.loads(self.notebook.run(f"import json; print(json.dumps({expression}))").text)

    def wait_for_words(self, panel: str, words: str) -> None:
        """Wait until a panel's summary holds `words`."""
        script = "document.querySelector(`[data-panel=${arg[0]}] .allm-body`).ariaLabel.includes(arg[1])"
        self.board.wait_for(script, [panel, words])


@pytest.fixture(scope="module")
def looked(browser: Browser, lab: Lab, models: Path) -> Iterator[Looked]:
    with notebooks(browser, lab) as open_notebook:
        notebook = open_notebook(ENGINE.replace("MODEL", repr(str(models / "qwen3_5"))))
        notebook.run(0)
        looked = Looked(notebook)
        looked.board.wait_for("view.store.next > 0")
        notebook.run(WATCHED)  # the kernel has heard that the panels are on the screen
        notebook.run(GENERATE)
        looked.board.wait_for_records(int(str(looked.kernel("llm.trace.next"))))
        yield looked
        assert not notebook.faults


def test_shares_are_recorded_while_the_panel_is_on_screen(looked: Looked) -> None:
    recorded = looked.kernel("[r['n'] for r in llm.trace.plain(0) if r['t'] == 'shares']")
    steps = looked.kernel("[s.number for s in llm.trace.steps]")
    assert isinstance(recorded, list) and isinstance(steps, list)
    assert recorded[-12:] == steps[-12:] and 1 not in recorded
    summary = looked.board.summary("attention")
    assert summary.startswith(f"answering at step {steps[-1]}: rules ")
    assert all(looked.board.pixels("attention", colour) > 20 for colour in ("#D55E00", "#00875F", "#A3539B"))


def test_the_state_of_now_is_asked_for(looked: Looked) -> None:
    last = looked.kernel("llm.trace.steps[-1].number")
    looked.wait_for_words("states", f"answering, layer 0, state at step {last}; size left by: rules ")
    looked.board.panel("states").get_by_text("an entry's colour is as strong as its root").wait_for()
    layer = looked.board.panel("states").get_by_label("layer", exact=True)
    layer.select_option("4")
    looked.board.wait_for("view.choices['states.layer'] === '4'")
    looked.wait_for_words("states", "layer 4, state at")
    looked.notebook.run("while 4 not in llm.instruments.watched.layers: await asyncio.sleep(0)")
    layer.select_option("0")


def test_tokens_are_measured_when_somebody_wants_them(looked: Looked) -> None:
    """Not before; then at the next step, and the newest ones are shown."""
    assert looked.kernel("llm.instruments.watched.tokens") is False
    panel = looked.board.panel("attention")
    panel.get_by_role("button", name="Tokens").click()
    looked.notebook.run("while not llm.instruments.watched.tokens: await asyncio.sleep(0)")
    looked.notebook.run(GENERATE)
    measured = looked.kernel(
        "[n for n in llm.instruments.steps if llm.instruments.reading(n).parts[0].weights_by_block]"
    )
    assert isinstance(measured, list)  # a few of them: steps of so small a model are too many to measure all
    script = "document.querySelector('.allm-tokens').textContent.includes(`at step ${arg} looks at · `)"
    looked.board.wait_for(script, measured[-1])
    assert "MB of readings kept" in panel.locator(".allm-tokens").inner_text()
    assert "notes The hive is full." in panel.locator(".allm-tokens").inner_text()


def test_an_earlier_step_shows_what_the_ring_still_has(looked: Looked) -> None:
    kept = looked.kernel("[n for n in llm.instruments.steps if llm.instruments.reading(n).layers]")
    assert isinstance(kept, list) and kept
    looked.board.ask("view.store.show(arg)", kept[-2])
    looked.wait_for_words("states", f"state at step {kept[-2]};")
    looked.board.ask("view.store.show(1)")
    looked.wait_for_words("attention", "not recorded up to this step")
    looked.board.ask("view.store.show(null)")


def test_nothing_is_measured_for_panels_off_the_screen(looked: Looked) -> None:
    looked.notebook.run("print('line\\n' * 400)")
    looked.notebook.page.evaluate("() => { document.querySelector('.allm').style.display = 'none'; }")
    looked.notebook.run(UNWATCHED)
    looked.notebook.page.evaluate("() => { document.querySelector('.allm').style.display = ''; }")
    looked.notebook.run(WATCHED)
