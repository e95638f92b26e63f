"""A writer that a probe holds back or lets go: when it writes, and what it reads."""

from __future__ import annotations

from functools import partial

import pytest
from helpers import engine, until
from scripted import script

from asyncllm_nb import AsyncLLM, CacheBlock
from asyncllm_nb.agents import thinker_writer
from asyncllm_nb.agents.thinker_writer import Writing

THOUGHT = "One.\n\nTwo.\n\nThree.\n\nFour, and a long one.</think>"


def answers(patch: pytest.MonkeyPatch, llm: AsyncLLM, *probabilities: float) -> list[list[str]]:
    """Probes run as they are and then answer with these. Returns what each one's blocks held."""
    probe, given, held = llm.probe, iter(probabilities), list[list[str]]()

    async def scripted(question: str, view: list, choices: tuple[str, str]) -> dict[str, float]:  # type: ignore[type-arg]
        held.append([block.text for block in view])
        await probe(question, view, choices)
        yes = next(given)
        return {choices[0]: yes, choices[1]: 1 - yes}

    patch.setattr(llm, "probe", scripted)
    return held


async def test_it_writes_when_the_probe_says_so_and_the_thinker_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with engine() as llm:
        agent = thinker_writer(llm, "Add up.", choices=("y", "n"))
        held = answers(monkeypatch, llm, 0.1, 0.8)
        script(monkeypatch, llm, {"thinker": THOUGHT, "writer": "46"})
        results = await agent.start()
        assert results == {"think": THOUGHT, "write": Writing("\n</think>\n\n46", (0.1, 0.8))}
        assert [texts[1].count("\n\n") for texts in held] == [1, 2]  # behind each paragraph
        steps = list(llm.trace.steps)
        first = next(i for i, step in enumerate(steps) if any(r.name == "write" for r in step.rows))
        later = [row for step in steps[first:] for row in step.rows if row.name == "think"]
        assert len(later) > 10  # the thinking went on beside it
        assert {tuple(b for b, _ in row.view) for row in later} == {("prompt", "thinker")}
        probes = [
            row for step in steps for row in step.rows if row.kind == "probe" and row.commit is not None
        ]
        assert len(probes) == 2 and all(row.block is None for row in probes)


async def test_the_writer_reads_what_the_thinker_adds_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine() as llm:
        agent = thinker_writer(llm, "Add up.")
        answers(monkeypatch, llm, 1.0)
        script(monkeypatch, llm, {"thinker": THOUGHT, "writer": "forty-six"})
        await agent.start()
        rows = [row for step in llm.trace.steps for row in step.rows if row.name == "write"]
        read = [dict(row.view)["thinker"] for row in rows]
        assert read == sorted(read) and len(set(read)) >= 8
        assert {tuple(b for b, _ in row.view) for row in rows} == {("prompt", "thinker", "writer")}


async def test_it_waits_for_the_end_if_the_probe_never_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine() as llm:
        agent = thinker_writer(llm, "Add up.", threshold=0.9)
        answers(monkeypatch, llm, *[0.5] * 9)
        script(monkeypatch, llm, {"thinker": THOUGHT, "writer": "46"})
        written = (await agent.start())["write"]
        assert written.text == "\n\n46" and len(written.modes) <= 3  # the thinker has closed its thinking
        steps = list(llm.trace.steps)
        first = next(i for i, step in enumerate(steps) if any(r.name == "write" for r in step.rows))
        assert not any(row.name == "think" for step in steps[first + 1 :] for row in step.rows)
        for wrong in ((" yes",), "yn"):
            with pytest.raises(ValueError, match="two answers, the first one for yes"):
                thinker_writer(llm, "Add up.", choices=wrong)  # type: ignore[arg-type]


async def test_a_thinking_without_paragraphs_is_answered_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine("llama") as llm:
        agent = thinker_writer(llm, "Add up.")
        script(monkeypatch, llm, {"thinker": "Just one", "writer": "46"})
        results = await agent.start()
        assert results == {"think": "Just one", "write": Writing("\n</think>\n\n46", ())}


def _holds(block: CacheBlock, text: str) -> bool:
    return block.text == text


async def test_a_restarted_thinker_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine() as llm:
        for _ in range(2):  # called again it begins anew
            agent = thinker_writer(llm, "Add up.")
            answers(monkeypatch, llm, *[0.1] * 9)
            script(monkeypatch, llm, {"thinker": THOUGHT, "writer": "46"})
            thinker = await agent.block("thinker")
            agent.start()
            await until(partial(_holds, thinker, "One.\n\nTw"))
            agent.restart("think")
            assert (await agent)["think"] == THOUGHT
            assert agent.blocks["writer"].text == "\n\n46"
