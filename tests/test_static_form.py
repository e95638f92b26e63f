"""The picture that a saved notebook keeps: a PNG without a drawing library, and tables."""

from __future__ import annotations

import base64
import re
import struct
import zlib

import pytest
from helpers import engine, tokens

from asyncllm_nb.engine.trace import RowRecord, StepRecord
from asyncllm_nb.static_form import GREY, LANE, RED, draw_static, draw_steps
from asyncllm_nb.widgets.picture import CLEAR, Raster


def decoded(png: bytes) -> tuple[int, int, list[bytes]]:
    """Width, height and rows of colour numbers of a PNG file; checks every chunk."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    at, data, size = 8, b"", (0, 0)
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        body = png[at + 8 : at + 8 + length]
        assert struct.unpack(">I", png[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + body)
        if kind == b"IHDR":
            size = struct.unpack(">II", body[:8])
            assert body[8:] == bytes([8, 3, 0, 0, 0])
        data += body if kind == b"IDAT" else b""
        at += 12 + length
    width, height = size
    raw = zlib.decompress(data)
    assert len(raw) == height * (width + 1)
    return width, height, [raw[y * (width + 1) + 1 : (y + 1) * (width + 1)] for y in range(height)]


def test_raster_is_a_png() -> None:
    raster = Raster(7, 3, ["#FF0000", "#00FF00"])
    raster.fill(1, 0, 2, 2, 1)
    raster.fill(5.6, 2, 99, 99, 2)
    raster.fill(0, 2, 0.01, 0.01, 2)
    raster.fill(70, 70, 1, 1, 1)
    rows = [[0, 1, 1, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0, 0], [2, 0, 0, 0, 0, 0, 2]]
    assert decoded(raster.png()) == (7, 3, [bytes(row) for row in rows])


@pytest.mark.parametrize(("width", "height"), [(0, 5), (5, -1), (20_000, 5)])
def test_raster_of_no_size(width: int, height: int) -> None:
    with pytest.raises(ValueError, match="picture"):
        Raster(width, height, [])


def test_draw_steps_shows_kinds_and_failures() -> None:
    rows = (
        RowRecord("a", "decode", "x", (("x", 1),), 1, (5,), 1, (3,)),
        RowRecord("b", "probe", None, (("x", 1),), 4, (5,) * 4, -1, (3,)),
    )
    steps = [StepRecord(1, 0, 0, rows, (), 1, 1), StepRecord(2, 0, 0, (), (), 1, 1, "failed")]
    raster = draw_steps(steps, ["a", "b"])
    assert raster.height == 2 * LANE
    assert raster.pixel(5, 1) == CLEAR and raster.pixel(5, LANE // 2) == 4
    assert raster.pixel(5, LANE + 2) == GREY and raster.pixel(15, 3) == RED


async def test_static_form_of_a_run() -> None:
    async with engine("llama") as llm:
        prompt, notes = await llm.create_blocks("prompt", "<notes>")
        await llm.forward(tokens(20), [prompt])
        await llm.generate(tokens(3), [prompt, notes], max_tokens=6, name="a & b")
        html, text = draw_static(llm._engine)
        assert html.startswith("<details><summary>Last picture of llm") and "open" not in html[:60]
        assert "&lt;notes&gt;" in html and "a &amp; b" in html and "<notes>" not in html
        assert f"{llm.trace.ledger.encoded} tokens encoded" in html and "prompt" in text
        (uri,) = re.findall(r'src="data:image/png;base64,([^"]+)"', html)
        width, height, rows = decoded(base64.b64decode(uri))
        assert (width, height) == (900, 2 * LANE)
        assert {number for row in rows for number in row} == {CLEAR, 2, 3}
        for lost in ("<svg", "<style", "var(", "<script"):
            assert lost not in html


async def test_static_form_of_nothing() -> None:
    async with engine("llama") as llm:
        html, text = draw_static(llm._engine)
        assert "step 0" in html and "<img" not in html and "idle" in text
