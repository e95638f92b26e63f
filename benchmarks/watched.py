"""What the dashboard costs: throughput with it open against closed, and how large a widget is when it opens.

Knows the API and the messages between kernel and view. The page is a stand-in in this process that
answers as a browser does; what a widget sends is serialised as a kernel serialises it. How long a browser
paints is what `benchmarks.paint` measures in a real one.

    python -m benchmarks.watched [model] [rounds]
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncllm_nb import AsyncLLM
from asyncllm_nb.testing import make_checkpoint
from asyncllm_nb.watching import watch
from asyncllm_nb.widgets import Dashboard

from .rounds import Compared, in_turns

STREAMS, TOKENS = 4, 120
PROMPT = list(range(5, 85))

Message = dict[str, Any]


class Page:
    """A widget and the page that shows it."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.choices: Message = {}
        self.num_bytes = 0
        watch(llm._engine).attach(self)  # type: ignore[arg-type]

    def handle(self, handler: Callable[[Any, Message], None], on_show: Callable[[], None]) -> None:
        self._handler = handler

    def send(self, content: Message, buffers: list[bytes] | None = None) -> None:
        self.num_bytes += len(json.dumps(content)) + sum(map(len, buffers or []))
        if "records" in content:
            end = content["first"] + len(content["records"])
            asyncio.get_running_loop().call_later(0.02, lambda: self.say("ack", next=end))

    def choose(self, choices: Message) -> None:
        self.choices = choices

    def say(self, kind: str, **more: Any) -> None:
        self._handler(self, {"type": kind, "client": "page", **more})

    def show(self, panels: list[str]) -> None:
        """Scroll the panels into view; none: away."""
        self.say("ready" if panels else "ping")
        self.say("visible", visible=bool(panels), panels=panels)


async def tokens_per_second(llm: AsyncLLM) -> float:
    """Several coroutines behind a prompt that they share."""
    prompt, *blocks = await llm.create_blocks(1 + STREAMS)
    await llm.forward(PROMPT, [prompt])
    began = time.perf_counter()
    streams = (llm.generate([5 + i], [prompt, block], max_tokens=TOKENS) for i, block in enumerate(blocks))

    async def read(stream: Any) -> int:
        return len([token async for token in stream])

    made = sum(await asyncio.gather(*map(read, streams)))
    return made / (time.perf_counter() - began)


async def compare(model: str, rounds: int) -> tuple[Compared, int]:
    """Open against closed, in turns, and the bytes that went to the page."""
    async with AsyncLLM(model, cache_tokens=8192) as llm:
        page = Page(llm)
        panels = [name for name in Dashboard.PANELS if name not in ("attention", "states")]

        async def opened() -> float:
            page.show(panels)
            return await tokens_per_second(llm)

        async def closed() -> float:
            page.show([])
            await asyncio.sleep(0.2)
            return await tokens_per_second(llm)

        return await in_turns(opened, closed, rounds), page.num_bytes


def main() -> None:
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 7
    with tempfile.TemporaryDirectory() as folder:
        tiny = str(make_checkpoint(Path(folder) / "tiny", "qwen3_5", tokenizer=True, eos_token_id=None))
        found, sent = asyncio.run(compare(sys.argv[1] if len(sys.argv) > 1 else tiny, rounds))
    opening = len(json.dumps(Dashboard().get_state(), default=repr).encode())
    print(f"tokens/s open {found.median_ours:.0f}, closed {found.median_theirs:.0f}: {found.ratio:.3f}")
    print(f"ratios {' '.join(f'{ratio:.3f}' for ratio in found.ratios)}; sent {sent:,} bytes")
    print(f"a dashboard opens with {opening:,} bytes")


if __name__ == "__main__":
    main()
