"""Files of a training run: the model as transformers reads it, and what a later piece goes on from.

Knows file names and formats. Every file is there whole or not at all, and none is larger than 16 MiB.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from .model import Network
from .optimizer import Optimizer


def save_model(network: Network, folder: Path, *, end: int, pad: int) -> None:
    """Write `config.json` and bfloat16 weights, by the names of the checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    config = network.sizes.config(end=end, pad=pad)
    _write_json(folder / "config.json", config)
    weights = {name: tensor.detach().bfloat16().cpu() for name, tensor in network.state_dict().items()}
    _save(weights, folder / "model.safetensors")


def save_progress(network: Network, optimizer: Optimizer, numbers: dict[str, Any], folder: Path) -> None:
    """Write float32 weights in two files, the optimizer's state in a third, and `numbers` last."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().cpu() for name, tensor in network.state_dict().items()}
    names = sorted(weights)
    for place, part in enumerate((names[::2], names[1::2])):
        _save({name: weights[name] for name in part}, folder / f"weights-{place + 1}.safetensors")
    _save({name: t.cpu() for name, t in optimizer.state().items()}, folder / "optimizer.safetensors")
    _write_json(folder / "progress.json", numbers)


def load_progress(network: Network, optimizer: Optimizer, folder: Path) -> dict[str, Any]:
    """Read what `save_progress` wrote; returns its numbers."""
    weights: dict[str, Tensor] = {}
    for place in (1, 2):
        weights |= load_file(folder / f"weights-{place}.safetensors")
    network.load_state_dict(weights)
    optimizer.load(load_file(folder / "optimizer.safetensors"))
    numbers: dict[str, Any] = json.loads((folder / "progress.json").read_text(encoding="utf-8"))
    return numbers


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    part = file.with_suffix(".part")
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, part, metadata={"format": "pt"})
    part.chmod(0o644)  # not only for whoever trained it
    os.replace(part, file)


def _write_json(file: Path, value: Any) -> None:
    part = file.with_suffix(".part")
    part.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(part, file)
