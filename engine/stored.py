"""What blocks hold, apart from any engine: their states and copies of their memory, and when that is whole.

Knows states, shapes and dtypes. Knows nothing of how it is copied (`storing`), nor of files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .batch import PAGE_TOKENS
from .blocks import BlockState
from .config import ModelConfig
from .memory import CacheTensors

OF_PAGES = ("keys", "values")
"""Tensors of `CacheTensors` that are [layers, H_kv, pages, ...]. All others are [layers, slots, ...]."""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One block. Its state numbers the stored pages and slots from 1; logits that are kept with it name
    blocks by the stored ids."""

    id: int
    name: str
    tokens: tuple[int, ...]
    state: BlockState


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks with all that they hold, on the CPU.

    `tensors` go by the names of `CacheTensors` and have their shapes, but for the number of pages P or
    of slots S: page and slot 1 come first. What P or S is 0 of is left out.
    """

    blocks: tuple[StoredBlock, ...]
    tensors: dict[str, Tensor]

    @property
    def num_pages(self) -> int:
        return _count(self.tensors, of_pages=True)

    @property
    def num_slots(self) -> int:
        return _count(self.tensors, of_pages=False)


def pools(cache: CacheTensors, of_pages: bool) -> list[tuple[str, Tensor]]:
    """The tensors that are made of pages, or those that are made of slots, with their names."""
    names = (field.name for field in fields(cache))
    return [(name, getattr(cache, name)) for name in names if (name in OF_PAGES) == of_pages]


def _count(tensors: Mapping[str, Tensor], of_pages: bool) -> int:
    """P or S of stored tensors."""
    axis = 2 if of_pages else 1
    shapes = [t.shape for name, t in tensors.items() if (name in OF_PAGES) == of_pages]
    return next((shape[axis] for shape in shapes if len(shape) > axis), 0)


def check(stored: Stored, cache: CacheTensors, config: ModelConfig) -> None:
    """Raise ValueError unless `stored` is whole, and fits into `cache`, some pages and slots aside."""
    pages, slots = stored.num_pages, stored.num_slots
    wanted = {name: pool for of_pages in (True, False) for name, pool in pools(cache, of_pages)}
    there = {name for name in wanted if (pages if name in OF_PAGES else slots)}
    if set(stored.tensors) != there:
        raise ValueError(f"tensors {sorted(stored.tensors)} are not {sorted(there)}")
    for name, tensor in stored.tensors.items():
        shape = list(wanted[name].shape)
        shape[2 if name in OF_PAGES else 1] = pages if name in OF_PAGES else slots
        if list(tensor.shape) != shape or tensor.dtype != wanted[name].dtype:
            raise ValueError(
                f"{name} are {list(tensor.shape)} {tensor.dtype}, and this engine's model asks for "
                f"{shape} {wanted[name].dtype}"
            )
    ids = {block.id for block in stored.blocks}
    if len(ids) < len(stored.blocks):
        raise ValueError("two blocks have one id")
    used_pages: set[int] = set()
    used_slots: set[int] = set()
    for block in stored.blocks:
        state = block.state
        wrong = _what_is_wrong(block, config.vocab_size, config.is_hybrid, ids)
        if wrong:
            raise ValueError(f"block {block.name!r}: {wrong}")
        used_pages.update(state.pages)
        used_slots.update([state.slot] if state.slot else [])
    if used_pages != set(range(1, pages + 1)) or used_slots != set(range(1, slots + 1)):
        raise ValueError("the blocks do not take just the pages and slots that are there")


def _what_is_wrong(block: StoredBlock, vocab_size: int, is_hybrid: bool, ids: set[int]) -> str:
    """Why a stored block is no block; '' if it is one."""
    state, kept = block.state, block.state.kept
    lengths = [segment.length for segment in state.segments]
    if not block.name or state.version < (1 if block.tokens else 0):
        return "it has no name or no version"
    if len(block.tokens) != state.num_tokens or sum(lengths) != state.num_tokens:
        return f"{len(block.tokens)} tokens, where {state.num_tokens} are said and {sum(lengths)} stored"
    if any(not 0 <= token < vocab_size for token in block.tokens):
        return f"a token id beyond the model's {vocab_size}"
    if any(s.length < 1 or len(s.pages) != -(-s.length // PAGE_TOKENS) for s in state.segments):
        return "a run of pages of another length than its tokens"
    if any(s.offset < 0 or s.offset >= state.span for s in state.segments):
        return f"tokens outside of its span {state.span}"
    if bool(state.slot) != (is_hybrid and state.num_tokens > 0) or bool(state.span) != bool(state.num_tokens):
        return "its slot or its span does not fit its tokens"
    if kept is None:
        return ""
    if kept.logits.shape != (vocab_size,) or kept.logits.dtype != torch.float32:
        return f"kept logits are not float32 [{vocab_size}]"
    return "" if ids >= {*kept.view, *kept.filled} else "kept logits name a block that is not there"
