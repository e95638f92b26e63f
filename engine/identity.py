"""Which model an engine runs, as a short text: equal for equal models, however and wherever they are loaded.

Knows a config, weights and their bits. Knows no files, so a folder that changed since makes no difference.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from .model import Decoder

CHUNK_ELEMENTS = 1 << 20
"""So many elements of a matrix are widened to 64 bits at once."""

UNCOMPARED = frozenset({"decay_rate"})
"""Weights that are computed when they are loaded, and that another processor may round otherwise."""

INTEGERS = {2: torch.int16, 4: torch.int32}

_known: weakref.WeakKeyDictionary[Decoder, str] = weakref.WeakKeyDictionary()


def model_identity(decoder: Decoder) -> str:
    """A sha256 in hex over the config (end tokens and the checkpoint's dtype aside) and the weights.

    Of a vector all bytes count; of a matrix its shape and, exactly, the sum of each row and of each
    column, its elements' bits taken as integers: any one bit that differs shows, and neither the device
    nor the order in memory does. The dtype that it was loaded in does. Computed once per model, on
    whatever thread asks: two passes over the weights.
    """
    identity = _known.get(decoder)
    if identity is None:
        identity = _known[decoder] = _identity(decoder)
    return identity


@torch.inference_mode()
def _identity(decoder: Decoder) -> str:
    facts = asdict(decoder.config)
    del facts["eos_token_ids"], facts["dtype"]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    seen: set[int] = set()
    for name, tensor in _tensors(decoder.weights):
        if id(tensor) in seen:  # a head that is the embedding
            continue
        seen.add(id(tensor))
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        for part in _sums(tensor) if tensor.dim() == 2 else [tensor]:
            own = part.clone(memory_format=torch.contiguous_format)  # numpy() takes a storage for good
            digest.update(own.cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _sums(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """int64 sums of a [rows, columns] matrix's bits: per row [rows] and per column [columns]."""
    bits = matrix.view(INTEGERS[matrix.element_size()])
    if bits.stride(0) < bits.stride(1):  # read it in the order in which it lies
        columns, rows = _sums_as_it_lies(bits.t())
    else:
        rows, columns = _sums_as_it_lies(bits)
    return rows, columns


def _sums_as_it_lies(bits: Tensor) -> tuple[Tensor, Tensor]:
    chunks = bits.split(max(1, CHUNK_ELEMENTS // bits.shape[1]))
    columns = torch.zeros(bits.shape[1], dtype=torch.int64, device=bits.device)
    rows = []
    for chunk in chunks:
        wide = chunk.to(torch.int64)
        rows.append(wide.sum(1))
        columns += wide.sum(0)
    return torch.cat(rows), columns


def _tensors(part: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors of a (nested) part of the weights that are compared, with their names."""
    if isinstance(part, Tensor):
        yield name, part
    elif isinstance(part, tuple):
        for index, item in enumerate(part):
            yield from _tensors(item, f"{name}.{index}")
    elif is_dataclass(part):
        for field in fields(part):
            if field.name not in UNCOMPARED:
                yield from _tensors(getattr(part, field.name), f"{name}.{field.name}")
