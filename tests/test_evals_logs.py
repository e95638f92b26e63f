"""The log watcher: when lines come and what the probes read, what is counted, and how text is read.

Also the section that puts it beside the other evaluations.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import checkpoint, engine, settle

from asyncllm_nb.evals import logs, sequential, sharded
from asyncllm_nb.evals.cases import arithmetic_cases
from asyncllm_nb.evals.logs import WAYS, Line, Watch, held_out_logs
from asyncllm_nb.evals.passes import Passes
from asyncllm_nb.evals.protocol import Frame, Setup
from asyncllm_nb.evals.report import section
from asyncllm_nb.evals.statistics import Share
from asyncllm_nb.tasks import held_out


def test_held_out_logs_are_reproducible() -> None:
    made = held_out_logs(7, lines=5, seed=2)
    assert made == held_out_logs(7, lines=5, seed=2) != held_out_logs(7, lines=5, seed=3)
    assert all(held_out(log) and len(log.lines) == 5 for log in made)


async def test_watcher_asks_behind_each_line_while_the_thinker_explains() -> None:
    pace, lines = 3, 7
    async with engine(seconds=60) as llm:
        result = await logs.run(llm, held_out_logs(1, lines), pace=pace, max_tokens=40)
        await settle(llm)
        assert not llm.blocks
        rows = [row for step in llm.trace for row in step.rows]
    probes = [row for row in rows if row.kind == "probe"]
    asked = [dict(row.view)["log"] for row in probes]
    assert asked == sorted([*range(2, lines + 2)] * 2), "after each line, a row for each choice of bytes"
    thoughts = [row for row in rows if row.block == "thinker" and row.kind == "decode"]
    read = [dict(row.view)["log"] for row in thoughts]
    assert read == sorted(read) and read[0] == 2 and read[-1] == lines + 1, "it sees lines as they come"
    arrivals = [index for index in range(1, len(read)) if read[index] > read[index - 1]]
    assert all(later - earlier == pace for earlier, later in zip(arrivals, arrivals[1:], strict=False))
    together = [line for line in result.lines if line.way == "watcher"]
    assert [line.delay for line in together] == [2] * lines, "a pass for the line, one for the question"


async def test_watcher_goes_on_when_the_thinker_has_ended() -> None:
    async with engine(seconds=60) as llm:
        result = await logs.run(llm, held_out_logs(1, 9), pace=3, max_tokens=5)
    watched = [line for line in result.lines if line.way == "watcher"]
    assert [line.index for line in watched] == list(range(9))
    assert all(line.warned is not None for line in watched)
    assert [line.delay for line in watched] == [2] * 9


async def test_sequential_loop_is_read_line_by_line() -> None:
    """Whole explanations, as a perfect model would write them, two characters a pass."""
    (log,) = held_out_logs(1, 6, seed=11)
    assert set(log.answers) == {True, False}
    text = "\n\n".join(log.explanations) + "\n</think>"
    ends = [1 + at // 2 for at in range(len(text))]
    async with engine() as llm:
        with Passes(llm) as passes:
            one = logs._OneLog(llm, Frame.of(llm, Setup()), passes, 4, log, 8, 100)
            found = [one.read(index, text, ends) for index in range(6)]
            cut = one.read(5, text[: text.rindex(":")], ends)
            unfinished = one.read(5, "\n\n".join(log.explanations), ends)
    assert [line.warned for line in found] == list(log.answers)
    assert [line.fires for line in found] == list(log.answers)
    for line, told in zip(found, log.explanations, strict=True):
        end = text.index(told) + len(told) - 1
        assert line.delay == (5 - line.index) * 8 + 1 + end // 2
    assert cut.warned is None and unfinished.warned is None, "what breaks off says nothing"


@pytest.mark.parametrize("wrong", [{"pace": 0}, {"max_tokens": 0}, {"concurrency": 0}, {"logs": []}])
async def test_run_checks_before_anything_runs(wrong: dict[str, object]) -> None:
    async with engine() as llm:
        with pytest.raises(ValueError, match="at least"):
            await logs.run(llm, **({"logs": held_out_logs(1)} | wrong))  # type: ignore[arg-type]  # mixed
        assert llm.trace.num_steps == 0


async def test_run_gives_the_same_alone_and_beside_others() -> None:
    made = held_out_logs(4, 5)
    async with engine(seconds=120, max_batch_tokens=4096, cache_tokens=8000) as llm:
        alone = await logs.run(llm, made, pace=3, max_tokens=20, concurrency=1)
        beside = await logs.run(llm, made, pace=3, max_tokens=20, concurrency=4)
    assert alone == beside
    assert len(alone.lines) == 2 * 4 * 5 and len(alone.passes["watcher"]) == 4


def test_watch_counts_and_round_trips(tmp_path: Path) -> None:
    told = [(True, True, 2), (True, False, 2), (True, None, None), (False, True, 9), (False, False, 4)]
    lines = [
        Line(0, index, way, fires, warned, delay)
        for way in WAYS
        for index, (fires, warned, delay) in enumerate(told)
    ]
    lines.append(Line(1, 0, "sequential", True, True, 41))
    watch = Watch({"model": "none"}, lines, {"watcher": [7], "sequential": [9, 10]})
    assert watch.detected("watcher") == Share(1, 3)
    assert watch.detected("sequential") == Share(2, 4)
    assert watch.false_alarms("watcher") == Share(1, 2)
    assert watch.delays("sequential") == [2, 41], "of those rightly warned of"
    assert "21.5" in str(watch.table()) and "9.5" in str(watch.table())
    assert Watch.from_json(watch.to_json(tmp_path / "logs.json")) == watch
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="no result of the log watcher"):
        Watch.from_json(tmp_path / "other.json")


def test_command_writes_a_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "logs.json"
    short = ["--model", str(checkpoint()), "--logs", "2", "--lines", "2", "--pace", "3", "--max-tokens", "9"]
    logs.main([*short, "--out", str(file)])
    watch = Watch.from_json(file)
    assert len(watch.lines) == 2 * 2 * 2
    assert str(watch.table()) in capsys.readouterr().out


async def test_section_of_the_results_has_a_row_for_each_condition(tmp_path: Path) -> None:
    setup = Setup(max_thinking=7, max_summary=2, max_answer=2)
    async with engine(seconds=120, max_batch_tokens=4096, cache_tokens=16_000, max_blocks=100) as llm:
        cases = arithmetic_cases(2)
        (await sharded.run(llm, cases, [3, None], ["after"], setup=setup)).to_json(tmp_path / "sharded.json")
        (await sequential.run(llm, cases, setup=setup)).to_json(tmp_path / "sequential.json")
        watch = await logs.run(llm, held_out_logs(1, 3), pace=3, max_tokens=9)
        watch.to_json(tmp_path / "logs.json")
    text = section(tmp_path)
    for row in ("| after | 3 | 2 |", "| – | never | 2 |", "| shared | 2 |", "| watcher | 3 |"):
        assert row in text
    for command in ("sharded --problems 2`", "sequential --problems 2`", "logs --logs 1 --lines 3`"):
        assert f"`python -m asyncllm_nb.evals.{command}: " in text
    assert "A line comes after every\n3 tokens" in text
