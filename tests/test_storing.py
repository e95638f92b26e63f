"""Blocks copied out of one engine and into another: the next token is the same, and all or nothing happens.

Two engines of one model stand side by side. What the first holds is read again in the second.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import random
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import (
    BOTH_KINDS,
    FAMILIES,
    answer_of,
    assert_close,
    contents,
    engine,
    filled_block,
    free_memory,
    only,
    settle,
    tokens,
    turns,
    until,
)

from asyncllm_nb import AsyncLLM, CacheBlock, CacheFullError, EngineClosedError
from asyncllm_nb.engine.blocks import BlockState, KeptLogits, Segment
from asyncllm_nb.engine.reducer import reduce
from asyncllm_nb.engine.stored import Stored, check
from asyncllm_nb.engine.storing import restore, store

OUTSIDE = contextvars.Context()
"""A task that runs in it is inside of no transaction."""


@asynccontextmanager
async def two(family: str, **options: Any) -> AsyncIterator[tuple[AsyncLLM, AsyncLLM]]:
    """Engines of one model."""
    async with engine(family, **options) as one, engine(family, **options) as other:
        yield one, other


async def moved(one: AsyncLLM, other: AsyncLLM, blocks: Sequence[CacheBlock]) -> list[CacheBlock]:
    """Blocks of `other` that hold what `blocks` of `one` hold."""
    return await restore(other._engine, await store(one._engine, blocks))


async def look(llm: AsyncLLM, view: Sequence[CacheBlock]) -> torch.Tensor:
    """Logits [vocab] after one more token under `view`; nothing stays of it."""
    block = await llm.create_block("look")
    logits = (await llm.forward([9], [*view, block])).logits
    await llm.free_block(block)
    assert logits is not None
    return logits


async def family_of_blocks(llm: AsyncLLM) -> list[CacheBlock]:
    """Plain, forked, merged, appended and compacted blocks that share pages, and an empty one."""
    prompt, own, empty = await llm.create_blocks("prompt", "own", "empty")
    await llm.forward(tokens(37), [prompt])
    await llm.forward(tokens(21, 1), [prompt, own])
    merged = await llm.merge_blocks(prompt, own, name="merged")
    twin = await llm.fork(merged, name="twin")
    await llm.forward(tokens(1, 2), [own, twin])
    grown = await llm.fork(own, name="grown")
    await llm.append_block(grown, grown)
    many = await llm.fork(own, name="many")
    for _ in range(9):  # more segments than a block keeps
        await llm.append_block(many, grown)
    await llm.clear(await filled_block(llm, tokens(3), "cleared"))
    return [prompt, own, empty, merged, twin, grown, many]


# ---- the same next token ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
async def test_next_tokens_are_the_same_bit_for_bit(family: str) -> None:
    async with two(family) as (one, other):
        blocks = await family_of_blocks(one)
        copies = await moved(one, other, blocks)
        for block, copy in zip(blocks, copies, strict=True):
            assert (copy.name, copy.version) == (block.name, block.version)
            assert (copy.token_ids, copy.span, copy.text) == (block.token_ids, block.span, block.text)
        for order in ([0], [3], [4], [5, 0], [6], [1, 2, 0], [0, 1, 3, 4, 5]):
            expected = await look(one, [blocks[i] for i in order])
            assert torch.equal(await look(other, [copies[i] for i in order]), expected)


@pytest.mark.parametrize("family", FAMILIES)
async def test_streams_go_on_as_they_would_have(family: str) -> None:
    async with two(family) as (one, other):
        blocks = prompt, own, *_ = await family_of_blocks(one)
        copies = await moved(one, other, blocks)
        for order in ([0], [0, 1], [0, 2, 1]):  # from logits that are kept
            expected = one.generate(None, [blocks[i] for i in order], max_tokens=7)
            await expected
            found = other.generate(None, [copies[i] for i in order], max_tokens=7)
            await found
            assert found.token_ids == expected.token_ids
        with pytest.raises(ValueError, match="give at least one token"):
            other.generate(None, [copies[3]])  # none are kept after a merge


async def test_kept_logits_under_a_block_that_is_not_stored_are_left_out() -> None:
    async with two("llama") as (one, other):
        prompt, own, unused = await one.create_blocks("prompt", "own", "unused")
        await one.forward(tokens(5), [prompt])
        await one.forward(tokens(6), [prompt, unused, own])
        (alone,) = await moved(one, other, [own])
        assert alone._record.state.kept is None
        before, last = await moved(one, other, [prompt, own])
        first, second = await moved(one, other, [prompt, own])  # an empty one counts for nothing
        expected = one.generate(None, [prompt, own], max_tokens=3)
        await expected
        found = other.generate(None, [first, second], max_tokens=3)
        await found
        assert found.token_ids == expected.token_ids
        await other.clear(before)  # it was not empty when `last` was encoded
        with pytest.raises(ValueError, match="give at least one token"):
            other.generate(None, [before, last])


@pytest.mark.parametrize("family", BOTH_KINDS)
async def test_pages_and_slots_that_were_shared_are_shared_again(family: str) -> None:
    async with two(family) as (one, other):
        before = free_memory(one)
        blocks = await family_of_blocks(one)
        gc.collect()
        await settle(one)
        copies = await moved(one, other, blocks)
        assert free_memory(other) == free_memory(one) != before
        twin, merged = copies[4], copies[3]
        shown = await look(other, [merged])
        await other.forward(tokens(40), [twin])  # copies the page that it shares
        assert torch.equal(await look(other, [merged]), shown)
        await other.clear(copies[0])
        assert torch.equal(await look(other, [merged]), shown)
        del twin, merged
        copies.clear()
        gc.collect()
        await settle(other)
        assert free_memory(other) == before


async def test_names_that_are_taken_get_a_number_and_the_recording_knows_the_texts() -> None:
    async with two("qwen3_5") as (one, other):
        blocks = await family_of_blocks(one)
        kept = await other.create_block("own")
        copies = await moved(one, other, blocks)
        assert copies[1].name == "own·2" and kept.num_tokens == 0
        state = reduce(other.trace.plain(0))["blocks"]
        for copy in copies:
            drawn = state[str(copy.id)]
            assert "".join(drawn["texts"]) == copy.text and drawn["n"] == copy.num_tokens
            assert drawn["version"] == copy.version
            assert drawn["pages"] == list(copy._record.state.pages)


async def test_places_that_hold_no_token_of_the_blocks_are_not_copied() -> None:
    async with engine("qwen3_5") as llm:
        block = await filled_block(llm, tokens(35), "block")
        cache = llm._engine.runner.cache
        stored = await store(llm._engine, [block])
        for name, pool in (("keys", cache.keys), ("values", cache.values)):
            pages = list(block._record.state.pages)
            copy = stored.tensors[name]
            assert torch.equal(copy[:, :, :2], pool[:, :, pages[:2]])
            assert torch.equal(copy[:, :, 2, :3], pool[:, :, pages[2], :3])
            assert not copy[:, :, 2, 3:].any()  # in the pool it is poison, or what was there before


# ---- one moment -------------------------------------------------------------------------------------


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("family", BOTH_KINDS)
async def test_yielded_tokens_are_in_it_and_nobody_goes_on_for_that(family: str, paused: bool) -> None:
    async with two(family) as (one, other):
        prompt, left, right = await one.create_blocks("prompt", "left", "right")
        await one.forward(tokens(19), [prompt])
        streams = [
            one.generate(tokens(3), [prompt, right, left], max_tokens=30),
            one.generate(tokens(4), [prompt, left, right], max_tokens=30),
        ]
        for stream in streams:
            for _ in range(5):
                await anext(stream)
        if paused:
            one.pause()
        assert any(block._record.pending for block in (left, right))
        told = left.token_ids, right.token_ids
        copies = await moved(one, other, [prompt, left, right])
        assert (copies[1].token_ids, copies[2].token_ids) == told == (left.token_ids, right.token_ids)
        assert one.stats()["paused"] is paused
        assert not any(block._record.pending for block in (left, right))
        one.resume()
        for order in ([0, 1, 2], [0, 2, 1]):
            expected = await look(one, [[prompt, left, right][i] for i in order])
            assert torch.equal(await look(other, [copies[i] for i in order]), expected)
        for stream in streams:
            await anext(stream)
            await stream.cancel()


async def test_queued_and_running_requests_neither_delay_it_nor_are_in_it() -> None:
    async with two("qwen3_5", max_batch_tokens=16) as (one, other):
        block = await filled_block(one, tokens(5), "block")
        running = asyncio.create_task(one.forward(tokens(400), [block]))
        await until(lambda: any(e.num_done for e in one._engine.scheduler.encodings))
        one.pause()
        queued = asyncio.create_task(one.forward(tokens(3), [block]))
        await turns()
        (copy,) = await moved(one, other, [block])
        assert not running.done() and copy.token_ids == tokens(5)
        one.resume()
        await asyncio.gather(running, queued)
        twin = await filled_block(other, tokens(5), "twin")
        assert torch.equal(await look(other, [copy]), await look(other, [twin]))


@pytest.mark.parametrize("seed", range(12))
async def test_at_any_moment_moves_are_whole_and_memory_fits_the_tokens(seed: int) -> None:
    """A lane is written and moved to a history in transactions, while another stream reads both."""
    family, draw = FAMILIES[seed % 4], random.Random(seed)
    async with two(family) as (one, other):
        lane, history, watcher = await one.create_blocks("lane", "history", "watcher")
        await one.forward([7], [history])
        ends = False

        async def write() -> None:
            while not ends:
                view, count = [history, lane], draw.randrange(1, 4)
                await one.generate([11], view, max_tokens=count, forbid=only(11))
                async with one.transaction(lane, history):
                    await one.append_block(history, lane)
                    await one.clear(lane)

        async def watch() -> None:
            while not ends:
                await one.generate([5], [history, lane, watcher], max_tokens=9)

        tasks = [asyncio.create_task(write()), asyncio.create_task(watch())]
        before = 0
        for _ in range(4):
            await turns(draw.randrange(500))
            copies = await moved(one, other, [history, lane])
            ids = copies[0].token_ids + copies[1].token_ids
            assert ids == [7] + [11] * (len(ids) - 1)
            assert len(ids) >= before, "a move was caught half done, or a token was lost"
            before = len(ids)
            flat = await filled_block(other, ids, "flat")
            assert_close(await look(other, copies), await look(other, [flat]))
        ends = True
        await asyncio.gather(*tasks)
        assert before > 3


@pytest.mark.parametrize("family", BOTH_KINDS)
async def test_blocks_of_a_transaction_are_as_whoever_asks_sees_them(family: str) -> None:
    async with two(family) as (one, other):
        block = await filled_block(one, tokens(5), "block")
        start = await look(one, [block])
        async with one.transaction(block):
            stream = one.generate(tokens(2), block, max_tokens=9)
            await anext(stream)  # yielded, not encoded: nobody outside may see it
            one.pause()
            outside = asyncio.create_task(store(one._engine, [block]), context=OUTSIDE)
            (copy,) = await restore(other._engine, await outside)
            assert copy.token_ids == tokens(5)
            assert torch.equal(await look(other, [copy]), start)
            assert block._record.pending
            inside = await store(one._engine, [block])
            assert list(inside.blocks[0].tokens) == block.token_ids
            (copy,) = await restore(other._engine, inside)
            one.resume()
        assert torch.equal(await look(other, [copy]), await look(one, [block]))


async def test_a_token_whose_step_failed_is_tried_again_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two("llama") as (one, other):
        left, right = await one.create_blocks("left", "right")
        streams = [one.generate([7], block, forbid=only(i)) for i, block in ((3, left), (4, right))]
        await asyncio.gather(*(anext(stream) for stream in streams))
        one.pause()
        decoder = one._engine.runner.decoder
        forward = decoder.forward

        def failing(batch: Any, *args: Any, **options: Any) -> Any:
            if 3 in batch.token_ids.tolist():
                raise ArithmeticError("this one cannot be encoded")
            return forward(batch, *args, **options)

        monkeypatch.setattr(decoder, "forward", failing)
        with pytest.raises(ArithmeticError, match="cannot be encoded"):
            await store(one._engine, [right, left])
        assert left._record.pending and not right._record.pending
        monkeypatch.undo()
        copies = await moved(one, other, [left, right])
        assert [copy.token_ids for copy in copies] == [[7, 3], [7, 4]]
        one.resume()
        for copy, block in zip(copies, (left, right), strict=True):
            assert torch.equal(await look(other, [copy]), await look(one, [block]))


# ---- all or nothing ---------------------------------------------------------------------------------


async def test_wrong_blocks_are_refused_at_once() -> None:
    async with two("llama") as (one, other):
        block = await filled_block(one, tokens(3), "block")
        freed = await one.create_block("freed")
        await one.free_block(freed)
        foreign = await other.create_block("foreign")
        for blocks, message in (
            ([block, block], "each block once"),
            ([freed], "freed"),
            ([foreign], "another engine"),
        ):
            with pytest.raises(ValueError, match=message):
                await store(one._engine, blocks)
        with pytest.raises(TypeError, match="a block is expected"):
            await store(one._engine, ["block"])  # type: ignore[list-item]
        task = asyncio.create_task(store(one._engine, [block]))
        await turns(1)
        await one.close()
        with pytest.raises(EngineClosedError):
            await task


@pytest.mark.parametrize("family", BOTH_KINDS)
async def test_pools_that_are_too_small_change_nothing(family: str) -> None:
    async with engine(family) as one, engine(family, cache_tokens=80, max_blocks=3) as small:
        stored = await store(one._engine, await family_of_blocks(one))
        own = [await filled_block(small, tokens(20), "own"), await small.create_block("prompt")]
        await check_unchanged(small, stored, CacheFullError, "the cache is full")
        assert own[0].token_ids == tokens(20)


async def test_what_could_fit_waits_for_memory() -> None:
    async with engine("qwen3_5") as one, engine("qwen3_5", cache_tokens=160, max_blocks=3) as small:
        stored = await store(one._engine, [await filled_block(one, tokens(100), "block")])
        own = await filled_block(small, tokens(70), "own")
        small.pause()  # nobody is told that the memory is full
        loading = asyncio.create_task(restore(small._engine, stored))
        await turns()
        assert not loading.done() and list(small.blocks) == ["own"]
        await small.free_block(own)
        (copy,) = await loading
        small.resume()
        assert copy.token_ids == tokens(100)


async def test_a_copy_that_fails_halfway_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two("qwen3_5") as (one, other):
        stored = await store(one._engine, await family_of_blocks(one))
        places = other._engine.runner.places

        def fails(slots: Sequence[int]) -> torch.Tensor:
            return places(slots) + 10_000

        monkeypatch.setattr(other._engine.runner, "places", fails)
        await check_unchanged(other, stored, (RuntimeError, IndexError), "index|range")


async def test_whoever_gives_up_waiting_leaves_nothing() -> None:
    async with two("qwen3_5") as (one, other):
        stored = await store(one._engine, await family_of_blocks(one))
        before = free_memory(other)
        for count in range(9):
            task = asyncio.create_task(restore(other._engine, stored))
            await turns(count)
            task.cancel()
            await asyncio.wait([task])
            del task
            gc.collect()
            await settle(other)
            assert free_memory(other) == before and not other.blocks


async def check_unchanged(
    llm: AsyncLLM, stored: Stored, error: type[Exception] | tuple[type[Exception], ...], message: str
) -> None:
    """Restoring raises, and leaves everything as it was."""
    before = contents(llm), free_memory(llm)
    answer = await answer_of(restore(llm._engine, stored))
    assert isinstance(answer, error) and re.search(message, str(answer)), repr(answer)
    assert (contents(llm), free_memory(llm)) == before
    llm.check_integrity()


def with_state(number: int, **changes: Any) -> Callable[[Stored], Stored]:
    """One block's state is changed."""

    def change(stored: Stored) -> Stored:
        blocks = list(stored.blocks)
        blocks[number] = replace(blocks[number], state=replace(blocks[number].state, **changes))
        return replace(stored, blocks=tuple(blocks))

    return change


def with_block(number: int, **changes: Any) -> Callable[[Stored], Stored]:
    def change(stored: Stored) -> Stored:
        blocks = list(stored.blocks)
        blocks[number] = replace(blocks[number], **changes)
        return replace(stored, blocks=tuple(blocks))

    return change


def with_tensor(name: str, tensor: torch.Tensor | None) -> Callable[[Stored], Stored]:
    def change(stored: Stored) -> Stored:
        tensors = {**stored.tensors}
        tensors.pop(name, None)
        return replace(stored, tensors=tensors if tensor is None else {**tensors, name: tensor})

    return change



def with_kept(view: tuple[int, ...], logits: torch.Tensor) -> Callable[[Stored], Stored]:
    return with_state(0, kept=KeptLogits(view, frozenset(), logits))

WRONG: dict[str, tuple[str, Callable[[Stored], Stored]]] = {
    "a page that is not there": ("not take just", with_state(0, segments=(Segment((1, 2, 400), 37, 0),))),
    "page 0": ("not take just", with_state(0, segments=(Segment((1, 0, 3), 37, 0),))),
    "too few pages": ("run of pages", with_state(0, segments=(Segment((1, 2), 37, 0),))),
    "too many pages": ("run of pages", with_state(0, segments=(Segment((1, 2, 3, 3), 37, 0),))),
    "another length": ("tokens, where", with_state(0, segments=(Segment((1, 2, 3), 38, 0),))),
    "no length": ("run of pages", with_state(2, segments=(Segment((), 0, 0),))),
    "a late offset": ("outside of its span", with_state(0, segments=(Segment((1, 2, 3), 37, 37),))),
    "no span": ("outside of its span", with_state(0, span=0)),
    "another count": ("tokens, where", with_state(0, num_tokens=36)),
    "a slot that is not there": ("not take just", with_state(0, slot=77)),
    "no slot": ("its slot or its span", with_state(0, slot=0)),
    "a slot of an empty block": ("its slot or its span", with_state(2, slot=1)),
    "no version": ("no version", with_state(0, version=0)),
    "a token that is not there": ("a token id beyond", with_block(0, tokens=(*tokens(36), 263))),
    "a negative token": ("a token id beyond", with_block(0, tokens=(*tokens(36), -1))),
    "no name": ("no name", with_block(0, name="")),
    "an id twice": ("one id", with_block(0, id=2)),
    "short logits": ("kept logits are", with_kept((), torch.zeros(262))),
    "logits of another type": ("kept logits are", with_kept((), torch.zeros(263).double())),
    "logits under no block": ("name a block", with_kept((99,), torch.zeros(263))),
    "no keys": ("^tensors", with_tensor("keys", None)),
    "keys of no shape": ("keys are", with_tensor("keys", torch.zeros(3))),
    "keys of another type": ("keys are", with_tensor("keys", torch.zeros(1, 2, 12, 16, 32).bfloat16())),
    "pairs of another model": ("pairs are", with_tensor("pairs", torch.zeros(4, 5, 6, 40, 15))),
    "a tensor too many": ("^tensors", with_tensor("more", torch.zeros(3))),
    "pages that nobody has": ("not take just", lambda stored: replace(stored, blocks=stored.blocks[:2])),
    "a page of an empty block": ("its slot or its span", with_block(
        2, tokens=(1,), state=BlockState((Segment((1,), 1, 0),), 1, 1, 0, None, 1)
    )),
}


@pytest.mark.parametrize("what", WRONG)
async def test_what_is_not_whole_changes_nothing(what: str) -> None:
    async with two("qwen3_5") as (one, other):
        own = await filled_block(other, tokens(20), "own")
        stored = await store(one._engine, await family_of_blocks(one))
        check(stored, other._engine.runner.cache, other.config)
        message, change = WRONG[what]
        await check_unchanged(other, change(stored), ValueError, message)
        assert own.token_ids == tokens(20)
