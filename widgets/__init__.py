"""Live pictures of a run for a notebook. Takes numbers, strings and bytes; knows no engine.

`Dashboard` has all panels; each panel is a widget of its own, too. Names are resolved when they are
first used, so that importing this loads no notebook library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .dashboard import Agents as Agents
    from .dashboard import Attention as Attention
    from .dashboard import Blocks as Blocks
    from .dashboard import Controls as Controls
    from .dashboard import Dashboard as Dashboard
    from .dashboard import Ledger as Ledger
    from .dashboard import Replay as Replay
    from .dashboard import Scrubber as Scrubber
    from .dashboard import States as States
    from .dashboard import Streams as Streams
    from .dashboard import Timeline as Timeline
    from .dashboard import Views as Views

__all__ = [
    "Agents",
    "Attention",
    "Blocks",
    "Controls",
    "Dashboard",
    "Ledger",
    "Replay",
    "Scrubber",
    "States",
    "Streams",
    "Timeline",
    "Views",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.dashboard"), name)
