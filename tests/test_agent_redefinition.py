"""Coroutines redefined at 200 random moments of a run: whole blocks, one copy of each, output in order."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from helpers import BOTH_KINDS, assert_close, engine, filled_block, settle, tokens, turns

from asyncllm_nb import Agent, AsyncLLM, CacheBlock

MOMENTS = 200
STEPS = 12
"""Steps within which a moment lies: a whole round of each coroutine, and what is between two."""

LOG_INPUT, PARAGRAPH, WAY, ADDED = tokens(5, 1), tokens(23, 2), tokens(2, 3), tokens(7, 4)
SEPARATOR = 3


class Run:
    """An agent of three coroutines, each with a block of its own, and what they are known to have written.

    think: a stream. learn: forwards of several chunks. move: a block that grows and another that is
    cleared, in one transaction. `output` has what they print.
    """

    def __init__(self, llm: AsyncLLM, prompt: CacheBlock, blocks: dict[str, CacheBlock]) -> None:
        self.llm = llm
        self.agent = Agent(llm, "solver")
        self.prompt = prompt
        self.blocks = blocks
        self.alive: Counter[str] = Counter()
        self.output: list[tuple[str, int, str]] = []
        self.thoughts: list[list[int]] = []  # the tokens that each stream has yielded
        self.rounds = 0
        self.versions: Counter[str] = Counter()
        self.kinds: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "think": self.think,
            "learn": self.learn,
            "move": self.move,
        }

    def define(self, name: str) -> None:
        """As running a cell again does: a new function of the same name."""
        self.versions[name] += 1
        version, body = self.versions[name], self.kinds[name]

        async def run() -> None:
            self.alive[name] += 1
            assert self.alive[name] == 1, f"two copies of {name}"
            self.output.append((name, version, "begins"))
            try:
                while True:
                    await body()
                    self.output.append((name, version, "round"))
            finally:
                await turns(self.rounds % 7)  # cleaning takes a while, or none
                self.output.append((name, version, "ends"))
                self.alive[name] -= 1

        self.agent.add(run, name=name, source=f"# version {version}")

    async def think(self) -> None:
        block = await self.agent.block("thinker")
        assert block is self.blocks["thinker"]
        mine = list[int]()
        self.thoughts.append(mine)
        stream = self.llm.generate(
            WAY, [self.prompt, block], max_tokens=5, temperature=1.0, forbid=[SEPARATOR, WAY[0]]
        )
        async for token in stream:
            mine.append(token.id)
            assert block.token_ids[-len(mine) - len(WAY) :] == WAY + mine
        self.rounds += 1

    async def learn(self) -> None:
        block = await self.agent.block("log")
        await self.llm.forward([*PARAGRAPH, SEPARATOR], [self.prompt, block], logits="none")
        if block.num_tokens > 400:
            await self.llm.replace(block, [*LOG_INPUT, SEPARATOR], [self.prompt])

    async def move(self) -> None:
        lane, history = await self.agent.block("lane"), await self.agent.block("history")
        await self.llm.forward(ADDED, [self.prompt, history, lane], logits="none")
        async with self.llm.transaction(lane, history):
            await self.llm.append_block(history, lane)
            await turns(2)
            await self.llm.clear(lane)

    def check(self) -> None:
        """At any moment: nothing is lost, nothing half written, nothing twice."""
        assert all(count <= 1 for count in self.alive.values())
        assert [c for c in self.agent.coroutines.values() if c.error is not None] == []
        assert self.agent.blocks == self.blocks
        self.check_thoughts(self.blocks["thinker"].token_ids)
        log = self.blocks["log"].token_ids
        first = LOG_INPUT if log[: len(LOG_INPUT)] == LOG_INPUT else PARAGRAPH
        parts = split(log)
        assert all(part == PARAGRAPH for part in parts[1:]) and parts[:1] in ([], [first])
        lane, history = self.blocks["lane"].token_ids, self.blocks["history"].token_ids
        for ids in (lane, history):
            assert ids == ADDED * (len(ids) // len(ADDED)), "a forward or a transaction came in part"

    def check_thoughts(self, held: list[int]) -> None:
        """Each stream that has yielded left its whole input and what it yielded, in order; one that was
        cancelled before its first token its whole input, or nothing."""
        starts = [index for index, token in enumerate(held) if token == WAY[0]]
        ends = [*starts, len(held)][1:]
        parts = [held[start:end] for start, end in zip(starts, ends, strict=True)]
        assert held[: starts[0] if starts else None] == [] and all(part[: len(WAY)] == WAY for part in parts)
        texts = [part[len(WAY) :] for part in parts]
        assert [text for text in texts if text] == [mine for mine in self.thoughts if mine]
        assert texts.count([]) <= self.thoughts.count([])

    def check_output(self) -> None:
        for name, last in self.versions.items():
            said = [(version, what) for who, version, what in self.output if who == name]
            begun = [version for version, what in said if what == "begins"]
            assert begun == sorted(begun) and begun[-1] == last
            assert [version for version, what in said if what == "ends"] == begun
            for version in begun:
                mine = [index for index, (number, _) in enumerate(said) if number == version]
                assert mine == list(range(mine[0], mine[-1] + 1)), "versions of a coroutine overlap"
                assert said[mine[0]][1] == "begins" and said[mine[-1]][1] == "ends"


def split(ids: list[int]) -> list[list[int]]:
    """The runs of `ids` that end with a separator."""
    parts: list[list[int]] = [[]]
    for token in ids:
        if token == SEPARATOR:
            parts.append([])
        else:
            parts[-1].append(token)
    assert parts[-1] == [], "a forward came in part"
    return parts[:-1]


async def some_moment(llm: AsyncLLM, agent: Agent, rng: random.Random) -> None:
    """A number of steps later, and then some turns of the loop."""
    goal = llm.stats()["steps"] + rng.randrange(STEPS) // 3
    while llm.stats()["steps"] < goal and agent.running:
        await asyncio.sleep(0)
    await turns(rng.randrange(9))


@pytest.mark.parametrize("family", BOTH_KINDS)
async def test_redefinition_at_any_moment_keeps_blocks_and_order(family: str) -> None:
    rng = random.Random(f"{family} 5")
    async with engine(family, seconds=240, max_batch_tokens=11) as llm:
        agent = Agent(llm, "solver")
        prompt = await filled_block(llm, tokens(17), "prompt")
        blocks = {name: await agent.block(name) for name in ("thinker", "log", "lane", "history")}
        run = Run(llm, prompt, blocks)
        for name in run.kinds:
            run.define(name)
        agent.start()
        for moment in range(MOMENTS):
            await some_moment(llm, agent, rng)
            again = rng.choice(list(run.kinds))
            run.define(again)
            if moment % 9 == 0:  # twice, before the old one has ended
                run.define(again)
            if moment % 31 == 7:  # all are stopped and started at once
                agent.stop()
                agent.start()
            run.check()
            if blocks["thinker"].num_tokens > 150:
                await check_memory(llm, run)
        await turns(30)
        assert all(c.state == "running" for c in agent.coroutines.values())
        assert run.rounds > 0 and any(what == "round" for _, _, what in run.output)
        assert {name: agent.source(name) for name in run.kinds} == {
            name: f"# version {version}" for name, version in run.versions.items()
        }
        await agent.stop()
        await settle(llm)
        run.check()
        run.check_output()
        await check_memory(llm, run)


async def check_memory(llm: AsyncLLM, run: Run) -> None:
    """What the layers remember of the stream's block is what a fresh encoding of its tokens gives; then
    it begins anew."""
    await run.agent.stop()
    block = run.blocks["thinker"]
    await llm.drain()
    fresh = await llm.create_block("fresh")
    await llm.forward(block.token_ids, [run.prompt, fresh], logits="none")
    question = tokens(3, 9)
    expected = await llm.forward(question, [run.prompt, fresh, await llm.create_block()])
    found = await llm.forward(question, [run.prompt, block, await llm.create_block()])
    assert expected.logits is not None
    assert_close(found.logits, expected.logits)
    await llm.clear(block)
    run.thoughts.clear()
    run.agent.start()
