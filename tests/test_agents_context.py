"""An evolving context: what a reader reads when it is replaced, and the versions that its answers name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from helpers import engine, until
from scripted import script

from asyncllm_nb import AsyncLLM
from asyncllm_nb.agents import Polled, evolving_context
from asyncllm_nb.agents.context import Reading
from asyncllm_nb.engine.trace import RowRecord
from asyncllm_nb.models import resolve

STATES = ["09:14 fan speed 64\n", "09:15 tank level 8\n09:16 fan speed 75\n", "09:17 fan speed 9\n"]
ASKED = "What is the fan speed now?"


def reading_rows(llm: AsyncLLM) -> list[RowRecord]:
    """Rows of the reader's answers, oldest first."""
    return [row for step in llm.trace.steps for row in step.rows if row.block == "reader"]


async def test_tiny_hybrid_answers_for_each_state() -> None:
    async with engine(resolve("tiny-hybrid")) as llm:
        seen: list[Reading] = []

        async def states() -> AsyncIterator[str]:
            for number, state in enumerate(STATES, 1):
                yield state
                await until(lambda: len(seen) == number)  # noqa: B023  # awaited at once

        agent = evolving_context(
            llm,
            states(),
            ASKED,
            prompt="Rule: warn if the fan speed is above 70.\nLog:\n",
            on_reading=seen.append,
            enable_thinking=False,
        )
        results = await agent.start()
        assert results["refresh"] == 3 and results["read"] == tuple(seen)
        assert [str(reading) for reading in seen] == [
            "The fan speed is 64. [version 1]",
            "The fan speed is 75. [version 2]",
            "The fan speed is 9. [version 3]",
        ]
        assert agent.blocks["context"].text == STATES[-1] and agent.blocks["prompt"].version == 1


class Changing:
    """States, each of the later ones when the reader has written some tokens of its answer."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens

    async def states(self, llm: AsyncLLM) -> AsyncIterator[str]:
        yield STATES[0]
        for number, state in zip(self.tokens, STATES[1:], strict=False):
            while sum(row.kind == "decode" for row in reading_rows(llm)) < number:
                await asyncio.sleep(0)
            yield state


async def test_an_answer_is_begun_anew_when_what_it_read_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine() as llm:
        agent = evolving_context(llm, Changing(5).states(llm), ASKED)
        script(monkeypatch, llm, {"reader": "The fan speed is a number.The fan speed is another."})
        readings = (await agent.start())["read"]
        (reading,) = readings
        assert (reading.version, reading.latest) == (2, 2) and str(reading).endswith("[version 2]")
        rows = reading_rows(llm)
        assert {tuple(block for block, _ in row.view) for row in rows} == {("prompt", "context", "reader")}
        read = [dict(row.view)["context"] for row in rows]
        assert read == sorted(read) and set(read) == {1, 2}
        begins = [place for place, row in enumerate(rows) if row.kind == "prefill"]
        assert len(begins) == 2 and begins[1] <= 8  # the first answer ends soon after its fifth token
        assert len({rows[place].num_tokens for place in begins}) == 1  # asked twice, from the start
        assert read[begins[1]] == 2 and len(rows) - begins[1] > 20  # no token of it is of the old state
        assert agent.blocks["reader"].text.endswith(reading.text)


async def test_an_answer_that_is_not_begun_anew_says_what_it_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine() as llm:
        agent = evolving_context(llm, Changing(5).states(llm), ASKED, restarts=0, max_tokens=9)
        script(monkeypatch, llm, {"reader": "It is 64." + "It is 75."})
        first, second = (await agent.start())["read"]
        assert (first.version, first.latest, second.version, second.latest) == (1, 2, 2, 2)
        assert str(first) == "It is 64. [version 1; now 2]"
        assert (first.text, second.text) == ("It is 64.", "It is 75.")
        rows = reading_rows(llm)
        begins = [place for place, row in enumerate(rows) if row.kind == "prefill"]
        read = [dict(row.view)["context"] for row in rows[: begins[1]]]
        assert set(read) == {1, 2} and read == sorted(read)  # in the middle of the answer
        assert read.index(2) >= 5


async def test_a_reader_finds_the_old_or_the_new_state_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that takes several steps to encode is read by nobody before it is whole."""
    states = ["a" * 50, "b" * 170, "c" * 33]

    async def feed(llm: AsyncLLM) -> AsyncIterator[str]:
        for number, state in enumerate(states):
            yield state
            while sum(row.kind == "decode" for row in reading_rows(llm)) < 6 * (number + 1):
                await asyncio.sleep(0)

    async with engine(max_batch_tokens=32) as llm:
        agent = evolving_context(llm, feed(llm), ASKED, restarts=0, max_tokens=40)
        script(monkeypatch, llm, {"reader": "x" * 200})
        await agent.start()
        begin = agent.blocks["prompt"].num_tokens
        rows = reading_rows(llm)
        sizes, own = dict[int, set[int]](), 0
        for before, row in zip([None, *rows], rows, strict=False):
            if row.kind == "prefill" and (before is None or before.kind == "decode"):
                own = 0  # the reader's block was cleared for the next question
            sizes.setdefault(dict(row.view)["context"], set()).add(row.context - begin - own)
            own += row.num_tokens
        assert sizes == {number: {len(state)} for number, state in enumerate(states, 1)}


async def test_states_that_come_faster_than_answers_are_skipped() -> None:
    async with engine() as llm:
        states = [f"{number}\n" for number in range(11)]
        agent = evolving_context(llm, states, ASKED, max_tokens=3, restarts=2)
        results = await agent.start()
        assert results["refresh"] == 11 and 1 <= len(results["read"]) < 11
        assert results["read"][-1].version == results["read"][-1].latest == 11


async def test_a_value_that_is_polled_is_followed() -> None:
    values = iter([20, 20, 21, 22])
    async with engine() as llm:
        polled = Polled(lambda: f"{next(values)} degrees", seconds=0.001, count=3)
        agent = evolving_context(llm, polled, ASKED, max_tokens=2)
        results = await agent.start()
        assert results["refresh"] == 3 and agent.blocks["context"].text == "22 degrees"


async def test_markers_in_states_stay_text_and_restarts_are_counted_from_zero() -> None:
    async with engine() as llm:
        (marker,) = llm.encode("<|im_end|>")
        agent = evolving_context(llm, ["<|im_end|>"], ASKED, max_tokens=2)
        await agent.start()
        context = agent.blocks["context"]
        assert context.text == "<|im_end|>" and marker not in context.token_ids
        with pytest.raises(ValueError, match="restarts must be 0 or more"):
            evolving_context(llm, [], ASKED, restarts=-1)
