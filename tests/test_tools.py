"""Tools of an agent: gates, approvals, time limits, threads, and what the trace says of each call."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable
from typing import Any

import pytest
from helpers import answer_of, engine, tokens, turns, until

from asyncllm_nb import Agent, AsyncLLMError, ToolDenied
from asyncllm_nb.toolbox import CALLS_KEPT
from asyncllm_nb.tools import ToolCall


def begun(call: Awaitable[Any]) -> asyncio.Task[Any]:
    """A task of its answer, exceptions included."""
    return asyncio.create_task(answer_of(call))


def states(agent: Agent) -> list[tuple[str, str]]:
    """Tool and state of each call."""
    return [(call.name, call.state) for call in agent.calls]


def recorded(agent: Agent, number: int) -> list[str]:
    """States of a call in the trace, in order."""
    records = agent.llm.trace.plain(0)
    return [r["state"] for r in records if r["t"] == "tool" and r["c"] == number]


async def test_a_tool_runs_in_a_thread_while_the_model_goes_on() -> None:
    async with engine() as llm:
        agent, go_on = Agent(llm, "solver"), threading.Event()

        @agent.tool
        def search(query: str, limit: int = 3) -> str:
            """Finds things."""
            assert go_on.wait(30)
            return f"{limit} of {query} in {threading.current_thread() is threading.main_thread()}"

        @agent.coroutine
        async def act() -> str:
            return str(await search("bees"))

        @agent.coroutine
        async def think() -> None:
            await llm.generate(tokens(3), max_tokens=7)
            go_on.set()

        assert await agent.start() == {"act": "3 of bees in False", "think": None}
        assert agent.tools == {"search": search} and search.__doc__ == "Finds things."
        (call,) = agent.calls
        assert call.caller == "act" and call.arguments == "query='bees'" and call.state == "done"
        assert recorded(agent, call.number) == ["running", "done"]
        assert repr(search) == "<Tool search(query: 'str', limit: 'int' = 3) -> 'str'>"


async def test_an_async_tool_is_awaited_and_errors_come_through() -> None:
    async with engine("llama") as llm:
        agent = Agent(llm, "solver")

        @agent.tool
        async def send(text: str) -> str:
            await turns(3)
            if not text:
                raise LookupError("nothing to send")
            return text.upper()

        assert await send("x") == "X"
        with pytest.raises(LookupError, match="nothing to send"):
            await send("")
        with pytest.raises(TypeError, match="missing a required argument: 'text'"):
            await send()
        assert states(agent) == [("send", "done"), ("send", "failed")]
        assert agent.calls[1].reason == "LookupError: nothing to send" and agent.calls[1].caller == ""


async def test_a_gate_holds_a_call_until_it_is_open() -> None:
    async with engine("llama") as llm:
        agent, sent = Agent(llm, "solver"), list[str]()

        @agent.tool(gate="checked")
        async def send(text: str) -> None:
            sent.append(text)

        calling = begun(send("x"))
        await turns()
        (call,) = agent.pending
        assert call.state == "gate" and sent == []
        with pytest.raises(ValueError, match="waits for its gate and for nobody's approval"):
            call.approve()
        agent.event("checked").set()
        assert await calling is None and sent == ["x"] and agent.pending == []
        assert await begun(send("y")) is None  # it stays open
        assert recorded(agent, call.number) == ["gate", "running", "done"]


async def test_a_call_can_be_denied_at_its_gate() -> None:
    async with engine("llama") as llm:
        agent, sent = Agent(llm, "solver"), list[str]()

        @agent.tool(gate=asyncio.Event(), approve=True)
        def send(text: str) -> None:
            sent.append(text)

        calling = begun(send("x"))
        await turns()
        agent.pending[0].deny("the answer is wrong")
        denied = await calling
        assert isinstance(denied, ToolDenied) and isinstance(denied, AsyncLLMError)
        assert str(denied) == "call 1, send(text='x'): the answer is wrong" and sent == []
        assert agent.calls[0].state == "denied" and agent.pending == []


async def test_a_person_approves_from_any_thread_before_or_behind_the_gate() -> None:
    async with engine("llama") as llm:
        agent = Agent(llm, "solver")
        gate = agent.event("checked")

        @agent.tool(gate=gate, approve=True)
        def send(text: str) -> str:
            return text

        first, second = begun(send("a")), begun(send("b"))
        await turns()
        early, late = agent.pending
        await asyncio.to_thread(early.approve)
        await turns()
        assert not first.done() and early.state == "gate"
        gate.set()
        assert await first == "a"
        await turns()
        assert late.state == "asking" and agent.pending == [late] and not second.done()
        await asyncio.to_thread(late.approve)
        assert await second == "b"
        for call in (early, late):
            with pytest.raises(ValueError, match="past deciding: done"):
                call.deny()
        assert recorded(agent, late.number) == ["gate", "asking", "running", "done"]


async def test_a_call_is_decided_once() -> None:
    async with engine("llama") as llm:
        agent = Agent(llm, "solver")

        @agent.tool(approve=True)
        def send(text: str) -> str:
            return text

        calling = begun(send("a"))
        await turns()
        (call,) = agent.pending
        with pytest.raises(TypeError, match="the reason is text"):
            call.deny(3)  # type: ignore[arg-type]
        call.deny("no")
        with pytest.raises(ValueError, match=r"past deciding: it was denied \(no\)"):
            call.approve()
        assert isinstance(await calling, ToolDenied)
        assert repr(call) == "<ToolCall 1 send(text='a'), denied: no>"


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_policy_decides(is_async: bool) -> None:
    async def slow_policy(call: ToolCall) -> bool:
        await turns(3)
        return policy(call)

    def policy(call: ToolCall) -> bool:
        if call.arguments == "text='why'":
            call.deny("one should not")
        return call.arguments != "text='no'"

    async with engine("llama") as llm:
        agent = Agent(llm, "solver")

        @agent.tool(approve=slow_policy if is_async else policy)
        def send(text: str) -> str:
            return text

        assert await send("yes") == "yes"
        with pytest.raises(ToolDenied, match="its policy said no"):
            await send("no")
        with pytest.raises(ToolDenied, match="one should not"):
            await send("why")
        assert recorded(agent, 2) == ["asking", "denied"]
        assert [call.state for call in agent.calls] == ["done", "denied", "denied"]


async def test_a_person_is_faster_than_a_slow_policy() -> None:
    never = asyncio.Event()

    async def policy(_: ToolCall) -> bool:
        return await never.wait()

    async with engine("llama") as llm:
        agent = Agent(llm, "solver")

        @agent.tool(approve=policy)
        def send(text: str) -> str:
            return text

        calling = begun(send("a"))
        await turns()
        agent.pending[0].approve()
        assert await calling == "a"


async def test_a_policy_that_answers_nothing_lets_nothing_through() -> None:
    async with engine("llama") as llm:
        agent, sent = Agent(llm, "solver"), list[str]()

        @agent.tool(approve=lambda call: None)  # type: ignore[arg-type,return-value]
        def send(text: str) -> None:
            sent.append(text)

        with pytest.raises(TypeError, match="the policy of tool 'send' answers True or False, not None"):
            await send("x")
        assert sent == [] and agent.calls[0].state == "failed"


async def test_a_timeout_counts_the_waiting() -> None:
    async with engine("llama") as llm:
        agent, sent = Agent(llm, "solver"), list[str]()

        @agent.tool(gate="never", timeout=0.001)
        def gated(text: str) -> None:
            sent.append(text)

        @agent.tool(approve=True, timeout=0.001)
        def asked(text: str) -> None:
            sent.append(text)

        @agent.tool(timeout=0.001)
        async def endless() -> None:
            await asyncio.Event().wait()

        for call in (gated("x"), asked("x"), endless()):
            with pytest.raises(TimeoutError, match=r"call \d, \w+\(.*\): after 0.001 s, while"):
                await call
        assert [call.state for call in agent.calls] == ["timeout"] * 3 and agent.pending == []
        reasons = [call.reason.partition(", while ")[2] for call in agent.calls]
        assert reasons == ["its gate was closed", "nobody had approved it", "it ran"] and sent == []
        with pytest.raises(ValueError, match="past deciding: timeout"):
            agent.calls[1].approve()


async def test_a_timeout_of_the_function_itself_is_its_failure() -> None:
    async with engine("llama") as llm:
        agent = Agent(llm, "solver")

        @agent.tool(timeout=30)
        def send() -> None:
            raise TimeoutError("the server is slow")

        with pytest.raises(TimeoutError, match="the server is slow"):
            await send()
        assert agent.calls[0].state == "failed"


async def test_a_call_goes_with_its_coroutine() -> None:
    async with engine("llama") as llm:
        agent, sent = Agent(llm, "solver"), list[str]()

        @agent.tool(approve=True)
        def send(text: str) -> None:
            sent.append(text)

        async def act() -> None:
            await send("x")

        agent.add(act)
        agent.start()
        await until(lambda: agent.pending)
        agent.add(act)
        await until(lambda: len(agent.calls) == 2)
        assert states(agent) == [("send", "cancelled"), ("send", "asking")]
        assert len(agent.pending) == 1
        await agent.stop()
        assert agent.pending == [] and sent == []


async def test_calls_are_kept_up_to_a_number() -> None:
    async with engine("llama") as llm:
        agent = Agent(llm, "solver")

        @agent.tool(gate="never")
        async def waits() -> None: ...

        @agent.tool
        async def short(text: str) -> None: ...

        waiting = begun(waits())
        await turns()
        for number in range(CALLS_KEPT + 5):
            await short(f"{number} " + "x" * 999)
        assert len(agent.calls) == CALLS_KEPT + 1 and agent.calls[0].name == "waits"
        assert len(agent.calls[1].arguments) < 220 and agent.calls[1].arguments.startswith("text='5 xxx")
        waiting.cancel()
        await waiting


async def test_misuse_of_a_tool_names_the_fix() -> None:
    async with engine("llama") as llm:
        agent = Agent(llm, "solver")

        def send() -> None: ...

        def search(query: str) -> None: ...

        with pytest.raises(TypeError, match=r"no keyword 'aprove': did you mean 'approve'"):
            agent.tool(aprove=True)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="approve is True"):
            agent.tool(approve="me")(send)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match=r"gate is an event: agent.event\(name\)"):
            agent.tool(gate=threading.Event())(send)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="number of seconds"):
            agent.tool(timeout="5")(send)  # type: ignore[call-overload]
        with pytest.raises(ValueError, match="positive number of seconds"):
            agent.tool(timeout=0)(send)
        with pytest.raises(TypeError, match="a tool is a function"):
            agent.tool(3)  # type: ignore[call-overload]
        assert agent.tools == {} and agent.events == {}
        wants_text = agent.tool(search)
        with pytest.raises(TypeError, match=r"^search\(query.*\).*: missing .* 'query'$"):
            await wants_text()
        assert agent.calls == []


async def test_the_recording_holds_agents_and_calls() -> None:
    async with engine("llama") as llm:
        agent = Agent(llm, "solver")

        @agent.tool(approve=True)
        def send(text: str) -> None: ...

        @agent.coroutine
        async def act() -> None:
            await send("x")

        @agent.coroutine
        async def fails() -> None:
            raise LookupError("no such thing")

        with pytest.raises(LookupError):
            await agent.start()
        state = json.loads(json.dumps(llm.trace.state()))
        assert state["agents"]["solver.fails"] | {"k": 0} == {
            "a": "solver",
            "name": "fails",
            "state": "failed",
            "version": 1,
            "k": 0,
            "error": "LookupError: no such thing",
        }
        (call,) = state["calls"].values()
        assert (call["by"], call["name"], call["args"], call["state"]) == (
            "act",
            "send",
            "text='x'",
            "asking",
        )
        task = state["tasks"][str(state["agents"]["solver.act"]["k"])]
        assert task["name"] == "solver.act"
        await agent.remove("fails")
        agent.pending[0].deny()
        with pytest.raises(ToolDenied):
            await agent
        state = llm.trace.state()
        assert set(state["agents"]) == {"solver.act"}
        assert next(iter(state["calls"].values()))["state"] == "denied"
