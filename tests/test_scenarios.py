"""Random coroutines over shared blocks: nothing leaks, nobody hangs, whatever is cancelled when.

A scenario is a few actors, each a seeded list of actions on blocks that all of them share, and a
monkey that cancels one of them, pauses the engine, or interrupts the whole scenario as Ctrl-C does,
at a seeded moment. Time is counted in changes of the engine and turns of the loop.
"""

from __future__ import annotations

import asyncio
import random
import re
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress

import pytest
from helpers import BOTH_KINDS, HANG_SECONDS, Bench, answer_of, engine, no_deadlock, tokens, turns

from asyncllm_nb import AsyncLLM, CacheBlock, CacheFullError
from asyncllm_nb.engine.model import Decoder

SCENARIOS = 120
PAGE = 16
POOLS = {
    "tiny": {"cache_tokens": 12 * PAGE, "max_blocks": 9, "max_batch_tokens": 16},
    "roomy": {"cache_tokens": 200 * PAGE, "max_blocks": 60, "max_batch_tokens": 48},
}

ERRORS_OF_USE = "|".join(
    (
        "was freed",
        "all blocks are freed",
        "the consumer fails",
        "give at least one token",
        "not part of this transaction",
        "belongs to a transaction",
        "still reading stream",
    )
)
"""What an actor may be told; any other ValueError is a fault."""

Action = Callable[[], Awaitable[object]]


class Undo(Exception):
    """Raised inside a transaction to have it undone."""


class Scenario:
    """The actors of one seed."""

    def __init__(self, llm: AsyncLLM, seed: int) -> None:
        self.llm = llm
        self.random = random.Random(seed)
        self.blocks: list[CacheBlock] = []
        self.num_answered = 0
        self.changes = asyncio.Event()
        self.interrupts = seed % 5 == 0

    async def run(self) -> None:
        """All actors and the monkey; an actor may end well, or cancelled, and in no other way."""
        self.blocks = await self.llm.create_blocks(self.random.randint(2, 4))
        unsubscribe = self.llm.observe(self.changes.set)
        actors = [asyncio.create_task(self.act()) for _ in range(self.random.randint(2, 5))]
        monkey = asyncio.create_task(self.meddle(actors))
        try:
            await asyncio.gather(*actors, return_exceptions=True)
        finally:
            monkey.cancel()
            for actor in actors:
                actor.cancel()
            answers = await asyncio.gather(*actors, monkey, return_exceptions=True)
            unsubscribe()
            self.llm.resume()
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, asyncio.CancelledError):
                raise answer

    async def act(self) -> None:
        for _ in range(self.random.randint(1, 5)):
            await self.attempt(self.random.choice(self.actions))

    async def attempt(self, action: Action) -> None:
        """Blocks get freed by others, memory is short and so on: errors of use are answers, too."""
        try:
            await action()
        except CacheFullError:
            pass
        except ValueError as error:
            if not re.search(ERRORS_OF_USE, str(error)):
                raise AssertionError("not an error of use") from error
        self.num_answered += 1

    async def meddle(self, actors: list[asyncio.Task[None]]) -> None:
        while True:
            for _ in range(self.random.randint(1, 12)):
                self.changes.clear()
                await self.changes.wait()
            await turns(self.random.randint(0, 5))
            match self.random.choice(("cancel", "cancel", "pause", "interrupt")):
                case "cancel":
                    self.random.choice(actors).cancel()
                case "pause":
                    await self.llm.step(self.random.randint(1, 3))
                    self.llm.resume()
                case "interrupt" if self.interrupts:
                    signal.raise_signal(signal.SIGINT)

    # ---- actions ------------------------------------------------------------------------------

    @property
    def actions(self) -> list[Action]:
        return [
            self.forward,
            self.speak,
            self.speak,
            self.probe,
            self.fork,
            self.merge,
            self.append,
            self.replace,
            self.clear,
            self.free,
            self.change_together,
        ]

    def block(self) -> CacheBlock:
        if not self.blocks:
            raise ValueError("all blocks are freed")
        return self.random.choice(self.blocks)

    def view(self) -> list[CacheBlock]:
        self.block()
        return self.random.sample(self.blocks, self.random.randint(1, min(3, len(self.blocks))))

    def inputs(self) -> list[int]:
        size = self.random.choice((1, 2, 5, 20, 60))
        return tokens(size, self.random.randrange(10))

    async def forward(self) -> None:
        await self.llm.forward(self.inputs(), self.view())

    async def speak(self) -> None:
        """Read a stream for a while; do something else in its body now and then."""
        view, limit = self.view(), self.random.randint(1, 12)
        inputs = self.inputs() if self.random.random() < 0.8 else None
        async for _ in self.llm.generate(inputs, view, max_tokens=limit, temperature=1.0):
            match self.random.randrange(12):
                case 0:
                    break
                case 1:
                    raise ValueError("the consumer fails")
                case 2 | 3:
                    await self.attempt(self.random.choice(self.actions))
                case 4:
                    await turns(self.random.randint(1, 30))

    async def probe(self) -> None:
        await self.llm.probe("Is it?", self.view(), choices=("a", "bc"))

    async def fork(self) -> None:
        self.keep(await self.llm.fork(self.block()))

    async def merge(self) -> None:
        self.keep(await self.llm.merge_blocks(self.block(), self.block()))

    def keep(self, block: CacheBlock) -> None:
        """Some new blocks stay; the others lose their only reference at once."""
        if len(self.blocks) < 5:
            self.blocks.append(block)

    async def append(self) -> None:
        await self.llm.append_block(self.block(), self.block())

    async def replace(self) -> None:
        view = self.view()
        await self.llm.replace(view[-1], self.inputs(), view)

    async def clear(self) -> None:
        await self.llm.clear(self.block())

    async def free(self) -> None:
        block = self.block()
        await self.llm.free_block(block)
        if block in self.blocks:
            self.blocks.remove(block)

    async def change_together(self) -> None:
        """A transaction over some blocks, with tasks of its own, that is kept or undone."""
        with suppress(Undo):
            async with self.llm.transaction(*self.view()):
                for _ in range(self.random.randint(1, 3)):
                    action = self.random.choice(self.actions)
                    if self.random.random() < 0.3:
                        await asyncio.create_task(self.attempt(action))
                    else:
                        await self.attempt(action)
                if self.random.random() < 0.4:
                    raise Undo


@pytest.mark.parametrize("family", BOTH_KINDS)
async def test_failed_step_leaves_everything_as_it_was(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward pass breaks once, in the middle of a long input and beside a stream's token."""
    async with engine(family, max_batch_tokens=16) as llm:
        block, other = await llm.create_blocks("block", "other")
        await llm.forward(tokens(20), block)
        iterator = aiter(llm.generate(tokens(3), other, max_tokens=9))
        await anext(iterator)
        before = block.token_ids
        llm.pause()
        writing = asyncio.create_task(answer_of(llm.forward(tokens(90), block)))
        assert await llm.step(2) == 2
        with monkeypatch.context() as patch:
            patch.setattr(Decoder, "forward", broken_forward)
            llm.resume()
            assert isinstance(await writing, MemoryError)
        assert block.token_ids == before
        yielded = other.token_ids
        await llm.forward([5], [block, other])
        assert other.token_ids == [*yielded, 5]


def broken_forward(*_: object, **__: object) -> None:
    raise MemoryError("no memory for the step")


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    """The engines that all scenarios share."""
    with Bench() as bench:
        yield bench


async def bounded(scenario: Scenario) -> None:
    async with no_deadlock(scenario.llm, HANG_SECONDS):
        await scenario.run()


async def nothing() -> None:
    """What is checked after a scenario needs no more work."""


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("family", BOTH_KINDS)
def test_scenarios(bench: Bench, family: str, pool: str) -> None:
    """120 seeds for each of four engines."""
    answered = 0
    for seed in range(SCENARIOS):
        llm = bench.engine(family, **POOLS[pool])
        scenario = Scenario(llm, seed)
        try:
            with suppress(KeyboardInterrupt):
                bench.runner.run(bounded(scenario))
            bench.run(llm, nothing())
        except BaseException as error:
            error.add_note(f"seed {seed}, {family}, {pool} pool")
            raise
        answered += scenario.num_answered
    assert answered > 3 * SCENARIOS, "most of what was asked for is answered"
