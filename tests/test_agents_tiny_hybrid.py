"""Agents that finish a task on the bundled small model, each beside the loop that does the same work."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from helpers import engine

import asyncllm_nb
from asyncllm_nb import diagram
from asyncllm_nb.evals.patterns import PATTERNS
from asyncllm_nb.tasks import parse_answer

MODEL = Path(asyncllm_nb.__file__).parent / "tiny_hybrid"

ROWS = {
    "workers": [
        "forward writes prompt",
        "worker 1 reads prompt, history, lane 2 and writes lane 1",
        "worker 2 reads prompt, history, lane 1 and writes lane 2",
        "conclude reads prompt, history and writes answer",
    ],
    "thinker and writer": [
        "forward writes prompt",
        "think reads prompt and writes thinker",
        "probe reads prompt, thinker and writes nothing",
        "write reads prompt, thinker and writes writer",
    ],
    "delegation": [
        "forward writes prompt",
        "caller reads prompt, helper 1, helper 2 and writes caller 3",
        "helper 1 reads prompt and writes helper 1",
        "helper 2 reads prompt, helper 1 and writes helper 2",
    ],
}


@pytest.mark.parametrize("pattern", ["workers", "thinker and writer", "delegation", "tool calls"])
async def test_it_finishes_its_task(pattern: str) -> None:
    about = PATTERNS[pattern]
    task = about.problem(Random(f"patterns/{pattern}/0"))
    async with engine(MODEL, seconds=120, cache_tokens=4096, max_batch_tokens=256) as llm:
        agent = about.agent(llm, task, pattern)
        results = await agent.start()
        assert parse_answer(about.said(results)) == task.answer
        shown = diagram(agent).text.splitlines()
        if pattern in ROWS:
            assert shown == ROWS[pattern]
        else:
            calls = len(task.kinds) - 1
            assert [call.name for call in agent.calls] == ["calc"] * calls
            assert any(row.startswith("caller reads prompt, caller 1, result 1") for row in shown)
        if pattern == "thinker and writer":
            modes = results["write"].modes
            assert modes[-1] >= 0.5 and all(mode < 0.5 for mode in modes[:-1])
