"""A caller and its helpers: where results stand, who waits for whom, and how deep it may go."""

from __future__ import annotations

import pytest
from helpers import answer_of, engine
from scripted import script

from asyncllm_nb import AsyncLLM
from asyncllm_nb.agents import delegation

A, B = "Sub-question: how many a?", "Sub-question: how many b?"
WORK = "a is 3 + 4, so it is seven.\n\nSub-answer: a is 7."
TEXTS = {
    "caller 1": " how many a?" + " how many b?",
    "helper 1": WORK,
    "helper 2": "Sub-answer: b is 5.",
    "caller 3": "Together 12.",
}
"""What each block gets behind the words that are given."""


def views_of(llm: AsyncLLM, name: str) -> list[tuple[str, ...]]:
    """The different views, as names of blocks, of all rows of a name, in order."""
    rows = [row for step in llm.trace.steps for row in step.rows if row.name == name]
    return list(dict.fromkeys(tuple(block for block, _ in row.view) for row in rows))


async def test_results_stand_in_the_view_of_all_who_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine() as llm:
        agent = delegation(llm, "Add up.")
        script(monkeypatch, llm, TEXTS)
        assert await agent.start() == {"call": f"{A}\n\n{B}\n\nTogether 12."}
        results = ("prompt", "helper 1", "helper 2")
        assert views_of(llm, "caller") == [("prompt", "caller 1"), (*results, "caller 3")]
        assert views_of(llm, "helper 1") == [results[:2]]
        assert views_of(llm, "helper 2") == [results]
        read = "".join(agent.blocks[name].text for name in (*results[1:], "caller 3"))
        assert read == f"{A}\n\n{WORK}\n\n{B}\n\nSub-answer: b is 5.\n\nTogether 12."
        encoded = llm.stats()["tokens_encoded"]
        assert encoded == sum(block.num_tokens for block in agent.blocks.values())  # nothing twice


async def test_the_caller_goes_on_while_a_helper_works_and_waits_for_all_at_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with engine() as llm:
        agent = delegation(llm, "Add up.")
        script(monkeypatch, llm, TEXTS)
        await agent.start()
        writes = [{row.block: row for row in step.rows} for step in llm.trace.steps]
        assert sum({"helper 1", "caller 1"} <= rows.keys() for rows in writes) >= 10
        assert not any({"helper 1", "helper 2"} <= rows.keys() for rows in writes)  # one at a time
        first = next(i for i, rows in enumerate(writes) if "caller 3" in rows)
        read = writes[first]["caller 3"].context  # all that the helpers wrote
        assert read == sum(agent.blocks[name].num_tokens for name in ("prompt", "helper 1", "helper 2"))
        assert not any("helper" in str(block) for rows in writes[first + 1 :] for block in rows)


async def test_helpers_at_the_same_time_do_not_read_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine() as llm:
        agent = delegation(llm, "Add up.", at_once=2)
        script(monkeypatch, llm, TEXTS | {"helper 2": "b is five.\n\nSub-answer: b is 5."})
        await agent.start()
        writes = [{row.block for row in step.rows} for step in llm.trace.steps]
        assert sum({"helper 1", "helper 2"} <= rows for rows in writes) >= 5
        assert views_of(llm, "helper 2") == [("prompt", "helper 2")]
        (*_, last) = views_of(llm, "caller")
        assert last[0] == "prompt" and set(last[1:3]) == {"helper 1", "helper 2"}


async def test_one_question_at_a_time_is_read_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine("llama") as llm:
        agent = delegation(llm, "Add up.", ahead=1)
        texts = {"caller 1": " how many a?", "caller 2": B, "caller 3": "Together 12."}
        script(monkeypatch, llm, TEXTS | texts)
        await agent.start()
        writes = [{row.block for row in step.rows} for step in llm.trace.steps]
        for earlier, later in (("caller 1", "helper 1"), ("helper 1", "caller 2")):
            # The last token of one is encoded beside the first ones of the other.
            assert sum({earlier, later} <= rows for rows in writes) <= 1
        assert views_of(llm, "caller")[1] == ("prompt", "helper 1", "caller 2")
        assert agent.blocks["caller 2"].text == f"\n\n{B}"


async def test_a_caller_with_no_further_question_waits_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine("llama") as llm:
        agent = delegation(llm, "Add up.", ahead=3)
        texts = {"caller 1": " how many a?" + " none", "caller 2": "It is 7."}
        script(monkeypatch, llm, {"helper 1": WORK} | texts)
        assert (await agent.start())["call"] == f"{A}\n\nSub-question: none\n\nIt is 7."
        assert views_of(llm, "caller")[-1] == ("prompt", "helper 1", "caller 2")


NESTED = TEXTS | {
    "helper 1": "Sub-question: how many c?" + "So a is 3 + 4.\n\nSub-answer: a is 7.",
    "helper 1.2": "Sub-answer: c is 3.",
}


async def test_a_helper_asks_a_helper_whose_block_becomes_part_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with engine() as llm:
        agent = delegation(llm, "Add up.", max_depth=2)
        script(monkeypatch, llm, NESTED)
        await agent.start()
        assert agent.blocks["helper 1"].text == (
            f"{A}\n\nSub-question: how many c?\n\nSub-answer: c is 3."
            "\n\nSo a is 3 + 4.\n\nSub-answer: a is 7."
        )
        assert "helper 1.2" not in llm.blocks
        assert views_of(llm, "helper 1.2") == [("prompt", "helper 1", "helper 1.2")]


async def test_bounds_are_named_in_their_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine() as llm:
        deep = delegation(llm, "Add up.")
        script(monkeypatch, llm, NESTED)
        deep.start()
        error = await answer_of(deep)
        assert isinstance(error, RecursionError) and "deeper than max_depth=1: raise max_depth" in str(error)
        for block in deep.blocks.values():
            await llm.free_block(block)
        many = delegation(llm, "Add up.", max_calls=1, name="many")
        script(monkeypatch, llm, TEXTS)
        many.start()
        error = await answer_of(many)
        assert isinstance(error, RuntimeError) and "more than max_calls=1 questions" in str(error)
        assert not many.running
        with pytest.raises(ValueError, match="at_once, max_depth and max_calls must each be 1 or more"):
            delegation(llm, "Add up.", at_once=0)


async def test_a_restarted_caller_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine() as llm:
        agent = delegation(llm, "Add up.")
        script(monkeypatch, llm, TEXTS)
        first = await agent.start()
        held = {name: block.text for name, block in agent.blocks.items()}
        encoded = agent.blocks["prompt"].version
        script(monkeypatch, llm, TEXTS)
        assert await agent.start() == first
        assert {name: block.text for name, block in agent.blocks.items()} == held
        assert agent.blocks["prompt"].version == encoded  # the question is encoded once
