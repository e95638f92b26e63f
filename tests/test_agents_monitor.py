"""The monitor: what each line is read under, probes beside explanations, notes, and a log that moves on."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from helpers import engine
from scripted import script

from asyncllm_nb import Agent, AsyncLLM
from asyncllm_nb.agents import Output, Tail, monitor
from asyncllm_nb.agents.monitor import Watched
from asyncllm_nb.engine.trace import RowRecord
from asyncllm_nb.models import resolve
from asyncllm_nb.tasks import make_log

RULE = "Rule: warn if the fan speed is above 70."
LINES = ["09:14 fan speed 64", "09:15 door opened", "09:16 fan speed 75"]


def rows_of(llm: AsyncLLM, kind: str = "", block: str | None = "") -> list[RowRecord]:
    """Rows of a kind, and of those that write a block (None: that write none)."""
    rows = [row for step in llm.trace.steps for row in step.rows]
    return [row for row in rows if kind in ("", row.kind) and block in ("", row.block)]


def views(rows: list[RowRecord]) -> set[str]:
    return {" ".join(block for block, _ in row.view) for row in rows}


async def test_tiny_hybrid_warns_explains_and_concludes() -> None:
    log = make_log(random.Random(3), 7, held_out=True)
    assert any(log.answers) and not all(log.answers)
    async with engine(resolve("tiny-hybrid")) as llm:
        warned: list[str] = []
        agent = monitor(llm, log.rule, log.lines, on_warning=warned.append)
        results = await agent.start()
        assert [entry.warned for entry in results["watch"]] == list(log.answers)
        assert warned == [line for line, fires in zip(log.lines, log.answers, strict=True) if fires]
        assert results["explain"] == log.verdict
        assert agent.blocks["log"].text == "".join(f"{line}\n" for line in log.lines)
        explained = "\n\n".join(log.explanations)
        assert agent.blocks["thinker"].text.endswith(f"{explained}\n</think>\n\n{log.verdict}")


async def test_each_line_is_probed_while_the_thinker_explains_an_older_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with engine() as llm:
        why = " because of this and that."
        script(monkeypatch, llm, {"thinker": why * 3 + "Warned."})

        async def lines() -> AsyncIterator[str]:
            for number, line in enumerate(LINES):
                yield line
                some = number * (len(why) - 1) + 6  # in the middle of the explanation
                while len(rows_of(llm, "decode", "thinker")) < some:
                    await asyncio.sleep(0)

        agent = monitor(llm, RULE, lines())
        results = await agent.start()
        assert [entry.line for entry in results["watch"]] == LINES and results["explain"] == "Warned."
        assert views(rows_of(llm, "prefill", "log")) == {"prompt log"}
        assert views(rows_of(llm, "probe")) == {"prompt log"}
        assert views(rows_of(llm, block="thinker")) == {"prompt log thinker"}
        beside = [step for step in llm.trace.steps if {"probe", "decode"} <= {row.kind for row in step.rows}]
        assert len({dict(row.view)["log"] for s in beside for row in s.rows if row.kind == "probe"}) == 2
        read = [dict(row.view)["log"] for row in rows_of(llm, "decode", "thinker")]
        assert read == sorted(read) and set(read) == {1, 2, 3}  # it sees lines as they come
        told = agent.blocks["thinker"].text.split("\n\n")
        assert told[0].endswith(f"assistant\n{LINES[0]}:{why}")
        assert told[1:] == [f"{LINES[1]}:{why}", f"{LINES[2]}:{why}\n</think>", "Warned."]


async def test_notes_are_read_by_one_of_the_two() -> None:
    async with engine() as llm:
        agent = monitor(
            llm,
            RULE,
            LINES,
            probe_note="\nJudge the last line only.\n",
            thinker_note="\nDo not look up.\n",
            probe_reads_thinker=True,
            max_tokens=3,
        )
        await agent.start()
        assert views(rows_of(llm, "probe")) == {"prompt log thinker probe's note"}
        assert views(rows_of(llm, block="thinker")) == {"prompt log thinker's note thinker"}
        assert agent.blocks["probe's note"].text == "\nJudge the last line only.\n"
        assert agent.blocks["probe's note"].version == agent.blocks["thinker's note"].version == 1


async def test_a_long_log_moves_on_in_single_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"09:{minute:02} fan speed {minute}" for minute in range(11, 24)]
    async with engine() as llm:
        script(monkeypatch, llm, {"thinker": " no." * len(lines) + "Quiet."})
        agent = monitor(llm, RULE, lines, keep=5)
        results = await agent.start()
        assert [entry.line for entry in results["watch"]] == lines
        log = agent.blocks["log"]
        assert log.version == len(lines)  # a replaced log is one change
        # 5 lines, then the 2 newest and the next one; 5 again; and so on.
        assert log.text == "".join(f"{line}\n" for line in lines[-4:])
        assert agent.blocks["thinker"].text.count(" no.") == len(lines) % 5
        most = max(row.context + row.num_tokens for row in rows_of(llm, "probe"))
        per_line = len(llm.encode(f"{lines[0]}\n"))
        assert most <= agent.blocks["prompt"].num_tokens + 5 * per_line + len(llm.encode("Warn? yes"))


async def test_markers_in_lines_stay_text() -> None:
    async with engine() as llm:
        (marker,) = llm.encode("<|im_end|>")
        agent = monitor(llm, RULE, ["09:14 <|im_end|>"], max_tokens=2)
        await agent.start()
        assert agent.blocks["log"].text == "09:14 <|im_end|>\n"
        assert marker not in agent.blocks["log"].token_ids
        assert agent.blocks["thinker"].token_ids.count(marker) == 1  # its own, that closes the turn


async def test_no_line_is_lost_when_the_watcher_is_restarted() -> None:
    async with engine() as llm:
        agent = Agent(llm, "guard")
        lines = agent.queue("lines")
        assert monitor(agent, RULE, lines, max_tokens=2) is agent
        agent.start()
        for line in LINES:
            lines.put_nowait(line)
            probed = len(rows_of(llm, "probe"))
            while len(rows_of(llm, "probe")) == probed:
                await asyncio.sleep(0)
            await llm.drain()
            agent.restart("watch")
        lines.put_nowait(None)
        results = await agent
        assert [entry.line for entry in results["watch"]] == LINES
        assert all(isinstance(entry, Watched) for entry in results["watch"])
        assert agent.blocks["prompt"].version == 1


async def test_lines_of_a_file_and_of_a_program_are_watched(tmp_path: Path) -> None:
    path = tmp_path / "log"
    async with engine() as llm:
        tail = Tail(path, seconds=0.001)
        agent = monitor(llm, RULE, tail, max_tokens=2, name="file")
        agent.start()
        for line in LINES:
            before = len(rows_of(llm, "probe"))
            with path.open("a") as file:
                file.write(f"{line}\n")
            while len(rows_of(llm, "probe")) == before:
                await asyncio.sleep(0)
        tail.close()
        assert [entry.line for entry in (await agent)["watch"]] == LINES
        program = f"for line in {LINES!r}: print(line)"
        async with Output(sys.executable, "-c", program) as output:
            results = await monitor(llm, RULE, output, max_tokens=2, name="program").start()
        assert [entry.line for entry in results["watch"]] == LINES


async def test_a_log_without_lines_is_concluded() -> None:
    async with engine() as llm:
        agent = monitor(llm, RULE, [], max_tokens=3)
        results = await agent.start()
        assert results["watch"] == () and agent.blocks["thinker"].text.endswith(results["explain"])


async def test_wrong_use_is_refused_and_another_rule_too() -> None:
    async with engine() as llm:
        with pytest.raises(ValueError, match="choices are two answers"):
            monitor(llm, RULE, [], choices=("yes",))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="keep must be 2"):
            monitor(llm, RULE, [], keep=1)
        await monitor(llm, RULE, LINES[:1], max_tokens=2).start()
        with pytest.raises(ValueError, match="another question"):
            await monitor(llm, "Rule: never warn.", LINES, max_tokens=2).start("watch")
