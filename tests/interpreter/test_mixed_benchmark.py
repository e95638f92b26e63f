"""The benchmark of mixed steps, kernels in the interpreter: that it runs whole, and what its table says."""

from __future__ import annotations

import pytest
from fused_engine import emulate_cuda, launch
from helpers import engine, scratch, tokens

from asyncllm_nb.testing import make_checkpoint
from benchmarks import agents, gpu_steps, h200, mixed_steps


async def test_mixed_steps_are_measured_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step runs as it is said to, which the benchmark asserts, and no memory is kept."""
    folder = make_checkpoint(
        scratch() / "mixed-benchmark", "qwen3_5", seed=3, tokenizer=True, eos_token_id=None,
        num_hidden_layers=2, full_attention_interval=2,
    )  # fmt: skip
    emulate_cuda(monkeypatch)
    monkeypatch.setattr(gpu_steps, "times", lambda run: run() or {"p50": 1.0, "p95": 2.0})
    monkeypatch.setattr(agents, "tokens", lambda count, seed=0: tokens(count))
    for name in ("PROMPT", "PEER", "OWN"):
        monkeypatch.setattr(agents, name, 5)
    monkeypatch.setattr(mixed_steps, "WARM_UP", 1)
    monkeypatch.setattr(mixed_steps, "REPEATS", 1)
    monkeypatch.setattr(mixed_steps, "ROUNDS", (2, 2))
    async with engine(folder, seconds=200.0) as llm:
        launch(llm)
        found = await mixed_steps.measure_all(llm, (0, 2), (3,))
    assert list(found["steps"]) == ["0", "2"] and list(found["steps"]["2"]) == ["3"]
    assert list(found["beside_streams"]) == ["2"]
    lines = h200.table({"mixed": found}).split("\n")
    for line in ("0 decodes + 3 tokens", "2 decodes + 3 tokens", "2 streams and probes of 3: a probe"):
        assert sum(line in one for one in lines) == 1
    assert {line.count("|") for line in lines[lines.index("") + 1 :]} == {5}
