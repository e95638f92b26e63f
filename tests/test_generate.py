"""How a stream chooses its tokens, where it begins, and what it is called."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import BOTH_KINDS, checkpoint, engine, literal, tokens, vocab_size
from literal import LiteralBlock
from torch import Tensor

from asyncllm_nb import AsyncLLM, CacheBlock, Token, TokenStream

PROMPT = tokens(15)
VOCAB = vocab_size(checkpoint())


async def read_all(stream: TokenStream) -> list[Token]:
    return [token async for token in stream]


async def ids_of(llm: AsyncLLM, inputs: list[int] | None = PROMPT, **options: Any) -> list[int]:
    """The ids that a stream into a new block yields."""
    return [token.id async for token in llm.generate(inputs, **options)]


def distributions(family: str, start: list[int], made: list[Token]) -> Tensor:
    """Float64 log-probabilities [len(made), vocab] that each token was drawn from."""
    model = literal(checkpoint(family))
    _, logits = model.encode(start + [token.id for token in made], [LiteralBlock()])
    return logits[len(start) - 1 : -1].log_softmax(-1)


# ---- sampling ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", BOTH_KINDS)
async def test_greedy_takes_the_largest(family: str) -> None:
    async with engine(family) as llm:
        made = await read_all(llm.generate(PROMPT, max_tokens=12))
    said = distributions(family, PROMPT, made)
    assert [token.id for token in made] == said.argmax(-1).tolist()
    assert [t.logprob for t in made] == pytest.approx(said.max(-1).values.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [{"temperature": 3.0}, {"temperature": 0.5, "top_p": 0.4}, {"temperature": 1.0, "top_k": 2}],
    ids=str,
)
async def test_logprob_is_of_the_models_own_distribution(options: dict[str, Any]) -> None:
    async with engine() as llm:
        made = await read_all(llm.generate(PROMPT, max_tokens=9, forbid=range(100), **options))
    said = distributions("qwen3_5", PROMPT, made)
    own = [float(row[token.id]) for row, token in zip(said, made, strict=True)]
    assert [token.logprob for token in made] == pytest.approx(own, abs=1e-4)


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.999}], ids=str)
async def test_narrowest_filters_are_greedy(narrow: dict[str, Any]) -> None:
    async with engine() as llm:
        greedy = await ids_of(llm, max_tokens=9)
        assert await ids_of(llm, max_tokens=9, temperature=2.0, **narrow) == greedy


async def test_filters_keep_what_they_should() -> None:
    async with engine() as llm:
        for seed in range(6):
            options: dict[str, Any] = {"temperature": 5.0, "seed": seed, "max_tokens": 8}
            for kind, value in (("top_k", 3), ("top_p", 0.3), ("min_p", 0.5)):
                made = await read_all(llm.generate(PROMPT, **(options | {kind: value})))
                hot = (distributions("qwen3_5", PROMPT, made) / 5.0).softmax(-1)
                for row, token in zip(hot, made, strict=True):
                    larger = row[row > row[token.id]]
                    assert kind != "top_k" or len(larger) < 3
                    assert kind != "top_p" or larger.sum() < 0.3 + 1e-4
                    assert kind != "min_p" or row[token.id] > 0.5 * row.max() - 1e-6


async def test_sampled_frequencies_follow_the_distribution() -> None:
    """First tokens of 600 streams that differ in their seed only; four standard deviations."""
    async with engine() as llm:
        prompt, count = (await llm.forward(PROMPT)).block, 600
        counts = torch.zeros(VOCAB, dtype=torch.float64)
        for seed in range(count):
            view = [prompt, await llm.create_block()]
            (first,) = await ids_of(llm, None, cache_view=view, max_tokens=1, temperature=1.0, seed=seed)
            counts[first] += 1
    said = literal(checkpoint()).encode(PROMPT, [LiteralBlock()])[1][-1].softmax(-1)
    deviation = (count * said * (1 - said)).sqrt() + 1
    assert ((counts - count * said).abs() < 4 * deviation).all()


# ---- seeds ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", BOTH_KINDS)
async def test_same_seed_gives_the_same_tokens_whatever_else_runs(family: str) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 11, "max_tokens": 20}
    async with engine(family) as llm:
        alone = await ids_of(llm, **options)
    async with engine(family, max_batch_tokens=20, seed=5) as llm:
        others = [ids_of(llm, tokens(9 + i), temperature=1.0, max_tokens=30) for i in range(5)]
        answers = await asyncio.gather(ids_of(llm, **options), *others)
    assert answers[0] == alone


async def test_seed_of_a_stream_derives_from_the_engines_seed_and_a_running_count() -> None:
    runs = []
    for seed in (0, 0, 1):
        async with engine(seed=seed) as llm:
            runs.append([await ids_of(llm, temperature=1.0, max_tokens=12) for _ in range(3)])
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert len({tuple(ids) for ids in runs[0]}) == 3


async def test_yielded_tokens_drive_the_random_numbers_and_draws_do_not() -> None:
    """A body that has the drawn token dropped, by writes that change nothing that is read."""
    options: dict[str, Any] = {"temperature": 1.0, "seed": 2, "max_tokens": 12}
    async with engine() as llm:
        plain = await ids_of(llm, **options)
        block = await llm.create_block()
        disturbed = []
        async for token in llm.generate(PROMPT, block, **options):
            disturbed.append(token.id)
            await llm.fork(block)
            with pytest.raises(ZeroDivisionError):
                async with llm.transaction(block):
                    await llm.clear(block)
                    raise ZeroDivisionError
        assert disturbed == plain


# ---- where a stream begins ----------------------------------------------------------------------


@pytest.mark.parametrize("family", BOTH_KINDS)
async def test_goes_on_from_the_last_token_of_the_view(family: str) -> None:
    """Empty blocks aside, in an empty block and in the same one; no token is encoded again."""
    async with engine(family) as llm:
        expected = await ids_of(llm, max_tokens=6)
        prompt, empty, answer = await llm.create_blocks("prompt", "empty", "answer")
        await llm.forward(PROMPT, prompt)
        steps = len(llm.trace.steps)
        got = await ids_of(llm, None, cache_view=[prompt, empty, answer], max_tokens=3)
        assert len(llm.trace.steps) - steps <= 4
        got += await ids_of(llm, None, cache_view=[prompt, empty, answer], max_tokens=3)
        assert got == expected
        assert answer.token_ids == got


@pytest.mark.parametrize("family", BOTH_KINDS)
async def test_fork_goes_on_like_the_original(family: str) -> None:
    async with engine(family) as llm:
        prompt = (await llm.forward(PROMPT)).block
        fork = await llm.fork(prompt)
        here = await ids_of(llm, None, cache_view=prompt, max_tokens=5)
        assert await ids_of(llm, None, cache_view=fork, max_tokens=5) == here


async def other_view(llm: AsyncLLM, block: CacheBlock, extra: CacheBlock) -> list[CacheBlock]:
    return [extra, block]


async def merged(llm: AsyncLLM, block: CacheBlock, extra: CacheBlock) -> list[CacheBlock]:
    return [await llm.merge_blocks(extra, block)]


async def appended(llm: AsyncLLM, block: CacheBlock, extra: CacheBlock) -> list[CacheBlock]:
    return [await llm.append_block(block, extra)]


async def cleared(llm: AsyncLLM, block: CacheBlock, extra: CacheBlock) -> list[CacheBlock]:
    await llm.clear(block)
    return [block]


@pytest.mark.parametrize("change", [other_view, merged, appended, cleared])
async def test_cannot_go_on_without_logits(change: Callable[..., Any]) -> None:
    async with engine() as llm:
        block, extra = (await llm.forward(PROMPT)).block, (await llm.forward([7, 8])).block
        view = await change(llm, block, extra)
        held = view[-1].token_ids
        with pytest.raises(ValueError, match="give at least one token"):
            async for _ in llm.generate(None, view):
                pass
        assert view[-1].token_ids == held


async def test_views_are_copied_and_short_forms_mean_the_same() -> None:
    async with engine() as llm:
        prompt, a, b, c = await llm.create_blocks("prompt", "a", "b", "c")
        await llm.forward(PROMPT, prompt)
        view = [prompt, a]
        stream = llm.generate([5], view, max_tokens=3)
        view.append(b)  # too late
        made = [token.id for token in await read_all(stream)]
        assert (a.num_tokens, b.num_tokens) == (4, 0)
        assert await ids_of(llm, [5], cache_view=[prompt], write_to=c, max_tokens=3) == made
        assert await ids_of(llm, [*PROMPT, 5], max_tokens=3) == made
        assert stream.block is a


async def test_same_tokens_as_text_list_and_tensor() -> None:
    async with engine() as llm:
        text = "Bees make honey."
        ids = llm.encode(text)
        for inputs in (text, ids, tuple(ids), torch.tensor(ids), torch.tensor(ids).int()):
            output = await llm.forward(inputs)
            assert output.block.token_ids == ids
            assert output.block.text == text


# ---- names and steps ----------------------------------------------------------------------------


async def test_name_is_that_of_the_coroutine_that_reads() -> None:
    async with engine() as llm:

        async def think() -> str:
            stream = llm.generate(PROMPT, max_tokens=3)
            await read_all(stream)
            return stream.name or ""

        names = await asyncio.gather(think(), asyncio.create_task(think()), think())
        assert all(name.split("·")[0].endswith("think") for name in names)
        assert sorted(name.partition("·")[2] for name in names) == ["", "2", "3"]
        stream = llm.generate(PROMPT, max_tokens=2, name="speaker")
        await read_all(stream)
        assert stream.name == "speaker"
        shown = {row.name for step in llm.trace.steps for row in step.rows}
        assert {"speaker", *names} <= shown


async def test_step_of_a_token_is_in_the_trace() -> None:
    async with engine() as llm:
        made = await read_all(llm.generate(PROMPT, max_tokens=5, name="speaker"))
        steps = [token.step for token in made]
        assert steps == sorted(set(steps))
        rows = {s.number: r for s in llm.trace.steps for r in s.rows if r.name == "speaker"}
        assert [rows[step].kind for step in steps] == ["prefill"] + ["decode"] * 4
        assert [rows[step].token_ids for step in steps[1:]] == [(t.id,) for t in made[:-1]]
