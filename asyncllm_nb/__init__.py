"""Shared-memory inference for notebooks: one language model, several coroutines, one memory.

Start with `AsyncLLM`. Names are resolved when they are first used, so that importing the package does
not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# At once, not lazily: a submodule with the name of its function would hide it once it is imported.
from .check import check
from .run import run

if TYPE_CHECKING:
    from .engine.blocks import CacheBlock as CacheBlock
    from .engine.errors import AsyncLLMError as AsyncLLMError
    from .engine.errors import CacheFullError as CacheFullError
    from .engine.errors import EngineClosedError as EngineClosedError
    from .engine.errors import ModelError as ModelError
    from .engine.streams import Token as Token
    from .engine.streams import TokenStream as TokenStream
    from .llm import AsyncLLM as AsyncLLM
    from .llm import ForwardOutput as ForwardOutput
    from .magics import load_ipython_extension as load_ipython_extension
    from .replaying import replay as replay

__version__ = "0.1.0"

_HOMES = {
    "AsyncLLM": "llm",
    "ForwardOutput": "llm",
    "AsyncLLMError": "engine.errors",
    "CacheFullError": "engine.errors",
    "EngineClosedError": "engine.errors",
    "ModelError": "engine.errors",
    "CacheBlock": "engine.blocks",
    "Token": "engine.streams",
    "TokenStream": "engine.streams",
    "load_ipython_extension": "magics",
    "replay": "replaying",
}

__all__ = [
    "AsyncLLM",
    "AsyncLLMError",
    "CacheBlock",
    "CacheFullError",
    "EngineClosedError",
    "ForwardOutput",
    "ModelError",
    "Token",
    "TokenStream",
    "__version__",
    "check",
    "replay",
    "run",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
