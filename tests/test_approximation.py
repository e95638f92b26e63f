"""The cost of reading shared blocks: nothing where there is nothing to pay, and what the definition says."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from random import Random

import pytest
import torch
from helpers import answer_of, assert_close, checkpoint, engine, literal, read, tokens
from literal import KeyValue, LiteralBlock, Update

from asyncllm_nb.engine.boundary import Boundary
from asyncllm_nb.engine.grafting import graft
from asyncllm_nb.evals import approximation
from asyncllm_nb.evals.approximation import _compared, _grafted, _logits, measure
from asyncllm_nb.evals.divergence import VARIANTS, Divergence, Result
from asyncllm_nb.evals.reordering import Scene, make_scenes
from asyncllm_nb.tasks import make_problem

ROUNDING = 1e-11
"""Nats: what float32 makes of the same numbers computed in another order, at most."""

PARTS = {"one": tuple(tokens(19)), "two": tuple(tokens(2)), "three": tuple(tokens(33, seed=3))}
GIVEN = tuple(tokens(4, seed=4))
IN_ORDER = ((("one",), 19), (("one", "two"), 2), (("one", "two", "three"), 33))


def scene(*read_order: str) -> Scene:
    """The parts, written one behind the other, read in another order."""
    return Scene(", ".join(read_order), PARTS, IN_ORDER, read_order, GIVEN)


@pytest.mark.parametrize("boundary", ["written", "recomputed"])
async def test_blocks_that_are_read_as_they_were_written_cost_nothing(boundary: Boundary) -> None:
    async with engine(boundary=boundary) as llm:
        found = await measure(
            llm, 0, scene("one", "two", "three"), {}, length=9, recomputes=boundary == "recomputed"
        )
        assert not llm.blocks
    assert len(found) == {"written": 4, "recomputed": 2}[boundary]
    for divergence in found:
        assert divergence.positions == len(GIVEN) + 9
        assert divergence.worst < ROUNDING and not divergence.changed


async def test_another_order_costs_what_the_literal_model_says() -> None:
    """In every variant: the literal blocks take keys and values from one encoding, updates from another."""
    view = ("three", "one", "two")
    continuations: approximation.Continuations = {}
    found: dict[str, Divergence] = {}
    for boundary in ("written", "recomputed"):
        async with engine(boundary=boundary) as llm:
            recomputes = boundary == "recomputed"
            made = await measure(llm, 0, scene(*view), continuations, length=6, recomputes=recomputes)
            found |= {divergence.variant: divergence for divergence in made}
    (ids,) = continuations.values()
    model = literal(checkpoint())
    shared = dict(zip(PARTS, read(model, *PARTS.values()), strict=True))
    fresh = read(model, *(PARTS[name] for name in view))
    pairs = [(shared[name], block) for name, block in zip(view, fresh, strict=True)]
    expected = model.encode(ids, [*fresh, LiteralBlock()])[1]
    for variant, blocks in {
        "as is": [one for one, _ in pairs],
        "attention": [mixed(one, other) for one, other in pairs],
        "states": [mixed(other, one) for one, other in pairs],
    }.items():
        want = _compared(0, "", variant, expected, model.encode(ids, [*blocks, LiteralBlock()])[1])
        assert found[variant].total == pytest.approx(want.total, rel=1e-2)
        assert found[variant].worst == pytest.approx(want.worst, rel=1e-2)
        assert found[variant].changed == want.changed
    assert found["one block"].worst < ROUNDING < found["attention"].worst < found["states"].worst
    assert found["recomputed"].total < found["as is"].total


def mixed(attention: LiteralBlock, states: LiteralBlock) -> LiteralBlock:
    """The keys and values of one block, the updates of another."""
    memory = tuple(
        tuple(kv if isinstance(kv, KeyValue) else update for kv, update in zip(one, other, strict=True))
        for one, other in zip(attention.memory, states.memory, strict=True)
    )
    assert any(isinstance(left, Update) for left in memory[0])
    return LiteralBlock(attention.tokens, memory)


async def test_both_memories_of_the_fresh_blocks_are_the_fresh_blocks() -> None:
    async with engine() as llm:
        fresh = await scene("two", "three", "one").as_fresh(llm)
        both = await _grafted(llm, fresh, fresh)
        assert torch.equal(await _logits(llm, both, GIVEN), await _logits(llm, fresh, GIVEN))


async def test_a_graft_is_written_like_any_block() -> None:
    """It shares pages and slots: what it is made of may grow or go, and it may be written."""
    async with engine() as llm:
        front, alone = [(await llm.forward(tokens(n, seed=n))).block for n in (5, 21)]
        behind = await llm.create_block()
        await llm.forward(tokens(21, seed=21), [front, behind])
        grafted = await graft(llm._engine, behind, alone)
        await llm.forward(tokens(3), [behind])
        await llm.free_block(alone)
        model = literal(checkpoint())
        start, more = tokens(5, seed=5), tokens(21, seed=21)
        twin = mixed(read(model, start, more)[1], read(model, more)[0])
        output = await llm.forward(tokens(7), [grafted], logits="all")
        assert_close(output.logits, model.encode(tokens(7), [twin])[1])
        llm.check_integrity()


async def test_a_graft_needs_the_same_tokens_and_two_memories() -> None:
    async with engine() as llm:
        one, other = [(await llm.forward(tokens(n))).block for n in (5, 6)]
        error = await answer_of(graft(llm._engine, one, other))
        assert isinstance(error, ValueError) and "hold different tokens" in str(error)
        assert len(llm.blocks) == 2
    async with engine("llama") as llm:
        block = (await llm.forward(tokens(5))).block
        error = await answer_of(graft(llm._engine, block, block))
        assert isinstance(error, ValueError) and "no Gated DeltaNet layers" in str(error)


async def test_full_attention_alone_has_no_states_to_swap() -> None:
    async with engine("llama") as llm:
        found = await measure(llm, 3, scene("three", "two", "one"), {}, length=5)
        assert [divergence.variant for divergence in found] == ["as is", "one block"]
        assert found[0].worst > 1e-9 > found[1].worst


def test_compared_is_the_divergence_from_the_fresh_encoding() -> None:
    said, other = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]), torch.tensor([[0.25, 0.5, 0.25]] * 2)
    found = _compared(1, "view", "as is", said.log() + 3, other.log())
    each = [
        0.5 * math.log(2) - 0.25 * math.log(2),
        0.1 * math.log(0.4) + 0.2 * math.log(0.4) + 0.7 * math.log(2.8),
    ]
    assert found.total == pytest.approx(sum(each)) and found.worst == pytest.approx(max(each))
    assert (found.positions, found.changed) == (2, 2)


async def test_scenes_are_what_agents_write_and_read() -> None:
    async with engine() as llm:
        scenes = {scene.name: scene for scene in make_scenes(llm, 7)}
        assert [*scenes.values()] == make_scenes(llm, 7) != make_scenes(llm, 8)
        rng = Random("reordered views 7")
        problem = make_problem(rng, (3, 6), 1, held_out=True)

        def text(scene: Scene) -> str:
            ids = [id for name in scene.read for id in scene.tokens[name]]
            return str(llm.tokenizer.decode([*ids, *scene.given]))

        for scene in scenes.values():
            blocks = await scene.as_shared(llm)
            assert [tuple(block.token_ids) for block in blocks] == [scene.tokens[name] for name in scene.read]
            assert (problem.question in text(scene)) == (scene.name != "two workers")
        swapped = text(scenes["halves of a prompt swapped"])
        assert swapped.index(problem.question) < swapped.index(problem.quantities[0].sentence)
        apart = text(scenes["halves written apart"])
        assert f"user\n {problem.text}<|im_end|>" in apart
        assert "assistant\n" + "\n\n".join(problem.thinking[:2]) in text(scenes["thinker and writer"])
        assert f"In short, {problem.statement(0)}.\n\nIn short, " in text(scenes["thinker and writer"])
        corrected = text(scenes["an input before the thinking"])
        assert re.search(r"\?\n(Correction: |Sorry, |Wait, )[^\n]+<\|im_end\|>\n<\|im_start\|>", corrected)


def test_the_command_line_measures_and_keeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "made" / "result.json"
    approximation.main(
        ["--model", str(checkpoint()), "--problems", "1", "--length", "3", "--out", str(file)]
    )
    result = Result.from_json(file)
    assert len(result.scenes) == 5 and len(result.runs) == 5 * len(VARIANTS)
    for name in result.scenes:
        found = {variant: result.summary(name, variant) for variant in VARIANTS}
        assert all(found.values())
        as_is, floor = found["as is"], found["one block"]
        assert as_is is not None and floor is not None
        assert as_is.mean > 100 * floor.mean and as_is.worst >= as_is.mean and math.isnan(as_is.error)
    printed = capsys.readouterr().out
    assert str(result.table()) in printed and str(result.overview()) in printed
    assert result.overview().columns[1:] == tuple(VARIANTS)
    document = json.loads(file.read_text())
    assert document["settings"]["model"] == checkpoint().name
    assert document["summaries"][result.scenes[0]]["as is"][:2] == [1, result.runs[0].positions]


def test_the_command_line_says_at_once_what_a_gpu_cannot_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("asyncllm_nb.engine.boundary.why_not_fused", lambda device: "")
    with pytest.raises(SystemExit):
        approximation.main(["--model", "no such model"])
    assert "device='cpu', or leave what is recomputed out with --as-written" in capsys.readouterr().err


def test_summaries_are_over_all_positions() -> None:
    runs = [
        Divergence(0, "s", "as is", positions=4, total=2.0, worst=1.5, changed=1),
        Divergence(1, "s", "as is", positions=1, total=1.0, worst=1.0, changed=1),
    ]
    found = Result({}, runs).summary("s", "as is")
    assert found is not None
    assert (found.problems, found.positions, found.mean, found.worst, found.changed) == (2, 5, 0.6, 1.5, 0.4)
    assert found.error == pytest.approx(0.25)
