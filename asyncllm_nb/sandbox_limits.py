"""What a run in the sandbox may use, what it has used, and the words for how it ended.

Knows numbers and strings. That limits are kept is up to whoever counts: the kernel for memory and
processor time, `sandbox_calls` for tokens and calls, `sandbox` for the clock and what is printed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "returned", "raised", "cancelled", "tokens", "calls", "printing", "time", "messages", "forbidden", "died"
]
"""How a run in the sandbox ended. returned, raised, cancelled: as any coroutine does. tokens, calls,
printing, time: over a limit. messages: it sent what is no message. forbidden: a system call that the
kernel does not let it make. died: its process ended in another way."""


LEAST_MEMORY_MB = 64
"""Below that Python itself would not start everywhere."""


class Violation(Exception):
    """The code inside did what ends it."""

    def __init__(self, kind: Kind, reason: str) -> None:
        super().__init__(reason)
        self.kind, self.reason = kind, reason


@dataclass(frozen=True)
class Limits:
    """What one run in the sandbox may use.

    Attributes
    ----------
    seconds: from start to end by the clock; None: as long as it likes.
    cpu_seconds: of its own processor time, in all.
    memory_mb: address space of its process, 64 or more; Python itself needs about 40.
    tokens: turned from text, encoded and generated, in all; None: any number.
    calls: messages to the model, in all; None: any number.
    at_once: calls that wait for their answer, and blocks and streams that it made and still holds.
    printed: characters that it may print, in all.
    grace: seconds that its ``finally`` may take once it is cancelled.
    """

    seconds: float | None = 60.0
    cpu_seconds: int = 10
    memory_mb: int = 256
    tokens: int | None = 20_000
    calls: int | None = 50_000
    at_once: int = 32
    printed: int = 100_000
    grace: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is None and name in ("seconds", "tokens", "calls"):
                continue
            number = int | float if name in ("seconds", "grace") else int
            if not isinstance(value, number) or isinstance(value, bool) or not 0 < value < math.inf:
                wanted = "a whole number" if number is int else "a number"
                raise ValueError(f"the limit {name} is {wanted} above 0, not {value!r}")
        if self.memory_mb < LEAST_MEMORY_MB:
            raise ValueError(f"the limit memory_mb is {LEAST_MEMORY_MB} or more, not {self.memory_mb}")


@dataclass
class Use:
    """What a run has used."""

    tokens: int = 0
    calls: int = 0
    printed: int = 0
