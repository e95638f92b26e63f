"""Blocks of a GPU on disk: they come back bit for bit, while steps run ahead and as CUDA graphs."""

from __future__ import annotations

import functools
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from asyncllm_nb import AsyncLLM
from asyncllm_nb.testing import FAMILIES, make_checkpoint

pytestmark = pytest.mark.gpu


@functools.cache
def folder(family: str) -> Path:
    return make_checkpoint(mkdtemp(), family, seed=3, tokenizer=True, eos_token_id=None)


def on_gpu(family: str, name: str, device: str = "cuda") -> AsyncLLM:
    options: dict[str, Any] = {"max_blocks": 40} if family == "qwen3_5" else {}
    return AsyncLLM(
        folder(family), name=name, device=device, dtype="float32", cache_tokens=4096, **options
    )


@pytest.mark.parametrize("family", FAMILIES)
async def test_blocks_come_back_while_streams_run_ahead(tmp_path: Path, family: str) -> None:
    async with on_gpu(family, "one") as one, on_gpu(family, "other") as other:
        prompt, left, right = await one.create_blocks("prompt", "left", "right")
        await one.forward(list(range(10, 47)), [prompt])
        streams = [
            one.generate([60], [prompt, right, left], max_tokens=200),
            one.generate([61], [prompt, left, right], max_tokens=200),
        ]
        for _ in range(21):  # slots have changed places by now
            for stream in streams:
                await anext(stream)
        one.pause()
        blocks = [prompt, left, right]
        path = await one.save_blocks(tmp_path / "file", blocks)
        copies = await other.load_blocks(path)
        assert [copy.token_ids for copy in copies] == [block.token_ids for block in blocks]
        one.resume()
        for stream in streams:
            await stream.cancel()
        for order in ([0, 1, 2], [0, 2, 1]):
            first = await one.fork(blocks[order[-1]])
            second = await other.fork(copies[order[-1]])
            expected = one.generate([9], [*(blocks[i] for i in order[:-1]), first], max_tokens=9)
            found = other.generate([9], [*(copies[i] for i in order[:-1]), second], max_tokens=9)
            await expected
            await found
            assert found.token_ids == expected.token_ids
        for llm in (one, other):
            await llm.drain()
            llm.check_integrity()


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_file_goes_from_gpu_to_cpu(tmp_path: Path, family: str) -> None:
    """The identity does not depend on the device, and neither do the bytes."""
    async with on_gpu(family, "gpu") as gpu, on_gpu(family, "cpu", "cpu") as cpu:
        block = (await gpu.forward(list(range(10, 47)))).block
        (copy,) = await cpu.load_blocks(await gpu.save_blocks(tmp_path / "first", [block]))
        await cpu.save_blocks(tmp_path / "second", [copy])
        (back,) = await gpu.load_blocks(tmp_path / "second")
        first, second = await gpu.forward([9], [block]), await gpu.forward([9], [back])
        assert first.logits is not None and second.logits is not None
        assert torch.equal(first.logits, second.logits)
