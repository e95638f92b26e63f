"""What ends a stream, which tokens it may not use, and how its text shows.

The small tokenizer has a token per byte: strings span tokens, and so do most characters.
"""

from __future__ import annotations

from typing import Any

import pytest
from helpers import BOTH_KINDS, checkpoint, engine, only, tokens, until, with_end_tokens

from asyncllm_nb import AsyncLLM, Token, TokenStream

PROMPT = tokens(15)


async def read_all(stream: TokenStream) -> list[Token]:
    return [token async for token in stream]


async def ids_of(llm: AsyncLLM, **options: Any) -> list[int]:
    """The ids that a stream into a new block yields."""
    return [token.id async for token in llm.generate(PROMPT, **options)]


# ---- forbid, stop and end tokens ---------------------------------------------------------------


async def test_forbidden_tokens_are_not_drawn() -> None:
    async with engine() as llm:
        greedy = await ids_of(llm, max_tokens=8)
        forbidden = sorted(set(greedy))
        for temperature in (0.0, 1.0):
            made = await ids_of(llm, max_tokens=30, temperature=temperature, forbid=forbidden)
            assert not set(made) & set(forbidden)
        (letter,) = llm.encode("a")
        assert await ids_of(llm, max_tokens=2, forbid=only(letter)) == [letter] * 2
        assert letter not in await ids_of(llm, max_tokens=40, temperature=9.0, forbid="a")


@pytest.mark.parametrize("family", BOTH_KINDS)
async def test_several_end_tokens(family: str) -> None:
    """The first that comes ends the stream, and the block does not hold it."""
    async with engine(family) as llm:
        ids = await ids_of(llm, temperature=1.0, seed=3, max_tokens=30)
    for ends in ([ids[9], ids[5]], [ids[17]]):
        async with engine(with_end_tokens(checkpoint(family), ends)) as llm:
            stream = llm.generate(PROMPT, temperature=1.0, seed=3, max_tokens=30)
            made = [token.id for token in await read_all(stream)]
        first = min(ids.index(end) for end in ends)
        assert made == ids[:first]
        assert stream.stop_reason == "eos"


async def test_forbidden_end_token_ends_nothing() -> None:
    async with engine() as llm:
        ids = await ids_of(llm, max_tokens=3)
    async with engine(with_end_tokens(checkpoint(), ids)) as llm:
        assert await ids_of(llm, max_tokens=5) == []
        assert len(await ids_of(llm, max_tokens=5, forbid=ids)) == 5


def readable(llm: AsyncLLM) -> dict[str, Any]:
    """Options of a stream of 30 letters from a to h."""
    letters = llm.encode("abcdefgh")
    return {"max_tokens": 30, "temperature": 1.0, "seed": 4, "forbid": only(*letters)}


async def test_stop_string_over_several_tokens() -> None:
    """It is yielded and held; `await stream` gives the text before it."""
    async with engine() as llm:
        options = readable(llm)
        plain = await llm.generate(PROMPT, **options)
        stop = plain[11:14]
        stream = llm.generate(PROMPT, **options, stop=stop)
        text = await stream
        end = plain.index(stop)
        assert text == plain[:end]
        assert stream.stop_reason == "stop"
        assert stream.block.text == llm.tokenizer.decode(PROMPT) + plain[: end + 3]
        assert len(stream.token_ids) == end + 3


async def test_several_stops_and_ids() -> None:
    async with engine() as llm:
        options = readable(llm)
        plain = await read_all(llm.generate(PROMPT, **options))
        text = "".join(plain)
        stops: list[Any] = [
            [text[20], text[8:10]],
            (plain[6].id, text[12:15]),
            plain[3].id,
            {text[5]},
        ]
        for stop in stops:
            parts = [stop] if isinstance(stop, str | int) else list(stop)
            ends = [
                text.index(p) + len(p) if isinstance(p, str) else [t.id for t in plain].index(p) + 1
                for p in parts
            ]
            stream = llm.generate(PROMPT, **options, stop=stop)
            made = await read_all(stream)
            assert "".join(made) == text[: min(ends)]
            assert stream.stop_reason == "stop"


# ---- text -------------------------------------------------------------------------------------


async def test_split_over_token_borders() -> None:
    async with engine() as llm:
        options = readable(llm) | {"max_tokens": 40, "forbid": only(*llm.encode("ab\n"))}
        text = await llm.generate(PROMPT, **options)
        assert "\n\n" in text, "the seed gives paragraphs"
        parts = [part async for part in llm.generate(PROMPT, **options).split("\n\n")]
        expected = text.split("\n\n")
        assert parts == expected[: len(expected) - (not expected[-1])]


async def test_leaving_split_ends_the_stream() -> None:
    async with engine() as llm:
        options = readable(llm) | {"max_tokens": 400, "forbid": only(*llm.encode("ab\n"))}
        stream = llm.generate(PROMPT, **options)
        async for _ in stream.split("\n\n"):
            break
        await until(lambda: stream.stop_reason)
        assert stream.stop_reason == "cancelled"
        assert stream.block.token_ids == PROMPT + stream.token_ids


async def test_text_never_shows_half_a_character() -> None:
    """Streams of the bytes of "é", "→" and "a" in any order: parts join to the decoded whole."""
    async with engine() as llm:
        letters = llm.encode("é→a")
        for seed in range(12):
            stream = llm.generate(PROMPT, max_tokens=25, temperature=3.0, seed=seed, forbid=only(*letters))
            shown = ""
            async for token in stream:
                shown += token
                whole = llm.tokenizer.decode(stream.token_ids)
                assert whole.startswith(shown)
                assert whole[len(shown) :].strip("\ufffd") == "", "all that is whole is shown"
            assert shown == llm.tokenizer.decode(stream.token_ids)


async def test_block_text_holds_back_an_unfinished_character() -> None:
    async with engine() as llm:
        first, second = llm.encode("é")
        block = (await llm.forward(llm.encode("caf"))).block
        stream = llm.generate(None, block, max_tokens=2, forbid=only(first))
        iterator = aiter(stream)
        assert await anext(iterator) == ""
        assert block.text == "caf"
        await stream.cancel()
        await llm.forward([second], block)
        assert block.text == "café"


async def test_markers_in_text_count_only_when_asked() -> None:
    async with engine() as llm:
        marked, plain = llm.encode("<|im_end|>"), llm.encode("<|im_end|>", control=False)
        assert len(marked) == 1
        assert len(plain) > 1
        block = (await llm.forward("a<|im_end|>")).block
        assert block.token_ids == llm.encode("a") + marked
        assert block.text == "a<|im_end|>"
