"""The child's end of the pipe: calls go out, answers come back, on the child's only loop.

Knows the standard library and the form of messages. Knows nothing of what they say.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

from .sandbox_wire import (
    CHILD_BYTES,
    HEADER_BYTES,
    PARENT_BYTES,
    Message,
    WireError,
    body_length,
    pack,
    unpack,
)

ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ValueError, TypeError, RuntimeError, OSError)
}
"""How an error of the parent is raised in the child; any other kind as `LLMError`."""


class LLMError(Exception):
    """An error of the engine, such as a full cache."""


class Wire:
    """The two ends of the pipe, on the child's only loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_message: Callable[[Message], None]) -> None:
        self.loop = loop
        self._on_message = on_message  # what is not an answer
        self._received = b""
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._read, self._write = os.read, os.write

    def send(self, **message: Any) -> None:
        """Send one message; waits while the pipe is full."""
        try:
            data = pack(message, CHILD_BYTES)
        except WireError as error:
            raise ValueError(f"too much for one call: {error}") from None
        while data:
            data = data[self._write(1, data) :]

    def send_later(self, **message: Any) -> None:
        """The same from the loop's next turn: safe in a finalizer, which may run within a send."""
        self.loop.call_soon(lambda: self.send(**message))

    def request(self, call: str, **arguments: Any) -> asyncio.Future[Any]:
        """Ask the parent; the future gets its answer."""
        self._number += 1
        self.send(call=call, id=self._number, **arguments)
        answer: asyncio.Future[Any] = self.loop.create_future()
        self._answers[self._number] = answer
        return answer

    def ask(self, call: str, **arguments: Any) -> Any:
        """Ask the parent and wait on the spot, for what is not awaited in `AsyncLLM` either."""
        answer = self.request(call, **arguments)
        while not answer.done():
            self.receive()
        return answer.result()

    def receive(self) -> None:
        """Read what has arrived; waits if there is nothing."""
        data = self._read(0, 2**16)
        if not data:
            os._exit(1)  # the parent is gone
        self._received += data
        while len(self._received) >= HEADER_BYTES:
            end = HEADER_BYTES + body_length(self._received[:HEADER_BYTES], PARENT_BYTES)
            if len(self._received) < end:
                break
            body, self._received = self._received[HEADER_BYTES:end], self._received[end:]
            self._take(unpack(body))

    def _take(self, message: Message) -> None:
        answer = self._answers.pop(message.get("id", 0), None)
        if answer is None:
            self._on_message(message)
        elif not answer.done():  # a cancelled one is
            if "error" in message:
                kind, text = message["error"]
                answer.set_exception(ERRORS.get(kind, LLMError)(text))
            else:
                answer.set_result(message["value"])
