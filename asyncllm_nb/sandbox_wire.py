"""Messages between a sandboxed child and its parent: JSON behind its length. Both sides use it.

Knows the standard library only. Knows nothing about models, nor what the messages say. The parent
trusts none of them: whatever has the wrong size or form raises `WireError`.
"""

from __future__ import annotations

import json
from typing import Any

HEADER_BYTES = 4
CHILD_BYTES = 2**16
"""Largest message that a child may send."""
PARENT_BYTES = 2**25
"""Largest message that the parent sends."""

Message = dict[str, Any]


class WireError(Exception):
    """What arrived is no message: says why."""


def pack(message: Message, most: int) -> bytes:
    """A message as it is sent. Raises WireError if it is larger than `most` bytes, TypeError or
    ValueError if JSON cannot hold it."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > most:
        raise WireError(f"a message of {len(body)} bytes; at most {most} are taken")
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def body_length(header: bytes, most: int) -> int:
    """How many bytes follow a header. Raises WireError."""
    length = int.from_bytes(header, "big")
    if not 1 <= length <= most:
        raise WireError(f"a message of {length} bytes; at most {most} are taken")
    return length


def unpack(body: bytes) -> Message:
    """The message of a body. Raises WireError."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"something that is no message ({type(error).__name__})") from None
    if not isinstance(message, dict):
        raise WireError("something that is no message (not an object)")
    return message
