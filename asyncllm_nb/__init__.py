"""Shared-memory inference for notebooks: one language model, several coroutines, one memory.

Start with `AsyncLLM`. Names are resolved when they are first used, so that importing the package does
not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# At once, not lazily: a submodule with the name of its function would hide it once it is imported.
from .check import check
from .diagram import diagram
from .run import run

if TYPE_CHECKING:
    from .agent import Agent as Agent
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
    from .rewriting import EditingTask as EditingTask
    from .sandbox_process import SandboxUnavailable as SandboxUnavailable
    from .self_editing import SelfEditing as SelfEditing
    from .tools import ToolDenied as ToolDenied

__version__ = "0.1.0"

_HOMES = {
    "Agent": "agent",
    "AsyncLLM": "llm",
    "ForwardOutput": "llm",
    "AsyncLLMError": "engine.errors",
    "CacheFullError": "engine.errors",
    "EngineClosedError": "engine.errors",
    "EditingTask": "rewriting",
    "ModelError": "engine.errors",
    "SandboxUnavailable": "sandbox_process",
    "SelfEditing": "self_editing",
    "CacheBlock": "engine.blocks",
    "Token": "engine.streams",
    "TokenStream": "engine.streams",
    "load_ipython_extension": "magics",
    "ToolDenied": "tools",
    "replay": "replaying",
}

__all__ = [
    "Agent",
    "AsyncLLM",
    "AsyncLLMError",
    "CacheBlock",
    "CacheFullError",
    "EditingTask",
    "EngineClosedError",
    "ForwardOutput",
    "ModelError",
    "SandboxUnavailable",
    "SelfEditing",
    "Token",
    "TokenStream",
    "ToolDenied",
    "__version__",
    "check",
    "diagram",
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
