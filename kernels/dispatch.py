"""Which implementation of the kernels runs: plain PyTorch, or the fused Triton ones.

Knows devices and Triton's interpreter flag. Imports no Triton: files named ``*_triton.py`` do, and
they are loaded only where this says that they can run.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch


def interprets() -> bool:
    """Does Triton run its kernels in Python here (``TRITON_INTERPRET=1``)? For tests on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_not_fused(device: torch.device) -> str:
    """Why the fused kernels cannot run on `device`; empty if they can."""
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if interprets():
        return ""
    if device.type != "cuda":
        return f"Triton compiles for GPUs, and the device is {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"the fused kernels need compute capability 8.0, and this GPU has {major}.{minor}"
    return ""
