"""Ready-made agents, short enough to read and to copy: each is a function that returns an `Agent`.

`feeds` has what some of them read: files that grow, programs that print, values that change.
"""

from .calculator import calc
from .context import evolving_context
from .delegation import delegation
from .feeds import Output, Polled, Tail
from .listener import listener
from .monitor import monitor
from .thinker_writer import thinker_writer
from .tool_calls import tool_calls
from .workers import workers

__all__ = [
    "Output",
    "Polled",
    "Tail",
    "calc",
    "delegation",
    "evolving_context",
    "listener",
    "monitor",
    "thinker_writer",
    "tool_calls",
    "workers",
]
