"""Streams: whatever ends one, its block holds exactly what it yielded.

Tokens are sampled at temperature 1 with a fixed seed: greedy tokens of a random model soon repeat.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from helpers import (
    BOTH_KINDS,
    answer_of,
    assert_close,
    checkpoint,
    engine,
    literal,
    read,
    tokens,
    turns,
    until,
    with_end_tokens,
)

from asyncllm_nb import AsyncLLM, CacheBlock, EngineClosedError, Token, TokenStream

PROMPT = tokens(21)
INPUT = tokens(3, seed=1)
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 7}


@dataclass
class Case:
    """A stream that is about to end, and what its consumer has got of it."""

    llm: AsyncLLM
    view: list[CacheBlock]
    family: str = "qwen3_5"
    stream: TokenStream = field(init=False)
    iterator: AsyncIterator[Token] | None = None  # kept, so that only the ending ends it
    got: list[int] = field(default_factory=list)

    def start(self, **options: Any) -> TokenStream:
        self.stream = self.llm.generate(INPUT, self.view, **(SAMPLED | options))
        return self.stream

    async def get(self, count: int) -> None:
        """Take `count` tokens and stay in the loop body."""
        self.iterator = self.iterator or aiter(self.stream)
        for _ in range(count):
            self.got.append((await anext(self.iterator)).id)

    async def get_all(self) -> None:
        async for token in self.stream:
            self.got.append(token.id)


def what_follows(ids: list[int]) -> int:
    """The first token after the second that did not occur before: something to stop at."""
    return next(i for at, i in enumerate(ids) if at > 1 and i not in ids[:at])


async def sample_ids(model: str, count: int = 8) -> list[int]:
    """The tokens that `Case.start` yields when nothing stops it."""
    async with engine(model) as llm:
        view = await llm.create_blocks("prompt", "block")
        await llm.forward(PROMPT, view[:1])
        return [t.id async for t in llm.generate(INPUT, view, max_tokens=count, **SAMPLED)]


async def at_length(case: Case) -> None:
    case.start(max_tokens=5)
    await case.get_all()


async def at_stop_id(case: Case) -> None:
    case.start(max_tokens=8, stop=what_follows(await sample_ids(case.family)))
    await case.get_all()


async def by_break_with_the_stream_kept(case: Case) -> None:
    async for token in case.start():
        case.got.append(token.id)
        if len(case.got) == 4:
            break


async def by_return_from_the_loop(case: Case) -> None:
    async def consume() -> None:
        async for token in case.start():
            case.got.append(token.id)
            if len(case.got) == 3:
                return

    await consume()


async def by_exception_in_the_body(case: Case) -> None:
    with pytest.raises(ZeroDivisionError):
        async for token in case.start():
            case.got.append(token.id)
            if len(case.got) == 3:
                raise ZeroDivisionError


async def by_cancelling_the_task_in_the_body(case: Case) -> None:
    async def consume() -> None:
        async for token in case.start():
            case.got.append(token.id)
            if len(case.got) == 3:
                await asyncio.Event().wait()

    task = asyncio.create_task(consume())
    await until(lambda: len(case.got) == 3)
    task.cancel()
    assert isinstance(await answer_of(task), asyncio.CancelledError)


async def by_cancelling_the_task_inside_anext(case: Case) -> None:
    case.start()
    await case.get(3)
    case.llm.pause()  # the fourth token does not come
    task = asyncio.create_task(case.get(1))
    await turns()
    task.cancel()
    assert isinstance(await answer_of(task), asyncio.CancelledError)
    case.iterator = None
    case.llm.resume()


async def by_timeout_inside_anext(case: Case) -> None:
    case.start()
    await case.get(2)
    case.llm.pause()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await case.get(1)
    case.iterator = None
    case.llm.resume()


async def by_its_own_cancel_in_the_body(case: Case) -> None:
    case.start()
    await case.get(3)
    await case.stream.cancel()


async def by_cancel_from_another_task_while_asked(case: Case) -> None:
    case.start()
    await case.get(3)
    case.llm.pause()
    asking = asyncio.create_task(case.get(1))
    await turns()
    await case.stream.cancel()
    assert isinstance(await answer_of(asking), StopAsyncIteration)
    case.llm.resume()


async def by_leaving_async_with(case: Case) -> None:
    async with case.start():
        await case.get(3)


async def by_dropping_the_iterator(case: Case) -> None:
    case.start()
    await case.get(3)
    case.iterator = None
    gc.collect()


async def by_dropping_the_iterator_in_another_thread(case: Case) -> None:
    case.start()
    await case.get(3)
    held = [case.iterator]
    case.iterator = None
    await asyncio.to_thread(held.clear)


CANCELLED: list[Callable[[Case], Awaitable[None]]] = [
    by_break_with_the_stream_kept,
    by_return_from_the_loop,
    by_exception_in_the_body,
    by_cancelling_the_task_in_the_body,
    by_cancelling_the_task_inside_anext,
    by_timeout_inside_anext,
    by_its_own_cancel_in_the_body,
    by_cancel_from_another_task_while_asked,
    by_leaving_async_with,
    by_dropping_the_iterator,
    by_dropping_the_iterator_in_another_thread,
]
ENDINGS = [(at_length, "length"), (at_stop_id, "stop")] + [(end, "cancelled") for end in CANCELLED]


@pytest.mark.parametrize("family", BOTH_KINDS)
@pytest.mark.parametrize(("end", "reason"), ENDINGS, ids=[end.__name__ for end, _ in ENDINGS])
async def test_block_holds_what_was_yielded(
    family: str, end: Callable[[Case], Awaitable[None]], reason: str
) -> None:
    """At once after the loop, and what it holds is what the literal model computes for it."""
    async with engine(family) as llm:
        case = Case(llm, await llm.create_blocks("prompt", "block"), family)
        prompt, block = case.view
        await llm.forward(PROMPT, [prompt])
        await end(case)
        assert case.got, "the case yields something"
        assert block.token_ids == INPUT + case.got
        assert block.num_tokens == block.span == len(INPUT) + len(case.got)
        assert case.stream.token_ids == case.got
        assert llm.tokenizer.decode(block.token_ids) == block.text
        output = await llm.forward(tokens(4), case.view, logits="all")
        await until(lambda: case.stream.stop_reason is not None)
        assert case.stream.stop_reason == reason
        assert case.stream.state == "ended"
        assert block.token_ids == INPUT + case.got + tokens(4)
        model = literal(checkpoint(family))
        twin = read(model, PROMPT, INPUT + case.got)
        assert_close(output.logits, model.encode(tokens(4), twin)[1])


@pytest.mark.parametrize("family", BOTH_KINDS)
async def test_end_token_is_neither_yielded_nor_stored(family: str) -> None:
    ids = await sample_ids(family)
    end = what_follows(ids)
    async with engine(with_end_tokens(checkpoint(family), [3, end])) as llm:
        case = Case(llm, await llm.create_blocks("prompt", "block"))
        await llm.forward(PROMPT, case.view[:1])
        case.start(max_tokens=8)
        await case.get_all()
        assert case.got == ids[: ids.index(end)]
        assert case.view[1].token_ids == INPUT + case.got
        assert case.stream.stop_reason == "eos"


async def test_close_ends_streams_and_leaves_what_they_yielded() -> None:
    async with engine() as llm:
        case = Case(llm, await llm.create_blocks("prompt", "block"))
        await llm.forward(PROMPT, case.view[:1])
        case.start()
        await case.get(3)
        llm.pause()
        waiter = asyncio.create_task(llm.forward(tokens(2), case.view[:1]))
        asking = asyncio.create_task(case.get(1))
        await turns()
        await llm.close()
        assert isinstance(await answer_of(waiter), EngineClosedError)
        assert isinstance(await answer_of(asking), StopAsyncIteration | EngineClosedError)
        assert case.stream.stop_reason == "cancelled"
        assert case.view[1].token_ids == INPUT + case.got == INPUT + case.stream.token_ids
        assert case.view[1].text == llm.tokenizer.decode(INPUT + case.got)


async def test_token_is_in_the_block_from_the_moment_it_is_yielded() -> None:
    async with engine() as llm:
        block = await llm.create_block()
        got: list[int] = []
        async for token in llm.generate(INPUT, block, max_tokens=6, **SAMPLED):
            got.append(token.id)
            assert block.token_ids == INPUT + got
            assert block.num_tokens == block.span == len(INPUT) + len(got)


async def test_input_that_was_not_encoded_whole_leaves_no_trace() -> None:
    """A stream, and a forward, that end after some of their chunks."""
    async with engine(max_batch_tokens=16) as llm:
        block = (await llm.forward(PROMPT)).block
        before, pages = (block.version, block.token_ids), llm.snapshot()["pools"]
        for request in (
            anext(aiter(stream := llm.generate(tokens(90), block))),
            llm.forward(tokens(90), [block]),
        ):
            llm.pause()
            task = asyncio.ensure_future(request)
            assert await llm.step(2) == 2
            task.cancel()
            assert isinstance(await answer_of(task), asyncio.CancelledError)
            llm.resume()
            await llm.drain()
            assert (block.version, block.token_ids) == before
            assert llm.snapshot()["pools"] == pages
        assert stream.token_ids == []


async def test_stream_runs_at_most_one_step_ahead() -> None:
    """A consumer that stays in its body: the engine does not go on generating for it."""
    async with engine() as llm:
        case = Case(llm, await llm.create_blocks("prompt", "block"))
        case.start()
        await case.get(3)
        await llm.drain()
        await llm.forward(tokens(5), case.view[:1])  # others have steps meanwhile
        rows = [r for s in llm.trace.steps for r in s.rows if r.name == case.stream.name]
        assert len([row for row in rows if row.kind == "decode"]) <= 4


async def test_second_reader_gets_an_error_and_disturbs_nobody() -> None:
    async with engine() as llm:
        stream = llm.generate(INPUT, max_tokens=6)

        async def read() -> list[int]:
            return [token.id async for token in stream]

        first, second = await asyncio.gather(answer_of(read()), answer_of(read()))
        assert isinstance(second, RuntimeError)
        assert "another task" in str(second)
        assert first == stream.token_ids
        assert len(first) == 6


async def test_stream_that_nobody_reads_warns() -> None:
    async with engine() as llm:
        block = await llm.create_block()
        with pytest.warns(Warning, match="read|async for|await"):
            llm.generate(INPUT, block)
            gc.collect()
            await turns()
        assert block.num_tokens == 0
