"""Triton's kernels run in Python here: the flag has to be set before Triton is imported.

Part "interpreter" of ``make test`` is a process of its own, so nothing else sees the flag.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter

_patch_lang_tensor = interpreter._patch_lang_tensor


def _patch_with_index(tensor: Any, scope: Any) -> None:
    """Loop bounds are arrays of one element, which NumPy 2.4 no longer turns into integers."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch_with_index
