"""What the tests of the AsyncLLM API share: tiny checkpoints and engines, token ids, loop turns.

Knows the public API, and of the engine only `check_integrity`, `snapshot` and the trace. `engine`
ends every test the same way: drained, no page or slot lost, closed; and a test that hangs fails as
"deadlock" with a picture of the engine.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
import random
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

from literal import LiteralBlock, LiteralModel
from torch import Tensor

from asyncllm_nb import AsyncLLM, CacheBlock
from asyncllm_nb.testing import assert_close_logits, make_checkpoint

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_5")
BOTH_KINDS = ("llama", "qwen3_5")
"""Full attention only, and a hybrid: what depends on the kind of memory shows in these."""

HANG_SECONDS = 30.0


@functools.cache
def scratch() -> Path:
    """A folder for checkpoints, removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="asyncllm-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def checkpoint(family: str = "qwen3_5", *, seed: int = 1, positions: int = 8192) -> Path:
    """A seeded random checkpoint with a tokenizer and no end token, made once per process."""
    folder = scratch() / f"{family}-{seed}-{positions}"
    make_checkpoint(
        folder, family, seed, tokenizer=True, max_position_embeddings=positions, eos_token_id=None
    )
    return folder


def with_end_tokens(folder: Path, ids: Sequence[int]) -> Path:
    """The same checkpoint, whose streams end at any of `ids`."""
    copy = scratch() / f"{folder.name}-ends-{'-'.join(map(str, ids))}"
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    for name in ("config.json", "generation_config.json"):
        if (file := copy / name).exists():
            config = json.loads(file.read_text())
            file.write_text(json.dumps({**config, "eos_token_id": list(ids)}))
    return copy


@functools.cache
def literal(folder: Path) -> LiteralModel:
    """The literal model of a checkpoint."""
    return LiteralModel(folder)


@functools.cache
def vocab_size(folder: Path) -> int:
    """Number of token ids."""
    config = json.loads((folder / "config.json").read_text())
    return int(config.get("text_config", config)["vocab_size"])


def make_engine(folder: Path, *, max_blocks: int, **options: Any) -> AsyncLLM:
    """An engine of a checkpoint, small unless `options` say more. Slots are for hybrid models."""
    if "qwen3_5" in (folder / "config.json").read_text():
        options["max_blocks"] = max_blocks
    return AsyncLLM(folder, **({"cache_tokens": 2048, "max_batch_tokens": 64} | options))


@asynccontextmanager
async def engine(
    model: str | Path = "qwen3_5", *, seconds: float = HANG_SECONDS, **options: Any
) -> AsyncIterator[AsyncLLM]:
    """A small engine of a family (or folder); counts pages and slots when the test is through."""
    folder = model if isinstance(model, Path) else checkpoint(model)
    llm = make_engine(folder, **({"max_blocks": 64} | options))
    try:
        async with no_deadlock(llm, seconds):
            yield llm
            if not llm.snapshot()["closed"]:
                await settle(llm)
    finally:
        await llm.close()


@asynccontextmanager
async def no_deadlock(llm: AsyncLLM, seconds: float = HANG_SECONDS) -> AsyncIterator[None]:
    """Turns a hang into a failure that shows what everybody was waiting for."""
    alarm = asyncio.timeout(seconds)
    try:
        async with alarm:
            yield
    except TimeoutError:
        if alarm.expired():
            raise AssertionError(f"deadlock: {json.dumps(llm.snapshot(), default=str)}") from None
        raise


class Bench:
    """Engines that the many examples of a test share, in one event loop of their own.

    An example that fails takes its engine with it, so that the next one starts clean.
    """

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self._engines: dict[str, AsyncLLM] = {}

    def engine(self, family: str, **options: Any) -> AsyncLLM:
        """The engine of these options; made when first asked for."""
        key = f"{family} {options}"
        if key not in self._engines:
            self._engines[key] = make_engine(checkpoint(family), **options)
        return self._engines[key]

    def run(self, llm: AsyncLLM, work: Coroutine[Any, Any, None], seconds: float = 30.0) -> None:
        """Run one example; afterwards no block is left, and no page or slot is lost."""
        try:
            self.runner.run(self._run(llm, work, seconds))
        except BaseException:
            self._engines = {key: kept for key, kept in self._engines.items() if kept is not llm}
            self.runner.run(llm.close())
            raise

    async def _run(self, llm: AsyncLLM, work: Coroutine[Any, Any, None], seconds: float) -> None:
        async with no_deadlock(llm, seconds):
            await work
            await settle(llm)
            for block in list(llm.blocks.values()):
                await llm.free_block(block)
            await settle(llm)
            pools = llm.snapshot()["pools"]
            assert pools["pages_free"] == pools["pages_total"]
            assert pools["slots_free"] == pools["slots_total"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for llm in self._engines.values():
            self.runner.run(llm.close())
        self.runner.close()


async def settle(llm: AsyncLLM) -> None:
    """Let everything that was asked for finish, then count pages and slots."""
    llm.resume()
    await llm.drain()
    llm.check_integrity()


async def turns(count: int = 50) -> None:
    """Give every other task of the loop `count` chances to run."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], object], limit: int = 100_000) -> None:
    """Turn the loop until `condition` holds."""
    for _ in range(limit):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition never came true")


async def answer_of(request: Awaitable[Any]) -> Any:
    """What a request returns, or the exception that it raises, cancellation included.

    The exception comes without its traceback, whose frames would keep blocks alive.
    """
    try:
        return await request
    except (Exception, asyncio.CancelledError) as error:
        return error.with_traceback(None)


async def filled_block(llm: AsyncLLM, ids: list[int], name: str) -> CacheBlock:
    """A new block that holds `ids`."""
    block = await llm.create_block(name)
    await llm.forward(ids, block)
    return block


def tokens(count: int, seed: int = 0) -> list[int]:
    """`count` reproducible token ids that every checkpoint here knows and that mark nothing."""
    return random.Random(f"{count}/{seed}").choices(range(5, 90), k=count)


def only(*allowed: int) -> list[int]:
    """What to forbid so that nothing but `allowed` is drawn."""
    return [i for i in range(vocab_size(checkpoint())) if i not in allowed]


def contents(llm: AsyncLLM) -> dict[str, tuple[int, int, list[int]]]:
    """Every live block: its id, version and tokens."""
    return {name: (b.id, b.version, b.token_ids) for name, b in llm.blocks.items()}


def free_memory(llm: AsyncLLM) -> tuple[int, int]:
    """Free pages and slots."""
    pools = llm.snapshot()["pools"]
    return pools["pages_free"], pools["slots_free"]


def assert_close(actual: Tensor | None, expected: Tensor) -> None:
    """Logits agree within the tolerance of well-conditioned float32 checkpoints."""
    assert actual is not None
    assert_close_logits(actual, expected)


def is_close(actual: Tensor | None, expected: Tensor) -> bool:
    """Whether they agree within that tolerance."""
    try:
        assert_close(actual, expected)
    except AssertionError:
        return False
    return True


def read(model: LiteralModel, *runs: Sequence[int]) -> list[LiteralBlock]:
    """Literal blocks with `runs` in them, each written under all blocks before it."""
    view: list[LiteralBlock] = []
    for run in runs:
        block = LiteralBlock()
        if run:
            block, _ = model.encode(run, [*view, block])
        view.append(block)
    return view


def flatten(parts: Iterable[Sequence[int]]) -> list[int]:
    """All parts one after the other."""
    return [token for part in parts for token in part]
