"""Where this Python runs: the kernel's event loop, and the program in front of the kernel.

Knows IPython, if something else has loaded it, and environment variables. Loads nothing itself, so
that a script pays nothing for it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

_SIGNS = (
    ("COLAB_RELEASE_TAG", "Google Colab"),
    ("KAGGLE_KERNEL_RUN_TYPE", "Kaggle"),
    ("JPY_SESSION_NAME", "JupyterLab or Notebook"),
    ("VSCODE_PID", "VS Code"),  # also below a JupyterLab that was started in its terminal
    ("VSCODE_CWD", "VS Code"),
)
"""Variables that a host sets for its kernels; the first that is there decides."""


def shell() -> Any:
    """IPython's shell; None in a plain script."""
    if "IPython" not in sys.modules:  # importing it would take a while, only to find no shell
        return None
    from IPython.core.getipython import get_ipython

    return get_ipython()


def kernel_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop on which a Jupyter kernel runs its cells; None outside a kernel."""
    io_loop = getattr(getattr(shell(), "kernel", None), "io_loop", None)
    loop = getattr(io_loop, "asyncio_loop", None)
    return loop if isinstance(loop, asyncio.AbstractEventLoop) else None


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The loop that runs in this thread; None where none does."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def messages_wait(on_main_thread: bool) -> bool:
    """Do messages of widgets wait until the running cell has ended, even if it only awaits?

    So they do in older ipykernels, except for those that come `on_main_thread` no more: JupyterLab
    sends them to a thread of their own, if the kernel offers that and the setting is on.
    """
    module = sys.modules.get("ipykernel")
    return module is not None and module.version_info[:2] < (7, 4) and on_main_thread


def host_name() -> str:
    """The program that shows what the code displays, as far as a kernel can tell.

    JupyterLab and Notebook look alike from here, and a kernel without a sign of its host is most
    likely executed without a browser (nbclient, papermill).
    """
    current = shell()
    if current is None:
        return "no notebook (plain Python)"
    if getattr(current, "kernel", None) is None:
        return "a terminal (IPython)"
    if "__vsc_ipynb_file__" in current.user_ns:  # set in each of its notebooks
        return "VS Code"
    hosts = (name for sign, name in _SIGNS if os.environ.get(sign))
    return next(hosts, "a kernel without a browser")
