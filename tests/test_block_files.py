"""Files of blocks: written whole or not at all, read by the same model only; refused ones change nothing."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    BOTH_KINDS,
    checkpoint,
    contents,
    engine,
    filled_block,
    free_memory,
    scratch,
    tokens,
)
from safetensors import safe_open
from safetensors.torch import save_file

from asyncllm_nb import AsyncLLM, CacheBlock, CacheFullError, block_files


async def some_blocks(llm: AsyncLLM) -> list[CacheBlock]:
    prompt = await filled_block(llm, tokens(37), "prompt")
    own = await llm.create_block("own")
    await llm.forward(tokens(5), [prompt, own])
    return [prompt, own, await llm.fork(own, name="twin"), await llm.create_block("empty")]


async def saved(folder: Path, family: str = "qwen3_5") -> Path:
    """A file of blocks of an engine that is gone."""
    async with engine(family) as llm:
        return await llm.save_blocks(folder / "blocks.safetensors", await some_blocks(llm))


async def check_refused(llm: AsyncLLM, file: Path, message: str) -> None:
    """Loading raises ValueError, and leaves everything as it was."""
    before = contents(llm), free_memory(llm)
    with pytest.raises(ValueError, match=message):
        await llm.load_blocks(file)
    assert (contents(llm), free_memory(llm)) == before
    llm.check_integrity()


@pytest.mark.parametrize("family", BOTH_KINDS)
async def test_a_file_brings_back_the_blocks(tmp_path: Path, family: str) -> None:
    async with engine(family) as one, engine(family) as other:
        blocks = await some_blocks(one)
        path = await one.save_blocks(str(tmp_path / "blocks"), blocks)
        assert path == tmp_path / "blocks" and list(tmp_path.iterdir()) == [path]
        copies = await other.load_blocks(str(path))
        assert [(c.name, c.version, c.token_ids) for c in copies] == [
            (b.name, b.version, b.token_ids) for b in blocks
        ]
        for view in ([0], [0, 1], [0, 3, 2]):
            expected = one.generate([9], [blocks[i] for i in view], max_tokens=3)
            await expected
            found = other.generate([9], [copies[i] for i in view], max_tokens=3)
            await found
            assert found.token_ids == expected.token_ids


async def test_forks_share_what_they_keep_in_the_file_too(tmp_path: Path) -> None:
    async with engine("llama") as llm:
        block = await filled_block(llm, tokens(20), "block")
        path = await llm.save_blocks(tmp_path / "a", [block, *[await llm.fork(block) for _ in range(5)]])
        with safe_open(path, framework="pt") as file:
            assert sorted(k for k in file.keys() if "tokens" not in k) == ["keys", "logits.0", "values"]  # noqa: SIM118 (no mapping)
            assert file.get_tensor("keys").shape[2] == 2  # pages


async def test_no_block_is_a_file_too(tmp_path: Path) -> None:
    async with engine("qwen3_5") as llm:
        assert await llm.load_blocks(await llm.save_blocks(tmp_path / "none", [])) == []


# ---- what is refused --------------------------------------------------------------------------------


async def test_a_file_that_is_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    data = (await saved(tmp_path)).read_bytes()
    async with engine("qwen3_5") as llm:
        own = await filled_block(llm, tokens(3), "own")
        for length in [0, 1, 7, 8, 9, 500, len(data) // 2, len(data) - 4096, len(data) - 1]:
            (tmp_path / "cut").write_bytes(data[:length])
            await check_refused(llm, tmp_path / "cut", "cut short")
        (tmp_path / "cut").write_bytes(data + b"\0")
        await check_refused(llm, tmp_path / "cut", "cut short")
        assert own.token_ids == tokens(3)


async def test_a_file_with_any_changed_byte_is_refused(tmp_path: Path) -> None:
    data = (await saved(tmp_path)).read_bytes()
    places = [*range(0, 4000, 97), *range(4000, len(data), len(data) // 60), len(data) - 1]
    async with engine("qwen3_5") as llm:
        for place in places:
            changed = bytearray(data)
            changed[place] ^= 0x11
            (tmp_path / "changed").write_bytes(changed)
            await check_refused(llm, tmp_path / "changed", str(tmp_path / "changed"))
        assert await llm.load_blocks(tmp_path / "blocks.safetensors")


class Evil:
    """Writes a file when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.write_text, (scratch() / "ran", "x")


async def test_foreign_files_are_refused_and_nothing_of_them_runs(tmp_path: Path) -> None:
    files = {
        "text": b"not a file of tensors",
        "pickle": pickle.dumps(Evil()),
        "empty": b"",
        "json": b'{"format": "asyncllm_nb.blocks"}',
    }
    async with engine("llama") as llm:
        for name, data in files.items():
            (tmp_path / name).write_bytes(data)
            await check_refused(llm, tmp_path / name, "cut short, or no file of saved blocks")
        torch.save(Evil(), tmp_path / "torch")
        await check_refused(llm, tmp_path / "torch", "cut short, or no file of saved blocks")
        await check_refused(llm, checkpoint("llama") / "model.safetensors", "not a file of saved blocks")
        for text in ("", "[]", "{}", "null", '{"format": "asyncllm_nb.blocks"}', "{"):
            save_file({"keys": torch.zeros(3)}, tmp_path / "odd", {"asyncllm_nb": text})
            await check_refused(llm, tmp_path / "odd", "not a file of saved blocks")
        assert not (scratch() / "ran").exists()
        with pytest.raises(FileNotFoundError, match="there is no file"):
            await llm.load_blocks(tmp_path / "nothing")
        with pytest.raises(FileNotFoundError, match="there is no file"):
            await llm.load_blocks(tmp_path)


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The same file with other metadata, its digest right again."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (no mapping)
        head = json.loads(file.metadata()["asyncllm_nb"])
    change(head)
    text = json.dumps(head)
    other = path.with_name("rewritten")
    save_file(tensors, other, {"asyncllm_nb": text, "sha256": block_files._digest(text, tensors)})
    return other


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("version 7 of the format, written by asyncllm_nb 9.9", lambda h: h.update(version=7, package="9.9")),
        ("pages of 32 tokens", lambda h: h["model"].update(page_tokens=32)),
        ("not a file of saved blocks", lambda h: h["model"].update(more=1)),
        ("not a file of saved blocks", lambda h: h.update(format="other")),
        ("not as version 1", lambda h: h["blocks"][0].pop("span")),
        ("not as version 1", lambda h: h["blocks"][0].update(name=3)),
        ("not as version 1", lambda h: h["blocks"][0].update(slot=1.5)),
        ("not as version 1", lambda h: h["blocks"][0].update(segments=[[["1"], 1, 0]])),
        ("not as version 1", lambda h: h["blocks"][0].update(segments=[3])),
        ("not as version 1", lambda h: h["blocks"].append({})),
        ("not as version 1", lambda h: h.update(blocks=None)),
        ("not as version 1", lambda h: h.pop("agent")),
        ("does not fit together: tensors", lambda h: h["blocks"].pop()),
        ("does not fit together", lambda h: h["blocks"][0].update(span=0)),
        ("does not fit together", lambda h: h["blocks"][0]["segments"][0].__setitem__(0, [1, 2, 300])),
    ],
)
async def test_what_the_format_does_not_allow_is_refused(
    tmp_path: Path, message: str, change: Callable[[dict[str, Any]], None]
) -> None:
    path = await saved(tmp_path)
    async with engine("qwen3_5") as llm:
        own = await llm.load_blocks(rewritten(path, lambda _: None))
        await check_refused(llm, rewritten(path, change), message)
        assert own[0].token_ids == tokens(37)


async def test_another_model_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = await saved(tmp_path, "llama")
    async with engine("qwen3") as llm:
        await check_refused(llm, path, r"another model: it was saved with .*llama.* runs .*qwen3")
    async with engine(checkpoint("llama", seed=2)) as llm:  # only the weights differ
        await check_refused(llm, path, "whose config or weights differ")
    async with engine("llama", dtype="bfloat16") as llm:
        await check_refused(llm, path, "make the engine with dtype='float32'")


async def test_an_engine_with_another_boundary_is_refused_and_its_own_comes_back(tmp_path: Path) -> None:
    path = await saved(tmp_path)
    async with engine("qwen3_5", boundary="recomputed") as llm, engine(
        "qwen3_5", boundary="recomputed"
    ) as other:
        await check_refused(llm, path, "make the engine with boundary='written'")
        blocks = await some_blocks(llm)
        copies = await other.load_blocks(await llm.save_blocks(path, blocks))
        for order in ([0, 1], [1, 0]):
            first = (await llm.forward([9], [blocks[i] for i in order])).logits
            second = (await other.forward([9], [copies[i] for i in order])).logits
            assert first is not None and second is not None and torch.equal(first, second)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_half_precision_comes_back_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    async with engine("qwen3_5", dtype=dtype) as one, engine("qwen3_5", dtype=dtype) as other:
        blocks = await some_blocks(one)
        copies = await other.load_blocks(await one.save_blocks(tmp_path / "a", blocks))
        first, second = await one.forward([9], blocks[:2]), await other.forward([9], copies[:2])
        assert first.logits is not None and second.logits is not None
        assert torch.equal(first.logits, second.logits)


async def test_pools_that_are_too_small_are_told_and_unchanged(tmp_path: Path) -> None:
    path = await saved(tmp_path)
    for options in ({"cache_tokens": 48}, {"max_blocks": 1}):
        async with engine("qwen3_5", **options) as llm:
            before = free_memory(llm)
            with pytest.raises(CacheFullError, match="4 pages and 2 slot"):
                await llm.load_blocks(path)
            assert free_memory(llm) == before and not llm.blocks


# ---- writing ----------------------------------------------------------------------------------------


async def test_a_failed_save_leaves_the_earlier_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = await saved(tmp_path)
    earlier = path.read_bytes()
    async with engine("qwen3_5") as llm:
        blocks = await some_blocks(llm)

        def half(tensors: Any, file: Path, metadata: Any) -> None:
            file.write_bytes(earlier[:100])
            raise OSError("no space left")

        monkeypatch.setattr(block_files, "save_file", half)
        with pytest.raises(OSError, match="no space left"):
            await llm.save_blocks(path, blocks)
    assert path.read_bytes() == earlier and list(tmp_path.iterdir()) == [path]


async def test_places_that_cannot_be_written_are_refused_before_anything_is_done(tmp_path: Path) -> None:
    async with engine("llama") as llm:
        block = await filled_block(llm, tokens(3), "block")
        stream = llm.generate([5], block, max_tokens=5)
        await anext(stream)
        llm.pause()
        pending = block._record.pending
        with pytest.raises(FileNotFoundError, match="make it first"):
            await llm.save_blocks(tmp_path / "no" / "file", [block])
        with pytest.raises(IsADirectoryError, match="name a file"):
            await llm.save_blocks(tmp_path, [block])
        assert block._record.pending is pending
        llm.resume()
        await stream.cancel()


async def test_streams_go_on_while_a_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine("llama") as llm:
        block = await llm.create_block("block")
        loop, gate = asyncio.get_running_loop(), asyncio.Event()
        writing = block_files.write

        def waits(*args: Any) -> None:
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(30)
            writing(*args)

        monkeypatch.setattr(block_files, "write", waits)
        stream = llm.generate([5], block, max_tokens=40)
        await anext(stream)
        task = asyncio.create_task(llm.save_blocks(tmp_path / "file", [block]))
        async for _ in stream:
            pass
        assert not task.done()
        gate.set()
        await task
        (copy,) = await llm.load_blocks(tmp_path / "file")
        assert copy.token_ids == block.token_ids[: copy.num_tokens]


async def test_many_saves_to_one_place_leave_one_whole_file(tmp_path: Path) -> None:
    async with engine("qwen3_5") as llm:
        blocks = await some_blocks(llm)
        await asyncio.gather(*(llm.save_blocks(tmp_path / "file", blocks[:n]) for n in (1, 2, 3, 4)))
        assert list(tmp_path.iterdir()) == [tmp_path / "file"]
        assert await llm.load_blocks(tmp_path / "file")
