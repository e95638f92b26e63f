"""The summary of a run: its numbers, its figure, and the table where no figure can be drawn."""

from __future__ import annotations

import json

import pytest
from helpers import engine, tokens

from asyncllm_nb.engine.trace import RowKind, RowRecord, StepRecord
from asyncllm_nb.summary import BINS, summarise


def step(
    number: int, started: float, seconds: float, *rows: tuple[str, RowKind, int], error: str = ""
) -> StepRecord:
    made = tuple(
        RowRecord(name, kind, "block", (("block", number),), count, (7,) * count)
        for name, kind, count in rows
    )
    return StepRecord(number, started, seconds, made, (), 90 - number, 5, error)


RUN = [
    step(1, 10.0, 0.4, ("ask", "prefill", 63)),
    step(2, 10.5, 0.1, ("think", "decode", 1), ("write", "decode", 1)),
    step(3, 10.6, 0.1, ("think", "decode", 1), error="RuntimeError()"),
    step(4, 10.8, 0.2, ("think", "decode", 1), ("probe", "probe", 5)),
]


def test_numbers_of_a_run() -> None:
    summary = summarise(RUN, pages=100, slots=6)
    assert summary.seconds == pytest.approx(1.0)
    assert [summary.tokens(kind) for kind in ("decode", "prefill", "probe")] == [3, 63, 5]
    assert summary.token_gaps == pytest.approx([0.4])
    facts = dict(summary.facts())
    assert facts["steps"] == "4, 1 of them failed"
    assert facts["tokens generated per second"] == "3.0"
    assert facts["a step takes"] == "200.0 ms, 95 % within 380.0 ms"
    assert facts["pages in use, at most"] == "14 of 100"
    assert facts["slots in use, at most"] == "1 of 6"


def test_figure_counts_every_token_once() -> None:
    figure = summarise(RUN, pages=100, slots=6).figure
    names = [trace.name for trace in figure.data]
    assert names == ["generated", "read in", "probed", "a step", "pages", "slots"]
    width = 1.0 / len(RUN)
    assert [sum(trace.y) * width for trace in figure.data[:3]] == pytest.approx([3, 63, 5])
    assert list(figure.data[3].y) == pytest.approx([400, 100, 200])
    assert list(figure.data[4].y) == pytest.approx([0.11, 0.12, 0.13, 0.14])


def test_figure_of_a_long_run_stays_small() -> None:
    run = [step(n, n / 10, 0.1, ("think", "decode", 1)) for n in range(1, 3001)]
    figure = summarise(run).figure
    assert len(figure.data[0].x) == BINS
    assert len(figure.to_json()) < 300_000


def test_bundle_has_a_table_beside_the_figure() -> None:
    bundle = summarise(RUN, pages=100)._repr_mimebundle_()
    assert list(bundle) == ["application/vnd.plotly.v1+json", "text/html", "text/plain"]
    json.dumps(bundle)  # as the kernel sends it
    assert "63" in bundle["text/html"] and "<script" not in bundle["text/html"]
    assert "14 of 100" in bundle["text/plain"]


def test_nothing_has_run() -> None:
    summary = summarise([])
    assert dict(summary.facts())["steps"] == "0"
    assert "application/vnd.plotly.v1+json" in summary._repr_mimebundle_()
    assert repr(summary) == "<RunSummary of 0 steps in 0.00 s>"


async def test_summary_of_a_real_run() -> None:
    async with engine("llama") as llm:
        block = (await llm.forward(tokens(20))).block
        await llm.generate(None, block, max_tokens=7)
        await llm.drain()
        pages = llm.stats()["pages"]
        summary = summarise(llm.trace.steps, pages=pages)
        assert summary.tokens("prefill") == 20 and summary.tokens("decode") == 7
        assert len(summary.token_gaps) == 6 and all(gap > 0 for gap in summary.token_gaps)
        assert dict(summary.facts())["pages in use, at most"] == f"2 of {pages}"
