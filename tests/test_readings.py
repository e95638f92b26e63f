"""Readings as records: what a byte keeps of them, and what goes into the recording of a run."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import engine, tokens

from asyncllm_nb import AsyncLLM
from asyncllm_nb.engine.measuring import PartReading
from asyncllm_nb.engine.readings import (
    StepReading,
    norms_fields,
    shares_fields,
    state_bytes,
    weights_fields,
)
from asyncllm_nb.engine.trace import RowRecord, Trace
from asyncllm_nb.widgets.bundle import bundle

GENERATOR = np.random.default_rng(5)


def row(request: int = 7) -> RowRecord:
    return RowRecord("think", "decode", "thinker", (("prompt", 1), ("thinker", 3)), 1, (5,), request)


def shares(layers: int = 3, blocks: int = 2, heads: int = 5) -> np.ndarray:
    table = GENERATOR.random((layers, blocks, heads), dtype=np.float32)
    table /= table.sum(1, keepdims=True)
    return table


def test_shares_keep_every_head_within_a_byte() -> None:
    table = shares()
    fields = shares_fields(StepReading(4, (row(),), (PartReading((2, 1), shares=table),)))
    assert fields is not None and fields["n"] == 4 and fields["bin"] == 30
    (found,) = fields["rows"]
    assert (found["r"], found["layers"], found["heads"]) == (7, 3, 5)
    q = np.frombuffer(found["q"], np.uint8).reshape(3, 2, 5)
    np.testing.assert_allclose(q / 255, table, atol=0.5 / 255 + 1e-6)
    assert sum(found["mean"]) == pytest.approx(1, abs=1e-3)
    np.testing.assert_allclose(found["mean"], table.mean((0, 2)), atol=1e-4)


def test_many_heads_are_averaged_first() -> None:
    """So that a step of many streams takes little of a recording; the means stay exact."""
    parts = tuple(PartReading((2, 1), norms=shares(9, 2, 31)) for _ in range(3))
    fields = norms_fields(StepReading(4, (row(1), row(2), row(3)), parts), detail=9 * 2 * 31 * 3 - 1)
    assert fields is not None and fields["bin"] == 3 * 9 * 2
    assert [found["heads"] for found in fields["rows"]] == [1, 1, 1]
    assert parts[2].norms is not None
    np.testing.assert_allclose(fields["rows"][2]["mean"], parts[2].norms.mean((0, 2)), atol=1e-3)


def test_weights_and_states_keep_their_scale() -> None:
    weights = (GENERATOR.random((2, 3, 9)) * 0.01).astype(np.float16)
    fields = weights_fields(StepReading(4, (row(),), (PartReading((5, 4), weights=weights),)))
    assert fields is not None
    (found,) = fields["rows"]
    assert found["lengths"] == [5, 4]
    peak = np.array(found["peak"]).reshape(2, 3, 1)
    q = np.frombuffer(found["q"], np.uint8).reshape(2, 3, 9)
    np.testing.assert_allclose(q / 255 * peak, weights, atol=0.01 / 255)
    state = GENERATOR.standard_normal((2, 4, 5, 3)).astype(np.float32)
    state[:, 1] = 0
    plain = state_bytes(state)
    again = np.frombuffer(plain["q"], np.int8).reshape(plain["shape"]) / 127
    again = again * np.array(plain["peak"])[None, :, None, None]
    np.testing.assert_allclose(again, state, atol=np.abs(state).max() / 127)


async def readings_of(llm: AsyncLLM) -> list[dict[str, Any]]:
    """The readings that a run of a few steps recorded: the third one marked."""
    instruments = llm.instruments
    block = (await llm.forward(tokens(9))).block
    instruments.watch(shares=True, norms=True)
    await llm.forward([1], block)
    instruments.mark()
    await llm.forward([2], [block, await llm.create_block("other")])
    instruments.unwatch()
    await llm.forward([3], block)
    kinds = ("shares", "norms", "weights", "states")
    return [record for record in llm.trace.plain(0) if record["t"] in kinds]


async def test_a_run_is_recorded_with_its_readings(tmp_path: Path) -> None:
    async with engine("qwen3_5") as llm:
        found = await readings_of(llm)
        seen = [(record["n"], record["t"]) for record in found]
        assert seen.count((2, "shares")) == seen.count((2, "norms")) == 1
        layers = llm.instruments.linear_layers
        assert sorted(r["layer"] for r in found if r["t"] == "states") == layers
        assert {n for n, kind in seen if kind in ("weights", "states")} == {3}
        assert not any(n in (1, 4) for n, _ in seen)
        steps = {r["n"]: r for r in llm.trace.plain(0) if r["t"] == "step"}
        for record in found:
            assert [one["r"] for one in record["rows"]] == [one["r"] for one in steps[record["n"]]["rows"]]
        again = Trace.load(llm.trace.save(tmp_path / "run.json"))
        assert [r for r in again.plain(0) if r["t"] == "states"] == [r for r in found if r["t"] == "states"]


async def test_a_mark_leaves_room_in_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit is kept in memory only."""
    async with engine("qwen3_5") as llm:
        one = 2 * 6 * 24 * 16  # bytes of a layer's states of a view of two blocks
        monkeypatch.setattr("asyncllm_nb.engine.instruments.MARK_BYTES", 2 * one)
        found = await readings_of(llm)
        assert [record["layer"] for record in found if record["t"] == "states"] == [0, 1]
        reading = llm.instruments.reading(3)
        assert reading is not None and len(reading.layers) == 4


NODE = shutil.which("node")

UNPACK = """
import { readFileSync } from "node:fs";
const { rows } = JSON.parse(readFileSync(0, "utf8"));
const bytes = (row) => ({ ...row, q: Uint8Array.from(Buffer.from(row.q, "base64")) });
const [shares, weights, state] = rows.map(bytes);
const table = unpackTable(shares);
console.log(JSON.stringify({
  cell: table.at(2, 1, 4), layer: table.at(1, 0, null), all: table.at(null, 1, null),
  weights: [...unpackWeights(weights, 1, 2)], average: [...unpackWeights(weights, null, null)],
  part: [...unpackState(state, 1, 3)], sum: [...unpackState(state, null, 3)],
}));
"""


@pytest.mark.skipif(NODE is None, reason="needs node to run the browser's code")
def test_the_browser_unpacks_what_was_packed() -> None:
    """readings.js gives back shares, weights and states within what a byte keeps of them."""
    assert NODE is not None
    table, weights = shares(), (GENERATOR.random((2, 3, 9)) * 0.01).astype(np.float16)
    state = GENERATOR.standard_normal((2, 4, 5, 3)).astype(np.float32)
    reading = StepReading(4, (row(),), (PartReading((5, 4), shares=table, weights=weights),))
    fields = [shares_fields(reading), weights_fields(reading)]
    rows = [found["rows"][0] for found in fields if found is not None] + [state_bytes(state)]
    plain = [{**one, "q": base64.b64encode(one["q"]).decode()} for one in rows]
    done = subprocess.run(
        [NODE, "--input-type=module", "-e", bundle("readings") + UNPACK],
        input=json.dumps({"rows": plain}), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["cell"] == pytest.approx(table[2, 1, 4], abs=0.003)
    assert found["layer"] == pytest.approx(table[1, 0].mean(), abs=0.003)
    assert found["all"] == pytest.approx(table[:, 1].mean(), abs=1e-4)
    np.testing.assert_allclose(found["weights"], weights[1, 2], atol=0.01 / 255)
    np.testing.assert_allclose(found["average"], weights.mean((0, 1)), atol=0.01 / 255)
    peak = np.abs(state[:, 3]).max()
    np.testing.assert_allclose(np.array(found["part"]) * peak, state[1, 3].flatten(), atol=peak / 127)
    np.testing.assert_allclose(
        np.array(found["sum"]) * peak, state[:, 3].sum(0).flatten(), atol=2 * peak / 127
    )
