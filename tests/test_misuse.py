"""Each wrong use gets its error, with the fix in the message, and nothing has changed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import checkpoint, contents, engine, free_memory, tokens, vocab_size

from asyncllm_nb import AsyncLLM, CacheBlock, EngineClosedError, ModelError
from asyncllm_nb.testing import make_checkpoint

VOCAB = vocab_size(checkpoint())
POSITIONS = 256


@dataclass
class Desk:
    """An engine with two filled blocks, a freed one and one of another engine."""

    llm: Any  # an AsyncLLM; a type checker would refuse most of what is done to it here
    a: CacheBlock
    b: CacheBlock
    freed: CacheBlock
    foreign: CacheBlock


Wrong = Callable[[Desk], Any]


async def use(wrong: Any) -> None:
    """Await what is awaitable, and read a stream."""
    if hasattr(wrong, "__aiter__"):
        async for _ in wrong:
            pass
    elif hasattr(wrong, "__aenter__"):
        async with wrong:
            pass
    elif isinstance(wrong, Awaitable):
        await wrong


VIEWS: dict[str, tuple[Wrong, type[Exception], str]] = {
    "a block twice": (lambda d: d.llm.forward([5], [d.a, d.b, d.a]), ValueError, "'a'.*twice"),
    "written block not last": (
        lambda d: d.llm.forward([5], [d.a, d.b], write_to=d.a),
        ValueError,
        "'a'.*last",
    ),
    "freed block in a view": (lambda d: d.llm.forward([5], [d.freed, d.a]), ValueError, "'freed'"),
    "freed block written": (lambda d: d.llm.forward([5], write_to=d.freed), ValueError, "'freed'"),
    "block of another engine": (lambda d: d.llm.forward([5], [d.foreign]), ValueError, "'foreign'"),
    "view too long": (
        lambda d: d.llm.forward(tokens(POSITIONS - 20), [d.a, d.b]),
        ValueError,
        str(POSITIONS),
    ),
    "names for blocks": (lambda d: d.llm.forward([5], ["a"]), TypeError, "block"),
    "one name for a view": (lambda d: d.llm.forward([5], "a"), TypeError, "block"),
    "stream: a block twice": (lambda d: d.llm.generate([5], [d.a, d.a]), ValueError, "'a'.*twice"),
    "stream: freed": (lambda d: d.llm.generate([5], [d.freed]), ValueError, "'freed'"),
    "stream: foreign": (lambda d: d.llm.generate([5], d.foreign), ValueError, "'foreign'"),
    "probe: freed": (lambda d: d.llm.probe("?", [d.freed]), ValueError, "'freed'"),
    "replace: foreign": (lambda d: d.llm.replace(d.foreign, [5]), ValueError, "'foreign'"),
    "merge: freed": (lambda d: d.llm.merge_blocks(d.a, d.freed), ValueError, "'freed'"),
    "merge: foreign": (lambda d: d.llm.merge_blocks(d.foreign, d.a), ValueError, "'foreign'"),
    "append: freed": (lambda d: d.llm.append_block(d.freed, d.a), ValueError, "'freed'"),
    "append: no block": (lambda d: d.llm.append_block(d.a, None), TypeError, "block"),
    "fork: freed": (lambda d: d.llm.fork(d.freed), ValueError, "'freed'"),
    "clear: freed": (lambda d: d.llm.clear(d.freed), ValueError, "'freed'"),
    "free: freed": (lambda d: d.llm.free_block(d.freed), ValueError, "'freed'"),
    "free: foreign": (lambda d: d.llm.free_block(d.foreign), ValueError, "'foreign'"),
    "transaction: freed": (lambda d: d.llm.transaction(d.a, d.freed), ValueError, "'freed'"),
    "tokens of a freed block": (lambda d: d.freed.token_ids, ValueError, "'freed'"),
    "text of a freed block": (lambda d: d.freed.text, ValueError, "'freed'"),
}

INPUTS: dict[str, tuple[Wrong, type[Exception], str]] = {
    "no tokens": (lambda d: d.llm.forward([], [d.a]), ValueError, "empty|at least one"),
    "empty text": (lambda d: d.llm.forward("", [d.a]), ValueError, "empty|at least one"),
    "empty tensor": (lambda d: d.llm.forward(torch.zeros(0).long()), ValueError, "empty|at least"),
    "nothing": (lambda d: d.llm.forward(None, [d.a]), TypeError, "token"),
    "a number": (lambda d: d.llm.forward(5, [d.a]), TypeError, "token"),
    "floats": (lambda d: d.llm.forward([0.5], [d.a]), TypeError, "token|int"),
    "a float tensor": (lambda d: d.llm.forward(torch.ones(3), [d.a]), TypeError, "token ids"),
    "a matrix": (lambda d: d.llm.forward(torch.ones(1, 3).long()), ValueError, "1-D|dimension"),
    "negative id": (lambda d: d.llm.forward([5, -1], [d.a]), ValueError, "-1"),
    "id too large": (lambda d: d.llm.forward([VOCAB], [d.a]), ValueError, str(VOCAB)),
    "unknown logits": (lambda d: d.llm.forward([5], [d.a], logits="some"), ValueError, "last.*all"),
    "stream: no tokens": (lambda d: d.llm.generate([], [d.a]), ValueError, "empty|at least one"),
    "stream: id too large": (lambda d: d.llm.generate([VOCAB], [d.a]), ValueError, str(VOCAB)),
    "replace: nothing": (lambda d: d.llm.replace(d.a, []), ValueError, "empty|at least one"),
    "probe: no question": (lambda d: d.llm.probe("", [d.a]), ValueError, "empty|at least one"),
    "probe: no choices": (lambda d: d.llm.probe("?", [d.a], choices=()), ValueError, "choice"),
    "probe: empty choice": (lambda d: d.llm.probe("?", [d.a], ("yes", "")), ValueError, "choice"),
    "probe: choice twice": (lambda d: d.llm.probe("?", [d.a], ("a", "a")), ValueError, "choice"),
}

OPTIONS: dict[str, tuple[Wrong, type[Exception], str]] = {
    "max_tokens 0": (lambda d: d.llm.generate([5], max_tokens=0), ValueError, "max_tokens"),
    "max_tokens -1": (lambda d: d.llm.generate([5], max_tokens=-1), ValueError, "max_tokens"),
    "max_tokens 2.5": (lambda d: d.llm.generate([5], max_tokens=2.5), TypeError, "max_tokens"),
    "temperature as text": (lambda d: d.llm.generate([5], temperature="1"), TypeError, "temperature"),
    "messages without a role": (lambda d: d.llm.chat_prompt([{"text": "x"}]), TypeError, "role"),
    "no blocks": (lambda d: d.llm.create_blocks(0), ValueError, "number of blocks"),
    "a block without a name": (lambda d: d.llm.create_block(""), ValueError, "name"),
    "temperature": (lambda d: d.llm.generate([5], temperature=-1.0), ValueError, "temperature"),
    "temperature nan": (
        lambda d: d.llm.generate([5], temperature=float("nan")),
        ValueError,
        "temperature",
    ),
    "top_p 0": (lambda d: d.llm.generate([5], top_p=0.0), ValueError, "top_p"),
    "top_p 2": (lambda d: d.llm.generate([5], top_p=2.0), ValueError, "top_p"),
    "top_k": (lambda d: d.llm.generate([5], top_k=-1), ValueError, "top_k"),
    "min_p": (lambda d: d.llm.generate([5], min_p=1.5), ValueError, "min_p"),
    "empty stop": (lambda d: d.llm.generate([5], stop=""), ValueError, "stop"),
    "stop of a wrong type": (lambda d: d.llm.generate([5], stop=0.5), TypeError, "stop"),
    "forbid two tokens": (lambda d: d.llm.generate([5], forbid="no"), ValueError, "'no'"),
    "forbid unknown id": (lambda d: d.llm.generate([5], forbid=[VOCAB]), ValueError, str(VOCAB)),
    "forbid all": (lambda d: d.llm.generate([5], forbid=range(VOCAB)), ValueError, "no token"),
    "step 0": (lambda d: d.llm.step(0), ValueError, "step|n"),
    "split by nothing": (lambda d: d.llm.generate([5]).split(""), ValueError, "separator"),
}

UNKNOWN_KEYWORDS: dict[str, tuple[Wrong, type[Exception], str]] = {
    "generate": (lambda d: d.llm.generate([5], max_token=3), TypeError, "max_tokens"),
    "forward": (lambda d: d.llm.forward([5], logit="all"), TypeError, "logits"),
    "forward, view": (lambda d: d.llm.forward([5], cacheview=[d.a]), TypeError, "cache_view"),
    "probe": (lambda d: d.llm.probe("?", [d.a], choice=("a", "b")), TypeError, "choices"),
    "merge": (lambda d: d.llm.merge_blocks(d.a, d.b, names="c"), TypeError, "name"),
    "create_block": (lambda d: d.llm.create_block(nam="c"), TypeError, "name"),
    "AsyncLLM": (lambda d: type(d.llm)(checkpoint(), max_batch=3), TypeError, "max_batch_tokens"),
}

ALL = {
    f"{group}, {name}": case
    for group, cases in {
        "view": VIEWS,
        "inputs": INPUTS,
        "options": OPTIONS,
        "keyword": UNKNOWN_KEYWORDS,
    }.items()
    for name, case in cases.items()
}


@pytest.mark.filterwarnings("ignore:.*never read:RuntimeWarning")  # a stream made on the way
@pytest.mark.parametrize("case", ALL.values(), ids=ALL.keys())
async def test_wrong_use_raises_and_changes_nothing(
    case: tuple[Wrong, type[Exception], str],
) -> None:
    wrong, kind, message = case
    folder = checkpoint(positions=POSITIONS)
    async with engine(folder) as llm, engine(folder) as other:
        a, b, freed = await llm.create_blocks("a", "b", "freed")
        foreign = await other.create_block("foreign")
        await llm.forward(tokens(20), a)
        await llm.forward(tokens(4), b)
        await llm.free_block(freed)
        before, memory, steps = contents(llm), free_memory(llm), len(llm.trace.steps)
        with pytest.raises(kind, match=f"(?s){message}"):
            await use(wrong(Desk(llm, a, b, freed, foreign)))
        await llm.drain()
        assert contents(llm) == before
        assert free_memory(llm) == memory
        assert len(llm.trace.steps) == steps, "raised before anything ran"
        await llm.forward([5], [a, b])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "abacus"}, "abacus"),
        ({"dtype": "float12"}, "float12"),
        ({"cache_tokens": 0}, "cache_tokens"),
        ({"max_blocks": 0}, "max_blocks"),
        ({"max_batch_tokens": 0}, "max_batch_tokens"),
    ],
    ids=str,
)
def test_wrong_engine_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AsyncLLM(checkpoint(), **options)


def test_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises((ModelError, ValueError, FileNotFoundError), match="config.json"):
        AsyncLLM(tmp_path)


async def test_coroutine_where_a_block_is_expected() -> None:
    async with engine() as llm:
        coroutine: Any = llm.create_block()
        for wrong in (
            lambda: llm.forward([5], [coroutine]),
            lambda: llm.generate([5], coroutine),
            lambda: llm.fork(coroutine),
        ):
            with pytest.raises(TypeError, match="await"):
                await use(wrong())
        coroutine.close()


async def test_closed_engine_names_the_fix() -> None:
    async with engine() as llm:
        block = (await llm.forward(tokens(9))).block
        await llm.close()
        await llm.close()  # twice is fine
        assert block.token_ids == tokens(9)
        assert block.text
        for wrong in (
            lambda: llm.forward([5], block),
            lambda: llm.generate([5], block),
            lambda: llm.probe("?", block),
            lambda: llm.create_block(),
            lambda: llm.fork(block),
            lambda: llm.step(),
        ):
            with pytest.raises(EngineClosedError, match="again"):
                await use(wrong())


async def test_waiters_of_a_closing_engine_are_told() -> None:
    async with engine(cache_tokens=256, max_batch_tokens=16) as llm:
        block = await llm.create_block()
        llm.pause()
        requests = (
            llm.forward(tokens(90), block),
            llm.forward(tokens(70), block),
            llm.probe("?", block),
            llm.fork(block),
        )
        asked = asyncio.gather(*requests, return_exceptions=True)
        await llm.step(2)
        await llm.close()
        answers = await asked
        assert {type(answer) for answer in answers} == {EngineClosedError}


async def test_without_a_tokenizer_text_is_refused_and_ids_work(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3", 1, tokenizer=False, eos_token_id=None)
    async with engine(folder) as llm:
        block = await llm.create_block()
        for wrong in (
            lambda: llm.forward("text", block),
            lambda: llm.generate("text", block),
            lambda: llm.generate([5], block, stop="."),
            lambda: llm.encode("text"),
            lambda: llm.chat_prompt("text"),
        ):
            with pytest.raises(ValueError, match="tokenizer"):
                await use(wrong())
        made = [token async for token in llm.generate([5], block, max_tokens=4)]
        assert [str(token) for token in made] == [""] * 4
        assert block.text == ""
