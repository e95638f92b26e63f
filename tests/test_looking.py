"""What panels of attention and states make an engine measure, and the readings that they ask for."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from helpers import engine, tokens, until

from asyncllm_nb import AsyncLLM
from asyncllm_nb.engine.measuring import Wanted
from asyncllm_nb.engine.streams import TokenStream
from asyncllm_nb.looking import Looking
from asyncllm_nb.watching import Watch
from asyncllm_nb.widgets import Dashboard


@pytest.mark.parametrize(
    ("panels", "choices", "wanted"),
    [
        ((), [{}], None),
        (("blocks", "streams"), [{}], None),
        (("attention",), [{}], Wanted(shares=True)),
        (("attention",), [{}, {"attention.tokens": True}], Wanted(shares=True, tokens=True)),
        (("states",), [{}], Wanted(norms=True, layers=frozenset({0}))),
        (
            ("states",),
            [{"states.layer": "4"}, {"states.layer": "1"}],
            Wanted(norms=True, layers=frozenset({1, 4})),
        ),
        (("states",), [{"states.layer": "3"}], Wanted(norms=True, layers=frozenset({0}))),
    ],
)
async def test_panels_on_screen_are_measured_for(
    panels: tuple[str, ...], choices: list[dict[str, Any]], wanted: Wanted | None
) -> None:
    async with engine("qwen3_5") as llm:
        looking = Looking(llm._engine)
        looking.watched(panels, choices)
        assert llm.instruments.wanted() == wanted
        looking.watched((), choices)
        assert llm.instruments.wanted() is None


async def test_models_without_states_have_none_to_measure() -> None:
    async with engine("llama") as llm:
        looking = Looking(llm._engine)
        looking.watched(("states", "attention"), [{"states.layer": "0"}])
        assert llm.instruments.wanted() == Wanted(shares=True, norms=True)


async def a_stream(llm: AsyncLLM) -> TokenStream:
    """A stream of 5 tokens that has ended, under a view of two blocks; the first of this engine."""
    first, second = await llm.create_blocks("first", "second")
    await llm.forward(tokens(9), first)
    stream = llm.generate(tokens(2), [first, second], max_tokens=5, name="think")
    await stream
    await llm.drain()
    return stream


async def test_the_state_of_now_is_read_without_a_step() -> None:
    async with engine("qwen3_5") as llm:
        stream = await a_stream(llm)
        steps = len(llm.trace)
        view = [block.id for block in stream.view]
        question = {"what": "states", "n": 0, "exact": False, "r": stream.number, "layer": 1, "view": view}
        record = await Looking(llm._engine).read(question)
        exact = await llm.instruments.states(stream.view, 1)
        assert record is not None and record["t"] == "states" and record["n"] == steps == len(llm.trace)
        (row,) = record["rows"]
        scale = np.array(row["peak"])[None, :, None, None] / 127
        found = np.frombuffer(row["q"], np.int8).reshape(row["shape"]) * scale
        np.testing.assert_allclose(found, exact, atol=float(scale.max()))
        await llm.free_block(stream.view[0])
        assert await Looking(llm._engine).read(question) is None


async def test_readings_of_a_step_come_from_the_ring() -> None:
    async with engine("qwen3_5") as llm:
        llm.instruments.watch(tokens=True, states=[1])
        stream = await a_stream(llm)
        looking, last = Looking(llm._engine), len(llm.trace)
        other = (await llm.forward(tokens(3))).block
        ask = {"what": "weights", "n": last, "r": stream.number}
        for exact in (True, False):
            record = await looking.read({**ask, "exact": exact})
            assert record is not None and record["n"] == last
            assert [row["r"] for row in record["rows"]] == [stream.number]
            assert record["rows"][0]["lengths"] == [9, 7]
        states = await looking.read({**ask, "what": "states", "exact": True, "layer": 1})
        assert states is not None and states["layer"] == 1
        assert await looking.read({**ask, "exact": True, "n": last + 1}) is None
        assert await looking.read({**ask, "exact": True, "n": 999}) is None
        with pytest.raises(ValueError, match="no reading 'norms'"):
            await looking.read({**ask, "what": "norms"})
        assert other.num_tokens == 3


async def test_a_view_gets_its_reading_and_its_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the widget's messages: the answer carries bytes, and is for the page that asked."""
    async with engine("qwen3_5") as llm:
        stream = await a_stream(llm)
        watch = Watch(llm._engine)
        widget = Dashboard()
        sent: list[tuple[dict[str, Any], list[bytes]]] = []
        monkeypatch.setattr(
            widget, "send", lambda content, buffers=None: sent.append((content, buffers or []))
        )
        watch.attach(widget)

        def say(kind: str, **fields: Any) -> None:
            widget._receive(None, {"type": kind, "client": "page", **fields}, [])

        say("visible", visible=True, panels=["states"])
        say("choose", choices={"states.layer": "2"})
        question = {"what": "states", "n": 0, "exact": False, "r": stream.number}
        view = [block.id for block in stream.view]
        say("read", id=5, layer=2, view=view, **question)
        say("read", id=6, layer=3, view=view, **question)
        await until(lambda: sum(message["type"] == "reading" for message, _ in sent) == 2)
        assert llm.instruments.wanted() == Wanted(norms=True, layers=frozenset({2}))
        answers = {
            message["id"]: (message, buffers) for message, buffers in sent if message["type"] == "reading"
        }
        message, buffers = answers[5]
        assert message["client"] == "page" and message["records"][0]["rows"][0]["q"] == {"$b": 0}
        assert len(buffers[0]) == np.prod(message["records"][0]["rows"][0]["shape"])
        assert answers[6][0]["records"] == []
        assert any("layer 3 has no state" in m["text"] for m, _ in sent if m["type"] == "error")
        say("visible", visible=False, panels=[])
        await until(lambda: llm.instruments.wanted() is None)
        widget.close()
        await asyncio.sleep(0)
