"""What a block, a stream and an engine look like in a notebook, and a stream that is shown live.

Knows their public attributes. How a display is kept up to date is `live`'s, colours are `markup`'s,
the table of everything is `dashboard`'s.
"""

from __future__ import annotations

import asyncio
from html import escape

from .dashboard import Observable, blocks_html
from .engine.blocks import CacheBlock
from .engine.streams import TokenStream
from .host import kernel_loop, shell
from .live import LiveHTML, Picture
from .markup import block_colour, block_label, code, error_box, muted, tail, text_box

TAIL = 200
"""Characters of a block's text that its card shows."""

_reading: set[asyncio.Task[None]] = set()
"""Tasks that read the streams shown: the event loop itself holds tasks only weakly."""


def show_html(shown: object) -> str:
    """HTML of a block, a stream or an engine, for its ``_repr_html_``."""
    if isinstance(shown, CacheBlock):
        return _block_html(shown)
    if isinstance(shown, TokenStream):
        return draw_stream(shown)[0]
    assert isinstance(shown, Observable), f"nothing to show of {type(shown).__name__}"
    return blocks_html(shown.snapshot())


def display_stream(stream: TokenStream) -> None:
    """Show a stream that nobody reads yet as the cell's output, and read it to its end.

    The text grows in place while the cell has long returned. An error of the stream ends it and is
    shown there.
    """
    loop = kernel_loop()
    if loop is None:
        raise NotImplementedError("there is no kernel to show a stream in")  # IPython: show the repr
    live = LiveHTML(stream, draw_stream, kind="stream")
    reading = _read(stream, live)
    # A stream without a name is called after the coroutine that reads it: here, after the cell.
    number = len(shell().user_ns["In"]) - 1
    reading.__qualname__ = f"cell {number}"  # type: ignore[attr-defined]
    task = loop.create_task(reading)
    _reading.add(task)
    task.add_done_callback(_reading.discard)
    live.show()


async def _read(stream: TokenStream, live: LiveHTML[TokenStream]) -> None:
    try:
        async for _ in stream:
            live.changed()
    except Exception as error:
        # The stream keeps an error of its own and `draw_stream` shows it; any other goes below.
        live.retire("" if stream.stop_reason == "error" else f"{type(error).__name__}: {error}")
    finally:
        live.retire()


def draw_stream(stream: TokenStream) -> Picture:
    """A stream's state and its whole text."""
    block = stream.block
    count = f"{len(stream.logprobs)} tokens"
    state = stream.stop_reason or stream.state
    name = stream.name or "stream"
    label = block_label(block.id, block.name)
    head = f"<b>{escape(name)}</b> {muted('writes')} {label} {muted(f'· {count} · {state}')}"
    html = f"<div>{head}</div>{text_box(stream.full_text, block_colour(block.id))}"
    text = f"{name} writes {block.name}: {count}, {state}\n{stream.full_text}"
    if stream.stop_reason == "error":
        failure = RuntimeError(stream.failure)
        return html + error_box(failure), f"{text}\n{stream.failure}"
    return html, text


def _block_html(block: CacheBlock) -> str:
    label = block_label(block.id, block.name)
    try:
        count, span, version = block.num_tokens, block.span, block.version
        text = block.text
    except ValueError:  # a freed block has a name and nothing else
        return f"{label} {muted('freed')}"
    positions = "" if span == count else f" · {span} positions"
    facts = muted(f"· {count} tokens{positions} · version {version}")
    return f"<div>{label} {facts} {code(tail(text, TAIL))}</div>"
