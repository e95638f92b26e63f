"""Logs to watch: a rule, lines, and for each line whether it calls for a warning and why.

Knows rules and lines. Does not know who asks, or when.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from random import Random

from .pieces import between, drawn, pick

METRICS = (
    "pump temperature",
    "oil temperature",
    "room temperature",
    "pump pressure",
    "oil pressure",
    "fan speed",
    "belt speed",
    "tank level",
)
EVENTS = (
    "door opened",
    "door closed",
    "fan started",
    "fan stopped",
    "pump started",
    "pump stopped",
    "alarm tested",
    "filter changed",
)
LOWEST, HIGHEST = 5, 99
QUESTION = "Warn?"


@dataclass(frozen=True)
class Entry:
    """A log line: a metric with its value, or an event, whose value is None."""

    minute: int
    what: str
    value: int | None

    @property
    def clock(self) -> str:
        return f"{self.minute // 60:02}:{self.minute % 60:02}"

    @property
    def text(self) -> str:
        said = self.what if self.value is None else f"{self.what} {self.value}"
        return f"{self.clock} {said}"


@dataclass(frozen=True)
class Log:
    """A rule and log lines. `side` is "above", "below", or "says" for an event; `limit` is then 0."""

    subject: str
    side: str
    limit: int
    entries: tuple[Entry, ...]

    @property
    def rule(self) -> str:
        if self.side == "says":
            return f"Rule: warn if the log says {self.subject}."
        return f"Rule: warn if the {self.subject} is {self.side} {self.limit}."

    @property
    def head(self) -> str:
        """What stands before the first line."""
        return f"{self.rule}\nLog:\n"

    @property
    def key(self) -> str:
        return "\n".join((self.rule, *self.lines))

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """Without line breaks."""
        return tuple(entry.text for entry in self.entries)

    @cached_property
    def answers(self) -> tuple[bool, ...]:
        """For each line by itself, whether it calls for a warning."""
        return tuple(map(self._warns, self.entries))

    @cached_property
    def explanations(self) -> tuple[str, ...]:
        """For each line, a paragraph that says why it does or does not."""
        return tuple(f"{entry.text}: {self._why(entry)}" for entry in self.entries)

    @property
    def verdict(self) -> str:
        """ "Warned at 09:16 and 09:18." or "No warning." """
        times = [entry.clock for entry, warns in zip(self.entries, self.answers, strict=True) if warns]
        if not times:
            return "No warning."
        return f"Warned at {' and '.join(filter(None, (', '.join(times[:-1]), times[-1])))}."

    @property
    def last_value(self) -> int | None:
        """The newest value of the rule's metric; None if the log has none."""
        for entry in reversed(self.entries):
            if entry.what == self.subject and entry.value is not None:
                return entry.value
        return None

    def _warns(self, entry: Entry) -> bool:
        if entry.what != self.subject:
            return False
        if entry.value is None:
            return self.side == "says"
        return entry.value > self.limit if self.side == "above" else entry.value < self.limit

    def _why(self, entry: Entry) -> str:
        if entry.what != self.subject:
            return f"not {self.subject}." if self.side == "says" else f"not the {self.subject}."
        if entry.value is None:
            return f"{self.subject}, so warn."
        if self._warns(entry):
            return f"{entry.value} is {self.side} {self.limit}, so warn."
        return f"{entry.value} is not {self.side} {self.limit}."


def make_log(rng: Random, lines: int, held_out: bool | None = None) -> Log:
    """A log of so many lines. About half of them are about what the rule watches.

    Raises:
        ValueError: fewer than one line.
    """
    if lines < 1:
        raise ValueError(f"a log has at least one line, not {lines}")
    return drawn(lambda: _draft(rng, lines), held_out)


def _draft(rng: Random, count: int) -> Log:
    minute = between(rng, 0, 23 * 60)
    entries = []
    if rng.random() < 0.2:
        subject, side, limit = pick(rng, EVENTS), "says", 0
    else:
        subject, side = pick(rng, METRICS), pick(rng, ("above", "below"))
        limit = between(rng, 20, 85)
    for _ in range(count):
        watched = rng.random() < (0.35 if side == "says" else 0.7)
        what = subject if watched else pick(rng, EVENTS if rng.random() < 0.25 else METRICS)
        value = None if what in EVENTS else _value(rng, limit or 50)
        entries.append(Entry(minute, what, value))
        minute += 1 if rng.random() < 0.7 else between(rng, 2, 5)
    return Log(subject, side, limit, tuple(entries))


def _value(rng: Random, limit: int) -> int:
    """Half of the values lie near the limit, where it is hard; now and then one is the limit itself."""
    if rng.random() < 0.5:
        return between(rng, limit - 7, limit + 7)
    return between(rng, LOWEST, HIGHEST)
