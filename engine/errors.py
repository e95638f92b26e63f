"""The errors that a user of the engine can meet. Knows no torch and no other module.

::

    AsyncLLMError
    ├── CacheFullError       a request cannot get its pages or its slot
    ├── EngineClosedError    the engine was closed; make it again
    └── ModelError           a checkpoint that cannot be loaded, and why

Misuse of the API (a wrong view, an unknown keyword, an empty input) raises the built-in ``ValueError``
or ``TypeError`` instead, before anything has changed.
"""

from __future__ import annotations


class AsyncLLMError(Exception):
    """Base of the errors of this package."""


class CacheFullError(AsyncLLMError):
    """A request cannot get the memory it needs: says how much, what is free and who holds most."""


class EngineClosedError(AsyncLLMError):
    """The engine was closed, by ``close()`` or because the cell that makes it ran again."""


class ModelError(AsyncLLMError):
    """A checkpoint cannot be loaded: names the family, file or tensor that is in the way."""
