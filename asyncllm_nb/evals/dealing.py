"""How work is dealt out: to coroutines of one engine, and to processes that have an engine each.

Knows numbers of pieces of work, tasks and processes. Knows no model: what is done for a number, and what is
told of it, is the evaluation's.

    gather(partial(_work, options), range(300), processes=8, tell=found.append)

Each process is a new one (spawned), has one thread of torch, and gets a fixed share of the numbers; what its
work tells arrives in the process that called. So the same call deals in the same way.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from random import Random
from typing import Any, TypeVar

T = TypeVar("T")

Tell = Callable[[Any], None]
Work = Callable[[Sequence[int], Tell], Coroutine[Any, Any, None]]
"""Does the work of these numbers and tells what came out, piece by piece. What crosses to a process, and what
is told, has to be picklable."""


async def each(things: Iterable[T], do: Callable[[T], Awaitable[None]], at_a_time: int) -> None:
    """`do` all things, begun in their order, so many at a time. An error comes in a group, and ends all."""
    left = iter(things)

    async def work() -> None:
        for thing in left:  # shared by all that work
            await do(thing)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_a_time):
            group.create_task(work())


def deal(numbers: Iterable[int], processes: int) -> list[list[int]]:
    """Shares of equal size, or one apart; ascending, and none of them empty.

    Every n-th number would give one process all that is alike where kinds of work take turns, hence the
    fixed shuffle.
    """
    numbers = list(numbers)
    shuffled = Random(0).sample(numbers, len(numbers))
    return [sorted(shuffled[first::processes]) for first in range(min(processes, len(numbers)))]


def gather(work: Work, numbers: Iterable[int], processes: int, tell: Tell) -> None:
    """Do the work of all numbers; `tell` is called here, with each thing that is told, as it comes.

    One process is this one. Raises whatever the work raises, with its trace as the cause if that was another
    process, and RuntimeError if one was killed; the others are stopped then, as they are by Ctrl-C.
    """
    shares = deal(numbers, processes)
    if processes == 1:
        for share in shares:
            asyncio.run(work(share, tell))
        return
    workers: dict[Connection, SpawnProcess] = {}
    try:
        with _for_children():
            for share in shares:
                _start(work, share, workers)
        _listen(dict(workers), tell)
    finally:
        for process in workers.values():
            process.terminate()  # nothing to one that has ended
        for connection, process in workers.items():
            process.join()
            connection.close()


# ---- the process that calls -------------------------------------------------------------------------


class _Trace(Exception):
    """A trace of another process, shown as it was printed there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True)
class _Failure:
    """What went wrong in a process."""

    error: Exception
    trace: str


@contextmanager
def _for_children() -> Iterator[None]:
    """What processes inherit that are started meanwhile: one thread for libraries that start theirs when
    they are loaded; and Ctrl-C, which a terminal sends to all, is left to the process that calls."""
    threads = os.environ.get("OMP_NUM_THREADS")
    here = threading.current_thread() is threading.main_thread()  # signals are its business only
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if here else None
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if threads is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = threads
        if here:
            signal.signal(signal.SIGINT, handler)


def _start(work: Work, share: Sequence[int], workers: dict[Connection, SpawnProcess]) -> None:
    receiving, sending = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(work, share, sending), daemon=True
    )
    process.start()
    sending.close()  # the process has its own: when it ends, `receiving` does
    workers[receiving] = process


def _listen(workers: dict[Connection, SpawnProcess], tell: Tell) -> None:
    """Take what is told until all processes have ended."""
    while workers:
        for connection in wait(list(workers)):
            assert isinstance(connection, Connection)
            try:
                told = connection.recv()
            except EOFError:
                process = workers.pop(connection)
                process.join()
                if process.exitcode:
                    raise RuntimeError(
                        f"a process was ended from outside (exit status {process.exitcode}), perhaps for "
                        "want of memory: take fewer processes"
                    ) from None
                continue
            if isinstance(told, _Failure):
                raise told.error from _Trace(told.trace)
            tell(told)


# ---- the others -------------------------------------------------------------------------------------


def _serve(work: Work, share: Sequence[int], connection: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        asyncio.run(work(share, connection.send))
    except Exception as error:
        failure = _Failure(_portable(error), traceback.format_exc())
        try:
            connection.send(failure)
        except OSError:  # nobody listens any more
            return


def _portable(error: Exception) -> Exception:
    """The error, or one that says the same where it cannot cross to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class does when it is copied
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
