"""The public names: signatures, defaults, what is returned, and how things show themselves."""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    BOTH_KINDS,
    answer_of,
    assert_close,
    checkpoint,
    contents,
    engine,
    free_memory,
    literal,
    read,
    tokens,
    vocab_size,
)
from literal import LiteralBlock

import asyncllm_nb
from asyncllm_nb import AsyncLLM
from asyncllm_nb.agents import monitor

REQUIRED = inspect.Parameter.empty
SIGNATURES: dict[str, dict[str, Any]] = {
    "__init__": {
        "model": REQUIRED,
        "*name": "llm",
        "*device": "auto",
        "*dtype": "auto",
        "*cache_tokens": None,
        "*max_blocks": None,
        "*max_batch_tokens": None,
        "*seed": 0,
        "*boundary": "written",
    },
    "create_block": {"name": None},
    "forward": {"inputs": REQUIRED, "cache_view": None, "*write_to": None, "*logits": "last"},
    "generate": {
        "inputs": None,
        "cache_view": None,
        "*write_to": None,
        "*max_tokens": None,
        "*stop": (),
        "*temperature": 0.0,
        "*top_p": 1.0,
        "*top_k": 0,
        "*min_p": 0.0,
        "*seed": None,
        "*forbid": (),
        "*name": None,
    },
    "probe": {"question": REQUIRED, "cache_view": REQUIRED, "choices": ("yes", "no")},
    "merge_blocks": {"left": REQUIRED, "right": REQUIRED, "*name": None},
    "append_block": {"left": REQUIRED, "right": REQUIRED},
    "fork": {"block": REQUIRED, "*name": None},
    "replace": {"block": REQUIRED, "inputs": REQUIRED, "cache_view": None},
    "clear": {"block": REQUIRED},
    "free_block": {"block": REQUIRED},
    "pause": {},
    "resume": {},
    "step": {"n": 1},
    "drain": {},
    "close": {},
    "chat_prompt": {"messages_or_text": REQUIRED, "*system": None, "*generation_prompt": True},
    "turn": {"text": REQUIRED, "role": "user"},
    "encode": {"text": REQUIRED, "control": True},
}
"""Parameters in order with their defaults; a star marks the keyword-only ones."""


@pytest.mark.parametrize("method", SIGNATURES)
def test_signature(method: str) -> None:
    """Whatever else is accepted is caught by `**unknown`, which raises or goes to a template."""
    parameters = inspect.signature(getattr(AsyncLLM, method)).parameters.values()
    named = {
        ("*" if p.kind is p.KEYWORD_ONLY else "") + p.name: p.default
        for p in parameters
        if p.name != "self" and p.kind is not p.VAR_KEYWORD
    }
    assert list(named.items()) == list(SIGNATURES[method].items())


@pytest.mark.parametrize(
    "method",
    ["forward", "probe", "merge_blocks", "append_block", "fork", "replace", "clear", "free_block",
     "step", "drain", "close", "create_block", "create_blocks"],
)  # fmt: skip
def test_is_awaited(method: str) -> None:
    assert inspect.iscoroutinefunction(getattr(AsyncLLM, method))


def test_public_names() -> None:
    for name in ("AsyncLLM", "CacheFullError", "EngineClosedError", "run", "check"):
        assert name in asyncllm_nb.__all__
        assert getattr(asyncllm_nb, name)


# ---- blocks -----------------------------------------------------------------------------------


async def test_create_blocks_by_count_or_by_names() -> None:
    async with engine() as llm:
        three = await llm.create_blocks(3)
        named = await llm.create_blocks("prompt", "thinker")
        single = await llm.create_block("writer")
        unnamed = await llm.create_block()
        everything = [*three, *named, single, unnamed]
        assert len({block.name for block in everything}) == 7
        assert len({block.id for block in everything}) == 7
        assert [block.name for block in named] == ["prompt", "thinker"]
        assert dict(llm.blocks) == {block.name: block for block in everything}
        assert all(b.num_tokens == b.span == 0 and b.token_ids == [] for b in everything)
        await llm.free_block(single)
        del unnamed, everything
        gc.collect()
        await llm.drain()
        assert set(llm.blocks) == {block.name for block in (*three, *named)}


async def test_named_results() -> None:
    async with engine() as llm:
        left, right = await llm.create_blocks("left", "right")
        await llm.forward([5], left)
        assert (await llm.merge_blocks(left, right, name="both")).name == "both"
        assert (await llm.fork(left, name="copy")).name == "copy"
        assert await llm.append_block(left, right) is left


async def test_token_ids_are_a_copy() -> None:
    async with engine() as llm:
        block = (await llm.forward([5, 6])).block
        block.token_ids.append(7)
        assert block.token_ids == [5, 6]


# ---- forward ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", BOTH_KINDS)
async def test_what_forward_returns(family: str) -> None:
    vocab = vocab_size(checkpoint(family))
    async with engine(family) as llm:
        last = await llm.forward(tokens(9))
        assert last.logits is not None
        assert (last.logits.shape, last.logits.dtype) == ((vocab,), torch.float32)
        every = await llm.forward(tokens(9), logits="all")
        assert every.logits is not None
        assert (every.logits.shape, every.logits.dtype) == ((9, vocab), torch.float32)
        none = await llm.forward(tokens(9), logits="none")
        assert none.logits is None
        assert len({last.block.id, every.block.id, none.block.id}) == 3
        assert_close(last.logits, every.logits[-1].double())
        again = await llm.forward([5], last.block)
        assert again.block is last.block


# ---- probe ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", BOTH_KINDS)
@pytest.mark.parametrize(
    "choices", [("a", "b"), ("yes", "no"), (" yes", "yes", "y", "maybe"), ("one",)], ids=str
)
async def test_probe_scores_whole_choices(family: str, choices: tuple[str, ...]) -> None:
    """By the log-probability of all their tokens behind the question; it changes nothing."""
    model = literal(checkpoint(family))
    async with engine(family) as llm:
        block = (await llm.forward(tokens(20))).block
        before, memory = contents(llm), free_memory(llm)
        answer = await llm.probe("Is it done?", [block], choices=choices)
        assert (contents(llm), free_memory(llm)) == (before, memory)
        question = llm.encode("Is it done?")
        scores = []
        for choice in choices:
            ids = llm.encode(choice)
            _, logits = model.encode([*question, *ids], [*read(model, tokens(20)), LiteralBlock()])
            said = logits[len(question) - 1 : -1].log_softmax(-1)
            scores.append(sum(float(row[i]) for row, i in zip(said, ids, strict=True)))
        expected = torch.tensor(scores, dtype=torch.float64).softmax(0).tolist()
        assert list(answer) == list(choices)
        assert list(answer.values()) == pytest.approx(expected, abs=1e-4)
        assert sum(answer.values()) == pytest.approx(1.0)


async def test_cancelled_probe_gives_its_memory_back() -> None:
    async with engine(max_batch_tokens=16) as llm:
        block = (await llm.forward(tokens(20))).block
        memory = free_memory(llm)
        llm.pause()
        asked = asyncio.create_task(llm.probe("?" * 90, block))
        await llm.step(2)
        asked.cancel()
        assert isinstance(await answer_of(asked), asyncio.CancelledError)
        llm.resume()
        await llm.drain()
        assert free_memory(llm) == memory


# ---- prompts ----------------------------------------------------------------------------------


async def test_a_keyword_that_no_template_reads_is_refused() -> None:
    async with engine() as llm:
        with pytest.raises(TypeError, match=r"no keyword 'sytem', .*: did you mean 'system'"):
            llm.chat_prompt("Hello", sytem="Be brief.")
        with pytest.raises(TypeError, match=r"'enable_thinkin', .*: did you mean 'enable_thinking'"):
            llm.chat_prompt("Hello", enable_thinkin=False)
        with pytest.raises(TypeError, match="no keyword 'treshold'"):
            monitor(llm, "Rule: warn.", [], treshold=0.9)
        plain = llm.chat_prompt("Hello")
        assert llm.chat_prompt("Hello", enable_thinking=False) == plain  # nothing to switch off
        template = "{{ mood }}{{ messages[0].content }}"
        assert llm.chat_prompt("Hello", chat_template=template, mood="Oh ") == llm.encode("Oh Hello")


async def test_chat_prompt_from_text_and_messages() -> None:
    async with engine() as llm:
        asked = llm.chat_prompt("Hello", system="Be brief.")
        assert llm.tokenizer.decode(asked) == (
            "<|im_start|>system\nBe brief.<|im_end|>\n"
            "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
        )
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
        ]
        assert llm.chat_prompt(messages) == asked
        assert llm.chat_prompt(messages[1:], system="Be brief.") == asked
        closed = llm.chat_prompt("Hello", generation_prompt=False)
        assert llm.tokenizer.decode(closed) == "<|im_start|>user\nHello<|im_end|>\n"


async def test_turn_closes_the_open_one_and_opens_the_next() -> None:
    async with engine() as llm:
        asked = llm.chat_prompt("Hello")
        answered = asked + llm.encode("Hi.") + llm.turn("And now?")
        assert llm.tokenizer.decode(answered) == (
            "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi.<|im_end|>\n"
            "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
        )
        assert "<|im_start|>system\nStop" in llm.tokenizer.decode(llm.turn("Stop", role="system"))


# ---- stats, trace and repr --------------------------------------------------------------------


async def test_stats_show_the_budget() -> None:
    async with engine(cache_tokens=1024, max_blocks=20) as llm:
        shown = repr(llm.stats())
        assert "1024" in shown
        assert "20" in shown
        assert "\n" not in shown


async def test_trace_saves_what_it_holds(tmp_path: Path) -> None:
    async with engine() as llm:
        await llm.forward(tokens(5), name_me := await llm.create_block("named"))
        file = llm.trace.save(tmp_path / "run.json")
        saved = json.loads(Path(file).read_text())
        steps = [record for record in saved["records"] if record["t"] == "step"]
        assert len(steps) == len(llm.trace.steps) == 1
        assert steps[0]["rows"][0]["b"] == name_me.id


async def test_everything_shows_itself_in_one_line_without_tensors() -> None:
    async with engine() as llm:
        block = await llm.create_block("my block")
        output = await llm.forward(tokens(9), block)
        stream = llm.generate(None, block, max_tokens=2, name="my stream")
        shown: dict[str, object] = {
            "my block": block,
            "my stream": stream,
            checkpoint().name: llm,
            "block": output,
            "steps": llm.trace,
        }
        await stream
        for expected, thing in shown.items():
            assert expected in repr(thing)
            assert "\n" not in repr(thing)
            assert "tensor(" not in repr(thing)
            assert len(repr(thing)) < 300
            html = thing._repr_html_()  # type: ignore[attr-defined]
            assert html is None or 0 < len(html) < 20_000


async def test_names_are_escaped_in_html() -> None:
    async with engine() as llm:
        block = await llm.create_block("<b>bold")
        assert "<b>bold" not in (block._repr_html_() or "")


# ---- lifetime ---------------------------------------------------------------------------------


async def test_engine_is_an_async_context_manager() -> None:
    async with AsyncLLM(checkpoint(), cache_tokens=256, max_blocks=8) as llm:
        await llm.forward([5])
        assert not llm.snapshot()["closed"]
    assert llm.snapshot()["closed"]


async def test_last_reference_closes_the_engine() -> None:
    """The loop's task holds it weakly."""
    llm = AsyncLLM(checkpoint(), cache_tokens=256, max_blocks=8)
    await llm.forward([5])
    gone = weakref.ref(llm)
    del llm
    gc.collect()
    await asyncio.sleep(0)
    gc.collect()
    assert gone() is None
