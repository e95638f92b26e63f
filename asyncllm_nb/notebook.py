"""What is different in a notebook: cells run again, and last expressions are shown.

Knows engines and whether IPython runs. In a plain script nothing here does anything.
"""

from __future__ import annotations

import sys
import weakref

from .engine.engine import Engine

_engines: weakref.WeakValueDictionary[tuple[str, str], Engine] = weakref.WeakValueDictionary()
"""The notebook's engines by (model folder, name). Making one again closes the earlier one."""


def in_notebook() -> bool:
    """Does this code run in an IPython kernel?"""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return shell is not None and hasattr(shell, "kernel")


def close_earlier(folder: str, name: str) -> None:
    """Close the engine of the same model and name that an earlier run of the cell made.

    Its storage is given back before the new one loads.
    """
    earlier = _engines.pop((folder, name), None) if in_notebook() else None
    if earlier is not None and not earlier.closed:
        earlier.close_now()
        print(
            f"Closed the earlier engine {name!r} of this model; its blocks are gone. "
            "(A second engine of one model needs another name=...)"
        )


def remember(engine: Engine, folder: str) -> None:
    """From now on `engine` is the notebook's engine of this model and name."""
    if in_notebook():
        _engines[folder, engine.name] = engine


def install_displays(engine: Engine) -> None:
    """Let blocks, streams and engines show themselves with the dashboard's colours."""
    if in_notebook():
        from . import display

        engine.show_html = display.show_html
        engine.show_stream = display.display_stream
