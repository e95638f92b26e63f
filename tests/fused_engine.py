"""An engine on a CPU whose steps take the way that they take on a GPU: launched, recorded, ahead.

Knows the launcher and what it asks of CUDA. Kernels run in Triton's interpreter. A recording is a
function that is called again, and overwrites its results as a graph does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from launched_cases import CountingLauncher
from torch import Tensor

from asyncllm_nb import AsyncLLM
from asyncllm_nb.engine import build, graphs, mixed_graphs
from asyncllm_nb.engine.graphs import StepTokens


class Event:
    """Done at once, as everything on a CPU."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Graph:
    """Calls a step again, and puts what it gives where its first results lie."""

    def __init__(self, step: Callable[[], StepTokens]) -> None:
        self._step = step
        self.result = step()

    def replay(self) -> None:
        for old, new in zip(_tensors(self.result), _tensors(self._step()), strict=True):
            old.copy_(new)


def _tensors(tokens: StepTokens) -> list[Tensor]:
    assert tokens.looks is not None
    found = [getattr(tokens, field.name) for field in dataclasses.fields(tokens)]
    return [value for value in found if isinstance(value, Tensor)] + tokens.looks.stats + tokens.looks.queries


def _record(step: Callable[[], StepTokens], pool: Any) -> tuple[Graph, StepTokens]:
    graph = Graph(step)
    return graph, graph.result


def emulate_cuda(patch: pytest.MonkeyPatch) -> None:
    """What the launcher asks of CUDA, on a CPU; and spare memory to run ahead in."""
    for name in ("empty", "zeros"):
        patch.setattr(torch, name, _unpinned(getattr(torch, name)))
    patch.setattr(torch.cuda, "Event", Event)
    patch.setattr(torch.cuda, "synchronize", lambda *_: None)
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    patch.setattr(graphs, "_record", _record)
    # Padding costs time here: as little of it as shows that it does nothing.
    patch.setattr(graphs, "ENTRIES_PER_ROW", 6)
    patch.setattr(graphs, "MIN_ENTRIES", 24)
    patch.setattr(mixed_graphs, "ROWS", (4, 8, 21))
    patch.setattr(mixed_graphs, "REQUESTS", (1, 3))
    plan_spare = build.plan_spare
    patch.setattr(build, "plan_spare", lambda budget, _: plan_spare(budget, torch.device("cuda")))


def _unpinned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def allocate_unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        return allocate(*args, **kwargs)

    return allocate_unpinned


def launch(llm: AsyncLLM) -> CountingLauncher:
    """From now on steps of this engine, which is new, take the way of a GPU."""
    memory, runner = llm._engine.memory, llm._engine.runner
    budget = build.Budget(memory.pages.size, memory.slots.size, 1, 1)
    spare = build.plan_spare(budget, runner.device)
    runner._launcher = CountingLauncher(runner.decoder, runner.cache, runner.device, runner._places, spare)
    return runner._launcher
