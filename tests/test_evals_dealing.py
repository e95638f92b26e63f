"""How work is dealt out: each thing once, in the same way each time, and what becomes of errors.

The commands give the same results in one process and in two.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dealt
import pytest
from helpers import checkpoint, with_end_tokens

from asyncllm_nb.evals import approximation, logs, patterns, patterns_io, sequential, sharded
from asyncllm_nb.evals.dealing import deal, each, gather
from asyncllm_nb.evals.results import Result
from training import evaluate

# ---- in one process ---------------------------------------------------------------------------------


async def test_each_begins_in_order_and_so_many_at_a_time() -> None:
    begun: list[int] = []
    together = 0

    async def do(number: int) -> None:
        nonlocal together
        begun.append(number)
        together += 1
        assert together <= 3
        for _ in range(number % 4):
            await asyncio.sleep(0)
        together -= 1

    await each(range(17), do, 3)
    assert begun == list(range(17)) and not together


async def test_each_ends_with_the_first_error() -> None:
    done: list[int] = []

    async def do(number: int) -> None:
        await asyncio.sleep(0)
        if number == 4:
            raise ValueError("four")
        done.append(number)

    with pytest.raises(ExceptionGroup) as failed:
        await each(range(100), do, 2)
    assert failed.group_contains(ValueError, match="four") and len(done) < 7


@pytest.mark.parametrize(("count", "processes"), [(1, 1), (3, 28), (100, 7), (300, 28), (0, 2)])
def test_deal_gives_each_number_to_one(count: int, processes: int) -> None:
    numbers = range(10, 10 + count)
    shares = deal(numbers, processes)
    assert shares == deal(numbers, processes)
    assert sorted(number for share in shares for number in share) == list(numbers)
    assert len(shares) == min(count, processes)
    assert all(share == sorted(share) for share in shares)
    sizes = {len(share) for share in shares}
    assert not sizes or max(sizes) - min(sizes) <= 1


def test_deal_mixes_kinds_that_take_turns() -> None:
    for share in deal(range(220), 22):
        assert len({number % 22 for number in share}) > 3


def test_one_process_is_this_one() -> None:
    told: list[tuple[int, int]] = []
    gather(dealt.tells, range(5), 1, told.append)
    assert told == [(number, os.getpid()) for number in range(5)]


# ---- in several -------------------------------------------------------------------------------------


def test_gather_tells_all_from_other_processes() -> None:
    told: list[tuple[int, int]] = []
    gather(dealt.tells, range(7), 2, told.append)
    assert sorted(number for number, _ in told) == list(range(7))
    assert len({process for _, process in told}) == 2 and os.getpid() not in dict(told).values()
    gather(dealt.tells, (), 2, told.append)
    assert len(told) == 7 and not multiprocessing.active_children()


def test_processes_have_one_thread_and_leave_interrupts_to_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    handler = signal.getsignal(signal.SIGINT)
    told: list[Any] = []
    gather(dealt.tells_what_it_has, range(2), 2, told.append)
    assert told == [(1, "1", True)] * 2
    assert os.environ["OMP_NUM_THREADS"] == "3" and signal.getsignal(signal.SIGINT) is handler


def test_an_error_comes_with_its_trace_and_stops_the_others() -> None:
    with pytest.raises(ValueError, match="number 0 is wrong") as failed:
        gather(dealt.one_fails_and_others_wait, range(2), 2, print)
    assert "in one_fails_and_others_wait" in str(failed.value.__cause__)
    assert not multiprocessing.active_children()


def test_an_error_that_cannot_be_copied_is_told_in_words() -> None:
    with pytest.raises(RuntimeError, match="Local: 1 and 2"):
        gather(dealt.fails_with_its_own, range(2), 2, print)


def test_a_process_that_is_killed_is_told() -> None:
    with pytest.raises(RuntimeError, match=r"ended from outside \(exit status -9\)"):
        gather(dealt.one_is_killed_and_others_wait, range(2), 2, print)
    assert not multiprocessing.active_children()


def test_an_interrupt_stops_all() -> None:
    def tell(told: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        gather(dealt.tells_and_waits, range(2), 2, tell)
    assert not multiprocessing.active_children()


# ---- the commands -----------------------------------------------------------------------------------

SHORT = ["--max-thinking", "9", "--max-answer", "3", "--problems", "3"]
COMMANDS: list[tuple[Callable[[list[str]], object], list[str]]] = [
    (sharded.main, [*SHORT, "--ks", "0,5,never"]),
    (sequential.main, SHORT),
    (logs.main, ["--logs", "3", "--lines", "2", "--pace", "3", "--max-tokens", "9"]),
    (patterns.main, ["--pattern", "tool calls", "--problems", "3"]),
    (patterns_io.main, ["--pattern", "listener", "--problems", "3"]),
    (approximation.main, ["--problems", "2", "--length", "3", "--as-written"]),
]


def document(file: Path) -> dict[str, Any]:
    """What stands in a file, without what no two runs have in common."""
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    machine = found.pop("machine")
    assert machine["versions"]["asyncllm-nb"] and "UTC" in machine["date"]
    assert (machine.get("processes", 1), machine["threads"]) in {(1, 1), (2, 1)}
    found.pop("seconds", None)
    return found


def alike(one: Any, other: Any) -> bool:
    """Rounding aside."""
    if isinstance(one, float):
        return bool(one == pytest.approx(other, rel=1e-3, abs=1e-9))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


@pytest.mark.parametrize(("command", "arguments"), COMMANDS, ids=lambda one: getattr(one, "__module__", ""))
def test_commands_give_the_same_in_two_processes(
    command: Callable[[list[str]], object], arguments: list[str], tmp_path: Path
) -> None:
    # Some tokens end a stream, for a random model writes no end by itself.
    model = str(with_end_tokens(checkpoint(), [*range(100, 130)]))
    for processes in ("1", "2"):
        file = tmp_path / f"{processes}.json"
        command([*arguments, "--model", model, "--processes", processes, "--out", str(file)])
    assert alike(document(tmp_path / "1.json"), document(tmp_path / "2.json"))


def test_examinations_give_the_same_in_two_processes(tmp_path: Path) -> None:
    for processes in ("1", "2"):
        file = tmp_path / f"{processes}.json"
        evaluate.main(["--kinds", "g", "--problems", "2", "--processes", processes, "--out", str(file)])
    assert document(tmp_path / "1.json") == document(tmp_path / "2.json")


def test_a_mistake_that_a_process_finds_is_said_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        logs.main(["--logs", "2", "--model", "nowhere", "--processes", "2"])
    assert ended.value.code == 2
    assert "there is no model 'nowhere'" in capsys.readouterr().err.splitlines()[-1]


def test_an_evaluation_goes_on_in_several_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    words = [*SHORT, "--ks", "2,never", "--model", str(checkpoint()), "--out", str(file)]
    sharded.main([*words, "--processes", "1"])
    whole = Result.from_json(file)
    del whole.runs[3:9]
    whole.to_json(file)
    sharded.main([*words, "--processes", "2"])
    assert "12 of 12 runs" in capsys.readouterr().err
    again = Result.from_json(file)
    conditions = (("before", 2), ("after", 2), ("writer", 2), ("never", None))
    assert [run.key for run in again.runs] == [(case, *one) for case in "012" for one in conditions]
    assert again.runs[:3] == whole.runs[:3] and again.machine["processes"] == 2
