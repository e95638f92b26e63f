"""A step of the gated delta rule over slots: requests of one row and of many rows, in one batch.

Knows a pool of pairs, slots and rows as integers, and `gdn`. Knows no blocks and no model. Requests
of one row take the rank-1 path together; the others go chunk by chunk together, the long ones
further.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .gdn import CHUNK, gated_delta_chunk, gated_delta_token, read_through_chain, state_after_chain


@dataclass(frozen=True)
class Requests:
    """Some requests of a step, and where their blocks' pairs lie."""

    read_slot: Tensor  # [R']
    write_slot: Tensor  # [R']
    chain: Tensor  # [R', depth]
    index: Tensor  # [R'] which of the step's requests these are


@dataclass(frozen=True)
class Chunk:
    """At most CHUNK rows of each of the requests that have not ended, the first R'' of the many."""

    rows: Tensor  # [R'' * T] rows of the step; padding repeats a row
    padding: Tensor  # [R'', T] bool
    real: Tensor  # [rows that are no padding] index in `rows`
    real_rows: Tensor  # [the same] rows of the step


@dataclass(frozen=True)
class DeltaPlan:
    """Made once per step, the same for every layer."""

    single: Requests  # requests of one row
    single_rows: Tensor  # [R'] their rows
    many: Requests  # requests of several rows, longest first
    chunks: tuple[Chunk, ...]


def plan_delta(row_start: Tensor, read_slot: Tensor, write_slot: Tensor, chain: Tensor) -> DeltaPlan:
    """Plan a step of R requests: `row_start` [R + 1], slots [R], `chain` [R, depth]. All int64."""
    device = row_start.device
    start = row_start.cpu().numpy()
    count = np.diff(start)
    order = np.argsort(-count, kind="stable")
    single, many = order[count[order] == 1], order[count[order] > 1]

    def on_device(values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    def requests(chosen: np.ndarray) -> Requests:
        index = on_device(chosen)
        read, write, views = (x.index_select(0, index) for x in (read_slot, write_slot, chain))
        return Requests(read, write, views, index)

    chunks = []
    for begin in range(0, int(count[many].max(initial=0)), CHUNK):
        active = many[count[many] > begin]
        tokens = np.arange(begin, min(begin + CHUNK, count[many[0]]))
        padding = tokens >= count[active, None]
        rows = start[active, None] + np.minimum(tokens, count[active, None] - 1)
        real = np.flatnonzero(~padding)
        chunks.append(Chunk(*map(on_device, (rows.reshape(-1), padding, real, rows.reshape(-1)[real]))))
    return DeltaPlan(requests(single), on_device(start[single]), requests(many), tuple(chunks))


def gated_delta_over_view(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    pairs: Tensor,
    plan: DeltaPlan,
    before: Tensor | None = None,
) -> Tensor:
    """What N rows read through their views: float32 [N, H, d_v]. Writes the blocks' new pairs.

    `query`, `key` [N, H, d_k], `value` [N, H, d_v], `log_decay`, `beta` [N, H], all float32,
    prepared as in `gdn`. `pairs` [slots, H, d_k + d_v, d_k]: read at the plan's read slots and
    chains, written at its write slots, which no request reads. `before` [R, H, d_v, d_k]: the
    states before the written blocks, read instead of the chains.
    """
    inputs = (query, key, value, log_decay, beta)
    out = torch.empty_like(value)
    if plan.single_rows.shape[0]:
        _single_rows(inputs, pairs, plan, out, before)
    if plan.chunks:
        _many_rows(inputs, pairs, plan, out, before)
    return out


Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _single_rows(
    inputs: Inputs, pairs: Tensor, plan: DeltaPlan, out: Tensor, before: Tensor | None
) -> None:
    """Requests of one row: a rank-1 update each, all at once."""
    rows, requests = plan.single_rows, plan.single
    pair = pairs.index_select(0, requests.read_slot)
    heads = pair.shape[:2]
    query, key, value, log_decay, beta = (x.index_select(0, rows).flatten(0, 1) for x in inputs)
    read, new_pair = gated_delta_token(pair.flatten(0, 1), query, key, value, log_decay, beta)
    read = read.unflatten(0, heads)
    if before is None:
        read = read_through_chain(pairs, requests.chain, read)
    else:
        read = _read_state(before.index_select(0, requests.index), read[:, :, None])[:, :, 0]
    out.index_copy_(0, rows, read)
    pairs.index_copy_(0, requests.write_slot, new_pair.unflatten(0, heads))


def _many_rows(
    inputs: Inputs, pairs: Tensor, plan: DeltaPlan, out: Tensor, before: Tensor | None
) -> None:
    """Requests of several rows: chunk after chunk, those that have ended left out."""
    requests = plan.many
    if before is None:
        before = state_after_chain(pairs, requests.chain)
    else:
        before = before.index_select(0, requests.index)
    pair = pairs.index_select(0, requests.read_slot)
    for chunk in plan.chunks:
        active, tokens = chunk.padding.shape
        query, key, value, log_decay, beta = (
            x.index_select(0, chunk.rows).unflatten(0, (active, tokens)).transpose(1, 2) for x in inputs
        )
        padding = chunk.padding[:, None]
        log_decay, beta = log_decay.masked_fill(padding, 0), beta.masked_fill(padding, 0)
        chunk_inputs = [x.flatten(0, 1) for x in (query, key, value, log_decay, beta)]
        read, new_pair = gated_delta_chunk(pair[:active].flatten(0, 1), *chunk_inputs)
        pair[:active] = new_pair.unflatten(0, (active, -1))
        read = read.unflatten(0, (active, -1))  # [R'', H, T, d_k + d_v]
        read = _read_state(before[:active], read)
        rows = read.transpose(1, 2).flatten(0, 1).index_select(0, chunk.real)
        out.index_copy_(0, chunk.real_rows, rows)
    pairs.index_copy_(0, requests.write_slot, pair)


def _read_state(state: Tensor, read: Tensor) -> Tensor:
    """o = S y_first + y_second: `state` [R', H, d_v, d_k], `read` y [R', H, T, d_k + d_v]."""
    key_dim = state.shape[-1]
    return torch.matmul(read[..., :key_dim], state.mT) + read[..., key_dim:]
