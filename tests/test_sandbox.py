"""A coroutine in the sandbox has the model, as one outside has it, within its limits; and nothing else.

Ten hostile ones against a running agent are in `test_self_editing`.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import dataclasses
import json
import random
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers import BOTH_KINDS, answer_of, contents, engine, filled_block, tokens, until
from sandboxes import QUICK, function, run, sandbox

from asyncllm_nb import AsyncLLM, CacheBlock, SandboxUnavailable, sandbox_process
from asyncllm_nb.sandbox import CandidateError, Limits, Ran, Sandbox, run_sandboxed

__all__ = ["sandbox"]  # a fixture: named in tests, which a linter does not see

pytestmark = pytest.mark.usefixtures("sandbox")


async def desk(llm: AsyncLLM) -> dict[str, CacheBlock]:
    """Blocks to work on: a prompt, and an empty thinker."""
    return {
        "prompt": await filled_block(llm, tokens(21), "prompt"),
        "thinker": await llm.create_block("thinker"),
    }


# ---- the model, inside as outside ----------------------------------------------------------------------

PROGRAMS = {
    "streams": """
        seen = []
        async for token in llm.generate("go", [prompt, thinker], max_tokens=7, temperature=0.9, seed=3):
            seen.append([str(token), token.id, round(token.logprob, 3)])
        stream = llm.generate([9], [prompt, thinker], stop=[50, 51, 52, 53], max_tokens=40)
        text = await stream
        return [seen, text, stream.stop_reason, stream.token_ids, thinker.token_ids, thinker.num_tokens]
    """,
    "parts and leaving": """
        parts = [part async for part in llm.generate("a", [prompt, thinker], max_tokens=19).split("e")]
        stream = llm.generate([7], [prompt, thinker], temperature=1.0, seed=5)
        async for token in stream:
            if len(stream.token_ids) == 4:
                break
        async with llm.generate([8], [prompt, thinker], seed=6) as other:
            first = await other.__anext__()
        return [parts, stream.token_ids, other.stop_reason, first.id, thinker.token_ids]
    """,
    "forward and probe": """
        out = await llm.forward("to be", [prompt, thinker])
        made = (await llm.forward([5, 6, 7])).block
        chances = await llm.probe("?", [prompt, out.block, made], choices=["yes", "no", "perhaps"])
        return [out.block.name, made.token_ids, {k: round(v, 4) for k, v in chances.items()}, prompt.version]
    """,
    "blocks": """
        a, b = await llm.create_blocks("a", "b")
        await llm.forward([11, 12, 13], [a])
        await llm.forward("bb", [a, b])
        both = await llm.merge_blocks(a, b)
        copy = await llm.fork(both, name="copy")
        await llm.append_block(thinker, copy)
        await llm.replace(a, [40, 41], [prompt])
        await llm.clear(b)
        await llm.free_block(copy)
        facts = [both.token_ids, both.name, both.span, thinker.text, a.token_ids, b.num_tokens]
        return facts + [thinker.id != both.id]
    """,
    "text": """
        said = [llm.chat_prompt("hello", system="x"), llm.chat_prompt([{"role": "user", "content": "x"}])]
        return [llm.encode("<|im_end|>é", control=False), llm.encode("<|im_end|>"), llm.turn("more"), said]
    """,
    "tasks": """
        gate, order = asyncio.Event(), []
        async def waits():
            async for _ in llm.generate([3], [prompt, thinker], max_tokens=3):
                order.append("token")
            gate.set()
        async def follows():
            await gate.wait()
            order.append("after")
        async with asyncio.TaskGroup() as group:
            group.create_task(follows())
            group.create_task(waits())
        return order
    """,
    "errors": """
        found = []
        for wrong in (lambda: llm.generate([1], [thinker, prompt, thinker]), lambda: llm.generate([10**6]),
                      lambda: llm.generate("", [thinker])):
            try:
                wrong()
            except ValueError as error:
                found.append(str(error))
        try:
            await llm.forward([], [thinker])
        except ValueError as error:
            found.append(str(error))
        return found
    """,
}


async def outside(llm: AsyncLLM, source: str, blocks: dict[str, CacheBlock]) -> Any:
    """What the same coroutine returns when it runs as any other."""
    namespace: dict[str, Any] = {"llm": llm, "asyncio": asyncio, **blocks}
    exec(compile(ast.parse(source), "<outside>", "exec"), namespace)
    result = json.loads(json.dumps(await namespace["work"]()))
    namespace.clear()  # it is a cycle, which would keep blocks alive
    return result


@pytest.mark.parametrize("family", BOTH_KINDS)
@pytest.mark.parametrize("program", PROGRAMS)
async def test_a_coroutine_does_inside_what_it_does_outside(program: str, family: str) -> None:
    async with engine(family) as llm:
        blocks = await desk(llm)
        copies = {name: await llm.fork(block) for name, block in blocks.items()}
        expected = await outside(llm, function(PROGRAMS[program]), copies)
        await llm.drain()
        names = {*blocks, *(copy.name for copy in copies.values())}
        assert set(llm.blocks) == names
        ran = await run(llm, PROGRAMS[program], blocks)
        assert ran.kind == "returned", ran
        assert json.dumps(ran.result).replace("\\u00b72", "") == json.dumps(expected).replace("\\u00b72", "")
        await llm.drain()
        assert set(llm.blocks) == names  # what it made is gone with it
        for name, block in blocks.items():
            assert block.token_ids == copies[name].token_ids


async def test_print_input_and_imports_inside() -> None:
    async with engine() as llm:
        shown: list[str] = []
        body = """
            import statistics, collections.abc, datetime
            print(datetime.datetime.strptime("7", "%d").day, end=" ")
            from dataclasses import dataclass
            print("one", question["n"], statistics.mean([1, 2]))
            import sys
            print("two", file=sys.stderr)
            try:
                import numpy
            except ImportError as error:
                print(error)
            try:
                input()
            except RuntimeError as error:
                print(error)
            print("x" * 20_000)
            return question
        """
        ran = await run(llm, body, inputs={"question": {"n": 3}}, on_print=shown.append)
        assert ran.result == {"n": 3}
        lines = ran.printed.split("\n")
        assert lines == [
            "7 one 3 1.5",
            "two",
            "No module named 'numpy'",
            "input(): lost sys.stdin",
            "x" * 20_000,
            "",
        ]
        assert "".join(shown) == ran.printed


async def test_an_error_inside_comes_with_its_own_lines() -> None:
    async with engine() as llm:
        ran = await run(llm, "values = []\nreturn json.dumps(values[3])")
        assert (ran.kind, ran.reason) == ("raised", "raised IndexError: list index out of range")
        assert ran.trace.split("\n")[:2] == [
            '  File "<work>", line 3, in work',
            "    return json.dumps(values[3])",
        ]
        with pytest.raises(CandidateError, match=r"IndexError(.|\n)*line 3, in work"):
            await run_sandboxed("work", function("return [][3]").replace("return", "\n    return"), llm, {})
        for body, reason in {
            "return {1, 2}": "TypeError: Object of type set is not JSON serializable",
            "return 'x' * 70_000": "ValueError: too much for one call",
            "raise SystemExit(0)": "raised SystemExit",
            "raise KeyboardInterrupt": "raised KeyboardInterrupt",
            "raise asyncio.CancelledError": "was cancelled",
            "await llm.forward([1], logits='all')": "logits stay outside",
            "await llm.forward([1], [llm.create_block()])": "did you forget await",
        }.items():
            ran = await run(llm, body)
            assert not ran.ok and reason in ran.reason, ran


# ---- limits ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A body, the limits it runs under, and how that ends."""

    body: str
    limits: dict[str, Any]
    kind: str
    reason: str


LIMITS = {
    "tokens, generated": Case("await llm.generate([1], [thinker])", {"tokens": 30}, "tokens", "its 30 tok"),
    "tokens, encoded": Case("await llm.forward([1] * 31, [thinker])", {"tokens": 30}, "tokens", "its 30 tok"),
    "tokens, doubled": Case(
        "await llm.forward([1], [thinker])\nwhile True: await llm.append_block(thinker, thinker)",
        {"tokens": 100},
        "tokens",
        "its 100 tokens",
    ),
    "tokens, probed": Case(
        "await llm.probe([1] * 9, [prompt], choices=[f'{n}00' for n in range(9)])",
        {"tokens": 60},
        "tokens",
        "its 60 tokens",
    ),
    "tokens, of text": Case("while True: llm.encode('x' * 999)", {"tokens": 5000}, "tokens", "its 5000 tok"),
    "calls": Case("while True: prompt.version", {"calls": 63}, "calls", "its 63 calls"),
    "calls at once": Case(
        "await asyncio.gather(*(llm.forward([1], [thinker]) for _ in range(50)))",
        {"at_once": 7},
        "calls",
        "7 calls at once",
    ),
    "blocks": Case("await llm.create_blocks(8)", {"at_once": 7}, "raised", "7 blocks and streams are held"),
    "streams": Case(
        "return [llm.generate([1]) for _ in range(9)]", {"at_once": 7}, "raised", "8 blocks and streams"
    ),
    "printing": Case("while True: print('abc')", {"printed": 999}, "printing", "its 999"),
    "time": Case("await asyncio.sleep(3600)", {"seconds": 0.3}, "time", "within 0.3 s"),
    "processor time": Case("while True: pass", {"cpu_seconds": 1}, "time", "its 1 s of processor time"),
    "memory": Case(
        "hoard = []\nwhile True: hoard.append('x' * 10**6)", {"memory_mb": 100}, "raised", "MemoryError"
    ),
}


@pytest.mark.parametrize("name", LIMITS)
async def test_limits_end_a_run(name: str) -> None:
    case = LIMITS[name]
    async with engine() as llm:
        blocks = await desk(llm)
        ran = await run(llm, case.body, blocks, dataclasses.replace(QUICK, **case.limits))
        assert (ran.kind, case.reason in ran.reason) == (case.kind, True), ran
        assert ran.tokens <= case.limits.get("tokens", 500)
        assert (await run(llm, "return await llm.generate([2], [prompt], max_tokens=3)", blocks)).ok


def test_limits_are_numbers_above_zero() -> None:
    wrong: list[dict[str, Any]] = [
        {"seconds": 0}, {"seconds": float("inf")}, {"cpu_seconds": 1.5}, {"cpu_seconds": None},
        {"tokens": -1},
        {"calls": True}, {"memory_mb": 63}, {"grace": "1"}, {"printed": 0},
    ]  # fmt: skip
    for limits in wrong:
        with pytest.raises(ValueError, match=f"limit {next(iter(limits))} is"):
            Limits(**limits)
    assert Limits(seconds=None, tokens=None, calls=None).calls is None


async def test_blocks_that_it_may_only_read_stay_as_they_are() -> None:
    async with engine() as llm:
        blocks = await desk(llm)
        before = contents(llm)
        body = """
            ways = [
                lambda: llm.forward([1], [thinker, prompt]), lambda: llm.forward([1], write_to=prompt),
                lambda: llm.generate([1], [prompt]), lambda: llm.generate([1], [thinker], write_to=prompt),
                lambda: llm.append_block(prompt, thinker), lambda: llm.replace(prompt, [1]),
                lambda: llm.clear(prompt), lambda: llm.free_block(prompt), lambda: llm.free_block(thinker),
            ]
            for way in ways:
                try:
                    await way()
                    return "done"
                except ValueError as error:
                    print(error)
        """
        ran = await run(llm, body, blocks, writes=("thinker",))
        assert ran.ok and ran.result is None
        assert ran.printed.count("'prompt' may only be read") == 7
        assert ran.printed.count("was given; free only blocks that were made here") == 2
        assert contents(llm) == before
        with pytest.raises(ValueError, match="writes names wrong, and the blocks are prompt, thinker"):
            Sandbox("work", "", llm, blocks, writes=("wrong",))


async def test_what_is_let_go_inside_makes_room_for_more() -> None:
    async with engine() as llm:
        body = """
            for n in range(40):
                block = await llm.create_block()
                async for token in llm.generate([n], [prompt, block]):
                    break
                await llm.probe("?", [block, (await llm.forward([1, 2])).block])
            return len(prompt.token_ids)
        """
        ran = await run(llm, body, await desk(llm), dataclasses.replace(QUICK, at_once=7, tokens=None))
        assert ran.result == 21, ran


# ---- its end --------------------------------------------------------------------------------------------


async def cancelled(llm: AsyncLLM, body: str, blocks: dict[str, CacheBlock], **limits: Any) -> Any:
    """What comes out of a coroutine that is cancelled once it has printed something."""
    started = asyncio.Event()
    source = function(body)
    box = Sandbox("work", source, llm, blocks, limits=Limits(**limits), on_print=lambda text: started.set())
    task = asyncio.ensure_future(box.run())
    await started.wait()
    task.cancel()
    assert isinstance(await answer_of(task), asyncio.CancelledError)
    assert box.ran is not None
    return box.ran


async def test_a_cancelled_run_ends_as_a_coroutine_does() -> None:
    async with engine() as llm:
        blocks = await desk(llm)
        body = """
            try:
                async for token in llm.generate([4], [prompt, thinker]):
                    print(token)
            finally:
                await llm.forward([7, 7], [prompt, thinker])
        """
        ran: Ran = await cancelled(llm, body, blocks)
        assert ran.kind == "cancelled"
        assert blocks["thinker"].token_ids[-2:] == [7, 7]
        stubborn = (
            "print()\ntry:\n    await asyncio.sleep(99)\nfinally:\n    while True: await asyncio.sleep(0)"
        )
        assert (await cancelled(llm, stubborn, blocks, grace=0.3)).reason.startswith(
            "went on for 0.3 s after"
        )
        deaf = "print()\nwhile True: pass"
        assert (await cancelled(llm, deaf, blocks, grace=0.3)).reason.startswith("went on for 0.3 s after")
        raises = "print()\ntry:\n    await asyncio.sleep(99)\nfinally:\n    raise ValueError('no')"
        assert (await cancelled(llm, raises, blocks)).reason == "raised ValueError: no"


async def test_run_sandboxed_raises_an_error_of_its_finally_in_place_of_the_cancellation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with engine() as llm:
        body = "print('on')\ntry:\n    await llm.generate([4], [thinker])\nfinally:\n    {}"
        for last, expected in (("pass", asyncio.CancelledError), ("raise ValueError('no')", CandidateError)):
            blocks = await desk(llm)
            task = asyncio.ensure_future(run_sandboxed("work", function(body.format(last)), llm, blocks))
            while blocks["thinker"].num_tokens < 4:
                await asyncio.sleep(0)
            task.cancel()
            assert isinstance(await answer_of(task), expected)
        assert capsys.readouterr().out == "on\non\n"


async def test_a_run_goes_with_its_engine_and_with_its_loop() -> None:
    async with engine() as llm:
        blocks = await desk(llm)
        task = asyncio.ensure_future(run(llm, "await llm.generate([4], [prompt, thinker])", blocks))
        await until(lambda: blocks["thinker"].num_tokens > 3)
        await llm.close()
        ran = await task
        assert ran.kind == "raised" or ran.kind == "returned"  # the stream ends "cancelled"


async def test_a_second_stream_into_a_block_by_the_same_task_is_an_error_not_a_deadlock() -> None:
    async with engine() as llm:
        body = """
            async for _ in llm.generate([4], [thinker], max_tokens=9):
                async for _ in llm.generate([5], [thinker], max_tokens=9):
                    pass
        """
        ran = await run(llm, body, await desk(llm))
        assert "this task is still reading another stream into block 'thinker'" in ran.reason


async def test_others_go_on_while_a_run_hangs() -> None:
    async with engine() as llm:
        blocks = await desk(llm)
        hangs = asyncio.ensure_future(
            run(llm, "while True: pass", limits=Limits(seconds=300, cpu_seconds=200))
        )
        count = 0
        async for _ in llm.generate([2], blocks["thinker"], max_tokens=200):
            count += 1
        assert count == 200 and not hangs.done()
        hangs.cancel()
        assert isinstance(await answer_of(hangs), asyncio.CancelledError)


async def test_what_a_run_leaves_open_ends_with_it() -> None:
    async with engine() as llm:
        blocks = await desk(llm)
        tasks = asyncio.all_tasks()
        body = """
            async def reads():
                async for _ in llm.generate([4], [prompt, thinker]):
                    pass
            reading = asyncio.create_task(reads())
            held = llm.generate([5], [thinker])
            probing = asyncio.create_task(llm.probe("?", [prompt]))
            while thinker.num_tokens < 5:
                await asyncio.sleep(0)
            return len(asyncio.all_tasks())
        """
        ran = await run(llm, body, blocks)
        assert ran.ok and ran.result >= 2
        assert asyncio.all_tasks() == tasks
        count = blocks["thinker"].num_tokens
        await llm.drain()
        assert blocks["thinker"].num_tokens == count
        await llm.forward([6], blocks["thinker"])  # nobody else writes it


# ---- what reaches the parent ----------------------------------------------------------------------------

RAW = """
    import struct, sys
    os = __import__("os")
    def send(data):
        while data:
            data = data[os.write(1, data):]
    def frame(body):
        send(len(body).to_bytes(4, "big") + body)
"""
JUNK = {
    "no message": ("send(b'\\xff' * 64)", "messages", "a message of 4294967295 bytes"),
    "too long": ("send((70_000).to_bytes(4, 'big'))", "messages", "a message of 70000 bytes"),
    "empty": ("send(bytes(4))", "messages", "a message of 0 bytes"),
    "no JSON": ("frame(b'{]')", "messages", "no message"),
    "no text": ("frame(b'\\xff\\xfe\\x00')", "messages", "no message"),
    "no object": ("frame(b'[1]')", "messages", "not an object"),
    "too deep": ("frame(b'[' * 60_000)", "messages", "no message"),
    "a huge number": ("frame(b'{\"call\": ' + b'9' * 60_000 + b'}')", "messages", "no message"),
    "nothing known": ("frame(b'{\"unavailable\": \"x\"}')", "messages", "nothing known"),
    "no such call": ("frame(b'{\"call\": \"close\", \"id\": 1}')", "messages", "a call that does not exist"),
    "no name": ("frame(b'{\"call\": [], \"id\": 1}')", "messages", "a call that does not exist"),
    "no number": ("frame(b'{\"call\": \"encode\", \"id\": []}')", "messages", "a call that does not exist"),
    "half a message": ("send(bytes(3))\nawait asyncio.sleep(99)", "time", "did not end"),
    "half a message, then gone": ("send(bytes(3))\nos._exit(0)", "died", "exit status 0"),
    "crash": ("__import__('ctypes').string_at(0)", "died", "signal 11"),
    "flood": ("while True: send(bytes(2**16))", "messages", "a message of 0 bytes"),
    "flood of calls": ("while True: frame(b'{\"call\": \"drop\"}')", "calls", "its 2000 calls"),
    "flood of big calls": (
        "call = b'{\"call\": \"drop\", \"x\": \"' + b'x' * 65_000 + b'\"}'\nwhile True: frame(call)",
        "calls",
        "its 2000 calls",
    ),
    "flood of prints": ("while True: frame(b'{\"print\": \"\"}')", "printing", "its 100000 characters"),
    "never reads": (
        "call = b'{\"call\":\"block\", \"id\":5, \"block\":1, \"what\":\"text\"}'\nwhile True: frame(call)",
        "calls",
        "calls",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", JUNK)
async def test_junk_on_the_pipe_ends_the_run_and_takes_no_memory(case: str) -> None:
    body, kind, reason = JUNK[case]
    limits = dataclasses.replace(QUICK, seconds=1.0 if kind == "time" else 20.0)
    async with engine() as llm:
        blocks = await desk(llm)
        before = contents(llm)
        memory = psutil.Process().memory_info().rss
        ran = await run(llm, RAW + body.replace("\n", "\n    ").join(["    ", ""]), blocks, limits)
        assert (ran.kind, reason in ran.reason) == (kind, True), ran
        assert psutil.Process().memory_info().rss - memory < 30 * 2**20
        assert contents(llm) == before


async def test_forged_calls_of_any_form_are_errors_inside() -> None:
    """Whatever arguments are sent, the parent answers, and what is nobody's business stays so."""
    rng = random.Random(6)
    values: list[Any] = [
        None,
        True,
        -1,
        0,
        1,
        2,
        3,
        10**30,
        0.5,
        "",
        "thinker",
        "id",
        [],
        [1],
        [2],
        [[1]],
        [None],
    ]
    values += [{}, {"a": 1}, "x" * 99, ["yes", "no"], [{"role": "user"}], [1, 2], float("nan"), float("-inf")]
    keywords = (
        "block what name inputs view write_to max_tokens stop temperature top_p top_k min_p seed forbid "
        "stream question choices left right text control role messages system generation_prompt self"
    ).split()
    signatures = {
        "block": "block what", "create_block": "name", "forward": "inputs view write_to", "next": "stream",
        "generate": "inputs view write_to max_tokens stop temperature top_p top_k min_p seed forbid name",
        "cancel": "stream", "probe": "question view choices", "merge_blocks": "left right name",
        "append_block": "left right", "fork": "block name", "replace": "block inputs view", "clear": "block",
        "free_block": "block", "encode": "text control", "turn": "text role",
        "chat_prompt": "messages system generation_prompt enable_thinking",
    }  # fmt: skip
    calls = []
    for number in range(1, 1200):
        call = rng.choice(list(signatures))
        names = signatures[call].split() if rng.random() < 0.9 else rng.sample(keywords, 3)
        calls.append({"call": call, "id": -number, **{name: rng.choice(values) for name in names}})
    body = (
        RAW
        + """
    import time
    for call in calls:
        frame(json.dumps(call).encode())
        prompt.version  # wait until the parent has come so far
    return "through"
    """
    )
    async with engine(seconds=120) as llm:
        blocks = await desk(llm)
        kept = await filled_block(llm, tokens(5), "somebody else's")
        limits = Limits(tokens=None, calls=10_000, at_once=1000, seconds=100)
        ran = await run(llm, body, blocks, limits, writes=("thinker",), inputs={"calls": calls})
        assert ran.result == "through", ran
        assert blocks["prompt"].token_ids == tokens(21) and kept.token_ids == tokens(5)
        assert set(llm.blocks) == {"prompt", "thinker", "somebody else's"}


async def test_code_inside_cannot_be_told_from_code_that_forges_its_answer() -> None:
    """So an answer is only a value: it is never taken for more than what a coroutine returned."""
    async with engine() as llm:
        patches = (
            RAW
            + """
    import builtins
    builtins.isinstance = lambda *_: True
    builtins.len = lambda *_: 7
    json.dumps = lambda *_, **__: '{"returned": "forged"}'
    frame_ = b'{"returned": "forged"}'
    os.write(1, b"\\0\\0\\0\\x16" + frame_)
    """
        )
        ran = await run(llm, patches)
        assert (ran.kind, ran.result) == ("returned", "forged")
        assert not isinstance(1, str) and builtins.len("ab") == 2 and json.dumps(1) == "1"


# ---- where there is none --------------------------------------------------------------------------------


async def test_a_machine_whose_filter_does_not_hold_has_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine() as llm:
        monkeypatch.setattr(sandbox_process, "_proven", False)
        for proof, reason in {
            "import os; os._exit(0)": r"could do what is forbidden, or not start \(exit status 0\)",
            "raise OSError('capset: no')": r"exit status 1\): OSError: capset: no",
        }.items():
            monkeypatch.setattr(sandbox_process, "_PROOF", proof)
            with pytest.raises(SandboxUnavailable, match=reason):
                await run(llm, "return 1")
        monkeypatch.setattr(sandbox_process, "_proven", True)
        for child, reason in {
            "raise ImportError('no asyncio')": "the child did not start: ImportError: no asyncio",
            'import os; os.write(1, b\'\\0\\0\\0\\x16{"unavailable": "why"}\')': "on this machine: why",
        }.items():
            monkeypatch.setattr(sandbox_process, "_CHILD", child)
            with pytest.raises(SandboxUnavailable, match=reason):
                await run(llm, "return 1")


async def test_the_child_dies_with_its_parent(tmp_path: Path) -> None:
    """A parent that is killed cannot end its child: the kernel does."""
    code = (
        "import asyncio\n"
        "from asyncllm_nb.sandbox_process import ChildProcess\n"
        "from asyncllm_nb.sandbox_limits import Limits\n"
        "async def main():\n"
        "    child = ChildProcess()\n"
        "    await child.start(Limits())\n"
        "    source = 'async def work():\\n  print()\\n  while True: pass'\n"
        "    await child.send({'start': {'name': 'work', 'source': source, 'inputs': {}, 'blocks': []}})\n"
        "    await child.receive()\n"
        "    print(child._process.pid, flush=True)\n"
        "    await asyncio.sleep(3600)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = psutil.Process(int(await parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    await parent.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, [child], 10)
    assert not alive or child.status() == psutil.STATUS_ZOMBIE
