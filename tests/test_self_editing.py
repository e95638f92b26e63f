"""A model rewrites a coroutine of a running agent: what is taken, what is not, and ten that attack.

How single runs in the sandbox end is tested in `test_sandbox`.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import dataclasses
import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers import answer_of, contents, engine, tokens, turns, until
from sandboxes import QUICK, function, sandbox

from asyncllm_nb import Agent, AsyncLLM, EditingTask, SandboxUnavailable, SelfEditing, seccomp
from asyncllm_nb.candidates import CandidateRejected, checked_source, proposed_source
from asyncllm_nb.rewriting import Trial
from asyncllm_nb.sandbox import CandidateError

__all__ = ["sandbox"]  # a fixture: named in tests, which a linter does not see

needs_sandbox = pytest.mark.usefixtures("sandbox")

GOAL = "Write as many tokens into `thinker` as you can, and return how many."
FIRST = """
async for token in llm.generate([7], [prompt, thinker], max_tokens=3):
    pass
return thinker.num_tokens
"""
BETTER, SAME, WORSE = (FIRST.replace("max_tokens=3", f"max_tokens={n}") for n in (5, 3, 2))
SAME = SAME.replace("[7]", "[8]")


def call(source: str) -> str:
    """A model's text with a tool call."""
    return (
        "Let me see.</think>\n\n<tool_call>\n<function=rewrite>\n<parameter=source>\n"
        f"{source}</parameter>\n</function>\n</tool_call>"
    )


@dataclass
class Desk:
    """An agent with a beating heart beside the coroutine that is rewritten, and its editor."""

    llm: AsyncLLM
    agent: Agent
    editor: SelfEditing
    answers: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    beats: asyncio.Queue[int] = field(default_factory=lambda: asyncio.Queue(1))

    async def heart_beats(self) -> None:
        """The agent's other coroutine still runs, and its stream still gets tokens."""
        assert self.agent.coroutines["beat"].state == "running"
        for _ in range(3):
            await self.beats.get()


def score_tokens(trial: Trial) -> float:
    """How many tokens the thinker has."""
    return trial.blocks["thinker"].num_tokens


@asynccontextmanager
async def desk(*answers: str, first: str = FIRST, **options: Any) -> AsyncIterator[Desk]:
    """`answers`: what the author says, round by round. `first`: the body of the coroutine."""
    task = {"score": score_tokens, "blocks": ("prompt", "thinker"), "writes": ("thinker",), **options}
    async with engine(seconds=120) as llm:
        agent = Agent(llm, "solver")
        prompt = await agent.block("prompt")
        thinker = await agent.block("thinker")
        await llm.forward(tokens(20), prompt)
        pulse = await agent.block("pulse")
        namespace: dict[str, Any] = {"llm": llm, "prompt": prompt, "thinker": thinker, "asyncio": asyncio}
        agent.define("think", function(first, "think"), namespace)
        desk = Desk(llm, agent, None, list(answers))  # type: ignore[arg-type]  # made below

        @agent.coroutine
        async def beat() -> None:
            while True:
                async for token in llm.generate([3], pulse, max_tokens=50):
                    await desk.beats.put(token.id)
                await llm.clear(pulse)

        def author(request: str) -> str:
            desk.requests.append(request)
            return desk.answers.pop(0)

        desk.editor = SelfEditing(
            agent, EditingTask("think", GOAL, **task), author, trial=QUICK, running=QUICK
        )
        agent.start()
        try:
            yield desk
        finally:
            await agent.stop()
            await llm.clear(pulse)
        await llm.drain()
        assert set(llm.blocks) == {"prompt", "thinker", "pulse"}
        assert prompt.token_ids == tokens(20)


async def ended(agent: Agent, name: str = "think") -> Any:
    """The coroutine, once it has ended."""
    changed = asyncio.Event()
    unsubscribe = agent.observe(changed.set)
    while agent.coroutines[name].alive:
        changed.clear()
        await changed.wait()
    unsubscribe()
    return agent.coroutines[name]


def settled(llm: AsyncLLM) -> dict[str, tuple[int, list[int]]]:
    """Every block but the one of the heart: its id and tokens."""
    return {name: (id_, ids) for name, (id_, _, ids) in contents(llm).items() if name != "pulse"}


# ---- rounds ---------------------------------------------------------------------------------------------


@needs_sandbox
async def test_only_what_does_not_do_worse_is_taken() -> None:
    """And the agent runs what is taken, in the blocks that it has."""
    bodies = (WORSE, BETTER, WORSE, BETTER, SAME)
    async with desk(*(call(function(body, "think")) for body in bodies)) as d:
        assert (await ended(d.agent)).result == 4
        thinker = d.agent.blocks["thinker"]
        for score, against, version, reason in (
            (7, 8, None, "it does worse: 7, and what runs now 8"),
            (10, 8, 1, ""),
            (13, 16, None, "it does worse: 13, and what runs now 16"),  # from what version 1 has added
            (None, 16, None, "it is what runs now"),
        ):
            attempt = await d.editor.round()
            assert attempt is d.editor.attempts[-1]
            assert (attempt.score, attempt.against) == (score, against)
            assert (attempt.version, attempt.reason) == (version, reason)
            assert (await ended(d.agent)).result == (10 if d.editor.current.number else 4)
        assert thinker.num_tokens == 10 and d.agent.blocks["thinker"] is thinker
        assert d.editor.current.number == 1 and len(d.editor.versions) == 2
        same = await d.editor.consider(f"\n{d.editor.current.source}")
        assert (same.version, same.reason) == (None, "it is what runs now")
        await d.heart_beats()
        d.editor.rollback(0)
        assert (await ended(d.agent)).result == 14
        (attempt,) = await d.editor.run(1)
        assert (attempt.score, attempt.against, attempt.version) == (18, 18, 2)  # equal is not worse
        assert (await ended(d.agent)).result == 18
        assert "proposals taken" in d.editor._repr_html_() and "<SelfEditing solver.think" in repr(d.editor)


@needs_sandbox
async def test_the_model_is_told_the_task_the_code_and_what_became_of_its_proposals() -> None:
    async with desk(
        "Hm.", call("async def think(:\n"), call("async def think():\n    return 1/0\n"), ""
    ) as d:
        await ended(d.agent)
        attempts = await d.editor.run(4)
        assert not any(a.accepted for a in attempts)
        assert d.editor.versions == [d.editor.current]
        first, second, third, fourth = d.requests
        assert GOAL in first and function(FIRST, "think") in first and "Its score is 8" in first
        assert "the block `prompt`, which it may only read" in first
        assert "An earlier answer could not be read: there is no <tool_call>" in second
        assert "was not taken: line 1: invalid syntax" in third
        assert "was not taken: it raised ZeroDivisionError: division by zero" in fourth
        assert [a.ran is None for a in attempts] == [True, True, False, True]


@needs_sandbox
async def test_scores_that_are_none_take_nothing() -> None:
    scores: list[Any] = [1.0, float("nan"), "many", None, ZeroDivisionError("in the score")]

    async def score(trial: Trial) -> Any:
        await asyncio.sleep(0)
        value = scores.pop(0)
        if isinstance(value, Exception):
            raise value
        return value

    async with desk(score=score) as d:
        await ended(d.agent)
        for reason in (
            "score is nan",
            "could not convert",
            "score failed: TypeError",
            r"in the score \(score, line \d+\)$",
        ):
            attempt = await d.editor.consider(function(BETTER, "think"))
            assert not attempt.accepted and attempt.score is None and re.search(reason, attempt.reason)
            assert attempt.ran is not None and attempt.ran.ok


@needs_sandbox
async def test_code_of_a_person_that_cannot_be_tried_gives_way_to_any_that_can() -> None:
    async with desk(call(function(WORSE, "think")), first="await agent_of_mine.block('x')") as d:
        assert (await ended(d.agent)).state == "failed"
        attempt = await d.editor.round()
        assert (attempt.score, attempt.against, attempt.version) == (3.0, None, 1)
        assert "It could not be tried: 'think' uses agent_of_mine" in d.requests[0]
        assert (await ended(d.agent)).result == 3


@needs_sandbox
async def test_a_cell_that_defines_the_coroutine_makes_a_version_and_rollback_gives_each_back() -> None:
    async with desk() as d:
        await ended(d.agent)

        async def think() -> str:
            return "by hand"

        d.agent.coroutine(think)
        assert d.editor.current.number == 1
        assert (await ended(d.agent)).result == "by hand"
        attempt = await d.editor.consider(function(FIRST, "think"))  # what version 0 was, now in the sandbox
        assert attempt.version == 2, attempt
        await ended(d.agent)
        for number, result in ((1, "by hand"), (0, 12), (2, 16)):
            assert d.editor.rollback(number).number == number == d.editor.current.number
            assert (await ended(d.agent)).result == result
        assert len(d.editor.versions) == 3
        for wrong, error in ((3, ValueError), (-1, ValueError), ("1", TypeError), (True, TypeError)):
            with pytest.raises(error, match="version"):
                d.editor.rollback(wrong)  # type: ignore[arg-type]  # on purpose


@needs_sandbox
async def test_a_running_version_is_replaced_like_any_coroutine() -> None:
    body = """
        try:
            await llm.generate([4], [thinker], max_tokens=400)
        finally:
            await llm.forward([9, 9], [thinker])
    """
    async with desk(score=lambda trial: 1) as d:
        await ended(d.agent)
        thinker = d.agent.blocks["thinker"]
        count = thinker.num_tokens
        attempt = await d.editor.consider(function("return await asyncio.sleep(0)", "think"))
        assert attempt.accepted
        d.agent.restart("think")
        await ended(d.agent)
        d.editor._take(dataclasses.replace(d.editor.current, source=function(body, "think")))
        await until(lambda: thinker.num_tokens > count + 5)
        d.editor.rollback(0)
        assert (await ended(d.agent)).result == thinker.num_tokens
        assert [9, 9] in [thinker.token_ids[i : i + 2] for i in range(count, thinker.num_tokens)]


@needs_sandbox
async def test_a_model_is_the_author() -> None:
    """An untrained one answers with noise, which is told and taken for nothing; its block is gone."""
    async with engine(seconds=120) as llm:
        agent = Agent(llm, "solver")
        await agent.block("thinker")
        agent.define("think", function("return 1", "think"), {})
        task = EditingTask("think", GOAL, lambda trial: 1.0, blocks=("thinker",))
        editor = SelfEditing(agent, dataclasses.replace(task, goal="Go."))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("asyncllm_nb.rewriting.ANSWER_TOKENS", 30)
            attempt = await editor.round()
        await llm.drain()
        assert len(attempt.answer) > 0 and "there is no <tool_call>" in attempt.reason
        assert set(llm.blocks) == {"thinker"}


@needs_sandbox
async def test_what_was_taken_stays_in_the_sandbox_when_it_is_saved_and_loaded(tmp_path: Path) -> None:
    body = "print('ran')\nreturn __import__('sys').argv[0], thinker.num_tokens, question"
    async with desk(inputs={"question": 'why "not"?\n\\'}, score=lambda trial: 1) as d:
        await ended(d.agent)
        assert (await d.editor.consider(function(body, "think"))).accepted
        result = (await ended(d.agent)).result
        assert result[0] == "-c"  # the child's own command line
        await d.agent.stop()
        path = await d.agent.save(tmp_path / "agent.safetensors")
        text = d.agent.source("think")
        loaded = await Agent.load(path, d.llm, namespace={})
        assert loaded.source("think") == text
        (wrapper,) = ast.parse(text).body
        assert isinstance(wrapper, ast.AsyncFunctionDef)
        loaded.start("think")
        assert (await ended(loaded)).result == result == ["-c", 4, 'why "not"?\n\\']
        for block in loaded.blocks.values():
            if block.name.endswith("·2"):
                await d.llm.free_block(block)


# ---- ten that attack ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hostile:
    """A body, and what the parent sees of it."""

    body: str
    kind: str
    reason: str
    limits: dict[str, Any] = field(default_factory=dict)


HOSTILE = {
    "read a file": Hostile("return open(target).read()", "raised", "PermissionError: [Errno 13]"),
    "open a socket": Hostile(
        "s = __import__('_socket').socket()\ns.connect(('127.0.0.1', port))",
        "forbidden",
        "a forbidden system call",
    ),
    "loop for ever": Hostile("while True: pass", "time", "processor time", {"cpu_seconds": 1}),
    "exhaust memory": Hostile(
        "hoard = [[0]]\nwhile True: hoard.append(hoard[-1] * 2)", "raised", "MemoryError", {"memory_mb": 128}
    ),
    "fork bomb": Hostile("while True: __import__('os').fork()", "forbidden", "a forbidden system call"),
    "raise in finally": Hostile(
        "try:\n    await llm.generate([1], [thinker], max_tokens=3)\nfinally:\n"
        "    raise BaseException('finally')",
        "raised",
        "BaseException: finally",
    ),
    "patch builtins": Hostile(
        "b = __import__('builtins')\nb.isinstance = lambda *_: True\nb.len = json.dumps = None\n"
        "asyncio.Task = asyncio.sleep = b.open = dict",
        "died",
        "without an answer",
    ),
    "escape through attributes": Hostile(
        "for kind in ().__class__.__base__.__subclasses__():\n"
        "    if kind.__name__ == '_wrap_close':\n"
        "        kind.__init__.__globals__['system']('touch ' + target + '.touched')",
        "forbidden",
        "a forbidden system call",
    ),
    "flood the pipe": Hostile(
        "os = __import__('os')\nwhile True: os.write(1, bytes([0, 0, 0, 9]) + b'{\"a\": 11}' * 7000)",
        "messages",
        "no message",
    ),
}
MORE_HOSTILE = {
    "write a file": Hostile("open(target + '.touched', 'w')", "raised", "PermissionError: [Errno 13]"),
    "delete a file": Hostile("__import__('os').unlink(target)", "forbidden", "a forbidden system call"),
    "start a program": Hostile(
        "__import__('posix').execv('/bin/sh', ['sh', '-c', 'touch ' + target + '.touched'])",
        "forbidden",
        "a forbidden system call",
    ),
    "start a thread": Hostile(
        "__import__('_thread').start_new_thread(print, ())", "forbidden", "a forbidden system call"
    ),
    "kill the parent": Hostile(
        "os = __import__('os')\nos.kill(os.getppid(), 9)", "forbidden", "a forbidden system call"
    ),
    "raw system calls": Hostile(
        "c = __import__('ctypes')\nc.CDLL(None).syscall(435, None, 0)",
        "forbidden",
        "a forbidden system call",
    ),
    "code of its own": Hostile(
        "c = __import__('ctypes')\nc.CDLL(None).mmap(None, 4096, 7, 34, -1, 0)", "forbidden", "a forbidden"
    ),
    "catch the signal": Hostile(
        "s = __import__('signal')\ns.signal(s.SIGSYS, s.SIG_IGN)", "forbidden", "a forbidden system call"
    ),
    "lift the limits": Hostile(
        "r = __import__('resource')\nr.setrlimit(r.RLIMIT_CPU, (9, 9))",
        "forbidden",
        "a forbidden system call",
    ),
    "another filter": Hostile(
        "c = __import__('ctypes')\nc.CDLL(None).prctl(22, 0, 0)", "forbidden", "a forbidden system call"
    ),
}


AFTERWARDS = (
    "read a file",
    "fork bomb",
    "loop for ever",
    "raise in finally",
    "flood the pipe",
    "start a program",
)
"""What is tried after acceptance as well: one for each way in which a run ends."""


class Outside:
    """What an attack would like to reach: a file with a secret, and a port."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "secret"
        self.file.write_text("the secret")
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.socket.setblocking(False)

    @property
    def inputs(self) -> dict[str, Any]:
        return {"target": str(self.file), "port": self.socket.getsockname()[1]}

    def check(self) -> None:
        """It was not reached."""
        assert self.file.read_text() == "the secret"
        assert [path.name for path in self.file.parent.iterdir() if path.is_file()] == ["secret"]
        with pytest.raises(BlockingIOError):
            self.socket.accept()


@pytest.fixture
def outside(tmp_path: Path) -> Any:
    """Checked when the test is through."""
    there = Outside(tmp_path)
    yield there
    there.check()
    there.socket.close()


@needs_sandbox
@pytest.mark.parametrize("attack", [*HOSTILE, *MORE_HOSTILE])
async def test_a_hostile_candidate_harms_nobody_and_is_not_taken(attack: str, outside: Outside) -> None:
    hostile = {**HOSTILE, **MORE_HOSTILE}[attack]
    async with desk(call(function(hostile.body, "think")), inputs=outside.inputs) as d:
        await ended(d.agent)
        d.editor._trial = dataclasses.replace(QUICK, **hostile.limits)
        before = settled(d.llm)
        source, kept_builtins = d.agent.source("think"), (builtins.isinstance, builtins.len, json.dumps)
        memory = psutil.Process().memory_info().rss
        attempt = await d.editor.round()
        assert attempt.ran is not None
        assert (attempt.ran.kind, hostile.reason in attempt.ran.reason) == (hostile.kind, True), attempt
        assert not attempt.accepted and hostile.reason in attempt.reason
        assert d.agent.source("think") == source and d.editor.current.number == 0
        await until(lambda: len(settled(d.llm)) == len(before))  # the last tokens of the copies are encoded
        assert settled(d.llm) == before
        assert (builtins.isinstance, builtins.len, json.dumps) == kept_builtins
        assert psutil.Process().memory_info().rss - memory < 50 * 2**20
        await d.heart_beats()
        d.agent.restart("think")
        assert (await ended(d.agent)).result == 8


@needs_sandbox
@pytest.mark.parametrize("attack", AFTERWARDS)
async def test_one_that_behaves_well_in_the_trial_and_attacks_after_acceptance(
    attack: str, outside: Outside
) -> None:
    hostile = {**HOSTILE, **MORE_HOSTILE}[attack]
    attacks = "\n".join(f"    {line}" for line in hostile.body.split("\n"))
    body = f"{BETTER.rpartition('return')[0]}\nif 99 in thinker.token_ids:\n{attacks}\nreturn 'well'"
    async with desk(call(function(body, "think")), inputs=outside.inputs) as d:
        await ended(d.agent)
        d.editor._running = dataclasses.replace(QUICK, **hostile.limits)
        attempt = await d.editor.round()
        assert attempt.accepted and attempt.ran is not None and attempt.ran.result == "well"
        assert (await ended(d.agent)).result == "well"
        thinker = d.agent.blocks["thinker"]
        await d.agent.say("c", to=thinker)  # token 99
        before = thinker.token_ids
        d.agent.restart("think")
        coroutine = await ended(d.agent)
        assert coroutine.state == "failed"
        assert isinstance(coroutine.error, CandidateError)
        assert (coroutine.error.ran.kind, hostile.reason in str(coroutine.error)) == (hostile.kind, True)
        assert (
            thinker.token_ids[: len(before) + 6][: len(before)] == before
        )  # what it was allowed to write, it wrote
        assert len(thinker.token_ids) - len(before) in (6, 6 + 4)
        await d.heart_beats()
        d.editor.rollback(0)
        assert (await ended(d.agent)).result == thinker.num_tokens
        assert isinstance(await answer_of(d.agent.stop()), type(None))


# ---- use ------------------------------------------------------------------------------------------------


@needs_sandbox
async def test_misuse_says_what_to_do() -> None:
    async with desk() as d:
        agent, editor = d.agent, d.editor
        task = editor.task
        made: list[tuple[Callable[[], object], type[Exception], str]] = [
            (
                lambda: SelfEditing(agent, dataclasses.replace(task, coroutine="x")),
                ValueError,
                "no coroutine 'x'",
            ),
            (
                lambda: SelfEditing(agent, dataclasses.replace(task, blocks=("x",), writes=None)),
                ValueError,
                r"no block x: `await agent.block\(...\)` first",
            ),
            (lambda: SelfEditing(agent, "better"), TypeError, "not Agent and str"),  # type: ignore[arg-type]
            (lambda: SelfEditing(agent.llm, task), TypeError, "not AsyncLLM and EditingTask"),  # type: ignore[arg-type]
            (lambda: dataclasses.replace(task, blocks="x"), TypeError, r"\['x'\], not 'x'"),
            (lambda: dataclasses.replace(task, writes="x"), TypeError, r"\['x'\], not 'x'"),
            (lambda: dataclasses.replace(task, score=3), TypeError, "a function of a Trial"),  # type: ignore[arg-type]
            (lambda: dataclasses.replace(task, writes=("x",)), ValueError, "writes names x"),
            (lambda: dataclasses.replace(task, inputs={"a b": 1}), ValueError, "'a b' is no Python name"),
            (lambda: dataclasses.replace(task, inputs={"prompt": 1}), ValueError, "each name is given once"),
            (lambda: dataclasses.replace(task, inputs={"x": {1}}), ValueError, "what JSON can hold"),
            (lambda: dataclasses.replace(task, inputs={"x": float("nan")}), ValueError, "what JSON can hold"),
            (lambda: SelfEditing(agent, task, trail=QUICK), TypeError, "did you mean 'trial'"),  # type: ignore[call-arg]
        ]
        for make, error, message in made:
            with pytest.raises(error, match=message):
                make()
        with pytest.raises(ValueError, match="rounds must be 1 or more"):
            await editor.run(0)
        d.answers.append(5)  # type: ignore[arg-type]  # on purpose
        with pytest.raises(TypeError, match="the author answers with text"):
            await editor.round()
        slow = asyncio.ensure_future(editor.consider(function("await asyncio.sleep(99)", "think")))
        await until(lambda: editor._busy)
        with pytest.raises(RuntimeError, match="a round goes on"):
            await editor.round()
        slow.cancel()
        assert isinstance(await answer_of(slow), asyncio.CancelledError)
        await turns()
        assert (await editor.consider(function(BETTER, "think"))).accepted


def test_without_a_sandbox_there_is_no_editor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seccomp, "unavailable", lambda: "it needs Linux, and this is Darwin")
    with pytest.raises(
        SandboxUnavailable, match="no sandbox on this machine: it needs Linux, and this is Darwin"
    ):
        SelfEditing(None, None)  # type: ignore[arg-type]  # not looked at


# ---- proposals ------------------------------------------------------------------------------------------

SOURCE = "async def think():\n    return \"a < b\" and '</b>'\n"


@pytest.mark.parametrize(
    "text",
    [
        call(SOURCE),
        call("old\n") + call(SOURCE),
        call(SOURCE).removesuffix("</tool_call>"),
        f"<tool_call>{json.dumps({'name': 'rewrite', 'arguments': {'source': SOURCE}})}</tool_call>",
        f"<tool_call>\n{json.dumps({'arguments': {'source': SOURCE}, 'name': 'rewrite'})}\n",
    ],
)
def test_a_proposal_is_found_in_either_form_of_tool_call(text: str) -> None:
    assert proposed_source(text) == SOURCE


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("```python\nasync def think(): pass\n```", "there is no <tool_call>"),
        ("<tool_call>{</tool_call>", "cannot be read"),
        ("<tool_call>[1]</tool_call>", "cannot be read"),
        ('<tool_call>{"name": "rewrite"}</tool_call>', "cannot be read"),
        (f"<tool_call>{'[' * 9999}</tool_call>", "cannot be read"),
        ('<tool_call>{"name": "rewrite", "arguments": {"source": 5}}</tool_call>', "has no source"),
        ("<tool_call><function=run><parameter=source>x</parameter></tool_call>", "no tool 'run'"),
        ("<tool_call><function=rewrite></function></tool_call>", "has no source"),
    ],
)
def test_a_text_without_a_proposal_says_what_is_missing(text: str, reason: str) -> None:
    with pytest.raises(CandidateRejected, match=reason):
        proposed_source(text)


WRONG = {
    "def think(): pass": "'think' is a plain function",
    "async def other(): pass": "one `async def think",
    "x = 1\nasync def think(): pass": "nothing beside it",
    "async def think(:": "line 1: invalid syntax: async def think\\(:",
    "async def think():\n  return 1\n return 2": "line 3: unindent",
    "async def think():\n    break": "line 2: 'break' outside loop",
    "async def think(agent): pass": "takes agent, and nobody would give it that",
    "async def think(prompt, n): pass": "takes n, and nobody",
    "async def think(*blocks): pass": "plain parameters only",
    "async def think(*, prompt): pass": "plain parameters only",
    "async def think(prompt, /): pass": "plain parameters only",
    "async def think():\n    yield 1": "yields, so nobody would run it",
    "@cache\nasync def think(): pass": "takes no decorators",
    "async def think():\n    import os": "'os' cannot be imported; what can be is asyncio, json",
    "async def think():\n    from . import engine": "'.' cannot be imported",
    "async def think():\n    async def f():\n        return agent.block": "uses agent, which it does not",
    "async def think():\n    return " + "(" * 300 + ")" * 300: "too many nested parentheses",
    "async def think():\n    return '\0'": "null bytes",
}


@pytest.mark.parametrize("source", WRONG)
def test_code_that_cannot_work_is_refused_with_the_reason(source: str) -> None:
    with pytest.raises(CandidateRejected, match=WRONG[source]):
        checked_source("think", source, ("llm", "prompt"))


def test_code_that_can_work_is_kept_without_the_decorator_of_an_agent() -> None:
    source = (
        "    @agent.coroutine\n"
        "    async def think(llm, prompt, n=3):\n"
        "        # why\n"
        "        import re as r\n"
        "        x: int = len(await llm.probe('?', [prompt]))\n"
        "        return [y for y in range(x) if r and json]\n"
    )
    checked = checked_source("think", source, ("llm", "prompt"))
    assert checked == "\n".join(line[4:] for line in source.split("\n")[1:])
    assert checked_source("think", checked, ("llm", "prompt")) == checked
