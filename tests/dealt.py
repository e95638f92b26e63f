"""Work for other processes, which have to find it by a module's name."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence

from asyncllm_nb.evals.dealing import Tell


class Local(Exception):
    """Cannot be copied to another process."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


async def tells(numbers: Sequence[int], tell: Tell) -> None:
    for number in numbers:
        tell((number, os.getpid()))


async def tells_what_it_has(numbers: Sequence[int], tell: Tell) -> None:
    import torch

    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    tell((torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], ignored))


async def one_fails_and_others_wait(numbers: Sequence[int], tell: Tell) -> None:
    if 0 not in numbers:
        await asyncio.Event().wait()
    raise ValueError("number 0 is wrong")


async def fails_with_its_own(numbers: Sequence[int], tell: Tell) -> None:
    raise Local(1, 2)


async def one_is_killed_and_others_wait(numbers: Sequence[int], tell: Tell) -> None:
    if 0 not in numbers:
        await asyncio.Event().wait()
    os.kill(os.getpid(), signal.SIGKILL)


async def tells_and_waits(numbers: Sequence[int], tell: Tell) -> None:
    tell(numbers)
    await asyncio.Event().wait()
