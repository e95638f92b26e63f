"""Blocks laid out by hand for tests of the model: pages in disorder, poisoned memory, no engine.

Knows `Batch` as its docstring describes it, and nothing of the engine's own way to build one, so
that a mistake there does not hide here. `Memory.step` runs requests and commits what they wrote.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from asyncllm_nb.engine.batch import CONV_ROWS, PAGE_TOKENS, Batch
from asyncllm_nb.engine.config import ModelConfig
from asyncllm_nb.engine.memory import CacheTensors
from asyncllm_nb.engine.model import Decoder
from asyncllm_nb.kernels.transitions import compose


@dataclass
class Run:
    """A run of tokens in pages; `offset` is the position, in the block, of its first token."""

    pages: list[int]
    length: int
    offset: int


@dataclass
class Laid:
    """A block: runs of tokens, and a slot (0 while it is empty)."""

    runs: list[Run] = field(default_factory=list)
    slot: int = 0
    span: int = 0  # largest position + 1

    @property
    def num_tokens(self) -> int:
        return sum(run.length for run in self.runs)


@dataclass
class Request:
    """Tokens to append to the last block of a view. `positions` [3, n] are within that block."""

    view: list[Laid]
    tokens: Sequence[int]
    positions: Tensor | None = None

    def own_positions(self) -> Tensor:
        if self.positions is not None:
            return self.positions
        span = self.view[-1].span
        return torch.arange(span, span + len(self.tokens)).expand(3, -1)


class Memory:
    """Poisoned pools, and the numbers of free pages and slots in random order."""

    def __init__(
        self,
        decoder: Decoder,
        seed: int = 0,
        num_pages: int = 120,
        num_slots: int = 40,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.decoder = decoder
        self.config: ModelConfig = decoder.config
        self.cache = CacheTensors.allocate(self.config, num_pages, num_slots, torch.device("cpu"), dtype)
        for pool in (self.cache.keys, self.cache.values):
            pool[:, :, 1:] = torch.nan
        self.cache.pairs[:, 1:] = torch.nan
        self.cache.conv_rows[:, 1:] = torch.nan
        self._random = random.Random(seed)
        self._pages = self._random.sample(range(1, num_pages), num_pages - 1)
        self._slots = self._random.sample(range(1, num_slots), num_slots - 1)

    def step(self, requests: Sequence[Request], shares: list[Tensor] | None = None) -> list[Tensor]:
        """Run one batch and commit it. -> all logits of each request, [n, vocab]."""
        batch, slots = self.lay_out(requests)
        logits = self.decoder.forward(batch, self.cache, shares=shares)
        for request, slot in zip(requests, slots, strict=True):
            own = request.view[-1]
            if own.slot:
                self._slots.insert(0, own.slot)
            own.slot = slot
            own.span = int(request.own_positions().max()) + 1
        return list(logits.split([len(request.tokens) for request in requests]))

    def lay_out(self, requests: Sequence[Request]) -> tuple[Batch, list[int]]:
        """The batch of `requests`, and the slot that each writes. Lengthens their own runs."""
        rows: dict[str, list[int]] = {"tokens": [], "store": [], "store_at": []}
        row_start, segment_start, page_start = [0], [0], [0]
        pages: list[int] = []
        segments: list[tuple[int, int, int]] = []  # length, shift, block
        for request in requests:
            *before, own = request.view
            origin = sum(block.span for block in before)
            first = self._grow(own, len(request.tokens))
            run = own.runs[-1]
            for index in range(first, run.length):
                page = run.pages[index // PAGE_TOKENS]
                rows["store"].append(page * PAGE_TOKENS + index % PAGE_TOKENS)
            rows["tokens"] += request.tokens
            row_start.append(len(rows["tokens"]))
            start = 0
            for number, block in enumerate(request.view):
                for part in block.runs:
                    segments.append((part.length, origin - start - part.offset, number))
                    pages += part.pages
                    page_start.append(len(pages))
                start += block.span
            segment_start.append(len(segments))
        positions = torch.cat([request.own_positions() for request in requests], dim=1)
        offsets = torch.cat([torch.full((len(r.tokens),), r.view[-1].runs[-1].offset) for r in requests])
        length, shift, block_index = (torch.tensor(column) for column in zip(*segments, strict=True))
        slots = [self._slots.pop() if self.config.is_hybrid else 0 for _ in requests]
        return Batch(
            token_ids=torch.tensor(rows["tokens"]),
            positions=positions,
            row_start=torch.tensor(row_start),
            logit_rows=torch.arange(len(rows["tokens"])),
            store_index=torch.tensor(rows["store"]),
            store_positions=positions - offsets,
            segment_start=torch.tensor(segment_start),
            segment_page_start=torch.tensor(page_start),
            pages=torch.tensor(pages),
            segment_length=length,
            segment_shift=shift,
            segment_block=block_index,
            **self._linear(requests, row_start, slots),  # type: ignore[arg-type] # names no boundary
        ), slots

    def merged(self, left: Laid, right: Laid) -> Laid:
        """A block that reads as `left`, then `right`. It shares their pages and is not written."""
        moved = [Run(run.pages, run.length, run.offset + left.span) for run in right.runs]
        block = Laid(left.runs + moved, span=left.span + right.span)
        if self.config.is_hybrid:
            block.slot = self._slots.pop()
            pairs, rows = self.cache.pairs, self.cache.conv_rows
            pairs[:, block.slot] = compose(pairs[:, left.slot], pairs[:, right.slot])
            newest = self._newest([left, right])
            rows[:, block.slot] = rows.flatten(1, 2)[:, torch.tensor(newest)]
        return block

    def continued(self, block: Laid) -> Laid:
        """`block`, to be appended to in a run of its own: full pages are not touched again."""
        return Laid([*block.runs, Run([], 0, block.span)], block.slot, block.span)

    def _grow(self, block: Laid, count: int) -> int:
        """Take pages for `count` more tokens; the index of the first of them in the last run."""
        if not block.runs:
            block.runs.append(Run([], 0, 0))
        run = block.runs[-1]
        first = run.length
        run.length += count
        while len(run.pages) * PAGE_TOKENS < run.length:
            run.pages.append(self._pages.pop())
        return first

    def _newest(self, blocks: Sequence[Laid]) -> list[int]:
        """The pool's newest three raw rows of blocks that follow one another, oldest first."""
        found: list[int] = []
        for block in blocks:
            kept = min(CONV_ROWS, block.num_tokens) if block.slot else 0
            found += [block.slot * CONV_ROWS + i for i in range(CONV_ROWS - kept, CONV_ROWS)]
        return ([0] * CONV_ROWS + found)[-CONV_ROWS:]

    def _linear(
        self, requests: Sequence[Request], row_start: Sequence[int], slots: Sequence[int]
    ) -> dict[str, Tensor]:
        """The fields of a batch that only Gated DeltaNet layers read; `_grow` has run already."""
        depth = max(len(request.view) for request in requests) - 1
        chains, history, new, old = [], [], [], []
        for request, start in zip(requests, row_start, strict=False):
            *before, own = request.view
            count = len(request.tokens)
            chain = [block.slot for block in reversed(before)]
            chains.append(chain + [0] * (depth - len(chain)))
            was = Laid([Run([], own.num_tokens - count, 0)], own.slot)
            history.append(self._newest([*before, was]))
            mine = self._newest([was])
            kept = [*mine, *range(count)][-CONV_ROWS:]
            stays = max(0, CONV_ROWS - count)
            old.append(kept[:stays] + [-1] * (CONV_ROWS - stays))
            new.append([-1] * stays + [start + row for row in kept[stays:]])
        return {
            "chain_slots": torch.tensor(chains, dtype=torch.int64).view(len(requests), depth),
            "read_slot": torch.tensor([request.view[-1].slot for request in requests]),
            "write_slot": torch.tensor(slots),
            "history_rows": torch.tensor(history),
            "kept_new": torch.tensor(new),
            "kept_old": torch.tensor(old),
        }


def pieces(total: int, sizes: Sequence[int]) -> list[range]:
    """`total` tokens cut into consecutive ranges of the given sizes, over and over."""
    cuts, start, i = [], 0, 0
    while start < total:
        stop = min(total, start + sizes[i % len(sizes)])
        cuts.append(range(start, stop))
        start, i = stop, i + 1
    return cuts


def encode(memory: Memory, tokens: Sequence[int], blocks: Sequence[int], chunks: Sequence[int]) -> Tensor:
    """Logits of all tokens, written into blocks of the given sizes in chunks of the given sizes."""
    view: list[Laid] = []
    logits: list[Tensor] = []
    for block in pieces(len(tokens), blocks):
        view.append(Laid())
        for chunk in pieces(len(block), chunks):
            part = [tokens[block[i]] for i in chunk]
            logits += memory.step([Request(view, part)])
    return torch.cat(logits)
