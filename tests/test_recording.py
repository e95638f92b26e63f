"""The recording says what the engine did: its end is the engine's state, its beginnings earlier ones.

Python's reducer is compared with the engine and with the browser's, which node runs.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import Bench, checkpoint, engine, literal, settle, tokens, turns, until
from hypothesis import given, settings
from hypothesis import strategies as st
from test_programs import OP, Op, Program
from transformers import AutoTokenizer

from asyncllm_nb import Agent, AsyncLLM, CacheBlock
from asyncllm_nb.engine.pieces import TokenTexts
from asyncllm_nb.engine.reducer import ENDED_KEPT, reduce
from asyncllm_nb.engine.text import Codec
from asyncllm_nb.engine.trace import Trace

ROOT = Path(__file__).resolve().parent.parent
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="needs node to run the browser's reducer")

State = dict[str, Any]


class Undo(Exception):
    """Raised inside a transaction to have it undone."""


def shown_blocks(state: State) -> dict[str, tuple[int, int, int]]:
    """Blocks of a picture by name: tokens, version, pages."""
    return {b["name"]: (b["n"], b["version"], len(b["pages"])) for b in state["blocks"].values()}


def real_blocks(llm: AsyncLLM) -> dict[str, tuple[int, int, int]]:
    return {b["name"]: (b["tokens"], b["version"], b["pages"]) for b in llm.snapshot()["blocks"]}


def assert_shows_the_engine(llm: AsyncLLM) -> None:
    """The recording's end is the engine now: blocks, texts, pages, pools, streams."""
    state, pools = llm.trace.state(), llm.snapshot()["pools"]
    assert shown_blocks(state) == real_blocks(llm)
    for block in state["blocks"].values():
        assert block["n"] == len(block["texts"])
        real = llm.blocks[block["name"]]
        assert block["id"] == real.id
        assert list(real._record.state.pages) == block["pages"]
    if state["pages"] is not None:  # as of the last step; operations since may have changed it
        assert 0 <= state["pages"] <= pools["pages_total"]
    texts = {r["r"]: r["text"] for r in state["requests"].values() if r["kind"] == "stream"}
    for stream in llm._engine.recent_streams():
        assert texts[stream.number] == stream.full_text
    assert all(r["kind"] == "stream" for r in state["requests"].values()), "a request never ended"


async def scenario(llm: AsyncLLM) -> list[CacheBlock]:
    """A bit of everything that changes blocks or streams. Returns the live blocks: keep them so."""
    prompt, notes, other = await llm.create_blocks("prompt", "notes", "other")
    await llm.forward(tokens(37), [prompt])
    await llm.forward(tokens(5), [prompt, notes])
    copy = await llm.fork(notes, name="copy")
    both = await llm.merge_blocks(prompt, notes, name="both")
    await llm.append_block(copy, prompt)
    await llm.probe(tokens(3), [prompt, notes], choices=("a", "bc"))
    async with llm.generate(tokens(2), [prompt, notes, other], max_tokens=9) as stream:
        async for _ in stream:
            if len(stream.token_ids) == 4:
                await llm.forward(tokens(3), [prompt, notes])
    with pytest.raises(Undo):
        async with llm.transaction(notes, other):
            await llm.forward(tokens(20), [notes])
            await llm.clear(other)
            inside = await llm.fork(notes, name="inside")
            raise Undo
    async with llm.transaction(other):
        await llm.replace(other, tokens(6), [prompt])
    del inside
    await settle(llm)
    assert_shows_the_engine(llm)
    await llm.replace(notes, tokens(18), [prompt])
    await llm.free_block(both)
    await llm.clear(copy)
    asked = asyncio.create_task(llm.forward(tokens(300), [copy]))
    await until(lambda: len(llm.trace.steps) and llm.trace.steps[-1].rows[-1].num_tokens > 30)
    asked.cancel()
    await asyncio.wait([asked])
    await llm.generate(tokens(2), [prompt, copy], name="never read").cancel()
    llm.pause()
    llm.resume()
    await run_agent(llm)
    await settle(llm)
    return [prompt, notes, other, copy]


async def run_agent(llm: AsyncLLM) -> None:
    """An agent whose coroutine is replaced while its tool waits, and one that is removed."""
    agent = Agent(llm, "solver")

    @agent.tool(approve=True)
    async def send(number: int) -> int:
        return number

    async def act() -> None:
        for number in range(ENDED_KEPT + 7):  # more than are shown
            await send(number)

    async def never() -> None: ...

    agent.add(act)
    agent.add(never)
    await agent.remove("never")
    agent.start()
    await until(lambda: agent.pending)
    agent.add(act)
    while agent.running:
        for call in agent.pending:
            call.approve()
        await turns(3)
    assert await agent == {"act": None}


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
async def test_the_recording_ends_where_the_engine_is(family: str) -> None:
    async with engine(family) as llm:
        kept = await scenario(llm)
        assert kept
        assert_shows_the_engine(llm)
        state = llm.trace.state()
        assert state["encoded"] == llm.stats()["tokens_encoded"] < state["resent"]
        assert state["passes"] == llm.stats()["steps"]
        assert not state["paused"]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with Bench() as bench:
        yield bench


class Watched(Program):
    """A random program, with the recording looked at after each operation."""

    def check_tokens(self) -> None:
        super().check_tokens()
        blocks = {b["id"]: b for b in self.llm.trace.state()["blocks"].values()}
        for block in self.blocks:
            assert blocks[block.id]["n"] == block.num_tokens
            assert blocks[block.id]["pages"] == list(block._record.state.pages)


@pytest.mark.exact
@settings(max_examples=25, deadline=None)
@given(ops=st.lists(OP, min_size=2, max_size=10))
def test_the_recording_of_a_random_program_ends_where_the_engine_is(bench: Bench, ops: list[Op]) -> None:
    llm = bench.engine("llama", cache_tokens=8192, max_blocks=64, max_batch_tokens=32)
    llm._engine.trace._max_weight = 400  # most of it is folded

    async def run() -> None:
        await Watched(llm, literal(checkpoint("llama"))).run(ops)
        await llm.drain()
        assert_shows_the_engine(llm)

    bench.run(llm, run())


# ---- bounded, saved, loaded -----------------------------------------------------------------------


def small_trace(records: list[dict[str, Any]], max_weight: int) -> Trace:
    trace = Trace("small", None, max_weight=max_weight)
    for record in records:
        trace._push(record, 1)
    return trace


async def records_of_a_run() -> list[dict[str, Any]]:
    async with engine("llama", max_batch_tokens=48) as llm:
        await scenario(llm)
        return json.loads(json.dumps(llm.trace.plain(0)))  # type: ignore[no-any-return]


async def test_folding_the_oldest_records_changes_no_later_state() -> None:
    records = await records_of_a_run()
    whole = reduce(records)
    for max_weight in (7, 60, 10_000):
        folded = small_trace(records, max_weight)
        assert folded.next == len(records)
        assert folded.first == max(0, len(records) - max_weight)
        assert folded.state() == whole


async def test_the_trace_is_bounded() -> None:
    trace = Trace("long", None, max_weight=100)
    for number in range(20_000):
        trace.add("mark", n=number, note="")
    assert trace.first == 19_900 and len(trace._records) < 5_000
    assert trace.plain(0)[0]["n"] == 19_900 and trace.plain(19_990, 19_992)[-1]["n"] == 19_991


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
async def test_a_saved_trace_comes_back(tmp_path: Path, name: str) -> None:
    async with engine("llama") as llm:
        await scenario(llm)
        llm.trace.add("picture", bin=3, rows=[{"q": b"\x00\xff!"}])
        loaded = Trace.load(llm.trace.save(tmp_path / name))
        assert loaded.state() == json.loads(json.dumps(llm.trace.state()))
        assert loaded.plain(0)[-1]["rows"][0]["q"] == b"\x00\xff!"
        for saved, made in zip(loaded.steps, llm.trace.steps, strict=True):
            assert saved.number == made.number and saved.error == made.error
            for row, real in zip(saved.rows, made.rows, strict=True):
                names = (row.name, row.kind, row.block, row.view, row.token_ids)
                assert names == (real.name, real.kind, real.block, real.view, real.token_ids)


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b'{"format": "other", "version": 2}', b"\xff", b"\x1f\x8b", gzip.compress(b"{}" * 9)[:-9]],
)
def test_other_files_are_not_loaded(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(ValueError, match="not a trace"):
        Trace.load(tmp_path / "file")


# ---- the browser's reducer ------------------------------------------------------------------------

COMPARE = """
import { readFileSync } from "node:fs";
const { emptyState, apply } = await import("ROOT/widgets/reducer.js");
const { Store } = await import("ROOT/widgets/store.js");
const records = JSON.parse(readFileSync(0, "utf-8"));
const plain = (state) => JSON.parse(JSON.stringify(state, (key, value) =>
  value && value.texts ? { ...value, texts: value.texts.slice(0, value.n) } : value));
const states = [];
const state = emptyState();
for (const record of records) { apply(state, record); states.push(plain(state)); }
const store = new Store(7);
store.reset(0, emptyState(), {});
for (let i = 0; i < records.length; i += 5) store.add(i, records.slice(i, i + 5));
const orders = [...records.keys()].reverse().concat([...records.keys()]);
const isWrong = (i) =>
  JSON.stringify(plain(store.stateBefore(i + 1))) !== JSON.stringify(states[i]);
const wrong = orders.filter(isWrong);
console.log(JSON.stringify({ states, wrong, checkpoints: store.checkpoints.length }));
"""


def in_node(records: list[dict[str, Any]]) -> dict[str, Any]:
    assert NODE is not None
    done = subprocess.run(
        [NODE, "--input-type=module", "-e", COMPARE.replace("ROOT", str(ROOT))],
        input=json.dumps(records),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@needs_node
async def test_the_browsers_reducer_agrees_after_every_record() -> None:
    records = await records_of_a_run()
    found = in_node(records)
    state: State | None = None
    for number, record in enumerate(records):
        state = reduce([record], state)
        expected = json.loads(json.dumps(state))
        assert found["states"][number] == expected, f"after record {number}: {record}"
    assert found["checkpoints"] > 5
    assert not found["wrong"], "states that scrubbing shows differ from those of a straight run"


# ---- texts of single tokens -----------------------------------------------------------------------


def test_token_texts_join_to_the_whole_text() -> None:
    codec = Codec(AutoTokenizer.from_pretrained(checkpoint("llama")))
    texts = TokenTexts(codec)
    for text in ("Grüße, 世界 🐝!", " a  b", "<|im_start|>x", ""):
        ids = codec.encode(text)
        assert "".join(texts.of(ids)) == codec.decode_whole(ids) == text
        assert len(texts.of(ids)) == len(ids)
    assert TokenTexts(None).of([1, 2]) == ["", ""]


# ---- coroutines -----------------------------------------------------------------------------------


async def test_coroutines_are_seen_where_they_wait(tmp_path: Path) -> None:
    gate, go_on = asyncio.Event(), asyncio.Event()

    async def waits() -> None:
        async for _ in llm.generate(tokens(3), max_tokens=2):
            pass
        gate.set()
        await go_on.wait()  # here it waits
        raise LookupError("no such thing")

    async with engine("llama") as llm:
        task = asyncio.create_task(waits())
        await gate.wait()
        await turns()
        llm._engine.recorder.look(now=True)
        (seen,) = llm.trace.state()["tasks"].values()
        assert seen["name"] == "waits" and seen["state"] == "waiting"
        assert "test_recording.py, line" in seen["line"] and "await go_on.wait()" in seen["line"]
        go_on.set()
        await asyncio.wait([task])
        await turns()
        (seen,) = llm.trace.state()["tasks"].values()
        assert seen["state"] == "failed" and seen["error"] == "LookupError: no such thing"
        assert "raise LookupError" in seen["line"]
        with pytest.raises(LookupError):
            task.result()


async def test_coroutines_that_wait_for_tokens_run() -> None:
    async def reads() -> str:
        return await llm.generate(tokens(3), max_tokens=200)

    async with engine("llama") as llm:
        llm.pause()
        tasks = [asyncio.create_task(reads(), name=str(i)) for i in range(3)]
        await turns()
        llm._engine.recorder.look(now=True)
        states = llm.trace.state()
        assert [t["state"] for t in states["tasks"].values()] == ["running"] * 3
        assert [r["name"] for r in states["requests"].values()] == ["reads", "reads·2", "reads·3"]
        tasks[0].cancel()
        llm.resume()
        await asyncio.wait(tasks)
        await turns()
        states = llm.trace.state()["tasks"]
        assert [t["state"] for t in states.values()] == ["cancelled", "done", "done"]
