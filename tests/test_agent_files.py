"""Agents on disk: code comes back as text and memory as it was, and nothing of a file runs before start()."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    FAMILIES,
    checkpoint,
    contents,
    engine,
    free_memory,
    only,
    tokens,
    until,
)
from kernel_harness import Kernel
from safetensors import safe_open
from safetensors.torch import save_file

from asyncllm_nb import AsyncLLM, CacheFullError, block_files
from asyncllm_nb.agent import Agent
from asyncllm_nb.agent_files import unresolved_names
from asyncllm_nb.sources import Source

THINK = """
async def think(agent):
    notes = await agent.block("notes")
    await llm.generate([5, 6, 7], [await agent.block("prompt"), notes], max_tokens=9)
    return notes.token_ids
"""


async def an_agent(llm: AsyncLLM, name: str = "solver") -> Agent:
    """One that has thought once: two blocks, of which one is read under the other."""
    agent = Agent(llm, name)
    await llm.forward(tokens(21), [await agent.block("prompt")])
    agent.define("think", THINK, {"llm": llm})
    agent.start()
    await agent
    return agent


async def look(llm: AsyncLLM, agent: Agent, *names: str) -> torch.Tensor:
    """Logits [vocab] after one more token under the agent's blocks; nothing stays of it."""
    block = await llm.create_block("look")
    logits = (await llm.forward([9], [*(agent.blocks[name] for name in names), block])).logits
    await llm.free_block(block)
    assert logits is not None
    return logits


# ---- what comes back --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
async def test_next_tokens_are_the_same_after_loading(tmp_path: Path, family: str) -> None:
    async with engine(family) as one, engine(family) as other:
        agent = await an_agent(one)
        left = await one.fork(agent.blocks["notes"])
        agent.adopt("both", await one.merge_blocks(agent.blocks["prompt"], left))
        path = await agent.save(tmp_path / "solver.safetensors")
        loaded = await Agent.load(path, other, {"llm": other})
        assert loaded is Agent(other, "solver") and loaded.state == "new"
        assert loaded.source() == agent.source() and list(loaded.coroutines) == ["think"]
        assert list(loaded.blocks) == ["prompt", "notes", "both"]
        for name, block in loaded.blocks.items():
            assert block.token_ids == agent.blocks[name].token_ids
            assert await loaded.block(name) is block
        for view in (["prompt"], ["prompt", "notes"], ["notes", "both"]):
            assert torch.equal(await look(other, loaded, *view), await look(one, agent, *view))
        results = []
        for each in (agent, loaded):
            each.start()
            results.append(await each)
        assert results[0] == results[1] and len(results[0]["think"]) == 24


async def test_a_coroutine_of_a_cell_is_saved_without_its_decorator(tmp_path: Path) -> None:
    async with engine("llama") as llm:
        agent = Agent(llm, "solver")
        kept = await agent.block("kept")

        @agent.coroutine
        async def think() -> str:
            """Two
            lines."""
            return "thought"

        path = await agent.save(tmp_path / "file")
        loaded = await Agent.load(path, llm, {})
        assert loaded is agent and "@agent.coroutine" in loaded.source()
        loaded.start()
        assert await loaded == {"think": "thought"}
        assert kept is not loaded.blocks["kept"] and "@agent" not in think.__name__


async def test_an_agent_that_runs_is_saved_at_one_moment_and_goes_on(tmp_path: Path) -> None:
    async with engine("qwen3_5") as one, engine("qwen3_5") as other:
        agent = Agent(one, "solver")
        names: dict[str, Any] = {"llm": one, "forbid": only(11)}
        agent.define("write", "async def write(agent):\n"
            "    block = await agent.block('block')\n"
            "    await llm.generate([7], block, max_tokens=90, forbid=forbid)\n", names)  # fmt: skip
        agent.start()
        block = await agent.block("block")
        await until(lambda: block.num_tokens > 9)
        told = block.num_tokens
        path = await agent.save(tmp_path / "file")
        assert agent.running
        loaded = await Agent.load(path, other, {"llm": other, "forbid": only(11)})
        count = loaded.blocks["block"].num_tokens
        assert told <= count < 91
        assert loaded.blocks["block"].token_ids == [7] + [11] * (count - 1)
        loaded.start()  # from its beginning: where it was is not saved
        await loaded
        assert loaded.blocks["block"].num_tokens == count + 91
        await agent


async def test_two_names_of_one_block_are_two_names_of_one_block(tmp_path: Path) -> None:
    async with engine("llama") as one, engine("llama") as other:
        agent = await an_agent(one)
        agent.adopt("again", agent.blocks["notes"])
        loaded = await Agent.load(await agent.save(tmp_path / "file"), other, {})
        assert loaded.blocks["again"] is loaded.blocks["notes"] is not loaded.blocks["prompt"]


async def test_what_a_file_cannot_hold_is_named_when_saving_and_when_loading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with engine("llama") as one, engine("llama") as other:
        agent = await an_agent(one)
        agent.event("paragraph").set()
        agent.event("over")
        agent.queue("lines").put_nowait("a line")

        @agent.tool
        def search(what: str) -> str:
            return what

        with pytest.warns(UserWarning) as warned:
            path = await agent.save(tmp_path / "file")
        (warning,) = warned
        assert warning.filename == __file__
        named = (
            "event 'paragraph' (set), event 'over' (not set), queue 'lines' (1 waiting in it), tool 'search'"
        )
        assert str(warning.message).endswith(f"agent 'solver', and not {named}")
        loaded = await Agent.load(path, other, {"llm": other})
        assert named in capsys.readouterr().out
        assert not loaded.events and not loaded.queues and not loaded.tools
        assert not loaded.event("paragraph").is_set()


# ---- nothing runs -----------------------------------------------------------------------------------


async def test_loading_runs_nothing_and_start_runs_it_in_the_namespace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = """
        @wrap("x")
        async def think(first=note("default")):
            note("body")
            return first, other_helper(other)
    """
    done: list[str] = []

    def wrap(text: str) -> Callable[[Any], Any]:
        done.append(f"wrap {text}")
        return lambda function: function

    async with engine("llama") as one, engine("llama") as other:
        agent = Agent(one, "solver")
        agent.define("think", source, {})
        path = await agent.save(tmp_path / "file")
        names: dict[str, Any] = {"note": done.append, "wrap": wrap}
        loaded = await Agent.load(path, other, names)
        assert set(names) == {"note", "wrap"} and not done
        told = capsys.readouterr().out
        assert 'note("body")' in told and "Nothing of its code has run" in told
        assert "think needs other, other_helper. Define them before start()" in told
        names |= {"other": 3, "other_helper": lambda number: number + 1}
        loaded.start()
        assert done == ["wrap x", "default"] and (await loaded) == {"think": (None, 4)}
        assert done == ["wrap x", "default", "body"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("pass", []),
        ("print(len([]), __name__, ValueError)", []),
        ("return known, unknown", ["unknown"]),
        ("x = 1; del x; y: int = 2; return y", []),
        ("return [a for a in b if a in c]", ["b", "c"]),
        ("def inner(a=d): return a + e\n    return inner", ["d", "e"]),
        ("async def inner():\n        async with f() as g: return g, x\n    x = 3\n    return inner", ["f"]),
        ("global counter\n    counter = 1\n    return counter", ["counter"]),
        ("import os, a.b as c\n    return os, c, a", ["a"]),
        ("try: pass\n    except Odd as error: return error", ["Odd"]),
        ("class C(Base):\n        x = y\n        def m(self): return x", ["Base", "x", "y"]),
        ("return f'{z!r:{width}}' if (q := 3) else q", ["width", "z"]),
        ("match given:\n        case Point(x=0, **rest) | {'a': rest}: return rest", ["Point", "given"]),
        ("return think", ["think"]),
        ("return lambda *a, **k: (a, k, m)", ["m"]),
        ("some.attribute.deep = 1", ["some"]),
    ],
)
def test_unresolved_names(body: str, expected: list[str]) -> None:
    if "Point" in body:
        body = body.replace("Point(x=0, **rest) | {'a': rest}", "Point(x=rest) | {'a': rest}")
    source = Source.parse("think", f"async def think():\n    {body}\n", "<test>")
    assert unresolved_names(source, {"known": 1, "__name__": "x"}) == expected


def test_unresolved_names_of_the_definition_itself() -> None:
    text = "@agent.coroutine\n@wrapped(option)\nasync def think(a: Kind = start, b=3) -> Result: return a\n"
    found = unresolved_names(Source.parse("think", text, "<test>"), {"start": 1})
    assert found == ["Kind", "Result", "option", "wrapped"]  # not agent: nothing registers again


# ---- refused, and nothing has changed ---------------------------------------------------------------


async def check_refused(
    llm: AsyncLLM, file: Path, message: str, error: type[Exception] = ValueError, kind: type[Agent] = Agent
) -> None:
    before = contents(llm), free_memory(llm), dict(llm._agents)
    with pytest.raises(error, match=message):
        await kind.load(file, llm, {})
    gc.collect()
    llm.check_integrity()
    assert (contents(llm), free_memory(llm), dict(llm._agents)) == before


async def test_another_model_a_damaged_file_and_small_pools_are_refused(tmp_path: Path) -> None:
    async with engine("qwen3_5") as llm:
        path = await (await an_agent(llm)).save(tmp_path / "file")
        plain = await llm.save_blocks(tmp_path / "plain", [])
    data = path.read_bytes()
    async with engine(checkpoint("qwen3_5", seed=2)) as llm:
        await check_refused(llm, path, "another model")
    async with engine("qwen3_5", cache_tokens=16) as llm:
        await check_refused(llm, path, "the cache is full", CacheFullError)
    async with engine("qwen3_5") as llm:
        (tmp_path / "cut").write_bytes(data[:-1])
        await check_refused(llm, tmp_path / "cut", "cut short")
        (tmp_path / "changed").write_bytes(data.replace(b"async def think", b"async def thonk"))
        await check_refused(llm, tmp_path / "changed", "is damaged")
        await check_refused(llm, plain, r"no agent: take them with llm\.load_blocks")
        assert (await Agent.load(path, llm, {})).name == "solver"


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("not whole", lambda a: a.pop("sources")),
        ("not whole", lambda a: a.update(name=3)),
        ("not whole", lambda a: a.update(name="")),
        ("not whole", lambda a: a.update(sources=[1])),
        ("not whole", lambda a: a["sources"].update(think=3)),
        ("not whole", lambda a: a.update(left_out=[3])),
        ("names blocks", lambda a: a["blocks"].pop("notes")),
        ("names blocks", lambda a: a["blocks"].update(notes=7)),
        ("names blocks", lambda a: a["blocks"].update(notes="1")),
        ("cannot be run again", lambda a: a["sources"].update(think="async def think(:")),
        ("cannot be run again", lambda a: a["sources"].update(think="print('ran')")),
        ("cannot be run again", lambda a: a["sources"].update(think=f"{THINK}\nprint('ran')")),
        ("cannot be run again", lambda a: a["sources"].update(think=THINK.replace("think", "other"))),
        ("cannot be run again", lambda a: a["sources"].update(think="async def think():\n  return \0")),
    ],
)
async def test_an_agent_that_no_version_wrote_is_refused(
    tmp_path: Path, message: str, change: Callable[[Any], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    async with engine("llama") as llm:
        path = await (await an_agent(llm)).save(tmp_path / "file")
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (no mapping)
        head = json.loads(file.metadata()["asyncllm_nb"])
    change(head["agent"])
    text = json.dumps(head)
    save_file(tensors, path, {"asyncllm_nb": text, "sha256": block_files._digest(text, tensors)})
    async with engine("llama") as llm:
        await check_refused(llm, path, message)
    assert not capsys.readouterr().out


async def test_over_an_agent_that_runs_nothing_is_loaded(tmp_path: Path) -> None:
    async with engine("qwen3_5") as llm:
        agent = await an_agent(llm)
        path = await agent.save(tmp_path / "file")
        agent.define("more", "async def more(): await never.wait()", {"never": asyncio.Event()})
        agent.start("more")
        await check_refused(llm, path, r"agent 'solver' of this engine runs: `await agent.stop\(\)` first")
        assert list(agent.coroutines) == ["think", "more"]
        await agent.stop()
        notes, held = agent.blocks["notes"], agent.event("over")
        await llm.forward([3], [notes])
        loaded = await Agent.load(path, llm, {"llm": llm})
        assert loaded is agent and list(agent.coroutines) == ["think"] and agent.event("over") is held
        assert agent.blocks["notes"].num_tokens == notes.num_tokens - 1
        agent.start()
        assert len((await agent)["think"]) == 24


async def test_an_agent_started_while_its_file_is_read_is_left_alone(tmp_path: Path) -> None:
    async with engine("llama") as llm:
        agent = await an_agent(llm)
        path = await agent.save(tmp_path / "file")
        never = asyncio.Event()
        agent.define("more", "async def more(): await never.wait()", {"never": never})
        task = asyncio.create_task(Agent.load(path, llm, {}))
        await until(lambda: llm._engine.scheduler.operations)  # its memory is being copied
        agent.start("more")
        with pytest.raises(ValueError, match="runs"):
            await task
        assert agent.coroutines["more"].alive and set(contents(llm)) == {"prompt", "notes"}
        await agent.stop()


async def test_code_without_a_source_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    async with engine("llama") as llm:
        agent = Agent(llm, "solver")
        names: dict[str, Any] = {}
        exec("async def think(): pass", names)
        agent.coroutine(names["think"])
        with pytest.raises(ValueError, match="the source of coroutine 'think' is not known"):
            await agent.save(tmp_path / "file")
        agent.add(an_agent_body, name="other")
        agent.remove("think")
        with pytest.raises(ValueError, match="the source of coroutine 'other' cannot be run again"):
            await agent.save(tmp_path / "file")
        assert not list(tmp_path.iterdir())


async def an_agent_body() -> None:
    """A function that is registered under another name."""


async def test_misuse_names_the_fix(tmp_path: Path) -> None:
    class Other(Agent):
        pass

    async with engine("llama") as llm:
        path = await (await an_agent(llm)).save(tmp_path / "file")
        with pytest.raises(TypeError, match="an agent needs an AsyncLLM"):
            await Agent.load(path, path)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="a dict of names, such as globals"):
            await Agent.load(path, llm, ["llm"])  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"is a Agent: load it with Agent\.load"):
            await Other.load(path, llm)
        with pytest.raises(FileNotFoundError, match="there is no file"):
            await Agent.load(tmp_path / "nothing", llm)


# ---- in a notebook ----------------------------------------------------------------------------------

SETUP = """
import torch; torch.set_num_threads(1)
from asyncllm_nb import AsyncLLM
from asyncllm_nb.agent import Agent
llm = AsyncLLM(FOLDER, cache_tokens=2048)
"""

CELL = """
agent = Agent(llm, "solver")

@agent.coroutine
async def think():
    notes = await agent.block("notes")
    await llm.generate("so", notes, max_tokens=5)
    print("thought")
    return notes.num_tokens
"""


@pytest.mark.kernel
def test_a_cell_is_saved_and_goes_on_in_another_kernel(tmp_path: Path) -> None:
    setup = f"FOLDER = {str(checkpoint())!r}; FILE = {str(tmp_path / 'file')!r}\n{SETUP}"
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with Kernel(tmp_path / "first") as kernel:
        kernel.run_ok(setup)
        kernel.run_ok(CELL)
        assert kernel.run_ok("agent.start(); print(await agent)").text == "{'think': 7}\n"
        kernel.run_ok("await agent.save(FILE)")
    with Kernel(tmp_path / "second") as kernel:
        kernel.run_ok(setup)
        told = kernel.run_ok("agent = await Agent.load(FILE, llm, namespace=globals())").text
        assert CELL[CELL.index("@") :].strip() in told and "think needs agent." in told
        assert told.count("thought") == 1  # in the source
        assert kernel.run_ok("agent.start(); print(await agent)").text == "{'think': 14}\n"
        told = kernel.run_ok("agent = await Agent.load(FILE, llm)").text
        assert "needs" not in told
        assert kernel.run_ok("agent.start(); print(await agent)").text == "{'think': 14}\n"
