"""Agents that take input while they work, beside loops: the clock, what is counted, and how it is kept."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from helpers import checkpoint, engine, free_memory, tokens

from asyncllm_nb import AsyncLLM
from asyncllm_nb.evals import evolving, listening, monitoring, patterns_io
from asyncllm_nb.evals.clock import Clock
from asyncllm_nb.evals.evolving import pages
from asyncllm_nb.evals.listening import speakers
from asyncllm_nb.evals.logs import held_out_logs
from asyncllm_nb.evals.measured import Measured, Measures
from asyncllm_nb.evals.monitoring import Watch
from asyncllm_nb.evals.statistics import Share
from asyncllm_nb.tasks import held_out

# ---- the clock ------------------------------------------------------------------------------------


@pytest.mark.parametrize("others", [0, 1, 5])
async def test_a_tick_is_a_pass_whatever_else_runs(others: int) -> None:
    async with engine(max_batch_tokens=512) as llm:
        clock = Clock(llm)
        seen: list[tuple[str, int]] = []

        async def work() -> None:
            block, other = await llm.create_blocks("a", "b")
            await llm.forward(tokens(7), block)
            seen.append(("forward", clock.now))
            async with llm.transaction(block, other):
                await llm.append_block(other, block)
                await llm.clear(block)
            await llm.probe("Well?", [other])
            seen.append(("probe", clock.now))
            async for _ in llm.generate(tokens(3), [block], max_tokens=3):
                seen.append(("token", clock.now))
            await clock.until(9)
            seen.append(("waited", clock.now))
            await clock.until(4)

        async def busy() -> None:
            await llm.generate(tokens(3), max_tokens=8)

        async def both() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(work())
                for _ in range(others):
                    group.create_task(busy())

        await clock.run(both())
        passes = [("forward", 1), ("probe", 2), ("token", 3), ("token", 4), ("token", 5), ("waited", 9)]
        assert seen == passes


async def test_paced_texts_come_when_they_are_due() -> None:
    async with engine() as llm:
        clock = Clock(llm)

        async def work() -> list[tuple[str, int]]:
            await clock.until(2)
            came = []
            async for text in clock.paced("abcd", 3):
                came.append((text, clock.now))
                if text == "b":
                    await clock.until(9)  # busy: c is due at 8, d at 11
            return came

        assert await clock.run(work()) == [("a", 2), ("b", 5), ("c", 9), ("d", 11)]
        assert llm.trace.num_steps == 0  # ticks pass without passes


async def test_a_run_that_never_ends_is_told() -> None:
    async with engine() as llm:
        ended: list[bool] = []

        async def stuck() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        with pytest.raises(RuntimeError, match="would never end"):
            await Clock(llm).run(stuck())
        assert ended == [True]
        await llm.forward(tokens(3))  # the engine goes on


# ---- what is counted ------------------------------------------------------------------------------


def test_watch_counts_warnings_delays_and_what_was_read() -> None:
    log = next(log for log in held_out_logs(99, 6) if log.answers == (False, True, False, True, False, False))
    watch = Watch(log, 8, start=100)
    watch.warned = [True, True, False, False, False, False]  # a false alarm, a warning, one missing
    watch.ticks = {0: 117, 1: 110}
    watch.conclusion = f"{log.verdict} "
    assert watch.numbers() == {
        "detected": [1, 0],
        "false alarms": [1, 0, 0, 0],
        "delay": [17, 2],
        "read before the answer, %": [pytest.approx(100 / 3), 100],
        "conclusion right": [1],
    }
    assert watch.due(99 + 8) == 1 and watch.due(108) == 2 and watch.due(999) == 6


def test_speaker_counts_delays_early_answers_and_what_was_talked_over() -> None:
    clock = Clock.__new__(Clock)
    (plain, breaks) = speakers(clock, 2, 3)
    assert not plain.change and breaks.change and held_out(plain.utterance)
    assert (plain.answer, breaks.answer != breaks.utterance.answer) == (plain.utterance.answer, True)
    words, changes = breaks.num_words, len(breaks.change.split())
    breaks.spoken = list(range(10, 10 + words + changes))
    last = 9 + words
    breaks.tokens = [
        (11, words - 1, words - 1),  # too early
        (last + 4, words, words),
        (last + 5, words, words),
        (last + 6, words + 1, words),  # talked over
        (last + 7, words + 2, words),
        (99, words + changes, words + changes),
    ]
    assert breaks.numbers(f" {breaks.answer}") == {
        "too early": [1.0],
        "question to answer": [4.0],
        "right after a change": [1.0],
        "change to answer": [99.0 - last - changes],
        "talked over": [2.0],
    }
    plain.spoken, plain.tokens = list(range(plain.num_words)), []
    assert plain.numbers("It is a lot.") == {"right": [0.0], "too early": [0.0], "question to answer": []}


def test_page_counts_what_is_right_when_an_answer_ends() -> None:
    clock = Clock.__new__(Clock)
    clock.now = 60
    (page,) = pages(clock, 1, 3)
    values = [value for _, value, _ in page.states]
    page.changed = list(zip([10, 20, 50], values, strict=True))
    page.answers = [
        (15, values[0], False),
        (25, values[0], True),  # stale, and noticed
        (30, values[1], False),
        (52, values[1], False),  # stale
        (55, None, False),
        (58, values[2], False),
    ]
    numbers = page.numbers()
    assert numbers["right when it ends"] == [1, 0, 1, 0, 0, 1]
    assert numbers["stale, and noticed"] == [1, 0, 0]
    assert numbers["change to right answer"] == [5, 10, 8]
    assert all(page.subject in text and str(value) in text for _, value, text in page.states)


# ---- running them ---------------------------------------------------------------------------------


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short answers: a random model never ends by itself."""
    for module, most in ((monitoring, 3), (listening, 3), (evolving, 4)):
        monkeypatch.setattr(module, "MOST", most)
    monkeypatch.setattr(listening, "WAITS", 7)
    monkeypatch.setattr(patterns_io, "LINES", 3)
    monkeypatch.setattr(patterns_io, "STATES", 3)


async def measured(llm: AsyncLLM, concurrency: int) -> Measures:
    result = await patterns_io.run(llm, problems=2, concurrency=concurrency)
    assert not llm.blocks
    return result


async def test_every_way_gives_the_same_alone_and_beside_others_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small(monkeypatch)
    async with engine(seconds=200, cache_tokens=20_000, max_batch_tokens=4096, max_blocks=300) as llm:
        free = free_memory(llm)
        alone = await measured(llm, 1)
        beside = await measured(llm, 2)
        assert free_memory(llm) == free
    assert alone == beside
    assert len({(run.pattern, run.way) for run in alone.runs}) == 9 and len(alone.runs) == 2 * 9
    assert alone.of("monitor", "monitor", "delay") == [2.0] * len(alone.of("monitor", "monitor", "delay"))
    assert all(passes > 5 for passes in alone.of("context", "loop", "forward passes"))
    assert Measures.from_json(alone.to_json(tmp_path / "io.json")) == alone
    for pattern in patterns_io.PATTERNS:
        assert "forward passes" in str(alone.table(pattern))
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no measures"):
        Measures.from_json(tmp_path / "other.json")


def test_measures_are_shares_or_means() -> None:
    def measure(problem: int, **numbers: list[float]) -> Measured:
        return Measured("p", "w", problem, numbers)

    runs = [measure(1, right=[1, 0], delay=[4.0]), measure(0, right=[1], delay=[1.0, 2.5], rest=[])]
    result = Measures({}, frozenset({"right"}), runs)
    assert result.of("p", "w", "delay") == [1.0, 2.5, 4.0] and result.share("p", "w", "right") == Share(2, 3)
    assert result.table("p").rows == (("w", "2", str(Share(2, 3)), "2.5", "–"),)


async def test_wrong_arguments_are_refused_before_anything_runs() -> None:
    async with engine() as llm:
        with pytest.raises(ValueError, match="no pattern 'monitr'; there are monitor"):
            await patterns_io.run(llm, ["monitr"])
        with pytest.raises(ValueError, match="at least"):
            await patterns_io.run(llm, problems=0)
        assert llm.trace.num_steps == 0


def test_the_command_prints_tables_and_writes_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small(monkeypatch)
    file = tmp_path / "io.json"
    words = ["--model", str(checkpoint()), "--pattern", "context", "--problems", "1", "--concurrency", "1"]
    patterns_io.main([*words, "--out", str(file)])
    written = Measures.from_json(file)
    assert str(written.table("context")) in capsys.readouterr().out
