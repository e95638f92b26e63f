"""Saved runs: a replay sends what live views were sent, and an exported page holds all that it shows.

Views are played by hand here: what a browser makes of a page is in browser/test_exported_page.py.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import engine, tokens, until
from ipywidgets.widgets.widget import _instances  # type: ignore[import-untyped]  # ships no types

import asyncllm_nb
from asyncllm_nb import Agent, AsyncLLM, export
from asyncllm_nb.engine.reducer import reduce
from asyncllm_nb.engine.trace import RowRecord, StepRecord, Trace
from asyncllm_nb.replaying import draw_recording

Message = dict[str, Any]


async def short_run(llm: AsyncLLM) -> None:
    """Blocks, a stream with readings and a marked step, a fork, a merge and a freed block."""
    first, second = await llm.create_blocks("first", "second")
    await llm.forward(tokens(9), first)
    llm.instruments.watch(shares=True, norms=True)
    await llm.generate(tokens(3), [first, second], max_tokens=8, name="think")
    await llm.drain()
    llm.instruments.mark()
    await llm.forward(tokens(2), [first, second])
    llm.instruments.unwatch()
    copy = await llm.fork(second)
    await llm.merge_blocks(first, copy, name="both")
    await llm.free_block(copy)


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


async def test_replay_shows_what_live_showed(tmp_path: Path) -> None:
    """The state at each step, as a live view had it then, and as the saved file gives it."""
    async with engine("qwen3_5") as llm:
        live: dict[int, Any] = {}

        def look() -> None:
            live[llm.trace.next] = as_json(llm.trace.state())

        llm.observe(look)
        await short_run(llm)
        saved = Trace.load(llm.trace.save(tmp_path / "run.json"))
        saved_at = llm.trace.next
    assert len(live) > 15
    for count, state in live.items():
        if count > saved_at:  # closing the engine is no longer in the file
            continue
        assert as_json(reduce(saved.plain(0, count))) == state


class Views:
    """A page that has opened a widget, played by hand: what it is sent."""

    def __init__(self, widget: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.messages: list[tuple[Message, list[bytes]]] = []
        self._widget = widget
        monkeypatch.setattr(
            widget, "send", lambda content, buffers=None: self.messages.append((content, buffers or []))
        )

    def say(self, kind: str, **fields: Any) -> None:
        self._widget._receive(None, {"type": kind, "client": "page", **fields}, [])

    def heard(self, kind: str) -> list[Message]:
        return [message for message, _ in self.messages if message["type"] == kind]


async def saved_run(folder: Path) -> tuple[Trace, Path]:
    async with engine("qwen3_5") as llm:
        await short_run(llm)
        file = llm.trace.save(folder / "run.json")
    return Trace.load(file), file


async def test_replay_sends_the_whole_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, file = await saved_run(tmp_path)
    views = Views(asyncllm_nb.replay(file, panels=["scrubber", "streams"]), monkeypatch)
    views.say("ready")
    await until(lambda: (m := views.heard("snapshot")) and len(m) == m[0]["parts"])
    records = [record for message in views.heard("snapshot") for record in message["records"]]
    assert [record["t"] for record in records] == [record["t"] for record in trace.plain(0)]
    assert (
        views.heard("snapshot")[0]["meta"] | {"replay": True, "records": trace.next}
        == (views.heard("snapshot")[0]["meta"])
    )
    buffers = [buffer for _, sent in views.messages for buffer in sent]
    wanted = [row["q"] for record in trace.plain(0) if record.get("bin") for row in record["rows"]]
    assert buffers == wanted and buffers


async def test_a_replay_leaves_a_picture_in_a_saved_notebook(tmp_path: Path) -> None:
    trace, _ = await saved_run(tmp_path)
    html, text = draw_recording(trace)
    assert html.startswith("<details><summary>A recorded run of ") and ": 11 steps, 22 tokens encoded" in html
    assert "data:image/png;base64," in html and "think" in html and "think: " in text
    assert "<script" not in html and "<svg" not in html


async def test_replay_cannot_be_controlled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, file = await saved_run(tmp_path)
    views = Views(asyncllm_nb.replay(file), monkeypatch)
    views.say("control", id=1, command="pause")
    views.say("read", id=2, what="states", n=3, r=1, layer=0)
    await until(lambda: views.heard("answer") and views.heard("reading"))
    assert views.heard("answer")[0]["ok"] is False and "replay" in views.heard("answer")[0]["text"]
    assert views.heard("reading")[0]["records"] == []


async def test_running_the_cell_again_leaves_one_widget(tmp_path: Path) -> None:
    _, file = await saved_run(tmp_path)
    asyncllm_nb.replay(file)
    before = len(_instances)
    for _ in range(5):
        asyncllm_nb.replay(file)
    assert len(_instances) == before


async def test_replay_loads_no_torch(tmp_path: Path) -> None:
    """A replay moves at once: what loads for seconds is not loaded."""
    _, file = await saved_run(tmp_path)
    code = f"import sys, asyncllm_nb; asyncllm_nb.replay({str(file)!r}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr


def test_replay_refuses_other_files(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ValueError, match="is not a trace"):
        asyncllm_nb.replay(tmp_path / "other.json")
    with pytest.raises(FileNotFoundError):
        asyncllm_nb.replay(tmp_path / "missing.json")


def recording_of(page: str) -> Any:
    found = re.search(r'id="recording">([^<]*)</script>', page)
    assert found is not None
    return json.loads(gzip.decompress(base64.b64decode(found[1])))


async def test_to_html_holds_the_whole_run_and_loads_nothing(tmp_path: Path) -> None:
    async with engine("qwen3_5") as llm:
        await short_run(llm)
        page = llm.trace.to_html(tmp_path / "run.html").read_text(encoding="utf-8")
        document = export.replay_document(llm.trace)
    assert recording_of(page) == as_json(document)
    assert "default-src 'none'" in page.replace("&#x27;", "'")
    assert not re.search(
        r"(src|href)\s*=|url\(|@import|\bfetch\(|https?://", page.partition('id="recording"')[0]
    )
    assert '"attention", "states"]' in page


async def test_pages_leave_out_panels_with_nothing_to_show(tmp_path: Path) -> None:
    async with engine("llama") as llm:
        await llm.forward(tokens(4))
        page = llm.trace.to_html(tmp_path / "run.html").read_text(encoding="utf-8")
    assert '"timeline"]);' in page and '"agents"' not in page.rpartition("showPage(")[2]


async def test_a_page_of_an_agents_run_has_its_panel(tmp_path: Path) -> None:
    """Also when the records of the agent were folded into the state that the page starts from."""
    async with engine("llama") as llm:
        agent = Agent(llm, "solver")
        agent.add(three)
        assert await agent.start() == {"three": 3}
        page = llm.trace.to_html(tmp_path / "run.html").read_text(encoding="utf-8")
        document = export.replay_document(llm.trace)
    assert '"agents"' in page.rpartition("showPage(")[2]
    folded = {**document, "base": reduce(document["records"]), "records": []}
    assert "agents" in export._panels_of(folded)
    assert "agents" not in export._panels_of({**folded, "base": {}})


async def three() -> int:
    return 3


def long_run(steps: int, streams: int) -> Trace:
    """A run of many steps with the shares of a model of 30 layers and 9 heads, all of them noise."""
    trace = Trace("long")
    generator = np.random.default_rng(3)
    for number in range(1, streams + 1):
        trace.add("block", id=number, name=f"block{number}")
        trace.add("request", r=number, kind="stream", name=f"s{number}", view=[number], block=number, task=0)
    for n in range(steps):
        rows = tuple(
            RowRecord(f"s{r}", "decode", f"block{r}", ((f"block{r}", n),), 1, (n,), r, (r,), n, (n + 1,))
            for r in range(1, streams + 1)
        )
        trace.append(StepRecord(n + 1, n / 30, 0.03, rows, (), 50, 0, recorded=n / 30 + 0.03))
        for r in range(1, streams + 1):
            trace.add("token", r=r, id=n, x=" word")
        table = [{"r": r, "layers": 30, "heads": 9, "mean": [0.5, 0.3, 0.2], "q": generator.bytes(810)}
                 for r in range(1, streams + 1)]  # fmt: skip
        trace.add("shares", n=n + 1, bin=810 * streams, rows=table)
    return trace


def test_a_page_of_a_thousand_steps_is_below_two_megabytes(tmp_path: Path) -> None:
    """Noise does not compress: heads are averaged, and no record is lost."""
    trace = long_run(1000, streams=4)
    page = export.to_html(trace, tmp_path / "run.html")
    assert page.stat().st_size < 2_000_000
    records = recording_of(page.read_text(encoding="utf-8"))["records"]
    assert [record["t"] for record in records] == [record["t"] for record in trace.plain(0)]
    shares = [record for record in records if record["t"] == "shares"]
    assert base64.b64decode(shares[7]["rows"][3]["q"]["$base64"]) == bytes([128, 76, 51])
    assert shares[7]["rows"][3]["mean"] == [0.5, 0.3, 0.2]


def test_readings_of_single_tokens_are_left_out_oldest_first(tmp_path: Path) -> None:
    trace = Trace("states")
    generator = np.random.default_rng(4)
    for n in range(4):
        row = {"r": 1, "shape": [1, 1, 500, 1000], "peak": [1.0], "q": generator.bytes(500_000)}
        trace.add("states", n=n, layer=0, bin=500_000, rows=[row])
    page = export.to_html(trace, tmp_path / "run.html")
    assert page.stat().st_size < 2_000_000
    records = recording_of(page.read_text(encoding="utf-8"))["records"]
    assert [len(record["rows"]) for record in records] == [0, 0, 1, 1]


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    trace, file = long_run(3, streams=1), tmp_path / "run.html"
    export.to_html(trace, file)
    before = file.read_text(encoding="utf-8")
    monkeypatch.setattr("asyncllm_nb.export.os.replace", full)
    with pytest.raises(OSError, match="no space"):
        export.to_html(trace, file)
    assert file.read_text(encoding="utf-8") == before
    assert [path.name for path in tmp_path.iterdir()] == ["run.html"]


def test_a_trace_alone_says_how_it_becomes_a_page(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="export.to_html"):
        Trace("alone").to_html(tmp_path / "run.html")
