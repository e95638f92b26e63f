"""Agents: registered, started, awaited, stopped and replaced; what their coroutines share by name."""

from __future__ import annotations

import asyncio
import functools
import gc
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from helpers import answer_of, engine, filled_block, tokens, turns, until

from asyncllm_nb import Agent, AsyncLLM, CacheBlock, EngineClosedError, agent_coroutines, agent_group

Function = Callable[[], Coroutine[Any, Any, Any]]


def waits_for(gate: asyncio.Event, log: list[str], name: str) -> Function:
    """A coroutine that says when it begins and ends, and returns its name."""

    async def run() -> str:
        log.append(f"{name} begins")
        try:
            await gate.wait()
        finally:
            log.append(f"{name} ends")
        return name

    return run


async def no_work() -> None: ...


# ---- one agent ------------------------------------------------------------------------------------


async def test_the_same_name_gives_the_same_agent_of_an_engine() -> None:
    async with engine("llama") as llm, engine("llama", name="other") as other:
        agent = Agent(llm, "solver")
        assert Agent(llm, "solver") is agent
        assert Agent(llm, "critic") is not agent and Agent(other, "solver") is not agent
        with pytest.raises(TypeError, match="an agent needs an AsyncLLM, not str"):
            Agent("smollm2", "solver")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="a string, not 3"):
            Agent(llm, 3)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="not empty"):
            Agent(llm, "")
    with pytest.raises(EngineClosedError):
        Agent(llm, "solver")


async def test_a_run_gives_the_results_by_name() -> None:
    async with engine() as llm:
        agent = Agent(llm, "solver")
        notes = await agent.block("notes")

        @agent.coroutine
        async def think() -> str:
            text = await llm.generate(tokens(3), [notes], max_tokens=5)
            agent.event("thought").set()
            return text

        @agent.coroutine
        async def count(agent: Agent) -> int:
            await agent.event("thought").wait()
            return agent.blocks["notes"].num_tokens

        assert asyncio.iscoroutinefunction(think) and think.__name__ == "think"
        assert repr(agent) == "<Agent 'solver': think new, count new>" and agent.state == "new"
        assert agent.start() is agent and agent.running
        results = await agent
        assert results == {"think": notes.text[-len(results["think"]) :], "count": 8}
        assert not agent.running and agent.state == "ended"
        assert repr(agent) == "<Agent 'solver': think done, count done>"
        assert await agent == results
        (stream,) = llm.snapshot()["streams"]
        assert stream["name"] == "think"


async def test_a_coroutine_added_to_a_running_agent_starts() -> None:
    async with engine("llama") as llm:
        agent, gate, log = Agent(llm, "solver"), asyncio.Event(), list[str]()
        agent.add(waits_for(gate, log, "a"), name="a")
        await turns()
        assert log == [] and not agent.running  # nothing starts before start()
        agent.start()
        await turns()
        agent.add(waits_for(gate, log, "b"), name="b")
        await turns()
        assert log == ["a begins", "b begins"]
        gate.set()
        assert await agent == {"a": "a", "b": "b"}
        agent.add(waits_for(gate, log, "c"), name="c")
        await turns()
        assert "c begins" not in log and agent.coroutines["c"].state == "new"


async def test_start_begins_those_that_do_not_run_once_each() -> None:
    async with engine("llama") as llm:
        agent, gate, log = Agent(llm, "solver"), asyncio.Event(), list[str]()
        agent.add(waits_for(gate, log, "a"), name="a")
        agent.add(no_work, name="short")
        agent.start()
        agent.start()
        await turns()
        agent.start("a")
        await turns()
        assert log == ["a begins"] and not agent.coroutines["short"].alive
        agent.start()
        assert agent.coroutines["short"].alive
        gate.set()
        assert await agent == {"a": "a", "short": None}


# ---- replaced -------------------------------------------------------------------------------------


async def test_a_new_definition_starts_when_the_old_finally_has_ended() -> None:
    async with engine("llama") as llm:
        agent, log, clean = Agent(llm, "solver"), list[str](), asyncio.Event()

        async def old() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                log.append("old cleans up")
                await clean.wait()
                log.append("old has ended")

        async def new() -> str:
            log.append("new begins")
            return "new"

        agent.add(old, name="think")
        agent.start()
        await turns()
        agent.add(no_work, name="think")  # never runs: a newer one comes before the old one's end
        await turns()
        agent.add(new, name="think")
        await turns()
        assert log == ["old cleans up"] and agent.coroutines["think"].state == "replacing"
        assert agent.coroutines["think"].version == 3 and agent.running
        clean.set()
        assert await agent == {"think": "new"}
        assert log == ["old cleans up", "old has ended", "new begins"]


async def test_blocks_stay_and_streams_end_when_a_coroutine_is_replaced() -> None:
    async with engine() as llm:
        agent = Agent(llm, "solver")
        notes = await agent.block("notes")
        streams = []

        async def think() -> None:
            stream = llm.generate(tokens(3), [await agent.block("notes")], max_tokens=900, temperature=1.0)
            streams.append(stream)  # kept: leaving the loop ends it all the same
            async for _ in stream:
                pass

        agent.add(think)
        agent.start()
        await until(lambda: notes.num_tokens > 7)
        agent.add(think)
        await until(lambda: len(streams) == 2)
        held = notes.token_ids
        await until(lambda: notes.num_tokens > len(held) + 4)
        assert await agent.block("notes") is notes
        assert notes.token_ids[: len(held)] == held
        assert streams[0].stop_reason == "cancelled" and streams[1].stop_reason is None
        await agent.stop()
        assert streams[1].stop_reason == "cancelled"
        assert [s["state"] for s in llm.snapshot()["streams"]] == ["ended", "ended"]


async def test_restart_starts_the_same_code_anew() -> None:
    async with engine("llama") as llm:
        agent, gate, log = Agent(llm, "solver"), asyncio.Event(), list[str]()
        agent.add(waits_for(gate, log, "a"), name="a")
        agent.restart("a")  # one that does not run starts
        await turns()
        agent.restart("a")
        await turns()
        assert log == ["a begins", "a ends", "a begins"] and agent.coroutines["a"].version == 1
        gate.set()
        assert await agent == {"a": "a"}
        with pytest.raises(ValueError, match="'b' is no coroutine of this agent: there are a"):
            agent.restart("b")


async def test_one_that_does_not_end_is_warned_about_and_can_be_cancelled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent_coroutines, "PATIENCE", 0.001)
    async with engine("llama") as llm:
        agent, caught = Agent(llm, "solver"), list[str]()

        async def stubborn() -> None:
            while len(caught) < 2:
                try:
                    await asyncio.Event().wait()  # here it stays
                except asyncio.CancelledError:
                    caught.append("told")
            caught.append("ends")

        agent.add(stubborn, name="think")
        agent.start()
        await turns()
        with pytest.warns(RuntimeWarning, match=r"'solver.think' was told to end .* here it stays") as seen:
            agent.add(no_work, name="think")
            await until(lambda: seen)
        assert caught == ["told"]
        agent.add(no_work, name="think")
        assert await agent == {"think": None}
        assert caught == ["told", "told", "ends"]


async def test_a_second_cancel_does_not_break_off_the_cleaning() -> None:
    async with engine("llama") as llm:
        agent, clean, log = Agent(llm, "solver"), asyncio.Event(), list[str]()

        async def think() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await clean.wait()
                log.append("clean")

        agent.add(think)
        agent.start()
        await turns()
        agent.restart("think")
        agent.add(no_work, name="think")
        stopping = agent.stop()
        await turns()
        assert log == [] and not stopping.done and agent.state == "ending"
        clean.set()
        await stopping
        assert log == ["clean"] and agent.state == "ended"


async def test_remove_forgets_and_a_new_one_of_the_name_waits_for_the_old() -> None:
    async with engine("llama") as llm:
        agent, gate, clean, log = Agent(llm, "solver"), asyncio.Event(), asyncio.Event(), list[str]()

        async def old() -> None:
            try:
                await gate.wait()
            finally:
                await clean.wait()
                log.append("old ends")

        agent.add(waits_for(gate, log, "other"), name="other")
        agent.add(old, name="think")
        agent.start()
        await turns()
        removing = agent.remove("think")
        await turns()
        assert list(agent.coroutines) == ["other"] and not removing.done
        agent.add(waits_for(gate, log, "new"), name="think")
        await turns()
        assert "new begins" not in log
        clean.set()
        await until(lambda: "new begins" in log)
        assert log == ["other begins", "old ends", "new begins"]
        gate.set()
        assert await agent == {"other": "other", "think": "new"}
        await agent.remove("think")
        assert await agent == {"other": "other"}


# ---- awaited and stopped --------------------------------------------------------------------------


async def test_cancelling_the_await_leaves_the_agent_running() -> None:
    async with engine("llama") as llm:
        agent, gate, log = Agent(llm, "solver"), asyncio.Event(), list[str]()
        agent.add(waits_for(gate, log, "a"), name="a")
        waiting = asyncio.ensure_future(answer_of(agent.start()))
        await turns()
        waiting.cancel()
        assert isinstance(await waiting, asyncio.CancelledError)
        assert agent.running and log == ["a begins"]
        gate.set()
        assert await agent == {"a": "a"}


async def test_stop_returns_when_all_have_ended_and_leaves_them_out() -> None:
    async with engine() as llm:
        agent, log = Agent(llm, "solver"), list[str]()
        agent.add(no_work, name="short")
        agent.add(waits_for(asyncio.Event(), log, "a"), name="a")

        @agent.coroutine
        async def write() -> None:
            async for _ in llm.generate(tokens(3), max_tokens=900):
                pass

        agent.start()
        await until(lambda: llm.stats()["tokens_generated"] > 5)
        stopping = agent.stop()
        assert "told to stop, in progress" in repr(stopping)
        assert agent.coroutines["short"].state == "done"  # it had ended
        await stopping
        assert log == ["a begins", "a ends"] and not agent.running
        assert await agent == {"short": None}
        assert await llm.generate(tokens(4), max_tokens=2) is not None
        agent.stop()  # of nothing that runs


async def test_start_behind_stop_waits_for_the_end() -> None:
    async with engine("llama") as llm:
        agent, gate, log = Agent(llm, "solver"), asyncio.Event(), list[str]()
        agent.add(waits_for(gate, log, "a"), name="a")
        agent.start()
        await turns()
        agent.stop()
        agent.start()
        await turns()
        assert log == ["a begins", "a ends", "a begins"]
        gate.set()
        assert await agent == {"a": "a"}


async def test_one_error_is_raised_itself_and_several_as_a_group() -> None:
    async with engine("llama") as llm:
        agent, gate = Agent(llm, "solver"), asyncio.Event()

        async def fails() -> None:
            async with asyncio.TaskGroup() as group:  # a group of one error is that error
                group.create_task(fails_inside())

        async def fails_inside() -> None:
            raise LookupError("no such thing")

        agent.add(waits_for(gate, [], "other"), name="other")
        agent.add(fails, name="first")
        with pytest.raises(LookupError, match="no such thing"):
            await agent.start()
        assert agent.running and agent.coroutines["other"].state == "running"  # the others go on

        agent.add(fails_inside, name="second")
        agent.start()
        await turns()
        with pytest.raises(ExceptionGroup) as caught:
            await agent
        assert [str(error) for error in caught.value.exceptions] == ["no such thing", "no such thing"]
        for name in ("first", "second"):
            agent.add(no_work, name=name)  # repaired: they start at once
        gate.set()
        assert await agent == {"other": "other", "first": None, "second": None}


async def test_errors_of_an_earlier_run_are_not_raised_again() -> None:
    async with engine("llama") as llm:
        agent, gate = Agent(llm, "solver"), asyncio.Event()

        @agent.coroutine
        async def fails() -> None:
            raise LookupError("no such thing")

        agent.add(waits_for(gate, [], "waits"), name="waits")
        gate.set()
        for _ in range(2):  # awaited again it says the same
            with pytest.raises(LookupError):
                await agent.start("fails") if agent.state == "new" else await agent
        assert await agent.start("waits") == {"waits": "waits"}
        agent.restart("waits")
        assert await agent == {"waits": "waits"} and agent.coroutines["fails"].state == "failed"
        agent.start("waits", "fails")
        with pytest.raises(LookupError):
            await agent
        gate.clear()
        agent.start("waits")
        agent.start("fails")  # while others run it is the same run
        await until(lambda: agent.coroutines["fails"].state == "failed")
        agent.restart("waits")
        with pytest.raises(LookupError):
            await agent
        await agent.stop()


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
async def test_what_ends_a_process_ends_a_coroutine_only(kind: type[BaseException]) -> None:
    async with engine("llama") as llm:
        agent = Agent(llm, "solver")

        @agent.tool
        def leave() -> None:
            raise kind(3)

        @agent.coroutine
        async def think() -> None:
            await leave()

        with pytest.raises(RuntimeError, match=rf"{kind.__name__}\(3\).*`return` ends a coroutine"):
            await agent.start()
        assert "raise kind(3)" in agent.coroutines["think"].where


async def test_ending_from_elsewhere_says_so_and_changes_nothing() -> None:
    async with engine("llama") as llm:
        agent = Agent(llm, "solver")
        agent.add(no_work)
        await agent.start()
        for end in (agent.stop, lambda: agent.remove("no_work")):
            with pytest.raises(RuntimeError, match="another thread's event loop"):
                await asyncio.to_thread(end)
        assert list(agent.coroutines) == ["no_work"]
    async with engine("llama") as llm:  # which no loop has used
        other = Agent(llm, "solver")
        other.add(no_work)
        for end in (other.stop, lambda: other.remove("no_work")):
            with pytest.raises(RuntimeError, match="in a coroutine or a notebook cell"):
                await asyncio.to_thread(end)
        assert list(other.coroutines) == ["no_work"]


async def test_an_error_that_nobody_awaits_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    async with engine("llama") as llm:
        agent = Agent(llm, "solver")

        @agent.coroutine
        async def think() -> None:
            raise LookupError("no such thing")

        agent.start()
        await until(lambda: agent.state == "ended")
        printed = capsys.readouterr().err
        assert "coroutine 'solver.think' failed" in printed and "no such thing" in printed
        assert printed.count("LookupError") == 1 + printed.count("raise LookupError")
        with pytest.raises(LookupError):
            await agent
        agent.observe(lambda: None)  # as a panel does: it shows errors
        with pytest.raises(LookupError):
            await agent.start()
        assert capsys.readouterr().err == ""


async def test_what_cannot_be_awaited_says_so() -> None:
    async with engine("llama") as llm:
        agent = Agent(llm, "solver")
        with pytest.raises(ValueError, match="has no coroutine: put @agent.coroutine above"):
            agent.start()

        @agent.coroutine
        async def think(agent: Agent) -> str:
            return str(await answer_of(agent))

        with pytest.raises(RuntimeError, match="has not been started"):
            await agent
        assert "awaits the agent, and so itself" in (await agent.start())["think"]


async def test_closing_the_engine_ends_an_agent_wherever_it_waits() -> None:
    async with engine("llama") as llm:
        agent, log = Agent(llm, "solver"), list[str]()
        agent.add(waits_for(asyncio.Event(), log, "a"), name="a")
        agent.start()
        await turns()
    await until(lambda: agent.state == "ended")
    assert log == ["a begins", "a ends"]
    with pytest.raises(EngineClosedError):
        agent.start()
    with pytest.raises(EngineClosedError):
        agent.add(no_work)
    await agent.stop()


async def test_who_awaits_is_told_that_the_engine_is_paused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_group, "PAUSE_NOTICE", 0.001)
    async with engine("llama") as llm:
        agent, told = Agent(llm, "solver"), list[str]()
        agent.add(waits_for(asyncio.Event(), [], "a"), name="a")
        waiting = asyncio.ensure_future(answer_of(agent.start()))
        llm.pause()
        while "which is paused: call resume()" not in "".join(told):
            told.append(capsys.readouterr().err)
            await asyncio.sleep(0)
        await agent.stop()
        assert await waiting == {}


async def test_no_cell_is_told_of_a_pause_by_steps_nor_by_coroutines_in_the_background(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncllm_nb.engine.engine.PAUSE_NOTICE", 0.0)
    async with engine("llama") as llm:
        agent, block = Agent(llm, "solver"), await llm.create_block()

        @agent.coroutine
        async def think() -> None:
            await llm.generate([7], block, max_tokens=5)

        llm.pause()
        agent.start()
        assert await llm.step(3) == 3
        await turns()
        assert capsys.readouterr().err == ""
        llm.resume()
        await agent


async def test_an_observer_that_fails_stops_nothing() -> None:
    async with engine("llama") as llm:
        agent, failures = Agent(llm, "solver"), list[str]()
        asyncio.get_running_loop().set_exception_handler(lambda _, what: failures.append(what["message"]))

        def observer() -> None:
            raise LookupError("no panel")

        end = agent.observe(observer)
        agent.add(no_work)
        assert await agent.start() == {"no_work": None}
        assert set(failures) == {"an observer of agent 'solver' failed"}
        end()
        end()
        failures.clear()
        assert await agent.start() == {"no_work": None} and failures == []


# ---- code -----------------------------------------------------------------------------------------


async def test_what_an_agent_cannot_run_is_refused() -> None:
    async with engine("llama") as llm:
        agent = Agent(llm, "solver")

        called: Any = no_work()

        def plain() -> None: ...

        async def yields() -> Any:
            yield 1

        async def wants(prompt: CacheBlock, length: int = 3) -> None: ...

        with pytest.raises(TypeError, match="is an `async def`"):
            agent.coroutine(plain)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="without brackets"):
            agent.coroutine()
        with pytest.raises(TypeError, match="'yields' yields"):
            agent.coroutine(yields)
        with pytest.raises(TypeError, match="'wants' takes prompt, and nobody would give it that"):
            agent.coroutine(wants)
        with pytest.raises(TypeError, match="pass the function 'no_work' itself"):
            agent.coroutine(called)
        with pytest.raises(ValueError, match="has no name: add it with name="):
            agent.coroutine(functools.partial(no_work))
        with pytest.raises(TypeError, match="no keyword 'too': did you mean 'to'"):
            agent.say("x", too="notes")  # type: ignore[call-arg]
        assert agent.coroutines == {}


async def test_source_is_the_code_as_it_runs_now() -> None:
    async with engine("llama") as llm:
        agent = Agent(llm, "solver")

        @agent.coroutine
        async def think() -> int:
            return 1

        agent.add(no_work, name="shown", source="# another text\n")
        first = agent.source()
        assert first.startswith("@agent.coroutine\nasync def think() -> int:\n    return 1\n")
        assert first.endswith("\n\n# another text\n")

        @agent.coroutine
        async def think() -> int:  # noqa: F811  # as a cell does that runs again
            return 2

        assert "return 2" in agent.source("think") and "return 1" not in agent.source()
        with pytest.raises(ValueError, match="did you mean 'think'"):
            agent.source("thnik")


async def test_define_checks_at_once_and_executes_at_the_start() -> None:
    async with engine("llama") as llm:
        agent, names = Agent(llm, "solver"), dict[str, Any]()
        text = """
            @agent.coroutine
            async def think(more=start()):
                return more + 1
        """
        coroutine = agent.define("think", text, names)
        with pytest.raises(NameError, match="start"):
            agent.start()
        assert agent.state == "new"
        names["start"] = lambda: 6
        assert await agent.start() == {"think": 7}
        assert set(names) == {"start", "__builtins__"}
        for text, message in (
            ("async def other(): ...", "one `async def think"),
            ("async def think(): ...\nprint()", "nothing beside it"),
            ("def think(): ...", "plain function: write `async def think`"),
            ("async def think(): yield 1", "'think' yields"),
        ):
            with pytest.raises(ValueError, match=message):
                agent.define("think", text, names)
        with pytest.raises(SyntaxError):
            agent.define("think", "async def think(:", names)
        assert coroutine.version == 1 and "more + 1" in agent.source()


async def test_what_a_running_agent_cannot_execute_replaces_nothing() -> None:
    async with engine("llama") as llm:
        agent, gate = Agent(llm, "solver"), asyncio.Event()
        agent.add(waits_for(gate, [], "a"), name="think")
        agent.start()
        await turns()
        with pytest.raises(NameError):
            agent.define("think", "async def think(more=missing): ...", {})
        with pytest.raises(TypeError, match="takes prompt"):
            agent.define("think", "async def think(prompt): ...", {})
        gate.set()
        assert await agent == {"think": "a"}


# ---- what coroutines share ------------------------------------------------------------------------


async def test_blocks_events_and_queues_are_made_once() -> None:
    async with engine() as llm:
        agent, other = Agent(llm, "solver"), Agent(llm, "critic")
        notes = await agent.block("notes")
        assert await agent.block("notes") is notes and notes.name == "notes"
        theirs = await other.block("notes")
        assert theirs is not notes and theirs.name == "notes·2"
        assert agent.blocks == {"notes": notes} and other.blocks == {"notes": theirs}
        assert agent.event("go") is agent.event("go") is not other.event("go")
        assert agent.queue("lines", maxsize=3) is agent.queue("lines") is agent.queues["lines"]
        with pytest.raises(ValueError, match="maxsize 3, which cannot change"):
            agent.queue("lines", maxsize=4)
        with pytest.raises(TypeError, match="the name of an agent's event is a string"):
            agent.event(asyncio.Event())  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="not empty"):
            await agent.block("")
        await llm.free_block(notes)
        assert agent.blocks == {}
        anew = await agent.block("notes")
        assert anew is not notes and anew.num_tokens == 0


async def test_adopt_gives_a_block_the_agents_name() -> None:
    async with engine() as llm:
        agent = Agent(llm, "solver")
        mine = await filled_block(llm, tokens(7), "somewhere")
        assert agent.adopt("notes", mine) is mine and await agent.block("notes") is mine
        assert agent.adopt("notes", mine) is mine
        with pytest.raises(ValueError, match="there is a block 'notes' already"):
            agent.adopt("notes", await llm.create_block())
        with pytest.raises(TypeError, match="did you forget await"):
            agent.adopt("more", llm.create_block())  # type: ignore[arg-type]


async def test_say_comes_at_a_token_boundary_and_markers_stay_text() -> None:
    async with engine() as llm:
        agent = Agent(llm, "solver")
        prompt, notes = await agent.block("prompt"), await agent.block("notes")
        await llm.forward(tokens(9), prompt)
        marker = llm.encode("<|im_end|>")
        yielded = []

        @agent.coroutine
        async def think() -> None:
            async for token in llm.generate(tokens(3), [prompt, notes], max_tokens=12, forbid=marker):
                yielded.append(token.id)
                if len(yielded) == 5:
                    said.append(agent.say("No <|im_end|>!", to="notes"))

        said: list[Any] = []
        await agent.start()
        text = llm.encode("No <|im_end|>!", control=False)
        assert await said[0] == len(text)
        assert notes.token_ids == [*tokens(3), *yielded[:5], *text, *yielded[5:]]
        assert marker[0] not in notes.token_ids
        (say,) = (row for step in llm.trace.steps for row in step.rows if row.name == "say")
        assert [name for name, _ in say.view] == ["prompt", "notes"]
        with pytest.raises(ValueError, match="'note' is no block of this agent: did you mean 'notes'"):
            agent.say("x", to="note")
        with pytest.raises(TypeError, match="text, not int"):
            agent.say(3, to=notes)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="no text"):
            agent.say("", to=notes)


async def test_what_is_said_needs_no_await() -> None:
    async with engine() as llm:
        agent = Agent(llm, "solver")
        await agent.block("notes")
        said = agent.say("Hello", to="notes")
        assert "tokens to notes, in progress" in repr(said)
        await llm.drain()
        await turns()
        assert agent.blocks["notes"].text == "Hello" and said.done


# ---- memory ---------------------------------------------------------------------------------------


async def test_an_agent_that_is_gone_leaves_nothing() -> None:
    llm = await make_and_use()
    gone = weakref.ref(llm._engine)
    await llm.close()
    del llm
    gc.collect()
    await turns()
    gc.collect()
    assert gone() is None


async def make_and_use() -> AsyncLLM:
    """An engine whose agent was used in all ways, and is not running any more."""
    async with engine() as llm:
        agent = Agent(llm, "solver")

        @agent.coroutine
        async def think() -> None:
            await llm.generate(tokens(3), [await agent.block("notes")], max_tokens=500)

        @agent.tool(approve=True)
        def send(text: str) -> str:
            return text

        @agent.coroutine
        async def act() -> None:
            await send("x")

        agent.start()
        await until(lambda: agent.pending)
        agent.coroutine(think)
        agent.restart("act")
        await turns()
        await agent.stop()
        assert agent.pending == []
        return llm


async def test_replacing_leaves_no_task_and_no_frame() -> None:
    async with engine("llama") as llm:
        agent = Agent(llm, "solver")
        held: list[weakref.ref[Any]] = []

        class Held: ...

        async def think() -> None:
            mine = Held()
            held.append(weakref.ref(mine))
            await asyncio.Event().wait()

        agent.add(think)
        agent.start()
        for _ in range(21):
            await turns(5)
            agent.add(think)
        await turns(5)
        gc.collect()
        assert len(held) == 22 and [one() is None for one in held] == [True] * 21 + [False]
        assert len([task for task in asyncio.all_tasks() if task.get_name() == "solver.think"]) == 1
        await agent.stop()
