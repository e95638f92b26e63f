"""What a person asks for in a view acts on the engine: while it runs, from any thread, and answered."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import engine, tokens, turns, until

from asyncllm_nb import Agent, AsyncLLM, CacheBlock, ToolDenied
from asyncllm_nb.controls import kernel_note
from asyncllm_nb.watching import watch

Message = dict[str, Any]


class Buttons:
    """A widget without a browser: asks for things from another thread, as a notebook's kernel does."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.sent: list[Message] = []
        self.choices: Message = {}
        self._count = 0
        watch(llm._engine).attach(self)  # type: ignore[arg-type]

    def handle(self, handler: Callable[[Any, Message], None], on_show: Callable[[], None]) -> None:
        self._handler = handler

    def send(self, content: Message, buffers: list[bytes] | None = None) -> None:
        self.sent.append(content)

    def choose(self, choices: Message) -> None:
        self.choices = choices

    async def ask(self, command: str, **more: Any) -> Message:
        """The kernel's answer."""
        self._count += 1
        number = self._count
        message = {"type": "control", "client": "c", "id": number, "command": command, **more}
        thread = threading.Thread(target=self._handler, args=(self, message))
        thread.start()
        thread.join()
        await until(lambda: self._answers(number))
        return self._answers(number)[0]

    def _answers(self, number: int) -> list[Message]:
        return [m for m in self.sent if m["type"] == "answer" and m["id"] == number]


async def endless(llm: AsyncLLM, view: list[CacheBlock]) -> None:
    async for _ in llm.generate(tokens(3), view, max_tokens=4000):
        pass


def records(llm: AsyncLLM, kind: str) -> list[Message]:
    return [record for record in llm.trace.plain(0) if record["t"] == kind]


async def test_pause_step_and_run_act_at_once_while_coroutines_run() -> None:
    async with engine("llama") as llm:
        buttons, block = Buttons(llm), await llm.create_block("b")
        task = asyncio.create_task(endless(llm, [block]))
        await until(lambda: len(llm.trace) > 3)
        for _ in range(5):
            before = len(llm.trace)
            assert (await buttons.ask("pause"))["ok"]
            made = len(llm.trace)
            assert made - before <= 2, "one step runs to its end"
            await turns()
            assert len(llm.trace) <= made + 1
            at_rest = len(llm.trace)
            assert (await buttons.ask("step", n=1))["text"] == "1 step made"
            assert (await buttons.ask("step", n=3))["text"] == "3 steps made"
            assert len(llm.trace) == at_rest + 4
            assert (await buttons.ask("run"))["ok"]
            await until(lambda n=at_rest: len(llm.trace) > n + 6)  # type: ignore[misc]
        task.cancel()
        await asyncio.wait([task])
        assert [r["what"] for r in records(llm, "control")] == ["pause", "step", "step", "run"] * 5


async def test_cancel_ends_the_coroutine_that_it_names() -> None:
    async with engine("llama") as llm:
        buttons = Buttons(llm)
        blocks = await llm.create_blocks(5)
        tasks = [asyncio.create_task(endless(llm, [block])) for block in blocks]
        await until(lambda: len(llm.trace.state()["tasks"]) == 5 and len(llm.trace) > 3)
        for left, number in enumerate((3, 1, 5, 2, 4)):
            answer = await buttons.ask("cancel", task=number)
            assert answer["ok"] and answer["text"] == "cancelled"
            assert tasks[number - 1].cancelled()
            assert sum(not task.done() for task in tasks) == 4 - left
        answer = await buttons.ask("cancel", task=1)
        assert not answer["ok"] and "ended already" in answer["text"]


async def test_say_puts_plain_text_into_a_block_while_it_is_written() -> None:
    async with engine("llama") as llm:
        buttons = Buttons(llm)
        prompt, notes = await llm.create_blocks("prompt", "notes")
        await llm.forward(tokens(9), [prompt])
        task = asyncio.create_task(endless(llm, [prompt, notes]))
        await until(lambda: len(llm.trace) > 4)
        text = "stop <|im_end|> now"
        answer = await buttons.ask("say", block=notes.id, text=text)
        assert answer["ok"], answer
        ids = llm.encode(text, control=False)
        assert len(ids) == len(text), "markers of a person are letters"
        found = notes.token_ids
        assert any(found[at : at + len(ids)] == ids for at in range(len(found)))
        said = next(row for step in llm.trace.steps for row in step.rows if row.name == "say")
        assert [name for name, _ in said.view] == ["prompt", "notes"]
        before = len(llm.trace)
        await until(lambda: len(llm.trace) > before + 3)
        task.cancel()
        await asyncio.wait([task])


async def test_say_into_a_block_that_streams_only_read_sees_what_stands_before_it() -> None:
    async with engine("llama") as llm:
        buttons = Buttons(llm)
        prompt, box, notes = await llm.create_blocks("prompt", "input", "notes")
        await llm.forward(tokens(9), [prompt])
        task = asyncio.create_task(endless(llm, [prompt, box, notes]))
        await until(lambda: len(llm.trace) > 4)
        answer = await buttons.ask("say", block=box.id, text="wait")
        assert answer["ok"], answer
        said = next(row for step in llm.trace.steps for row in step.rows if row.name == "say")
        assert [name for name, _ in said.view] == ["prompt", "input"]
        task.cancel()
        await asyncio.wait([task])


async def test_agents_are_told_and_calls_decided() -> None:
    async with engine("llama") as llm:
        buttons, agent = Buttons(llm), Agent(llm, "solver")

        @agent.tool(approve=True)
        async def send(text: str) -> str:
            return text.upper()

        @agent.coroutine
        async def act() -> str:
            try:
                return str(await send("a"))
            except ToolDenied as denied:
                return str(denied)

        assert (await buttons.ask("start_agent", agent="solver"))["text"] == "all started"
        await until(lambda: agent.pending)
        answer = await buttons.ask("approve", agent="solver", call=1)
        assert answer["ok"] and answer["text"] == "call 1, send(text='a') is approved"
        assert await agent == {"act": "A"}
        answer = await buttons.ask("approve", agent="solver", call=1)
        assert not answer["ok"] and "past deciding: done" in answer["text"]
        assert (await buttons.ask("restart_coroutine", agent="solver", coroutine="act"))["ok"]
        await until(lambda: agent.pending)
        assert (await buttons.ask("deny", agent="solver", call=2, reason="not now"))["ok"]
        assert await agent == {"act": "call 2, send(text='a'): not now"}
        assert (await buttons.ask("start_agent", agent="solver", coroutine="act"))["text"] == "act started"
        await until(lambda: agent.pending)
        assert (await buttons.ask("stop_agent", agent="solver", coroutine="act"))["text"] == "act stopped"
        assert agent.state == "ended" and agent.calls[-1].state == "cancelled"
        answer = await buttons.ask("stop_agent", agent="solvr")
        assert not answer["ok"] and "did you mean 'solver'" in answer["text"]
        answer = await buttons.ask("deny", agent="solver", call=9)
        assert not answer["ok"] and "call 9 has ended long ago" in answer["text"]


async def test_speed_lets_time_pass_between_steps() -> None:
    async with engine("llama") as llm:
        buttons = Buttons(llm)
        (block,) = await llm.create_blocks("b")
        assert (await buttons.ask("speed", interval=0.05))["ok"]
        await llm.generate(tokens(3), [block], max_tokens=4)
        begun = [step.started for step in llm.trace.steps]
        assert min(b - a for a, b in zip(begun, begun[1:], strict=False)) > 0.045
        assert (await buttons.ask("speed", interval=0))["text"] == "full speed"
        assert records(llm, "speed")[-1]["interval"] == 0


async def test_mark_is_recorded() -> None:
    async with engine("llama") as llm:
        buttons = Buttons(llm)
        await llm.forward(tokens(3))
        assert (await buttons.ask("mark", step=1, note="here"))["ok"]
        assert llm.trace.state()["marks"] == [{"n": 1, "note": "here"}]


@pytest.mark.parametrize(
    ("command", "more", "said"),
    [
        ("stop", {}, "no command 'stop'"),
        ("say", {"block": 99, "text": "x"}, "freed"),
        ("say", {"block": 1, "text": ""}, "no text"),
        ("speed", {"interval": -1}, "0 to 60"),
        ("cancel", {"task": 7}, "ended already"),
    ],
)
async def test_what_cannot_be_done_is_said(command: str, more: Message, said: str) -> None:
    async with engine("llama") as llm:
        buttons = Buttons(llm)
        block = await llm.create_block()
        answer = await buttons.ask(command, **more)
        assert not answer["ok"] and said in answer["text"]
        assert block.num_tokens == 0


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("6.31.0", "only when the running cell has ended"),
        ("7.3.0", "commsOverSubshells"),
        ("7.4.0", "while a cell awaits"),
        ("8.0.1", "while a cell awaits"),
    ],
)
def test_kernel_note_says_when_a_click_is_late(
    monkeypatch: pytest.MonkeyPatch, version: str, said: str
) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace(__version__=version))
    assert said in kernel_note() and version in kernel_note()
    monkeypatch.delitem(sys.modules, "ipykernel")
    assert kernel_note() == ""


async def test_after_close_the_answer_says_so() -> None:
    async with engine("llama") as llm:
        buttons = Buttons(llm)
        await llm.close()
        answer = await buttons.ask("run")
        assert not answer["ok"] and "closed" in answer["text"]
