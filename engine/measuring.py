"""What instruments read off one forward pass, on the worker thread, and what they read off blocks.

Knows a step's parts and tensors. Who wants which reading, and how long it is kept, is `instruments`'.
A step that nobody measures makes nothing of this.

Readings are about the last row of each part: for a decode its token, for a chunk its last one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kernels.inspection import SeenSegment, attention_weights, carried_parts, transition_norms
from .batch import CONV_ROWS, PAGE_TOKENS, Batch
from .boundary import BoundaryCache, Source, whole_pairs
from .config import FULL_ATTENTION, ModelConfig
from .layout import Part
from .memory import CacheTensors
from .model import Decoder

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to measure. `layers` of states: numbers of Gated DeltaNet layers of the model."""

    shares: bool = False  # of attention, per layer, block and head
    norms: bool = False  # of the transitions of all blocks in a view, per layer and head
    tokens: bool = False  # attention to single tokens, per layer and head
    layers: frozenset[int] = frozenset()  # the state after the view, block by block

    @property
    def looks(self) -> bool:
        """Is anything wanted that attention leaves behind only if it is asked to?"""
        return self.shares or self.tokens

    def __or__(self, other: Wanted) -> Wanted:
        return Wanted(
            self.shares or other.shares,
            self.norms or other.norms,
            self.tokens or other.tokens,
            self.layers | other.layers,
        )


@dataclass(frozen=True, slots=True)
class PartReading:
    """What was measured of one part of a step; None or empty where it was not wanted.

    L_a full-attention and L_g Gated DeltaNet layers, H heads (of queries, of values), B blocks of the
    view, the written one last. An empty block has shares of 0, norms of 1 and no tokens.
    """

    lengths: tuple[int, ...]  # [B] tokens that the row sees of each block
    shares: Floats | None = None  # [L_a, B, H], sums to 1 over B
    norms: Floats | None = None  # [L_g, B, H], ‖Â‖ / √d_k
    weights: Halves | None = None  # [L_a, H, sum of lengths], sums to 1 over the last
    states: dict[int, Floats] = field(default_factory=dict)
    # layer -> [B, H, d_v, d_k]: each block's own part, carried through what follows; their sum over B
    # is the state

    @property
    def weights_by_block(self) -> list[Halves]:
        """Attention to the tokens of each block: B arrays [L_a, H, tokens]; none if not measured."""
        if self.weights is None:
            return []
        return list(np.split(self.weights, np.cumsum(self.lengths)[:-1], axis=-1))

    @property
    def nbytes(self) -> int:
        arrays = [self.shares, self.norms, self.weights, *self.states.values()]
        return sum(array.nbytes for array in arrays if array is not None)


class Measurement:
    """Collects what is wanted of one step: lists for the decoder to fill (or what fused
    kernels kept), readings afterwards."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.shares: list[Tensor] | None = [] if wanted.shares else None
        self.queries: list[Tensor] | None = [] if wanted.tokens else None
        self._has_last_rows_only = False

    def saw(self, shares: Tensor, queries: Tensor) -> None:
        """Take what fused kernels kept: of each part its last row only, [L_a, R, ...]."""
        self.shares = list(shares) if self.wanted.shares else None
        self.queries = list(queries) if self.wanted.tokens else None
        self._has_last_rows_only = True

    def readings(
        self, parts: Sequence[Part], batch: Batch, decoder: Decoder, cache: CacheTensors
    ) -> list[PartReading]:
        """One reading per part, after the forward pass. Runs under inference mode."""
        config, wanted = decoder.config, self.wanted
        last = batch.row_start[1:] - 1
        if self._has_last_rows_only:
            last = torch.arange(len(parts), device=last.device)
        row_shares = _stacked_rows(self.shares, last)  # [L_a, R, blocks, H]
        row_queries = _stacked_rows(self.queries, last)  # [L_a, R, H, D]
        sources = [_sources(part) for part in parts]
        norms = _norms(decoder, cache, sources) if wanted.norms and config.is_hybrid else None
        layers = sorted(set(linear_layers(config)) & wanted.layers)
        host_shares = None if row_shares is None else row_shares.cpu().numpy()
        seen = _Seen(batch) if row_queries is not None else None
        found = []
        for index, part in enumerate(parts):
            blocks = len(part.view) + 1
            weights = None
            if seen is not None and row_queries is not None:
                weights = seen.weights(index, row_queries[:, index], decoder, cache)
            found.append(
                PartReading(
                    lengths=_lengths(part),
                    shares=None if host_shares is None else host_shares[:, index, :blocks].copy(),
                    norms=None if norms is None else norms[index],
                    weights=weights,
                    states=read_states(decoder, cache, sources[index], layers),
                )
            )
        return found


def attention_layers(config: ModelConfig) -> list[int]:
    """Numbers of the full-attention layers, counted over all layers from 0."""
    return [i for i, kind in enumerate(config.layer_types) if kind == FULL_ATTENTION]


def linear_layers(config: ModelConfig) -> list[int]:
    """Numbers of the Gated DeltaNet layers."""
    return [i for i, kind in enumerate(config.layer_types) if kind != FULL_ATTENTION]


def read_states(
    decoder: Decoder, cache: CacheTensors, sources: Sequence[Source], layers: Collection[int]
) -> dict[int, Floats]:
    """Each block's part of the state after a view whose blocks have these slots, per wanted layer.

    -> layer -> [B, H, d_v, d_k].
    """
    if not layers:
        return {}
    index = torch.arange(len(sources), device=cache.pairs.device)
    numbers = linear_layers(decoder.config)
    pairs = {layer: _pairs(decoder, cache, numbers.index(layer), sources) for layer in layers}
    return {layer: carried_parts(pairs[layer], index).cpu().numpy() for layer in layers}


def _pairs(decoder: Decoder, cache: CacheTensors, layer: int, sources: Sequence[Source]) -> Tensor:
    """What the blocks of a view do to a state: [B, H, d_k + d_v, d_k]. `layer`: among those with states."""
    if isinstance(cache, BoundaryCache):
        return whole_pairs(decoder.config, decoder.weights, cache, layer, sources)
    index = torch.tensor([slot for slot, _ in sources], dtype=torch.int64, device=cache.pairs.device)
    return cache.pairs[layer].index_select(0, index)


def _sources(part: Part) -> list[Source]:
    """Slots and numbers of raw rows of the view's blocks after the step, the written one last."""
    written = (part.draft.slot, min(CONV_ROWS, part.num_before + len(part.token_ids)))
    return [*((state.slot, state.num_rows) for state in part.view), written]


def _lengths(part: Part) -> tuple[int, ...]:
    return (
        *(state.num_tokens for state in part.view),
        part.num_before + len(part.token_ids),
    )


def _stacked_rows(layers: list[Tensor] | None, rows: Tensor) -> Tensor | None:
    """`rows` of each layer's tensor, [layers, rows, ...]."""
    return None if layers is None else torch.stack([x.index_select(0, rows) for x in layers])


def _norms(decoder: Decoder, cache: CacheTensors, views: Sequence[Sequence[Source]]) -> list[Floats]:
    """Per view [L_g, B, H]; a slot that several views read is measured once, unless it differs in them."""
    if isinstance(cache, BoundaryCache):
        layers = range(cache.pairs.shape[0])
        return [
            torch.stack([transition_norms(_pairs(decoder, cache, i, view)) for i in layers]).cpu().numpy()
            for view in views
        ]
    distinct = sorted({slot for view in views for slot, _ in view})
    place = {slot: index for index, slot in enumerate(distinct)}
    index = torch.tensor(distinct, dtype=torch.int64, device=cache.pairs.device)
    table = torch.stack([transition_norms(layer.index_select(0, index)) for layer in cache.pairs])
    host: Floats = table.cpu().numpy()
    return [host[:, [place[slot] for slot, _ in view]] for view in views]


class _Seen:
    """Where the tokens lie that the last row of each request sees."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._segment_start = batch.segment_start.tolist()
        self._page_start = batch.segment_page_start.tolist()
        self._length = batch.segment_length.tolist()
        self._shift = batch.segment_shift.tolist()

    def weights(self, request: int, query: Tensor, decoder: Decoder, cache: CacheTensors) -> Halves:
        """[L_a, H, tokens] of a request's last row, `query` [L_a, H, D]. Half precision: for looking."""
        start, end = self._segment_start[request : request + 2]
        position = self._batch.positions[:, self._batch.row_start[request + 1] - 1]  # [3]
        weights = attention_weights(
            query,
            cache.keys,
            position,
            [self._segment(segment) for segment in range(start, end)],
            decoder.rotary,
            decoder.config.head_dim**-0.5,
        )
        host: Halves = weights.half().cpu().numpy()
        return host

    def _segment(self, segment: int) -> SeenSegment:
        first, end = self._page_start[segment : segment + 2]
        pages = self._batch.pages[first:end, None] * PAGE_TOKENS
        places = pages + torch.arange(PAGE_TOKENS, device=pages.device)
        return SeenSegment(places.flatten()[: self._length[segment]], self._shift[segment])
