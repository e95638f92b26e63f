"""`SelfEditing`: a model rewrites a coroutine of a running agent, round by round, under guard.

A round: a model is told what the coroutine is for and proposes other code; the code is looked at
(`candidates`), run in the sandbox on copies of the blocks (`sandbox`), and scored; only code that does
not do worse than what runs now is taken into the agent. There, too, it runs in the sandbox. Knows agents
and blocks; knows neither processes nor how a model is asked for code.
"""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape

from .agent import Agent
from .agent_coroutines import Code
from .candidates import CandidateRejected, checked_source, proposed_source
from .engine.blocks import CacheBlock
from .inputs import check_count, known_keywords
from .markup import table
from .rewriting import Attempt, Author, EditingTask, Trial, answer_of, in_sandbox, request_text
from .sandbox import Limits, Ran, Sandbox
from .sandbox_process import check_available

SHOWN_ATTEMPTS = 2
"""How many of the last proposals the model is shown again."""

RUNNING = Limits(seconds=3600.0, cpu_seconds=60, tokens=200_000, calls=1_000_000, printed=1_000_000)
"""What accepted code may use in one run, unless told otherwise."""


@dataclass(frozen=True)
class Version:
    """Code that the coroutine has or had: its number, its source, its score when it was taken (None:
    not tried yet, or it cannot run on a copy of the task)."""

    number: int
    source: str
    score: float | None
    code: Code | None = field(default=None, repr=False, compare=False)  # of a person, run as it is


@dataclass(frozen=True)
class _Snapshot:
    """Copies of the task's blocks by name, and what they are copies of: ids and versions."""

    copies: Mapping[str, CacheBlock]
    moment: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Standing:
    """How code did: its source, its score, or why it has none, and how it ran if it did."""

    source: str
    score: float | None
    reason: str
    ran: Ran | None


class SelfEditing:
    """Rounds in which a model rewrites one coroutine of `agent` to do `task` better.

    `versions`: everything that the coroutine was, the code that it began with first. `attempts`: every
    proposal, oldest first. `current`: the version that it is now.
    """

    @known_keywords
    def __init__(
        self,
        agent: Agent,
        task: EditingTask,
        author: Author | None = None,
        *,
        trial: Limits | None = None,
        running: Limits | None = None,
    ) -> None:
        """
        Parameters
        ----------
        author: who writes: an AsyncLLM (None: the agent's), or a function of the request, perhaps async,
            that returns text with a tool call.
        trial, running: what code may use in a trial, and in a run of the agent.

        Raises SandboxUnavailable where there is no sandbox, ValueError for a coroutine or block that the
        agent does not have.
        """
        check_available()
        if not isinstance(agent, Agent) or not isinstance(task, EditingTask):
            what = f"{type(agent).__name__} and {type(task).__name__}"
            raise TypeError(f"SelfEditing takes an Agent and an EditingTask, not {what}")
        if task.coroutine not in agent.coroutines:
            raise ValueError(f"agent {agent.name!r} has no coroutine {task.coroutine!r}: define it first")
        missing = [name for name in task.blocks if name not in agent.blocks]
        if missing:
            raise ValueError(
                f"agent {agent.name!r} has no block {', '.join(missing)}: `await agent.block(...)` first"
            )
        self.agent, self.task = agent, task
        self.versions: list[Version] = []
        self.attempts: list[Attempt] = []
        self._author: Author = agent.llm if author is None else author
        self._trial, self._running = trial or Limits(), running or RUNNING
        self._defined: Code | None = None  # what the agent has by our doing
        self._standing: _Standing | None = None  # of the current version
        self._standing_of: object = None  # which one that was, and on which blocks
        self._busy = False
        self._notice()

    # ---- rounds ---------------------------------------------------------------------------------

    async def run(self, rounds: int = 3) -> list[Attempt]:
        """Make `rounds` rounds, one after the other."""
        check_count("rounds", rounds)
        return [await self.round() for _ in range(rounds)]

    async def round(self) -> Attempt:
        """Ask for a proposal, try it, and take it if it does not do worse than what runs now."""
        with self._alone():
            start = await self._snapshot()
            now = await self._current_standing(start)
            attempts = self.attempts[-SHOWN_ATTEMPTS:]
            request = request_text(self.task, self.current.source, now.score, now.reason, attempts)
            answer = await answer_of(self._author, request)
            try:
                source = proposed_source(answer)
            except CandidateRejected as error:
                return self._note(Attempt(None, None, now.score, None, str(error), None, answer))
            return await self._consider(source, start, now, answer)

    async def consider(self, source: str) -> Attempt:
        """A round with a proposal that is there already."""
        with self._alone():
            start = await self._snapshot()
            return await self._consider(source, start, await self._current_standing(start), "")

    async def _consider(self, source: str, start: _Snapshot, now: _Standing, answer: str) -> Attempt:
        before = self.current
        if source.strip() == before.source.strip():
            same = "it is what runs now"
            return self._note(Attempt(source, None, now.score, None, same, None, answer))
        tried = await self._try(source, start)
        reason = tried.reason
        if tried.score is not None and now.score is not None and tried.score < now.score:
            reason = f"it does worse: {tried.score:g}, and what runs now {now.score:g}"
        if not reason and self.current is not before:
            reason = "the coroutine was defined anew in the meantime"
        number = None
        if not reason:
            number = len(self.versions)
            self.versions.append(Version(number, tried.source, tried.score))
            self._take(self.versions[number])
            self._standing, self._standing_of = tried, (number, start.moment)
        return self._note(Attempt(tried.source, tried.score, now.score, number, reason, tried.ran, answer))

    def _note(self, attempt: Attempt) -> Attempt:
        self.attempts.append(attempt)
        return attempt

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if self._busy:
            raise RuntimeError("a round goes on: await it before the next one")
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    # ---- trials ---------------------------------------------------------------------------------

    async def _snapshot(self) -> _Snapshot:
        """Copies of the task's blocks, all of one moment."""
        blocks = {name: await self.agent.block(name) for name in self.task.blocks}
        if not blocks:
            return _Snapshot({}, ())
        llm = self.agent.llm
        async with llm.transaction(*blocks.values()):
            moment = tuple((block.id, block.version) for block in blocks.values())
            copies = {name: await llm.fork(b, name=f"{name} (copy)") for name, b in blocks.items()}
        return _Snapshot(copies, moment)

    async def _current_standing(self, start: _Snapshot) -> _Standing:
        """How the current version does from `start`. Tried anew only if the blocks have changed."""
        now = self.current
        if self._standing is None or self._standing_of != (now.number, start.moment):
            self._standing = await self._try(now.source, start)
            self._standing_of = (now.number, start.moment)
        return self._standing

    async def _try(self, source: str, start: _Snapshot) -> _Standing:
        """Run code in the sandbox on copies of the blocks, and score it."""
        task, llm = self.task, self.agent.llm
        try:
            source = checked_source(task.coroutine, source, task.given)
        except CandidateRejected as error:
            return _Standing(source, None, str(error), None)
        copies = {name: await llm.fork(b, name=f"{name} (trial)") for name, b in start.copies.items()}
        sandbox = Sandbox(
            task.coroutine,
            source,
            llm,
            copies,
            writes=task.writes,
            inputs=task.inputs,
            limits=self._trial,
            label=f"{task.coroutine} (trial)",
        )
        ran = await sandbox.run()
        if not ran.ok:
            return _Standing(source, None, f"it {ran.reason}", ran)
        try:
            score = task.score(Trial(ran, copies))
            number = float(await score if inspect.isawaitable(score) else score)
        except Exception as error:  # perhaps of what the code returned: that has any form
            place = traceback.extract_tb(error.__traceback__)[-1]
            error.__traceback__ = None  # its frames would keep the copies alive
            reason = f"its score failed: {type(error).__name__}: {error} ({place.name}, line {place.lineno})"
            return _Standing(source, None, reason, ran)
        if not math.isfinite(number):
            return _Standing(source, None, f"its score is {number}, which is no number to compare", ran)
        return _Standing(source, number, "", ran)

    # ---- versions -------------------------------------------------------------------------------

    @property
    def current(self) -> Version:
        """The version that the agent has. A cell that defined the coroutine anew has made another one."""
        self._notice()
        return self._current

    def _notice(self) -> None:
        """Whoever defines the coroutine in a cell makes a version, too."""
        code = self.agent.coroutines[self.task.coroutine].code
        if code is not self._defined:
            self._defined = code
            self._current = Version(len(self.versions), code.text, None, code)
            self.versions.append(self._current)

    def rollback(self, number: int) -> Version:
        """Have version `number` again; blocks stay as they are. Returns it."""
        self._notice()
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"a version is a whole number, not {number!r}")
        if not 0 <= number < len(self.versions):
            raise ValueError(f"there is no version {number}: there are 0 to {len(self.versions) - 1}")
        self._take(self.versions[number])
        return self._current

    def _take(self, version: Version) -> None:
        """Have the agent run a version: one of a person as it was, any other in the sandbox."""
        name, agent, code = self.task.coroutine, self.agent, version.code
        if code is None:
            text = in_sandbox(self.task, version.number, version.source, self._running)
            agent.define(name, text, {"__name__": "__main__"})
        else:  # in its cell's context, so that it prints where it did
            define = code.context.copy().run
            if code.function is not None:
                define(agent.add, code.function, name=name, source=code.text)
            else:
                assert code.namespace is not None
                define(agent.define, name, code.text, code.namespace)
        self._defined, self._current = agent.coroutines[name].code, version

    def __repr__(self) -> str:
        taken = sum(attempt.accepted for attempt in self.attempts)
        return (
            f"<SelfEditing {self.agent.name}.{self.task.coroutine}: version {self._current.number} of "
            f"{len(self.versions)}, {taken} of {len(self.attempts)} proposals taken>"
        )

    def _repr_html_(self) -> str:
        rows = [
            [
                str(number),
                "" if attempt.score is None else f"{attempt.score:g}",
                "" if attempt.against is None else f"{attempt.against:g}",
                f"version {attempt.version}" if attempt.accepted else escape(attempt.reason.split("\n")[0]),
            ]
            for number, attempt in enumerate(self.attempts, 1)
        ]
        columns = ("proposal", "score", "against", "what became of it")
        return f"<div>{escape(repr(self))}</div>{table(columns, rows, numeric=(1, 2))}"
