"""Colours, HTML pieces, the dashboard's picture of a plain snapshot; all of it without a notebook.

How displays behave in a kernel is tested in test_notebook_display.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from asyncllm_nb.dashboard import blocks_html, dashboard, draw_snapshot
from asyncllm_nb.live import LiveHTML
from asyncllm_nb.markup import (
    COLOURS,
    MARKS,
    bar,
    block_colour,
    block_label,
    block_mark,
    code,
    error_box,
    table,
    tail,
    text_box,
    text_table,
)

HOSTILE = "<script>alert('x')</script>&\"'"


def luminance(colour: str) -> float:
    """Relative luminance of #RRGGBB, as the web's contrast rules define it."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    red, green, blue = linear
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("page", ["#FFFFFF", "#111111"])
def test_block_colours_stand_out_from_light_and_dark_pages(page: str) -> None:
    assert min(contrast(colour, page) for colour in COLOURS) >= 3


def test_block_colours_and_marks_tell_56_blocks_apart() -> None:
    looks = [(block_colour(number), block_mark(number)) for number in range(57)]
    assert len(set(looks)) == 56 == len(COLOURS) * len(MARKS)
    assert all(a[0] != b[0] and a[1] != b[1] for a, b in pairwise(looks))
    assert looks[0] == looks[56]


@pytest.mark.parametrize(
    "html",
    [
        block_label(3, HOSTILE),
        code(HOSTILE),
        text_box(HOSTILE, COLOURS[0]),
        error_box(ValueError(HOSTILE)),
        table([HOSTILE], [[code(HOSTILE)]]),
    ],
)
def test_pieces_escape_what_they_show(html: str) -> None:
    assert "<script" not in html and "&lt;script&gt;" in html


def test_bar_says_the_share_as_a_number_too() -> None:
    assert "width:12.5%" in bar(0.125, COLOURS[1]) and " 12.5%" in bar(0.125, COLOURS[1])


def test_code_shows_line_breaks() -> None:
    assert "a⏎b" in code("a\nb")


@pytest.mark.parametrize(("text", "expected"), [("abc", "abc"), ("abcd", "…cd"), ("", ""), ("a" * 99, "…aa")])
def test_tail(text: str, expected: str) -> None:
    assert tail(text, 3) == expected


def test_text_table_aligns() -> None:
    assert text_table(("a", "bbb"), [["1111", "2"]]) == "a     bbb\n1111  2"


def test_table_refuses_rows_of_another_length() -> None:
    with pytest.raises(ValueError, match="zip"):
        table(["a", "b"], [["1"]])


# The dashboard's picture


def block(number: int, name: str, **other: Any) -> dict[str, Any]:
    facts = {"tokens": 35, "span": 36, "version": 7, "pages": 3, "slot": 0, "text": "the end"}
    return {"id": number, "name": name, **facts, "writer": None, "readers": [], **other}


def stream(name: str | None, **other: Any) -> dict[str, Any]:
    facts = {"state": "running", "reason": "", "tokens": 5, "text": "hello", "block": "w"}
    return {"name": name, **facts, "view": ["p", "w"], **other}


def snapshot(**other: Any) -> dict[str, Any]:
    pools = {"pages_total": 24, "pages_free": 18, "slots_total": 0, "slots_free": 0}
    return {
        "name": "llm",
        "model": "small",
        "step": 12,
        "paused": False,
        "closed": False,
        "blocks": [block(1, "p", readers=["say"]), block(2, "w", writer="say")],
        "streams": [stream("say")],
        "waiting": [],
        "pools": {**pools, "page_tokens": 16},
        **other,
    }


def words(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html))


def test_draw_snapshot_shows_all_facts() -> None:
    html, text = draw_snapshot(snapshot())
    shown = words(html)
    facts = ("small", "running", "step 12", "6 of 24 pages", "35", "36", "7", "12.5%", "the end")
    for fact in facts:
        assert fact in shown, fact
    assert re.search("p → .* w", shown) and block_mark(2) in shown and "hello" in shown
    assert "say" in text and "6 of 24 pages" in text and "<" not in text


@pytest.mark.parametrize(
    ("change", "words_of_it"),
    [
        ({"paused": True}, "paused"),
        ({"closed": True}, "closed"),
        ({"streams": []}, "idle"),
        ({"streams": [], "waiting": ["forward"]}, "queued: forward"),
        ({"streams": [stream("say", state="waiting", reason="memory")]}, "waits: memory"),
        ({"streams": [stream("say", state="ended", reason="length")]}, "ended: length"),
        ({"streams": [stream(None, state="new")]}, "not read yet"),
        ({"streams": [stream("say", view=["gone", "w"])]}, "gone → "),
        ({"pools": {**snapshot()["pools"], "slots_total": 9, "slots_free": 2}}, "7 of 9 slots"),
    ],
)
def test_draw_snapshot_shows_states(change: dict[str, Any], words_of_it: str) -> None:
    html, text = draw_snapshot(snapshot(**change))
    assert words_of_it in words(html)


def test_draw_snapshot_without_blocks() -> None:
    html, text = draw_snapshot(snapshot(blocks=[], streams=[]))
    assert "<table" not in html and text.startswith("llm: idle")


def test_draw_snapshot_escapes_names_and_texts() -> None:
    hostile = snapshot(
        name=HOSTILE,
        model=HOSTILE,
        blocks=[block(1, HOSTILE, text=HOSTILE, writer=HOSTILE, readers=[HOSTILE])],
        streams=[stream(HOSTILE, reason=HOSTILE, text=HOSTILE, view=[HOSTILE, "unknown<"])],
        waiting=[HOSTILE],
    )
    html, _ = draw_snapshot(hostile)
    assert "<script" not in html and "unknown<" not in html


def test_pictures_use_nothing_that_an_untrusted_notebook_loses() -> None:
    html, _ = draw_snapshot(snapshot())
    html += blocks_html(snapshot()) + error_box(ValueError("x")) + text_box("x", COLOURS[0])
    for lost in ("<svg", "<style", "aria-", "role=", "var(", "inherit", "currentColor"):
        assert lost not in html, lost


# Outside a notebook


class FakeLLM:
    """What a dashboard can look at."""

    def __init__(self) -> None:
        self.observers: list[Callable[[], None]] = []

    def snapshot(self) -> dict[str, Any]:
        return snapshot()

    def observe(self, callback: Callable[[], None]) -> Callable[[], None]:
        self.observers.append(callback)
        return lambda: self.observers.remove(callback)


def test_dashboard_does_nothing_outside_a_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM()
    dashboard(llm)
    assert llm.observers == [] and capsys.readouterr().out == ""


async def test_live_html_does_nothing_outside_a_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    llm, drawn = FakeLLM(), []

    def draw(source: FakeLLM) -> tuple[str, str]:
        drawn.append(source)
        return "", ""

    live = LiveHTML(llm, draw, kind="test")
    live.show()
    live.changed()
    live.retire("note")
    assert live.retired and drawn == [] and capsys.readouterr().out == ""
