"""The block diagram: rows of live views, in words and as a picture that needs no page around it."""

from __future__ import annotations

import base64
import re
import xml.etree.ElementTree as ET

import pytest
from helpers import engine, filled_block, tokens

from asyncllm_nb import Agent, diagram
from asyncllm_nb.markup import COLOURS


def shapes(svg: str) -> tuple[list[str], list[tuple[str | None, str | None]]]:
    """All texts of a picture, and (fill, stroke) of its rectangles."""
    parts = list(ET.fromstring(svg))
    texts = [part.text or "" for part in parts if part.tag.endswith("text")]
    boxes = [(p.get("fill"), p.get("stroke")) for p in parts if p.tag.endswith("rect")]
    return texts, boxes


async def test_rows_are_the_views_of_streams_probes_and_forwards() -> None:
    async with engine() as llm:
        assert diagram(llm).text == "no view has been read yet"
        assert "no view" in diagram(llm)._repr_html_()
        prompt = await filled_block(llm, tokens(5), "prompt")
        thinker, writer = await llm.create_blocks("thinker", "writer")
        await llm.generate(tokens(2), [prompt, thinker], max_tokens=3, name="think")
        await llm.generate(tokens(2), [prompt, thinker, writer], max_tokens=3, name="write")
        await llm.probe("ok?", [prompt, thinker])
        shown = diagram(llm)
        assert shown.text.splitlines() == [
            "forward writes prompt",
            "think reads prompt and writes thinker",
            "write reads prompt, thinker and writes writer",
            "probe reads prompt, thinker and writes nothing",
        ]
        assert repr(shown) == f"Blocks of llm\n{shown.text}"
        # A stream of the same name in another view: its row is the newest one.
        await llm.generate(tokens(2), [writer, prompt], max_tokens=2, name="think")
        assert "think reads writer and writes prompt" in diagram(llm).text
        assert "writes thinker" not in diagram(llm).text


async def test_a_stream_that_has_not_run_yet_is_there_and_freed_blocks_are_not() -> None:
    async with engine() as llm:
        prompt = await filled_block(llm, tokens(5), "prompt")
        other = await filled_block(llm, tokens(5), "other")
        stream = llm.generate(tokens(2), [prompt, other], max_tokens=5, name="think")
        await stream.__anext__()
        assert "think reads prompt and writes other" in diagram(llm).text
        await stream.cancel()
        await llm.free_block(prompt)
        assert diagram(llm).text == "forward writes other"


async def test_an_agent_shows_the_rows_that_write_its_blocks() -> None:
    async with engine("llama") as llm:
        agent = Agent(llm, "solver")
        await filled_block(llm, tokens(3), "stray")
        notes = await agent.block("notes")

        @agent.coroutine
        async def think() -> None:
            await llm.generate(tokens(3), [notes], max_tokens=2)

        await agent.start()
        shown = diagram(agent)
        assert shown.title == "Blocks of agent solver" and shown.text == "think writes notes"
        with pytest.raises(TypeError, match="draws an AsyncLLM or an Agent, not str"):
            diagram("solver")  # type: ignore[arg-type]


async def test_the_picture_says_the_same_as_the_words() -> None:
    async with engine() as llm:
        prompt = await filled_block(llm, tokens(5), "<prompt & co>")
        thinker = await llm.create_block("thinker")
        await llm.generate(tokens(2), [prompt, thinker], max_tokens=3, name="think")
        shown = diagram(llm)
        texts, boxes = shapes(shown.svg)
        assert texts == ["forward", "■ <prompt & co>", "think", "■ <prompt & co>", "▲ thinker"]
        frames = [stroke for _, stroke in boxes if stroke]
        assert frames == [COLOURS[1], COLOURS[2]]  # around what is written
        assert [fill for fill, stroke in boxes if not stroke][1::2][0] == COLOURS[1]
        html = shown._repr_html_()
        assert "<svg" not in html and "<style" not in html
        found = re.search(r'src="data:image/svg\+xml;base64,([^"]+)" alt="([^"]+)"', html)
        assert found is not None
        assert base64.b64decode(found[1]).decode() == shown.svg
        name = "&lt;prompt &amp; co&gt;"
        assert found[2] == f"forward writes {name}; think reads {name} and writes thinker"
