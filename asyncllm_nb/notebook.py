"""What is different in a notebook: cells run again, and last expressions are shown.

Knows engines and whether IPython runs. In a plain script nothing here does anything.
"""

from __future__ import annotations

import sys
import traceback
import weakref

from .engine.engine import Engine
from .host import shell

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
        engine.made_in = f" (In [{sys.modules['IPython'].get_ipython().execution_count}])"


def current_cell() -> object:
    """Identifies the cell that the running code belongs to, also in a task that it started."""
    parent = sys.modules["IPython"].get_ipython().get_parent()
    return parent.get("header", {}).get("msg_id")


def cell_name(file: str) -> str | None:
    """What the notebook calls the cell whose code has this file name: "In [3]"; None for other files."""
    found = shell().compile.format_code_name(file)
    return f"In [{found[1][3:-1]}]" if found and found[1].startswith("In[") else None


def error_text(error: BaseException) -> str:
    """An exception with its traceback as a cell shows it; as Python does in a plain script."""
    if not in_notebook():
        return "".join(traceback.format_exception(error))
    lines = shell().InteractiveTB.structured_traceback(type(error), error, error.__traceback__)
    return "\n".join(lines) + "\n"


def install_displays(engine: Engine) -> None:
    """Let blocks, streams and engines show themselves with the dashboard's colours, and messages find
    their cells."""
    if in_notebook():
        from . import display

        engine.current_cell = current_cell
        engine.show_html = display.show_html
        engine.show_stream = display.display_stream
        engine.recorder.tasks.cell_name = cell_name
