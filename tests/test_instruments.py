"""Instruments against the literal model: shares, attention to tokens, states and norms.

The oracle joins what blocks hold and takes one softmax over it; it shares no code with the engine.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import assert_close, checkpoint, engine, literal, settle, tokens
from literal import KeyValue, LiteralBlock, LiteralModel, Update
from torch import Tensor

from asyncllm_nb import AsyncLLM, CacheBlock
from asyncllm_nb.engine.instruments import Instruments
from asyncllm_nb.engine.measuring import PartReading, Wanted
from asyncllm_nb.engine.readings import StepReading
from asyncllm_nb.engine.runner import Runner

CLOSE = 2e-5
HALF = 2e-3  # attention to tokens is kept in half precision

RUNS = [tokens(37, 1), tokens(3, 2), tokens(18, 3)]


class WatchedModel(LiteralModel):
    """A literal model that remembers the attention of the last row, layer by layer."""

    def __init__(self, model: LiteralModel) -> None:
        self.__dict__.update(model.__dict__)
        self.weights_of: dict[int, Tensor] = {}  # layer -> [H, tokens]

    def _attention(self, layer: int, x: Tensor, seen: object) -> tuple[Tensor, KeyValue]:
        softmax = Tensor.softmax

        def spy(scores: Tensor, dim: int) -> Tensor:
            self.weights_of[layer] = softmax(scores, dim)
            return self.weights_of[layer]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "softmax", spy)
            return super()._attention(layer, x, seen)  # type: ignore[arg-type]


def assert_near(actual: np.ndarray, expected: Tensor, error: float) -> None:
    torch.testing.assert_close(torch.from_numpy(actual).double(), expected, rtol=0, atol=error)


def instruments(llm: AsyncLLM) -> Instruments:
    return llm.instruments


async def written(llm: AsyncLLM, *runs: list[int]) -> list[CacheBlock]:
    """Blocks with `runs` in them, each written under all blocks before it."""
    blocks = await llm.create_blocks(len(runs))
    for index, run in enumerate(runs):
        if run:
            await llm.forward(run, blocks[: index + 1])
    return blocks


def only(reading: StepReading | None) -> PartReading:
    """The reading of a step with one row."""
    assert reading is not None
    (part,) = reading.parts
    return part


def literal_view(family: str, runs: list[list[int]], last: int) -> tuple[WatchedModel, list[LiteralBlock]]:
    """The same blocks in the oracle; `last` goes into the last one, and is what is watched."""
    model, view = WatchedModel(literal(checkpoint(family))), []
    for run in runs:
        view.append(LiteralBlock())
        if run:
            view[-1], _ = model.encode(run, view)
    view[-1], _ = model.encode([last], view)
    return model, view


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5"])
@pytest.mark.parametrize("runs", [RUNS, [tokens(5), [], tokens(70, 2)], [tokens(1)]], ids=len)
async def test_attention_equals_a_direct_softmax(family: str, runs: list[list[int]]) -> None:
    """Of one token: shares per block, and weights per token, in each layer and head."""
    async with engine(family) as llm:
        blocks = await written(llm, *runs)
        instruments(llm).watch(shares=True, tokens=True)
        await llm.forward([77], blocks)
        part = only(instruments(llm).reading(len(llm.trace)))
    model, view = literal_view(family, runs, 77)
    expected = torch.stack([model.weights_of[layer] for layer in sorted(model.weights_of)])  # [L, H, T]
    assert part.shares is not None and part.weights is not None
    assert part.lengths == tuple(len(block.tokens) for block in view)
    assert list(model.weights_of) == instruments(llm).attention_layers
    assert_near(part.weights, expected, HALF)
    per_block = torch.stack([w.sum(-1) for w in expected.split(part.lengths, dim=-1)], dim=1)
    assert_near(part.shares, per_block, CLOSE)
    np.testing.assert_allclose(part.shares.sum(1), 1, atol=1e-5)
    assert tuple(cut.shape[-1] for cut in part.weights_by_block) == part.lengths


async def test_attention_reads_segments_of_merged_blocks() -> None:
    """A merged block is several runs of pages, which queries are turned for one by one."""
    left, right, own = tokens(21, 1), tokens(34, 2), tokens(2, 3)
    async with engine("qwen3") as llm:
        first, second = await llm.create_blocks(2)
        await llm.forward(left, first)
        await llm.forward(right, second)
        merged = await llm.merge_blocks(first, second)
        block = (await llm.forward(own, [merged, await llm.create_block()])).block
        instruments(llm).watch(tokens=True, shares=True)
        await llm.forward([42], [merged, block])
        part = only(instruments(llm).reading(len(llm.trace)))
    model = WatchedModel(literal(checkpoint("qwen3")))
    joined = LiteralBlock()
    for run in (left, right):
        joined = joined + model.encode(run, [LiteralBlock()])[0]
    written_block, _ = model.encode(own, [joined, LiteralBlock()])
    model.encode([42], [joined, written_block])
    expected = torch.stack([model.weights_of[layer] for layer in sorted(model.weights_of)])
    assert part.weights is not None and part.shares is not None
    assert_near(part.weights, expected, HALF)
    shares = torch.stack([w.sum(-1) for w in expected.split([55, 3], dim=-1)], dim=1)
    assert_near(part.shares, shares, CLOSE)


async def test_shares_in_a_batch_belong_to_their_rows() -> None:
    """Streams with views of different lengths, and a prefill in chunks beside them."""
    async with engine("qwen3_5", max_batch_tokens=16) as llm:
        blocks = await written(llm, *RUNS)
        instruments(llm).watch(shares=True)
        short = llm.generate([1, 2], blocks[:1], max_tokens=6, name="short")
        async for _ in short:
            await llm.forward(tokens(20), [blocks[1], await llm.create_block()])
        readings = [r for s in instruments(llm).steps if (r := instruments(llm).reading(s))]
        assert any(len(reading.rows) > 1 for reading in readings)
        for reading in readings:
            for row, part in zip(reading.rows, reading.parts, strict=True):
                assert part.shares is not None
                assert part.shares.shape[1] == len(row.view) == len(part.lengths)
                np.testing.assert_allclose(part.shares.sum(1), 1, atol=1e-5)


def literal_parts(view: list[LiteralBlock], layer: int) -> Tensor:
    """Each block's part of the state [B, H, d_v, d_k]: its updates alone, then those that follow with
    nothing written."""
    parts = []
    for index in range(len(view)):
        state: Tensor | None = None
        for number, block in enumerate(view):
            for memory in block.memory:
                update = memory[layer]
                assert isinstance(update, Update)
                if state is None:
                    heads, key, value = len(update.key), update.key.shape[1], update.value.shape[1]
                    state = torch.zeros(heads, value, key, dtype=torch.float64)
                kept = update if number == index else update._replace(value=update.value * 0)
                state = kept.apply(state)
        assert state is not None
        parts.append(state)
    return torch.stack(parts)


async def test_states_equal_the_literal_ones() -> None:
    """Block by block, at a step and on request; their sum is the state that the oracle reaches."""
    runs = [tokens(19, 1), [], tokens(4, 2), tokens(66, 3)]
    async with engine("qwen3_5") as llm:
        blocks = await written(llm, *runs)
        instruments(llm).watch(states=[0, 4])
        await llm.forward([9], blocks)
        part = only(instruments(llm).reading(len(llm.trace)))
        asked = await instruments(llm).states(blocks, 4)
        await settle(llm)
    model, view = literal_view("qwen3_5", runs, 9)
    joined = sum(view, LiteralBlock())
    assert sorted(part.states) == [0, 4]
    for layer, found in part.states.items():
        state = torch.from_numpy(found)
        assert_close(state, literal_parts(view, layer).float())
        assert not found[1].any()
        assert_close(state.sum(0), model._states(joined)[layer].float())
    np.testing.assert_array_equal(asked, part.states[4])


async def test_norms_say_how_much_of_the_past_passes() -> None:
    """Against the block's updates applied to the identity; 1 for an empty block."""
    runs = [tokens(6, 1), [], tokens(11, 3)]
    async with engine("qwen3_5") as llm:
        blocks = await written(llm, *runs)
        instruments(llm).watch(norms=True)
        await llm.forward([9], blocks)
        part = only(instruments(llm).reading(len(llm.trace)))
    _, view = literal_view("qwen3_5", runs, 9)
    assert part.norms is not None
    layers = instruments(llm).linear_layers
    assert part.norms.shape == (len(layers), 3, 6)
    assert (part.norms[:, 1] == 1).all() and (part.norms <= 1 + 1e-6).all()
    for place, layer in enumerate(layers):
        for index in (0, 2):
            passed = torch.eye(16, dtype=torch.float64).expand(6, 16, 16)
            for memory in view[index].memory:
                update = memory[layer]
                assert isinstance(update, Update)
                passed = update._replace(value=torch.zeros(6, 16, dtype=torch.float64)).apply(passed)
            expected = passed.square().sum((1, 2)).div(16).sqrt()
            assert_near(part.norms[place, index], expected, CLOSE)


async def test_nobody_looking_measures_nothing() -> None:
    async with engine("qwen3_5") as llm:
        heard: list[StepReading] = []
        instruments(llm).listeners.append(heard.append)
        assert instruments(llm).wanted() is None
        blocks = await written(llm, *RUNS)
        instruments(llm).watch("a", shares=True)
        instruments(llm).watch("b", norms=True, states=[1])
        assert instruments(llm).wanted() == Wanted(shares=True, norms=True, layers=frozenset({1}))
        await llm.forward([1], blocks)
        instruments(llm).unwatch("a")
        instruments(llm).unwatch("b")
        await llm.forward([1], blocks)
        assert [reading.step for reading in heard] == instruments(llm).steps == [4]
        part = only(heard[0])
        assert part.shares is not None and part.norms is not None and part.weights is None
        assert instruments(llm).nbytes == part.nbytes > 0


async def test_costly_readings_are_taken_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares at each step; the rest at most once in `every` seconds, and always when stepping by hand.

    Where steps run in fused kernels, shares are costly too.
    """
    now = 100.0
    async with engine("qwen3_5") as llm:
        board = instruments(llm)
        board.clock = lambda: now
        board.watch(shares=True, norms=True, states=[1], every=0.5)
        whole, light = Wanted(shares=True, norms=True, layers=frozenset({1})), Wanted(shares=True)
        assert board.wanted() == whole and board.wanted() == light
        now = 100.6
        assert board.wanted() == whole and board.wanted() == light
        llm.pause()
        assert board.wanted() == whole and board.wanted() == whole
        llm.resume()
        board.watch(norms=True, every=0.5)
        assert board.wanted() == Wanted(norms=True) and board.wanted() is None
        monkeypatch.setattr(Runner, "is_fused", property(lambda _: True))
        board.watch(shares=True, every=0.5)
        assert board.wanted() == Wanted(shares=True) and board.wanted() is None
        board.watch(shares=True)
        assert board.wanted() == board.wanted() == Wanted(shares=True)


async def test_measuring_takes_its_small_share_of_the_time() -> None:
    """Panels wait 50 times as long as measuring took, but no longer than is bearable."""
    now = 100.0
    async with engine("qwen3_5") as llm:
        board = instruments(llm)
        board.clock = lambda: now
        for cost, pause in ((0.001, 0.1), (0.02, 1.0), (9.0, 3.0)):
            board.watch(norms=True, every=0.1)
            assert board.wanted() is not None
            board.take(1, (), (), cost)
            now += pause - 0.01
            assert board.wanted() is None
            now += 0.02
            assert board.wanted() is not None


async def test_what_is_measured_changes_no_logits() -> None:
    async with engine("qwen3_5") as llm:
        plain = await llm.forward(RUNS[0], logits="all")
        instruments(llm).mark()
        measured = await llm.forward(RUNS[0], logits="all")
        assert plain.logits is not None and measured.logits is not None
        torch.testing.assert_close(plain.logits, measured.logits, rtol=0, atol=1e-5)


async def test_marks_outlive_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring keeps the last steps; a mark keeps a step that it has, or measures the next one whole."""
    monkeypatch.setattr("asyncllm_nb.engine.instruments.RING_STEPS", 4)
    async with engine("qwen3_5") as llm:
        board = instruments(llm)
        block = await llm.create_block()
        board.watch(shares=True)
        for token in range(6):
            await llm.forward([token], block)
        assert board.steps == [3, 4, 5, 6] and not board.mark(2)
        assert board.mark(3)
        assert not board.mark()
        await llm.forward([7], block)
        whole = only(board.reading(7))
        assert sorted(whole.states) == board.linear_layers and whole.weights is not None
        for token in range(6):
            await llm.forward([token], block)
        assert board.steps == [3, 7, 10, 11, 12, 13] and board.marked == [3, 7]
        assert repr(board).startswith("<Instruments: 6 steps kept, 2 of them marked, ")
        board.unmark(3)
        assert board.reading(3) is None and board.marked == [7]


async def test_the_ring_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine("qwen3_5") as llm:
        board = instruments(llm)
        board.watch(states=board.linear_layers)
        block = (await llm.forward([1])).block
        one = board.nbytes
        monkeypatch.setattr("asyncllm_nb.engine.instruments.RING_BYTES", 3 * one)
        for token in range(7):
            await llm.forward([token], block)
        assert board.steps == [6, 7, 8] and board.nbytes == 3 * one


async def test_a_failing_instrument_takes_no_step_down(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    async with engine("qwen3_5") as llm:
        monkeypatch.setattr("asyncllm_nb.engine.measuring._norms", broken)
        instruments(llm).watch(norms=True)
        output = await llm.forward([1, 2, 3])
        assert output.block.num_tokens == 3
        assert instruments(llm).fault == "RuntimeError: out of memory"
        assert instruments(llm).wanted() is None


async def test_layers_without_a_state_are_refused() -> None:
    async with engine("qwen3_5") as llm:
        with pytest.raises(ValueError, match="layer 3 has no state: Gated DeltaNet layers are 0, 1, 2, 4"):
            instruments(llm).watch(states=[3])
        block = await llm.create_block()
        with pytest.raises(ValueError, match="layer 9 has no state"):
            await instruments(llm).states([block], 9)
    async with engine("llama") as llm:
        with pytest.raises(ValueError, match="none in this model"):
            instruments(llm).watch(states=[0])
        instruments(llm).watch(norms=True)
        assert (await llm.forward([1])).logits is not None
        assert only(instruments(llm).reading(1)).norms is None
