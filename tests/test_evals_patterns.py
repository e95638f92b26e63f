"""Agents beside loops: what is counted, what is kept, and that a loop passes everything as text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import checkpoint, engine, free_memory
from scripted import script

from asyncllm_nb.evals import loops, patterns, patterns_io
from asyncllm_nb.evals.loops import Meter

END = "</think>"


def small(monkeypatch: pytest.MonkeyPatch, most: int = 5) -> None:
    """Short streams: a random model never ends by itself."""
    monkeypatch.setattr(loops, "MOST", most)
    for name in ("workers", "thinker_writer", "delegation", "tool_calls"):
        agent = getattr(patterns, name)
        limits = (
            {"max_thinking": most, "max_writing": most} if name == "thinker_writer" else {"max_tokens": most}
        )

        def shorter(*args: Any, agent: Any = agent, limits: dict[str, int] = limits, **kwargs: Any) -> Any:
            return agent(*args, **kwargs | limits)

        monkeypatch.setattr(patterns, name, shorter)


async def test_every_pattern_runs_in_both_ways_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small(monkeypatch)
    async with engine(cache_tokens=8192, max_batch_tokens=512) as llm:
        free = free_memory(llm)
        told: list[tuple[str, int]] = []
        result = await patterns.run(llm, problems=3, concurrency=2, progress=lambda *a: told.append(a))
        assert not llm.blocks and free_memory(llm) == free
        assert len(result.runs) == 3 * 2 * len(patterns.PATTERNS) and len(told) == 12
        for pattern in patterns.PATTERNS:
            for way in ("agent", "loop"):
                assert [run.problem for run in result.of(pattern, way)] == [0, 1, 2]
        assert all(run.passes > 1 and run.encoded > 50 for run in result.runs)
        again = patterns.Comparison.from_json(result.to_json(tmp_path / "runs.json"))
        assert again == patterns.Comparison(result.settings, result.runs)
        table = result.table()
        assert len(table.rows) == 8 and "one stream writes both parts" in str(table)


async def test_the_same_seed_gives_the_same_runs_however_many_go_on_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small(monkeypatch)
    async with engine("llama", cache_tokens=8192, max_batch_tokens=1024) as llm:
        one = await patterns.run(llm, ["tool calls", "thinker and writer"], 3, concurrency=1)
        many = await patterns.run(llm, ["tool calls", "thinker and writer"], 3, concurrency=3)
        for pattern in ("tool calls", "thinker and writer"):
            assert one.of(pattern, "agent") == many.of(pattern, "agent")
            assert one.of(pattern, "loop") == many.of(pattern, "loop")
        with pytest.raises(ValueError, match="no pattern 'walkers'; there are workers, thinker and writer"):
            await patterns.run(llm, ["walkers"])
        with pytest.raises(ValueError, match="at least one problem"):
            await patterns.run(llm, problems=0)


async def test_the_meter_counts_a_runs_own_passes_and_tokens() -> None:
    async with engine() as llm:
        with Meter(llm) as meter:
            here, there = await llm.create_blocks("here", "there")
            await llm.forward("abc", [here])
            await llm.forward("unrelated", [there])
            await llm.forward("de" + END, [here], logits="none")
            await llm.probe("x", [here])
            passes, until, encoded = meter.take([here])
            closing = len(llm.encode(END))
            assert (passes, until, encoded) == (
                3,
                2,
                3 + 2 + closing + len("x") + len("yes") - 1 + 1 + len("no") - 1,
            )
            assert meter.take([here]) == (0, None, 0) and meter.take([there])[0] == 1


async def test_a_loop_encodes_anew_what_is_passed_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [
        "Sub-question: a?",
        "a is 3.\n\nSub-answer: 7.",
        "Sub-question: b?",
        "Sub-answer: 5.",
        "It is 12.",
    ]
    async with engine() as llm:
        with Meter(llm) as meter:
            script(monkeypatch, llm, {f"loop·{n}" if n > 1 else "loop": t for n, t in enumerate(texts, 1)})
            said = await loops.passed_to_helpers(llm, "Add.")
            assert said.text == "\n\n".join(texts) and len(said.firsts) == 5
            prompt = llm.chat_prompt("Add.")
            for number, block in enumerate(said.firsts):
                before = "\n\n".join(texts[:number]) + ("\n\n" if number else "")
                assert block.token_ids == [*prompt, *llm.encode(before + texts[number])]
            await llm.drain()
            _, _, encoded = meter.take(said.firsts)
            assert encoded == sum(block.num_tokens for block in said.firsts)


async def test_a_tool_loop_passes_results_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = ["<tool_call>calc(37 * 48)</tool_call>", " and <tool_call>calc(1 / 0)</tool_call>", " Well."]
    async with engine("llama") as llm:
        script(monkeypatch, llm, {f"loop·{n}" if n > 1 else "loop": t for n, t in enumerate(calls, 1)})
        said = await loops.passed_to_tools(llm, "Use calc.")
        assert said.text == (
            f"{calls[0]}<tool_response>1776</tool_response>{calls[1]}"
            "<tool_response>error: '1 / 0' cannot be computed: division by zero</tool_response> Well."
        )


def test_the_command_line_writes_a_file_and_prints_a_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small(monkeypatch)
    file = tmp_path / "out.json"
    model = str(checkpoint("qwen3_5"))
    patterns.main(["--model", model, "--pattern", "workers", "--problems", "1", "--out", str(file)])
    document = json.loads(file.read_text())
    assert document["format"] == patterns.FORMAT and len(document["runs"]) == 2
    assert "forward passes" in capsys.readouterr().out
    file.write_text("{}")
    with pytest.raises(ValueError, match="no comparison of patterns"):
        patterns.Comparison.from_json(file)


@pytest.mark.parametrize("main", [patterns.main, patterns_io.main])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--problems", "0"], "at least 1"), (["--model", "nowhere"], "there is no model 'nowhere'")],
)
def test_a_mistake_on_the_command_line_is_said_in_a_line(
    main: Callable[[list[str]], None],
    arguments: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
