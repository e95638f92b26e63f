"""The child process of a sandbox as its parent has it: started, locked in, spoken to, killed.

Knows processes and the form of messages. Knows nothing of what they say, nor of models. The event loop
never waits for the child, and what the child sends takes a bounded part of the parent's memory.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from . import seccomp
from .engine.errors import AsyncLLMError
from .sandbox_limits import Limits
from .sandbox_wire import CHILD_BYTES, HEADER_BYTES, PARENT_BYTES, Message, body_length, pack, unpack

START_SECONDS = 30.0
"""How long a child may take until it is locked in."""

ERROR_CHARACTERS = 2_000

_FOLDER = str(Path(__file__).resolve().parent)
# The package without its __init__: the child loads the few modules that it needs and no other.
_BOOT = (
    "import sys, types; package = types.ModuleType('asyncllm_nb'); package.__path__ = [sys.argv.pop(1)];"
    "sys.modules['asyncllm_nb'] = package; "
)
# asyncio does without ssl, which would be half of what the child loads.
_CHILD = _BOOT + "sys.modules['ssl'] = None; from asyncllm_nb.sandbox_child import main; main()"
_PROOF = _BOOT + "from asyncllm_nb.seccomp import prove; prove()"


class SandboxUnavailable(AsyncLLMError):
    """This machine cannot run code that nobody trusts: says what it lacks."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"there is no sandbox on this machine: {reason}")


def check_available() -> None:
    """Raise SandboxUnavailable with the reason, as far as it shows without starting a process."""
    reason = seccomp.unavailable()
    if reason is not None:
        raise SandboxUnavailable(reason)


_proven = False


async def prove() -> None:
    """Once per process: see what is forbidden fail in a locked-in one. Raises SandboxUnavailable."""
    global _proven
    if _proven:
        return
    check_available()
    await asyncio.to_thread(_prove)
    _proven = True


def _prove() -> None:
    try:
        done = subprocess.run(
            _command(_PROOF),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=_environment(),
            timeout=START_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxUnavailable(str(error)) from error
    if done.returncode != -signal.SIGSYS:
        said = _last_line(done.stderr)
        raise SandboxUnavailable(
            "a process that had locked itself in could do what is forbidden, or not start (exit status "
            f"{done.returncode}){f': {said}' if said else ''}"
        )


class ChildProcess:
    """One child. After `start` it is locked in and waits for code; after `close` nothing of it is left."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None

    @property
    def status(self) -> int:
        """Its exit status once it is closed, or the negative number of the signal that it died of."""
        assert self._process is not None
        return int(self._process.returncode)

    async def start(self, limits: Limits) -> None:
        """Start it and wait until it is locked in. Raises SandboxUnavailable."""
        await prove()
        numbers = (os.getpid(), limits.memory_mb * 2**20, limits.cpu_seconds)
        here, there = socket.socketpair()
        try:
            # The folder is gone as soon as the child stands in it: nothing is in it, and nothing can be.
            with there, tempfile.TemporaryDirectory(prefix="asyncllm-sandbox-") as folder:
                self._process = subprocess.Popen(
                    _command(_CHILD, *numbers),
                    stdin=there.fileno(),
                    stdout=there.fileno(),
                    stderr=subprocess.PIPE,
                    cwd=folder,
                    env=_environment(),
                    start_new_session=True,
                )
            self._reader, self._writer = await asyncio.open_unix_connection(sock=here, limit=CHILD_BYTES)
        except BaseException as error:
            here.close()
            if isinstance(error, OSError):
                raise SandboxUnavailable(f"no process can be started: {error}") from error
            raise
        try:
            async with asyncio.timeout(START_SECONDS):
                message = await self.receive()
        except TimeoutError:
            raise SandboxUnavailable(f"the child was not locked in after {START_SECONDS:g} s") from None
        if message is None:
            raise SandboxUnavailable(f"the child did not start: {self._last_words()}")
        if "ready" not in message:
            raise SandboxUnavailable(str(message.get("unavailable")))

    def _last_words(self) -> str:
        """What a child that did not start wrote to its standard error."""
        assert self._process is not None and self._process.stderr is not None
        self._process.kill()
        return _last_line(self._process.stderr.read(2**16)) or f"exit status {self._process.wait()}"

    async def receive(self) -> Message | None:
        """The next message; None when the child is gone. Raises WireError."""
        try:
            header = await self._reader.readexactly(HEADER_BYTES)
            return unpack(await self._reader.readexactly(body_length(header, CHILD_BYTES)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def send(self, message: Message) -> None:
        """Send a message. To a child that is gone it is not sent: `receive` tells that. Raises WireError."""
        assert self._writer is not None
        data = pack(message, PARENT_BYTES)
        try:
            self._writer.write(data)
            await self._writer.drain()
        except ConnectionError:
            return

    def kill(self) -> None:
        """End it at once, whatever it does. It has no children."""
        if self._process is not None:
            self._process.kill()

    async def close(self) -> None:
        """Kill it, if it lives, and give back what belongs to it."""
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
            assert self._process.stderr is not None
            self._process.stderr.close()
        if self._writer is not None:
            self._writer.close()
            try:
                await self._writer.wait_closed()
            except ConnectionError:
                pass  # it was killed in the middle of a message


def _command(code: str, *arguments: int) -> list[str]:
    return [sys.executable, "-I", "-S", "-B", "-c", code, _FOLDER, *map(str, arguments)]


def _environment() -> dict[str, str]:
    """Nothing, but where the dynamic linker finds Python's own libraries, if that was set by hand."""
    return {key: os.environ[key] for key in ("LD_LIBRARY_PATH",) if key in os.environ}


def _last_line(said: bytes) -> str:
    return said.decode(errors="replace").strip()[-ERROR_CHARACTERS:].rpartition("\n")[2]
