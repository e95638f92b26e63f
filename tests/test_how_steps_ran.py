"""The recording says how steps ran: as recorded graphs, kernel by kernel, or on a CPU.

A launcher that computes as a CPU does, and says what one on a GPU would, stands in for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers import engine, tokens
from torch import Tensor

from asyncllm_nb.engine.layout import Part, make_batch
from asyncllm_nb.engine.runner import Runner
from asyncllm_nb.engine.sampling import Choice
from asyncllm_nb.engine.trace import RowRecord, Trace

MAX_DEPTH = 2
"""Blocks before the written one that a step may read to count as recorded."""


@dataclass
class FakeRow:
    logits: Tensor
    token: tuple[int, float] | None
    is_recorded: bool


class FakeLauncher:
    """Single tokens behind short views count as recorded, each row for itself."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def run(
        self, parts: Sequence[Part], choices: Sequence[Choice | None], goes_on: bool, looks: bool
    ) -> list[FakeRow]:
        runner = self._runner
        batch = make_batch(list(parts), runner.decoder.config.is_hybrid, runner.device)
        counts = [len(part.token_ids) - part.wanted_from for part in parts]
        logits = runner.decoder.forward(batch, runner.cache).split(counts)
        return [self._row(part, own) for part, own in zip(parts, logits, strict=True)]

    @staticmethod
    def _row(part: Part, logits: Tensor) -> FakeRow:
        token = (int(logits[-1].argmax()), 0.0) if len(logits) else (0, 0.0)
        return FakeRow(logits, token, len(part.token_ids) == 1 and len(part.view) <= MAX_DEPTH)

    def release(self) -> None:
        """Holds nothing."""


def fits(row: RowRecord) -> bool:
    return row.num_tokens == 1 and len(row.view) <= MAX_DEPTH + 1


async def run_two_streams(llm: Any) -> None:
    """One behind a short view and one, of fewer tokens, behind a long one."""
    prompt, a, b, c, d = await llm.create_blocks("prompt", "a", "b", "c", "d")
    await llm.forward(tokens(7), [prompt])
    for block in (a, b):
        await llm.forward(tokens(2), [block])
    await asyncio.gather(
        llm.generate(tokens(1), [prompt, c], max_tokens=9),
        llm.generate(tokens(2), [prompt, a, b, d], max_tokens=4),
    )
    await llm.drain()


async def test_trace_says_how_steps_ran(tmp_path: Path) -> None:
    """A step counts as recorded if all its rows do; the file keeps it."""
    async with engine() as llm:
        runner = llm._engine.runner
        runner._launcher = FakeLauncher(runner)  # type: ignore[assignment]
        await run_two_streams(llm)
        steps = list(llm.trace.steps)
        loaded = Trace.load(llm.trace.save(tmp_path / "trace.json"))
    expected = ["graph" if all(map(fits, step.rows)) else "eager" for step in steps]
    assert [step.ran for step in steps] == expected
    assert [step.ran for step in loaded] == expected
    mixed = [step.ran for step in steps if len({fits(row) for row in step.rows}) == 2]
    assert mixed and set(mixed) == {"eager"} and expected.count("graph") >= 3


async def test_steps_on_a_cpu_say_nothing() -> None:
    """No key in the file either: a recording without it reads the same."""
    async with engine() as llm:
        await run_two_streams(llm)
        assert {step.ran for step in llm.trace.steps} == {""}
        assert not any("ran" in record for record in llm.trace.plain(0))
