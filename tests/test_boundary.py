"""Blocks whose first tokens are convolved anew under the view that reads them: ``boundary="recomputed"``.

Against transformers where blocks are read as they were written, and against the literal model, which
convolves every token anew, where they are not.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import (
    Bench,
    answer_of,
    assert_close,
    checkpoint,
    engine,
    free_memory,
    is_close,
    read,
    tokens,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from literal import LiteralBlock, LiteralModel
from test_exactness import CUT, SEQUENCES, Cut, encode_cut, expected_logits
from test_programs import OP, Op, Program

from asyncllm_nb import AsyncLLM
from asyncllm_nb.engine.boundary import check_boundary
from asyncllm_nb.engine.build import plan_budget
from asyncllm_nb.engine.config import ModelConfig

HYBRID = "qwen3_5"


@functools.cache
def literal() -> LiteralModel:
    """The oracle that convolves every token anew in the order of the view."""
    return LiteralModel(checkpoint(HYBRID), boundary="recomputed")


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    """The engines that all tests here share."""
    with Bench() as bench:
        yield bench


def recomputing(bench: Bench, budget: int = 48) -> AsyncLLM:
    return bench.engine(
        HYBRID, cache_tokens=8192, max_blocks=64, max_batch_tokens=budget, boundary="recomputed"
    )


@pytest.mark.exact
@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(CUT, min_size=1, max_size=3), budget=st.sampled_from([48, 256]))
def test_any_cut_gives_the_logits_of_transformers(bench: Bench, cuts: list[Cut], budget: int) -> None:
    """Under the view that a block was written under, nothing is different."""
    llm = recomputing(bench, budget)

    async def encode_side_by_side() -> None:
        work = [encode_cut(llm, SEQUENCES[i], cut) for i, cut in enumerate(cuts)]
        for logits, whole in zip(await asyncio.gather(*work), expected_logits(HYBRID), strict=False):
            if len(logits):
                assert_close(logits, whole[: len(logits)])

    bench.run(llm, encode_side_by_side())


def test_many_tiny_blocks(bench: Bench) -> None:
    """Blocks of one to three tokens have a boundary and no pair."""
    llm = recomputing(bench)

    async def encode_in_crumbs() -> None:
        logits = await encode_cut(llm, SEQUENCES[1], [[1 + i % 3] for i in range(40)])
        assert_close(logits, expected_logits(HYBRID)[1][: len(logits)])

    bench.run(llm, encode_in_crumbs())


@pytest.mark.exact
@settings(max_examples=30, deadline=None)
@given(ops=st.lists(OP, min_size=2, max_size=14), budget=st.sampled_from([48, 256]))
def test_random_program_agrees_with_the_literal_model(bench: Bench, ops: list[Op], budget: int) -> None:
    llm = recomputing(bench, budget)
    bench.run(llm, Program(llm, literal()).run(ops))


async def test_same_blocks_in_another_order() -> None:
    """The boundary is that of the view at hand; as written it would be another."""
    parts = [tokens(n, seed=n) for n in (19, 2, 33)]
    as_written = LiteralModel(checkpoint(HYBRID))
    async with engine(HYBRID, boundary="recomputed") as llm:
        blocks = await llm.create_blocks(3)
        for i, part in enumerate(parts):
            await llm.forward(part, blocks[: i + 1])
        twins = read(literal(), *parts)
        differs = 0
        for order in itertools.permutations(range(3)):
            view = [*(blocks[i] for i in order), await llm.create_block()]
            output = await llm.forward(tokens(3), view, logits="all")
            ordered = [*(twins[i] for i in order), LiteralBlock()]
            assert_close(output.logits, literal().encode(tokens(3), ordered)[1])
            differs += not is_close(output.logits, as_written.encode(tokens(3), ordered)[1])
        assert differs == 5  # all but the order in which they were written


@pytest.mark.parametrize("sizes", [(1, 1), (1, 4), (2, 9), (3, 1), (21, 2), (40, 33)])
async def test_merged_blocks_read_as_left_then_right(sizes: tuple[int, int]) -> None:
    """Also inside: what was written alone reads as if it stood behind the other, before and after a merge."""
    left, right = (tokens(n, seed=n) for n in sizes)
    async with engine(HYBRID, boundary="recomputed") as llm:
        one, other = [(await llm.forward(part)).block for part in (left, right)]
        two = await llm.forward(tokens(4), [one, other], write_to=await llm.create_block(), logits="all")
        merged = await llm.merge_blocks(one, other)
        joined = await llm.forward(
            tokens(4), [merged], write_to=await llm.create_block(), logits="all"
        )
        assert two.logits is not None
        assert_close(joined.logits, two.logits)
        # And again: what the merged block keeps of its own first tokens is right under a third block.
        front = (await llm.forward(tokens(5, seed=8))).block
        third = await llm.forward(tokens(4), [front, merged], write_to=await llm.create_block(), logits="all")
        twins = [read(literal(), run)[0] for run in (tokens(5, seed=8), left, right)]
        assert_close(third.logits, literal().encode(tokens(4), [*twins, LiteralBlock()])[1])


async def test_blocks_that_grow_at_the_same_time() -> None:
    """The writer's first tokens were written when the thinker had fewer: read, they stand behind its last."""
    async with engine(HYBRID, boundary="recomputed") as llm:
        thinker, writer = await llm.create_blocks(2)
        twins = {"thinker": LiteralBlock(), "writer": LiteralBlock()}
        for turn in range(6):
            new = tokens(1 + turn % 3, seed=turn)
            await llm.forward(new, [thinker])
            twins["thinker"], _ = literal().encode(new, [twins["thinker"]])
            output = await llm.forward(new, [thinker, writer], logits="all")
            twins["writer"], expected = literal().encode(new, [twins["thinker"], twins["writer"]])
            assert_close(output.logits, expected)


async def test_a_cancelled_forward_leaves_the_boundary_as_it_was() -> None:
    """The first chunk of a forward of several is thrown away; the block still has the two tokens it had."""
    start, more = tokens(2), tokens(9)
    async with engine(HYBRID, boundary="recomputed", max_batch_tokens=16) as llm:
        block = (await llm.forward(start)).block
        llm.pause()
        cancelled = asyncio.ensure_future(llm.forward(tokens(60, seed=5), [block]))
        assert await llm.step() == 1
        cancelled.cancel()
        assert isinstance(await answer_of(cancelled), asyncio.CancelledError)
        llm.resume()
        output = await llm.forward(more, [block], logits="all")
        assert_close(output.logits, literal().encode(more, read(literal(), start))[1])


async def test_a_probe_reads_the_boundary_and_changes_nothing() -> None:
    async with engine(HYBRID, boundary="recomputed") as llm:
        one, other = [(await llm.forward(tokens(n, seed=n))).block for n in (7, 12)]
        free = free_memory(llm)
        found = await llm.probe(tokens(3), [one, other], ("a", "b"))
        assert free_memory(llm) == free
        twins = [read(literal(), tokens(n, seed=n))[0] for n in (7, 12)]
        logits = literal().encode(tokens(3), [*twins, LiteralBlock()])[1][-1]
        ids = [llm.encode(choice)[0] for choice in ("a", "b")]
        assert list(found.values()) == pytest.approx(logits[ids].softmax(-1).tolist(), abs=1e-4)


async def test_state_and_norms_are_those_of_all_tokens() -> None:
    """What instruments show includes the first tokens of each block, as the view reads them."""
    parts = [tokens(n, seed=n) for n in (11, 2, 6)]
    async with engine(HYBRID, boundary="recomputed") as llm:
        blocks = [(await llm.forward(part)).block for part in parts]
        merged = await llm.merge_blocks(await llm.merge_blocks(blocks[0], blocks[1]), blocks[2])
        for layer in llm.instruments.linear_layers:
            in_parts = await llm.instruments.states(blocks, layer)
            whole = await llm.instruments.states([merged], layer)
            twins = [read(literal(), part)[0] for part in parts]
            expected = literal()._states(sum(twins, LiteralBlock()))[layer].float()
            for state in (in_parts.sum(0), whole.sum(0)):
                assert_close(torch.from_numpy(state), expected)


async def test_norms_are_those_of_all_tokens() -> None:
    """Read as they were written, blocks let as much of the past through with the option as without."""
    found = []
    for boundary in ("written", "recomputed"):
        async with engine(HYBRID, boundary=boundary) as llm:
            llm.instruments.watch(norms=True)
            front, behind = await llm.create_blocks(2)
            await llm.forward(tokens(11), [front])
            await llm.forward(tokens(2), [front, behind])
            reading = llm.instruments.reading(llm.instruments.steps[-1])
            assert reading is not None and reading.parts[0].norms is not None
            found.append(torch.from_numpy(reading.parts[0].norms))
    assert_close(found[1], found[0])


async def test_saved_blocks_keep_their_first_tokens(tmp_path: Path) -> None:
    """And another engine reads them as it would its own, if its boundary is of the same kind."""
    file = tmp_path / "blocks.safetensors"
    async with engine(HYBRID, boundary="recomputed") as llm:
        blocks = [(await llm.forward(tokens(n, seed=n))).block for n in (9, 2)]
        await llm.save_blocks(file, blocks)
    async with engine(HYBRID, boundary="recomputed") as llm:
        loaded = await llm.load_blocks(file)
        view = [*reversed(loaded), await llm.create_block()]
        output = await llm.forward(tokens(3), view, logits="all")
        twins = [read(literal(), tokens(n, seed=n))[0] for n in (2, 9)]
        assert_close(output.logits, literal().encode(tokens(3), [*twins, LiteralBlock()])[1])
    async with engine(HYBRID) as llm:
        error = await answer_of(llm.load_blocks(file))
        assert isinstance(error, ValueError) and "boundary='recomputed'" in str(error)


def test_a_model_without_gated_delta_nets_has_no_boundary() -> None:
    async def same() -> None:
        async with engine("llama", boundary="recomputed") as llm:
            logits = await encode_cut(llm, SEQUENCES[0], [[9], [30]])
            assert_close(logits, expected_logits("llama")[0][:39])

    asyncio.run(same())


def test_an_unknown_boundary_is_an_error() -> None:
    with pytest.raises(ValueError, match="'written' or 'recomputed', not 'fresh'"):
        AsyncLLM(checkpoint(HYBRID), boundary="fresh")  # type: ignore[arg-type]


def test_fused_kernels_have_no_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncllm_nb.engine.boundary.why_not_fused", lambda device: "")
    with pytest.raises(ValueError, match="device='cpu'"):
        check_boundary("recomputed", torch.device("cuda"))
    check_boundary("written", torch.device("cuda"))


def test_the_budget_counts_first_tokens() -> None:
    config = ModelConfig.from_folder(checkpoint(HYBRID))
    budgets = [
        plan_budget(config, torch.float32, 1 << 30, 160, 8, boundary)
        for boundary in ("written", "recomputed")
    ]
    row = (2 * 3 * 16 + 6 * 24) * 4 + 2 * 6 * 4  # channels, and two gates of each head
    assert budgets[1].slot_bytes - budgets[0].slot_bytes == 4 * 3 * row
