"""The magics in a real IPython shell: what they show, what they complete, how they refuse."""

from __future__ import annotations

import builtins
import keyword
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import engine, tokens
from IPython.core.completer import provisionalcompleter
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from asyncllm_nb import Agent, AsyncLLM
from asyncllm_nb.engine.trace import Trace
from asyncllm_nb.summary import RunSummary


@pytest.fixture
def plain_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    """A shell without history, in a folder of its own."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.chdir(tmp_path)
    config = Config()
    config.HistoryManager.enabled = False
    InteractiveShell.clear_instance()
    yield InteractiveShell.instance(config=config)
    InteractiveShell.clear_instance()


@pytest.fixture
def shell(plain_shell: InteractiveShell) -> InteractiveShell:
    """The same with the extension loaded."""
    plain_shell.run_line_magic("load_ext", "asyncllm_nb")
    return plain_shell


async def filled(shell: InteractiveShell, llm: AsyncLLM, variable: str = "llm") -> None:
    """Two blocks, a forward and a stream of three tokens; the engine is in the shell's names."""
    prompt, thinker = await llm.create_blocks("prompt", "deep thinker")
    await llm.forward(llm.encode("Why?"), prompt)
    await llm.generate(tokens(2), [prompt, thinker], max_tokens=3, name="think")
    await llm.drain()
    shell.user_ns |= {variable: llm, f"{variable}_kept": (prompt, thinker)}


async def test_blocks(shell: InteractiveShell) -> None:
    async with engine("llama") as llm:
        await filled(shell, llm)
        shown = shell.run_line_magic("blocks", "")
        assert "deep thinker  5" in repr(shown) and "<table" in shown._repr_html_()
        whole = shell.run_line_magic("blocks", "prompt 'deep thinker'")
        assert repr(whole).startswith("prompt: 4 tokens\nWhy?") and "Why?" in whole._repr_html_()
        with pytest.raises(ValueError, match="'promt' is no live block: did you mean 'prompt'"):
            shell.run_line_magic("blocks", "promt")


async def test_views(shell: InteractiveShell) -> None:
    async with engine("llama") as llm:
        shell.user_ns["llm"] = llm
        assert repr(shell.run_line_magic("views", "")) == "no coroutine has read a stream yet"
        await filled(shell, llm)
        shown = shell.run_line_magic("views", "think")
        assert repr(shown).splitlines()[1].split() == ["think", "length", "prompt", "deep", "thinker", "3"]
        assert "prompt" in shown._repr_html_()
        with pytest.raises(ValueError, match="'thnk' is no stream: did you mean 'think'"):
            shell.run_line_magic("views", "thnk")


async def test_trace(shell: InteractiveShell, tmp_path: Path) -> None:
    async with engine("llama") as llm:
        shell.user_ns["llm"] = llm
        assert repr(shell.run_line_magic("trace", "")) == "no step was made yet"
        await filled(shell, llm)
        lines = repr(shell.run_line_magic("trace", "")).splitlines()
        assert len(lines) == 1 + len(llm.trace) and "forward prefill into prompt" in lines[1]
        assert len(repr(shell.run_line_magic("trace", "2")).splitlines()) == 3
        assert isinstance(shell.run_line_magic("trace", "plot"), RunSummary)
        saved = shell.run_line_magic("trace", "save run.json")
        assert len(Trace.load(saved)) == len(llm.trace)
        for wrong, message in (("save", "takes one file name"), ("backwards", "takes a number of steps")):
            with pytest.raises(ValueError, match=message):
                shell.run_line_magic("trace", wrong)


async def test_engines_are_told_apart(shell: InteractiveShell) -> None:
    with pytest.raises(ValueError, match="no open engine"):
        shell.run_line_magic("blocks", "")
    async with engine("llama") as one, engine("llama", name="second") as two:
        await filled(shell, one)
        await two.create_block("other")
        shell.user_ns["two"] = two
        with pytest.raises(ValueError, match="which engine"):
            shell.run_line_magic("blocks", "")
        assert "prompt" in repr(shell.run_line_magic("blocks", "llm"))
        assert repr(shell.run_line_magic("blocks", "second")) == "no blocks"
        assert {"llm", "two", "second"} <= set(completions(shell, "%blocks "))
        assert "prompt" in completions(shell, "%blocks llm ")
        await two.close()
        assert "prompt" in repr(shell.run_line_magic("blocks", ""))


def completions(shell: InteractiveShell, line: str) -> list[str]:
    """What the Tab key offers at the end of `line` beside what it offers anywhere in Python."""
    with provisionalcompleter():
        found = {found.text for found in shell.Completer.completions(line, len(line))}
    return sorted(found - {*keyword.kwlist, *dir(builtins)})


async def test_completion(shell: InteractiveShell) -> None:
    async with engine("llama") as llm:
        await filled(shell, llm)
        assert completions(shell, "%blocks ") == ["'deep thinker'", "prompt"]
        assert completions(shell, "%blocks pr") == ["prompt"]
        assert completions(shell, "blocks pr") == ["prompt"]
        assert completions(shell, "%blocks prompt ") == ["'deep thinker'"]
        assert completions(shell, "%views ") == ["think"]
        assert completions(shell, "%trace ") == ["html", "plot", "save"]
        assert completions(shell, "%trace s") == ["save"]


def cell_magic(shell: InteractiveShell, name: str, line: str, cell: str) -> None:
    shell.run_cell_magic(name, line, cell)  # type: ignore[no-untyped-call]  # IPython leaves it untyped


async def test_the_coroutine_magic_finds_agents_by_variable_and_by_name(shell: InteractiveShell) -> None:
    async with engine("llama") as llm:
        solver, critic = Agent(llm, "solver"), Agent(llm, "the critic")
        shell.user_ns |= {"llm": llm, "mine": solver, "word": "heard"}
        cell_magic(shell, "coroutine", "mine.think", "import asyncio\nawait asyncio.sleep(0)\nreturn word")
        cell_magic(shell, "coroutine", "the critic.judge", "# nothing yet")
        assert await solver.start() == {"think": "heard"} and await critic.start() == {"judge": None}
        assert "asyncio" not in shell.user_ns and "think" not in shell.user_ns
        assert completions(shell, "%%coroutine mi") == ["mine.", "mine.think"]
        assert "solver.think" in completions(shell, "%%coroutine ")
        with pytest.raises(ValueError, match="'min' is no agent of this notebook: did you mean 'mine'"):
            cell_magic(shell, "coroutine", "min.think", "pass")
        for wrong in ("think", "mine.", "mine.class", "mine.a b"):
            with pytest.raises(ValueError, match="takes AGENT.NAME"):
                cell_magic(shell, "coroutine", wrong, "pass")


def test_magics_are_not_there_before_the_extension_is_loaded(plain_shell: InteractiveShell) -> None:
    with pytest.raises(UsageError):
        plain_shell.run_line_magic("views", "")
