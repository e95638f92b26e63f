"""Workers on one problem: who reads whose lane, and pieces that move to the history as one change."""

from __future__ import annotations

import itertools

import pytest
from helpers import engine, settle, tokens, until
from scripted import script

from asyncllm_nb import Agent, AsyncLLM
from asyncllm_nb.agents import workers

PIECES = ["First:", "Second:", "Third:"]
TEXTS = {"lane 1": " ab\n\n cde\n\n", "lane 2": " fghijklmnopqrstuvwxyz.\n\n", "answer": " 46."}


def views_of(llm: AsyncLLM, name: str) -> set[tuple[str, ...]]:
    """The views, as names of blocks, of all rows of a name."""
    rows = [row for step in llm.trace.steps for row in step.rows if row.name == name]
    return {tuple(block for block, _ in row.view) for row in rows}


def one_piece_each(*texts: str) -> dict[str, str]:
    return {f"lane {number}": text for number, text in enumerate(texts, 1)} | {"answer": " 46."}


async def test_each_reads_the_history_and_the_others_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine() as llm:
        agent = workers(llm, "Add up.", [PIECES[:1], PIECES[1:2]], conclusion="In all")
        assert list(agent.coroutines) == ["conclude", "worker 1", "worker 2"]
        script(monkeypatch, llm, one_piece_each(" ab\n\n", " cdefg\n\n"))
        results = await agent.start()
        assert results == {"conclude": "In all 46.", "worker 1": 1, "worker 2": 1}
        assert agent.blocks["history"].text == "First: ab\n\nSecond: cdefg\n\n"  # the shorter one first
        assert agent.blocks["lane 1"].num_tokens == agent.blocks["lane 2"].num_tokens == 0
        assert views_of(llm, "worker 1") == {("prompt", "history", "lane 2", "lane 1")}
        assert views_of(llm, "worker 2") == {("prompt", "history", "lane 1", "lane 2")}
        assert views_of(llm, "conclude") == {("prompt", "history", "answer")}


async def test_both_write_in_the_same_steps_and_read_each_others_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with engine() as llm:
        agent = workers(llm, "Add up.", [PIECES[:1], PIECES[1:2]])
        script(monkeypatch, llm, one_piece_each(" abcdefghijk\n\n", " opqrstuvwxyz\n\n"))
        await agent.start()
        both = [step for step in llm.trace.steps if {r.name for r in step.rows} == {"worker 1", "worker 2"}]
        assert len(both) >= 12
        read = [  # versions of lane 2 that worker 1 has read, step by step
            dict(row.view)["lane 2"] for step in both for row in step.rows if row.name == "worker 1"
        ]
        assert read == sorted(read) and len(set(read)) >= 10


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
async def test_a_piece_moves_in_one_change(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """A reader that runs at every step finds each word of the work exactly once."""
    async with engine(family, cache_tokens=4096) as llm:
        agent = workers(llm, "Add up.", [PIECES[::2], PIECES[1:2]])
        lanes = [await agent.block("history"), await agent.block("lane 1"), await agent.block("lane 2")]
        eye = await llm.create_block("eye")
        script(monkeypatch, llm, TEXTS | {"eye": "x" * 500})
        told: dict[tuple[str, int], int] = {}  # tokens of each version of each block

        def look() -> None:
            for block in lanes:
                record = block._record
                told[block.name, record.state.version] = record.state.num_tokens

        stop = llm.observe(look)
        look()
        reader = llm.generate(tokens(2), [*lanes, eye], max_tokens=400, name="eye")
        await reader.__anext__()
        agent.start()
        while agent.running:
            await reader.__anext__()
        await agent
        await reader.cancel()
        stop()
        rows = [row for step in llm.trace.steps for row in step.rows if row.name == "eye"]
        seen = [row.context - 2 - place for place, row in enumerate(rows[1:])]  # without the eye's own
        assert all(a <= b for a, b in itertools.pairwise(seen)), seen  # nothing is ever missing
        assert all(b - a <= 20 for a, b in itertools.pairwise(seen)), seen  # and nothing stands there twice
        whole = sum(block.num_tokens for block in lanes)
        assert seen[-1] == whole == len(lanes[0].text)
        for row in rows:  # the recording agrees with what the blocks held
            versions = [view for view in row.view if view[0] != "eye"]
            assert all(view in told for view in versions)
        moved = {dict(row.view)["history"] for row in rows}
        assert len(moved) >= 3


async def test_a_free_worker_takes_the_next_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine() as llm:
        agent = workers(llm, "Add up.", [iter(PIECES)] * 2)
        script(monkeypatch, llm, TEXTS)
        results = await agent.start()
        assert (results["worker 1"], results["worker 2"]) == (2, 1)
        text = agent.blocks["history"].text
        assert text == "First: ab\n\nThird: cde\n\nSecond: fghijklmnopqrstuvwxyz.\n\n"


async def test_all_stop_when_the_answer_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine() as llm:
        agent = workers(
            llm,
            "Add up.",
            [itertools.repeat("Worker 1:"), itertools.repeat("Worker 2:")],  # without an end
            is_answer=lambda piece: "46" in piece,
        )
        script(monkeypatch, llm, one_piece_each(" a\n\n it is 46\n\n b\n\n", " " + "long" * 50))
        results = await agent.start()
        history = agent.blocks["history"].text
        assert results["worker 1"] == 2 and results["worker 2"] == 1
        assert history.startswith("Worker 1: a\n\nWorker 1: it is 46\n\nWorker 2: long")
        assert len(history) < 100  # the other one was broken off


async def test_a_worker_that_is_restarted_begins_its_piece_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine() as llm:
        agent = workers(llm, "Add up.", [PIECES[:1], PIECES[1:2]])
        script(monkeypatch, llm, one_piece_each(" abcdef" + " again\n\n", " " + "g" * 60 + "\n\n"))
        lane = await agent.block("lane 1")
        agent.start()
        await until(lambda: lane.text == "First: abcdef")
        agent.restart("worker 1")
        await agent
        assert agent.blocks["history"].text.startswith("First: again\n\n")
        assert "abc" not in agent.blocks["history"].text


async def test_another_question_under_the_same_name_is_refused() -> None:
    async with engine() as llm:
        agent = Agent(llm, "workers")
        await llm.forward("something else", [await agent.block("prompt")])
        workers(agent, "Add up.", [PIECES[:1]], max_tokens=3).start()
        with pytest.raises(ValueError, match="another question: give the agent another name="):
            await agent
        await agent.stop()
        for wrong in ([], "First:", PIECES):
            with pytest.raises(ValueError, match="one list a worker"):
                workers(llm, "Add up.", wrong)
        await settle(llm)


async def test_called_again_they_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine() as llm:
        for _ in range(2):
            agent = workers(llm, "Add up.", [PIECES[:1], PIECES[1:2]])
            script(monkeypatch, llm, one_piece_each(" ab\n\n", " cdefg\n\n"))
            results = await agent.start()
            assert results["conclude"] == "\n\nSo the answer is 46."
            assert agent.blocks["history"].text == "First: ab\n\nSecond: cdefg\n\n"
