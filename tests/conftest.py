"""What every test runs under: one thread, poisoned uninitialised memory, fixed seeds, no network.

Knows pytest, torch and asyncio. Knows nothing about the package that is tested. Modules of this
folder that are no tests (`literal`, `kernel_harness`, ...) are imported by their plain names.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import hypothesis
import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
# With flash-linear-attention installed, transformers' Qwen3.5 takes its Triton path even on a CPU
# and fails there. `None` makes `import fla` an ImportError, so transformers falls back to PyTorch.
sys.modules["fla"] = None  # type: ignore[assignment]

POISON_LIMIT_BYTES = 512 * 2**20
"""Larger tensors stay untouched: filling one would turn lazily taken memory into real memory."""

torch.set_num_threads(1)
# How long an example takes says more about who else uses the cores than about the code.
hypothesis.settings.register_profile("without_deadline", deadline=None, print_blob=True)
hypothesis.settings.load_profile("without_deadline")


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`allocate`, but what it leaves uninitialised is NaN, the largest integer, or True."""

    @functools.wraps(allocate)
    def allocate_poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        if tensor.is_meta or tensor.numel() * tensor.element_size() > POISON_LIMIT_BYTES:
            return tensor
        with torch.no_grad():
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.fill_(float("nan"))
            elif tensor.dtype == torch.bool:
                tensor.fill_(True)
            elif not tensor.is_quantized:
                tensor.fill_(torch.iinfo(tensor.dtype).max)
        return tensor

    return allocate_poisoned


@pytest.fixture(scope="session", autouse=True)
def poison_uninitialised_memory() -> Iterator[None]:
    """Whoever reads memory before writing it computes NaN instead of a lucky zero."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", _poisoned(torch.empty))
        patch.setattr(torch, "empty_like", _poisoned(torch.empty_like))
        patch.setattr(torch.Tensor, "new_empty", _poisoned(torch.Tensor.new_empty))
        yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The same random numbers whichever tests ran before; skips GPU tests without a GPU."""
    torch.manual_seed(0)
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")


def _run_in_new_loop(function: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        async def call() -> None:
            await function(*args, **kwargs)

        asyncio.run(call(), debug=False)

    return run


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs `async def test_*` in a new event loop; under hypothesis, one loop for each example."""
    function = pyfuncitem.obj
    given = getattr(function, "hypothesis", None)
    if given is not None and inspect.iscoroutinefunction(given.inner_test):
        given.inner_test = _run_in_new_loop(given.inner_test)
    if not inspect.iscoroutinefunction(function):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    _run_in_new_loop(function)(**{name: pyfuncitem.funcargs[name] for name in names})
    return True
