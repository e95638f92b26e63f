"""Widgets without a browser: their code, options, size and messages."""

from __future__ import annotations

import gc
import json
import re
import shutil
import subprocess
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from helpers import checkpoint, engine, tokens, turns, until

from asyncllm_nb import Agent, AsyncLLM, widgets
from asyncllm_nb.agent_display import agent_widget, draw_static_agent
from asyncllm_nb.markup import COLOURS, MARKS
from asyncllm_nb.widgets import base, bundle, dashboard

FOLDER = Path(bundle.__file__).parent
NODE = shutil.which("node")
CLASSES = [
    found
    for found in vars(dashboard).values()
    if isinstance(found, type) and issubclass(found, base.Widget) and found is not base.Widget
]


@pytest.mark.parametrize("kind", CLASSES)
def test_what_opens_a_widget_is_small(kind: type[base.Widget]) -> None:
    """A notebook server takes it in one message, and a reload is quick."""
    state = kind().get_state()
    assert len(json.dumps(state, default=repr).encode()) < 100_000


@pytest.mark.parametrize("kind", CLASSES)
def test_the_code_of_a_widget_is_one_module(kind: type[base.Widget], tmp_path: Path) -> None:
    code = kind()._esm
    assert "import " not in re.sub(r'"[^"]*"|`[^`]*`', "", code)
    assert code.count("export default") == 1
    for name in kind.PANELS:
        assert f'name: "{name}"' in code
    if NODE is not None:
        (tmp_path / "widget.mjs").write_text(code)
        done = subprocess.run([NODE, "--check", tmp_path / "widget.mjs"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_what_is_sent_is_the_code_without_comments_and_needless_line_breaks() -> None:
    text = """
    import { h } from "./palette.js";
    // alone
    export const WIDTH = 3; // px
    const address = "a://b"; // what "it" is
    function f(a, // first
      b) {
      return `${a}://${b}`
    }
    """
    lean = bundle._lean("\n".join(line.strip() for line in text.splitlines()))
    assert lean == (
        'const WIDTH = 3;const address = "a://b"; // what "it" is\nfunction f(a,b) {return `${a}://${b}`\n}'
    )


def test_top_level_names_are_unique_over_all_files() -> None:
    """They end in one scope. (Entry points are never joined with one another.)"""
    names: Counter[str] = Counter()
    for file in FOLDER.glob("*.js"):
        text = re.sub(r"^export ", "", file.read_text(), flags=re.MULTILINE)
        names.update(set(re.findall(r"^(?:async )?(?:const|let|function|class) (\w+)", text, re.MULTILINE)))
    assert [name for name, number in names.items() if number > 1] == []


def test_browser_and_python_give_blocks_the_same_looks() -> None:
    text = (FOLDER / "palette.js").read_text()
    lists = {
        name: re.findall(r'"([^"]+)"', line) for name, line in re.findall(r"const (\w+) = \[(.*)\];", text)
    }
    assert tuple(lists["COLOURS"]) == COLOURS and tuple(lists["MARKS"]) == MARKS


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"pni": "right"}, TypeError, "did you mean 'pin'"),
        ({"colour": 1}, TypeError, "it takes panels, pin, theme"),
        ({"pin": "left"}, ValueError, "'right', 'bottom'"),
        ({"theme": "blue"}, ValueError, "'auto', 'light', 'dark'"),
        ({"panels": ["block"]}, ValueError, "did you mean 'blocks'"),
    ],
)
def test_wrong_options_raise_with_a_hint(options: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        widgets.Dashboard(**options)
    with pytest.raises(error, match=said):
        widgets.Dashboard().update(**options)


async def test_the_same_dashboard_each_time() -> None:
    async with engine("llama") as llm:
        first = llm.dashboard(pin="right")
        assert llm.dashboard(pin="bottom") is first and first.pin == "bottom"
        assert len(llm._engine.observers) == len({*llm._engine.observers})
        observers = len(llm._engine.observers)
        for _ in range(50):
            llm.dashboard()
        assert len(llm._engine.observers) == observers
        other = llm.dashboard("streams", "blocks")
        assert other is not first and other.panels == ["streams", "blocks"] and first.comm is None


async def test_a_panel_is_a_widget_of_its_own() -> None:
    async with engine("llama") as llm:
        shown = widgets.Streams(llm)
        assert shown.panels == ["streams"] and "Streams of streams" in repr(shown)
        assert len(repr(shown)) < 60


async def test_an_agent_has_one_panel_that_shows_it_alone() -> None:
    async with engine("llama") as llm:
        agent, other = Agent(llm, "solver"), Agent(llm, "other")
        shown = agent_widget(agent)
        assert shown.panels == ["agents"] and shown.choices == {"agents.agent": "solver"}
        assert agent_widget(agent) is shown and agent_widget(other) is not shown
        shown.close()
        assert agent_widget(agent).comm is not None


async def test_the_static_form_of_an_agent_names_what_failed_and_what_waits() -> None:
    async with engine("llama") as llm:
        agent = Agent(llm, "solver")

        @agent.tool(approve=True)
        async def send(text: str) -> None: ...

        @agent.coroutine
        async def act() -> None:
            await send("<a>")

        @agent.coroutine
        async def fail() -> None:
            raise LookupError("no <such> thing")

        agent.start()
        await until(lambda: agent.pending and not agent.coroutines["fail"].alive)
        html, text = draw_static_agent(agent)
        words = "Last picture of agent solver, running; fail failed: no <such> thing; send waits for approval"
        assert text.startswith(f"{words}\n")
        assert html.startswith(
            "<details><summary>Last picture of agent solver, running; fail failed: no &lt;"
        )
        assert html.endswith("</details>")
        await agent.stop()


async def test_what_an_agent_is_shown_with_keeps_no_engine_alive() -> None:
    other = AsyncLLM(checkpoint("llama"), name="other", cache_tokens=512)
    agent = Agent(other, "solver")
    widget = agent_widget(agent)
    widget._handle_custom_msg({"type": "ready", "client": "page"}, [])
    await turns()
    gone = weakref.ref(other._engine)
    del other, agent
    await turns()
    gc.collect()
    await until(lambda: gone() is None)
    assert widget.comm is not None


def test_an_error_of_a_handler_is_told_to_the_views(monkeypatch: pytest.MonkeyPatch) -> None:
    widget, sent = widgets.Blocks(), list[Any]()
    monkeypatch.setattr(widget, "send", sent.append)

    def fail(_widget: base.Widget, _message: base.Message) -> None:
        raise LookupError("broken")

    widget.handle(fail)
    widget._handle_custom_msg({"type": "ready"}, [])
    assert sent == [{"type": "error", "text": "LookupError: broken"}]


def test_unknown_names_of_the_package_raise() -> None:
    with pytest.raises(AttributeError, match="Dashbord"):
        widgets.Dashbord  # noqa: B018
    assert {kind.__name__ for kind in CLASSES} == {*widgets.__all__}


async def test_a_dashboard_keeps_no_engine_alive() -> None:
    async with engine("llama") as llm:
        other = AsyncLLM(checkpoint("llama"), name="other", cache_tokens=512)
        widget = other.dashboard()
        widget._handle_custom_msg({"type": "ready", "client": "page"}, [])
        await other.forward(tokens(3))
        await turns()
        gone = weakref.ref(other._engine)
        del other
        await turns()
        gc.collect()
        await until(lambda: gone() is None)
        assert widget.comm is not None and llm.blocks == {}
