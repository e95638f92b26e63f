"""Figures of the bundled model on 40 fixed problems, outcome by outcome, as they are kept in `tests/data`.

Other machines add numbers in another order, and then two words that are as good as equal may change places.
So up to three problems may come out differently in each figure; more means that something was broken, or
changed on purpose. Then the files are made anew:

    python -m asyncllm_nb.evals.sharded --problems 40 --ks 0,32,never --routing before --routing after \\
        --out tests/data/sharded-40.json
    python -m asyncllm_nb.evals.sequential --problems 40 --out tests/data/sequential-40.json
    python -m asyncllm_nb.evals.logs --logs 40 --lines 6 --out tests/data/logs-40.json
"""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncllm_nb import AsyncLLM
from asyncllm_nb.evals import logs, sequential, sharded
from asyncllm_nb.evals.cases import arithmetic_cases
from asyncllm_nb.evals.logs import WAYS, Watch, held_out_logs
from asyncllm_nb.evals.results import Result, differing

pytestmark = pytest.mark.timeout(1200)  # under three minutes in all on free cores, which a desk may not have

DATA = Path(__file__).parent / "data"
MOST_DIFFERENT = 3


def engine() -> AsyncLLM:
    return AsyncLLM("tiny-hybrid", device="cpu", max_batch_tokens=sharded.BATCH)


async def test_sharded_outcomes_are_those_that_are_kept() -> None:
    kept = Result.from_json(DATA / "sharded-40.json")
    async with engine() as llm:
        ks, routings = kept.settings["ks"], kept.settings["routings"]
        found = await sharded.run(llm, arithmetic_cases(40), ks, routings)
    assert found.settings == kept.settings, "the same problems, the same way to work"
    for condition, problems in differing(kept, found).items():
        assert len(problems) <= MOST_DIFFERENT, f"{condition}: {problems}\n{found.table()}"


async def test_sequential_outcomes_are_those_that_are_kept() -> None:
    kept = sequential.Comparison.from_json(DATA / "sequential-40.json")
    async with engine() as llm:
        found = await sequential.run(llm, arithmetic_cases(40))
    for way, result in kept.ways.items():
        assert found.ways[way].settings == result.settings
        (problems,) = differing(result, found.ways[way]).values()
        assert len(problems) <= MOST_DIFFERENT, f"{way}: {problems}\n{found.table()}"


async def test_warnings_are_those_that_are_kept() -> None:
    kept = Watch.from_json(DATA / "logs-40.json")
    async with engine() as llm:
        found = await logs.run(llm, held_out_logs(40, 6))
    assert found.settings == kept.settings
    for way in WAYS:
        here, there = ([line.warned for line in w.lines if line.way == way] for w in (kept, found))
        assert len(here) == len(there) == 40 * 6
        different = {index // 6 for index in range(len(here)) if here[index] != there[index]}
        assert len(different) <= MOST_DIFFERENT, f"{way}: logs {sorted(different)}\n{found.table()}"
