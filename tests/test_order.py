"""Writes of one block happen one at a time, in the order asked; a stream lets others in.

What a loop body, another coroutine or a button asks for happens at the stream's next token
boundary. Only a second stream into the same block waits for the first one's end.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from helpers import (
    BOTH_KINDS,
    answer_of,
    assert_close,
    checkpoint,
    engine,
    flatten,
    literal,
    read,
    tokens,
    turns,
    until,
)
from literal import LiteralBlock

from asyncllm_nb import TokenStream

PROMPT = tokens(18)
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 5}


async def read_ids(stream: TokenStream) -> list[int]:
    return [token.id async for token in stream]


async def test_forwards_into_one_block_keep_their_order() -> None:
    """Large and small ones, asked for at once; each commits once."""
    parts = [tokens(n, seed=n) for n in (70, 1, 33, 2, 90)]
    async with engine(max_batch_tokens=32) as llm:
        block = await llm.create_block()
        before = block.version
        await asyncio.gather(*(llm.forward(part, block) for part in parts))
        assert block.token_ids == flatten(parts)
        assert block.version == before + len(parts)


async def test_all_kinds_of_writes_keep_their_order() -> None:
    async with engine(max_batch_tokens=16) as llm:
        block, extra = await llm.create_blocks("block", "extra")
        await llm.forward(tokens(5), extra)
        first, second, third = (tokens(40, seed=n) for n in range(3))
        asked: list[Any] = [
            llm.forward(first, block),
            llm.append_block(block, extra),
            llm.fork(block, name="early"),
            llm.clear(block),
            llm.forward(second, block),
            llm.merge_blocks(extra, block, name="merged"),
            llm.replace(block, third),
            llm.append_block(block, extra),
        ]
        answers = await asyncio.gather(*asked)
        assert answers[2].token_ids == first + tokens(5)
        assert answers[5].token_ids == tokens(5) + second
        assert block.token_ids == third + tokens(5)


async def test_free_waits_for_the_writes_before_it() -> None:
    async with engine() as llm:
        block = await llm.create_block("gone")
        written, freed, late = await asyncio.gather(
            llm.forward(tokens(50), block),
            llm.free_block(block),
            llm.forward(tokens(2), block),
            return_exceptions=True,
        )
        assert not isinstance(written, BaseException)
        assert freed is None
        assert isinstance(late, ValueError)
        assert "gone" in str(late)


@pytest.mark.parametrize("family", BOTH_KINDS)
async def test_body_appends_to_and_forks_its_own_block(family: str) -> None:
    """Each happens between two tokens, and what the block holds then is what it would be alone."""
    model, extra_ids = literal(checkpoint(family)), tokens(2, seed=9)
    async with engine(family) as llm:
        prompt, block, extra = await llm.create_blocks("prompt", "block", "extra")
        await llm.forward(PROMPT, prompt)
        await llm.forward(extra_ids, extra)
        twin_prompt, extra_twin = read(model, PROMPT)[0], read(model, extra_ids)[0]
        twin, forks = LiteralBlock(), []
        view = [prompt, block]
        async for token in llm.generate(tokens(1), view, max_tokens=5, **SAMPLED):
            new = [*(() if twin.tokens else tokens(1)), token.id]
            twin, _ = model.encode(new, [twin_prompt, twin])
            forks.append((await llm.fork(block), twin))
            await llm.append_block(block, extra)
            twin += extra_twin
            assert block.token_ids == list(twin.tokens)
        for fork, expected in [*forks, (block, twin)]:
            assert fork.token_ids == list(expected.tokens)
            output = await llm.forward(tokens(3), [prompt, fork], logits="all")
            assert_close(output.logits, model.encode(tokens(3), [twin_prompt, expected])[1])


async def test_body_writes_to_its_own_block() -> None:
    """A forward and a merge into it; the stream then goes on behind them."""
    async with engine() as llm:
        block = await llm.create_block()
        expected = tokens(1)
        async for token in llm.generate(tokens(1), block, max_tokens=4, **SAMPLED):
            expected.append(token.id)
            await llm.forward(tokens(2, seed=3), block)
            expected += tokens(2, seed=3)
            merged = await llm.merge_blocks(block, block)
            assert merged.token_ids == expected * 2
            assert block.token_ids == expected


@pytest.mark.parametrize("family", BOTH_KINDS)
async def test_stream_goes_on_behind_what_its_body_wrote(family: str) -> None:
    """The token that was drawn ahead is dropped: the next one follows what is in the block now."""
    model = literal(checkpoint(family))
    async with engine(family) as llm:
        prompt, block = await llm.create_blocks("prompt", "block")
        await llm.forward(PROMPT, prompt)
        twin_prompt, twin = read(model, PROMPT, [])
        last = tokens(1)
        async for token in llm.generate(last, [prompt, block], max_tokens=5, **SAMPLED):
            twin, said = model.encode(last, [twin_prompt, twin])
            assert token.logprob == pytest.approx(float(said[-1].log_softmax(-1)[token.id]), abs=1e-4)
            twin, _ = model.encode([token.id], [twin_prompt, twin])
            last = tokens(3, seed=token.id)
            await llm.forward(last, [prompt, block])


async def test_body_clears_and_replaces_its_own_block() -> None:
    async with engine() as llm:
        prompt, block = await llm.create_blocks("prompt", "block")
        await llm.forward(PROMPT, prompt)
        stream = llm.generate(None, [prompt, block], max_tokens=6, **SAMPLED)
        held: list[int] = []
        async for token in stream:
            held.append(token.id)
            assert block.token_ids == held
            if len(held) == 2:
                await llm.clear(block)
                held = []
            elif len(stream.token_ids) == 3:
                held = tokens(4)
                await llm.replace(block, held, [prompt, block])
                held = list(held)
            assert block.token_ids == held
        assert stream.stop_reason == "length"
        assert len(stream.token_ids) == 6


async def test_body_frees_its_own_block() -> None:
    async with engine() as llm:
        block = await llm.create_block("sawn off")
        stream = llm.generate(tokens(3), block, max_tokens=5)
        with pytest.raises(ValueError, match="sawn off"):
            async for _ in stream:
                await llm.free_block(block)
        assert stream.stop_reason == "error"


async def test_what_others_ask_for_happens_between_two_tokens() -> None:
    async with engine() as llm:
        block = await llm.create_block()
        writing = asyncio.create_task(read_ids(llm.generate(tokens(2), block, max_tokens=40)))
        await until(lambda: block.num_tokens > 5)
        await llm.forward(mark := [1, 2, 3, 1, 2, 3], block)
        assert block.token_ids[-6:] == mark
        assert not writing.done()
        made = await writing
        held = block.token_ids
        at = next(i for i in range(len(held)) if held[i : i + 6] == mark)
        assert held[:at] + held[at + 6 :] == tokens(2) + made


async def test_second_stream_waits_for_the_end_of_the_first() -> None:
    async with engine() as llm:
        block = await llm.create_block()
        first = llm.generate(tokens(2, seed=1), block, max_tokens=9, **SAMPLED)
        second = llm.generate(tokens(2, seed=2), block, max_tokens=4, **SAMPLED)
        made = await asyncio.gather(read_ids(first), read_ids(second))
        held = tokens(2, seed=1) + made[0] + tokens(2, seed=2) + made[1]
        assert block.token_ids == held


async def test_second_stream_waits_while_the_first_is_in_its_body() -> None:
    async with engine() as llm:
        block = await llm.create_block()
        go_on = asyncio.Event()

        async def hesitate() -> None:
            async for _ in llm.generate(tokens(2), block, max_tokens=3):
                await go_on.wait()

        first = asyncio.create_task(hesitate())
        await until(lambda: block.num_tokens == 3)
        second = asyncio.create_task(read_ids(llm.generate(tokens(1), block, max_tokens=2)))
        await llm.forward(tokens(4, seed=4))  # the engine has steps to spare
        await turns()
        assert not second.done()
        assert block.num_tokens == 3
        go_on.set()
        await asyncio.gather(first, second)
        assert block.num_tokens == 2 + 3 + 1 + 2


async def test_stream_whose_reader_is_gone_gives_way() -> None:
    """Its iterator is kept, but the task that was reading has ended."""
    async with engine() as llm:
        block = await llm.create_block()
        abandoned = llm.generate(tokens(2), block, **SAMPLED)
        iterator = aiter(abandoned)

        async def read_two() -> None:
            await anext(iterator)
            await anext(iterator)

        await asyncio.create_task(read_two())
        made = await read_ids(llm.generate(tokens(1), block, max_tokens=2))
        assert abandoned.stop_reason == "cancelled"
        assert block.token_ids == tokens(2) + abandoned.token_ids + tokens(1) + made


async def test_stream_goes_on_in_the_next_cell() -> None:
    """Nobody else wants the block: one that another task reads later was not given up."""
    async with engine() as llm:
        block = await llm.create_block()
        iterator = aiter(llm.generate(tokens(2), block, **SAMPLED))

        async def read_one() -> int:
            return (await anext(iterator)).id

        made = [await asyncio.create_task(read_one()) for _ in range(3)]
        assert block.token_ids == tokens(2) + made


async def test_stream_that_reads_a_freed_block_ends_with_an_error() -> None:
    async with engine() as llm:
        notes, block = await llm.create_blocks("notes", "block")
        await llm.forward(PROMPT, notes)
        stream = llm.generate(None, [notes, block], max_tokens=9)
        with pytest.raises(ValueError, match="notes"):
            async for _ in stream:
                if len(stream.token_ids) == 3:
                    await llm.free_block(notes)
        assert stream.stop_reason == "error"
        assert block.token_ids == stream.token_ids
        assert len(stream.token_ids) >= 3


async def test_reading_streams_delay_no_write() -> None:
    """A reader that sits in its body holds nothing: what it reads can be cleared."""
    async with engine() as llm:
        notes, block = await llm.create_blocks("notes", "block")
        await llm.forward(PROMPT, notes)
        stream = llm.generate(tokens(1), [notes, block], max_tokens=4)
        async for _ in stream:
            await llm.clear(notes)
            await llm.forward(tokens(3), notes)
        assert notes.token_ids == tokens(3)
        assert len(stream.token_ids) == 4


async def test_cancelled_writes_leave_the_others_in_order() -> None:
    parts = [tokens(40, seed=n) for n in range(5)]
    async with engine(max_batch_tokens=16) as llm:
        block = await llm.create_block()
        llm.pause()
        tasks = [asyncio.create_task(answer_of(llm.forward(part, block))) for part in parts]
        await turns()
        await llm.step(2)
        for dropped in (0, 3):  # one in the middle of its chunks, one still waiting
            tasks[dropped].cancel()
        llm.resume()
        await asyncio.gather(*tasks)
        assert block.token_ids == flatten(parts[n] for n in (1, 2, 4))
