"""A sandbox for one coroutine: a child process that can compute, and ask for tokens, and nothing else.

Knows how a run goes and how it ends. The process is `sandbox_process`'s, its locks are `seccomp`'s, and
what the coroutine may have done for it is decided in `sandbox_calls`. Knows no agent.

The child has no files, no network, no other process and an empty environment; its memory and its time
are limited; what it says is bounded and trusted in nothing.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .engine.blocks import CacheBlock
from .engine.errors import AsyncLLMError
from .llm import AsyncLLM
from .sandbox_calls import ERROR_CHARACTERS, Calls
from .sandbox_limits import Kind, Limits, Violation
from .sandbox_process import ChildProcess, SandboxUnavailable, check_available
from .sandbox_wire import Message, WireError

__all__ = ["CandidateError", "Limits", "Ran", "Sandbox", "SandboxUnavailable", "run_sandboxed"]

_closing: set[asyncio.Task[None]] = set()
"""Runs that are cleaned up; an event loop alone would not keep them alive."""


class CandidateError(AsyncLLMError):
    """A coroutine in the sandbox failed: says how, with its own lines where it raised. `ran`: more."""

    def __init__(self, ran: Ran) -> None:
        super().__init__(ran.reason + (f"\n{ran.trace.rstrip()}" if ran.trace else ""))
        self.ran = ran


@dataclass(frozen=True)
class Ran:
    """How a run in the sandbox ended.

    `kind`: how, in one word (`Kind`). `result`: what it returned, as JSON holds it. `reason`: in words,
    "" if it returned. `trace`: its own lines when it raised. `printed`: what it printed. `tokens` and
    `calls`: what it used. `seconds`: how long it ran.
    """

    kind: Kind
    result: Any = None
    reason: str = ""
    trace: str = ""
    printed: str = ""
    tokens: int = 0
    calls: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Did it return?"""
        return self.kind == "returned"


class Sandbox:
    """One run of one coroutine in a child process of its own; `run` makes it, once."""

    def __init__(
        self,
        name: str,
        source: str,
        llm: AsyncLLM,
        blocks: Mapping[str, CacheBlock],
        *,
        writes: Sequence[str] | None = None,
        inputs: Mapping[str, Any] | None = None,
        limits: Limits | None = None,
        label: str | None = None,
        on_print: Callable[[str], object] | None = None,
    ) -> None:
        """
        Parameters
        ----------
        name, source: of the ``async def``. Its parameters, and free names in it, are `llm`, the names of
            the blocks and those of the inputs; it imports from a part of the standard library.
        llm, blocks: what it works on. `writes`: the names of the blocks that it may change; None: all.
        inputs: more that it is given, by name: what JSON can hold.
        limits: what it may use.
        label: what its streams are called; None: `name`.
        on_print: gets what it prints, as it comes.

        Raises SandboxUnavailable, and ValueError for names in `writes` that no block has.
        """
        check_available()
        unknown = sorted(set(writes or ()) - set(blocks))
        if unknown:
            raise ValueError(f"writes names {', '.join(unknown)}, and the blocks are {', '.join(blocks)}")
        self.limits = limits or Limits()
        self.ran: Ran | None = None
        self._child = ChildProcess()
        self._calls = Calls(
            llm,
            blocks,
            writes=frozenset(blocks if writes is None else writes),
            label=label or name,
            limits=self.limits,
            reply=self._reply,
            stop=self._stop,
        )
        self._code = {"name": name, "source": source, "inputs": dict(inputs or {})}
        self._on_print = on_print or (lambda text: None)
        self._printed: list[str] = []
        self._violation: Violation | None = None
        self._begun = 0.0

    async def run(self) -> Ran:
        """Start the child, serve it until it ends, and say how it did. Cancelled, the coroutine inside is
        cancelled first and has the limit `grace` to end; then its process is killed, and `ran` says how
        it went.

        Raises SandboxUnavailable if the child could not be locked in, TypeError or ValueError for inputs
        that JSON cannot hold.
        """
        loop = asyncio.get_running_loop()
        reading: asyncio.Task[Message | None] | None = None
        clock: asyncio.TimerHandle | None = None
        last: Message | None = None
        try:
            await self._child.start(self.limits)
            self._begun = loop.time()
            await self._child.send({"start": {**self._code, "blocks": self._calls.given}})
            if self.limits.seconds is not None:
                late = Violation("time", f"did not end within {self.limits.seconds:g} s")
                clock = loop.call_later(self.limits.seconds, self._stop, late)
            reading = asyncio.create_task(self._read())
            try:
                last = await asyncio.shield(reading)
            except asyncio.CancelledError:
                last = await self._end_gently(reading)
                raise
        finally:
            if clock is not None:
                clock.cancel()
            self._child.kill()
            closing = asyncio.create_task(self._close(reading, last))
            _closing.add(closing)
            closing.add_done_callback(_closing.discard)
            await asyncio.shield(closing)
        assert self.ran is not None
        return self.ran

    # ---- messages -------------------------------------------------------------------------------

    async def _read(self) -> Message | None:
        """Serve the child until it says how it ended, or is gone."""
        try:
            while (message := await self._child.receive()) is not None:
                if "returned" in message or "raised" in message:
                    return message
                if "call" in message:
                    self._calls.begin(message)
                elif isinstance(message.get("print"), str):
                    self._print(message["print"])
                else:
                    raise WireError("something that is no message (nothing known in it)")
                # Messages that are there already are read without waiting: others get their turn here.
                await asyncio.sleep(0)
        except Violation as violation:
            self._stop(violation)
        except WireError as error:
            self._stop(Violation("messages", f"sent {error}"))
        return None

    def _print(self, text: str) -> None:
        use = self._calls.use
        use.printed += len(text) + 1  # an empty one is not free
        if use.printed > self.limits.printed:
            raise Violation("printing", f"printed more than its {self.limits.printed} characters")
        self._printed.append(text)
        self._on_print(text)

    async def _reply(self, message: Message) -> None:
        try:
            await self._child.send(message)
        except WireError as error:
            await self._child.send({"id": message["id"], "error": ["ValueError", f"the answer is {error}"]})

    # ---- the end --------------------------------------------------------------------------------

    def _stop(self, violation: Violation) -> None:
        """End the child at once, because of this unless it was ended before."""
        self._violation = self._violation or violation
        self._child.kill()

    async def _end_gently(self, reading: asyncio.Task[Message | None]) -> Message | None:
        """Cancel the coroutine inside and let it end."""
        ending = asyncio.create_task(self._child.send({"cancel": True}))
        done, _ = await asyncio.wait({reading}, timeout=self.limits.grace)
        if not done:
            self._stop(Violation("time", f"went on for {self.limits.grace:g} s after it was cancelled"))
        await ending
        return await reading

    async def _close(self, reading: asyncio.Task[Message | None] | None, last: Message | None) -> None:
        """Keep nothing of the child, which was killed, but how it went."""
        if reading is not None:
            reading.cancel()
            await asyncio.wait({reading})
        await self._calls.close()
        await self._child.close()
        if reading is not None:
            self.ran = self._how(last, self._child.status)

    def _how(self, last: Message | None, status: int) -> Ran:
        use = self._calls.use
        used: dict[str, Any] = {
            "printed": "".join(self._printed),
            "tokens": use.tokens,
            "calls": use.calls,
            "seconds": asyncio.get_running_loop().time() - self._begun,
        }
        if self._violation is not None:
            return Ran(self._violation.kind, reason=self._violation.reason, **used)
        if last is not None and "returned" in last:
            return Ran("returned", last["returned"], **used)
        if last is not None:
            kind, text, trace = (
                str(last.get(key, ""))[:ERROR_CHARACTERS] for key in ("raised", "text", "trace")
            )
            if kind == "CancelledError":
                return Ran("cancelled", reason="was cancelled", **used)
            return Ran("raised", reason=f"raised {kind}{': ' if text else ''}{text}", trace=trace, **used)
        if status == -signal.SIGSYS:
            return Ran("forbidden", reason="tried a forbidden system call", **used)
        if status == -signal.SIGXCPU:
            seconds = self.limits.cpu_seconds
            return Ran("time", reason=f"used up its {seconds} s of processor time", **used)
        if status < 0:
            return Ran("died", reason=f"died of signal {-status} ({signal.strsignal(-status)})", **used)
        return Ran("died", reason=f"ended without an answer (exit status {status})", **used)


async def run_sandboxed(
    name: str,
    source: str,
    llm: AsyncLLM,
    blocks: Mapping[str, CacheBlock],
    *,
    writes: Sequence[str] | None = None,
    inputs: Mapping[str, Any] | None = None,
    limits: Limits | None = None,
) -> Any:
    """Run a coroutine of which only the source is known in a sandbox, as if it were one of ours.

    Returns what it returns, prints what it prints; cancelled, it is cancelled. Parameters as in
    `Sandbox`.

    Raises CandidateError if it failed or did what it may not, SandboxUnavailable where it cannot run.
    """

    def show(text: str) -> None:
        print(text, end="", flush=True)

    sandbox = Sandbox(name, source, llm, blocks, writes=writes, inputs=inputs, limits=limits, on_print=show)
    try:
        ran = await sandbox.run()
    except asyncio.CancelledError:
        if sandbox.ran is None or sandbox.ran.kind in ("returned", "cancelled"):
            raise
        # As in any coroutine: an error of its `finally` takes the place of the cancellation.
        raise CandidateError(sandbox.ran) from None
    if not ran.ok:
        raise CandidateError(ran)
    return ran.result
