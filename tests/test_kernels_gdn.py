"""The gated delta rule: tokens, chunks, chains and steps against the recurrence as written."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from asyncllm_nb.kernels.gdn import (
    gated_delta_chunk,
    gated_delta_token,
    read_through_chain,
    state_after_chain,
)
from asyncllm_nb.kernels.gdn_step import gated_delta_over_view, plan_delta
from asyncllm_nb.kernels.norm import unit_length
from asyncllm_nb.kernels.transitions import compose

D_K, D_V, HEADS = 12, 20, 3
Tokens = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def random_tokens(*shape: int) -> Tokens:
    """query, key, value, log decay and beta of tokens that are remembered for long."""
    query = unit_length(torch.randn(*shape, D_K)) * D_K**-0.5
    key = unit_length(torch.randn(*shape, D_K))
    return query, key, torch.randn(*shape, D_V), -0.1 * torch.rand(shape), torch.rand(shape)


def identity(*shape: int) -> Tensor:
    """Pairs (I, 0)."""
    return torch.cat((torch.eye(D_K), torch.zeros(D_V, D_K))).expand(*shape, -1, -1).clone()


def states_one_by_one(state: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """S_t = S α (I − β k kᵀ) + β v kᵀ and S_t q_t over [B, T] tokens: reads [B, T, d_v], last S."""
    query, key, value, log_decay, beta = (part.double() for part in tokens)
    state, reads = state.double(), []
    for t in range(key.shape[1]):
        k, v, b = key[:, t, None], value[:, t, :, None], beta[:, t, None, None]
        alpha = log_decay[:, t].exp()[:, None, None]
        state = alpha * (state - b * (state @ k.mT) @ k) + b * v @ k
        reads.append((state @ query[:, t, :, None])[..., 0])
    return torch.stack(reads, dim=1).float(), state.float()


@pytest.mark.parametrize("count", [1, 2, 63, 64])
def test_gated_delta_chunk(count: int) -> None:
    """From any state, through a block that is not empty: both halves of the pair, and the reads."""
    first, tokens = random_tokens(HEADS, 5), random_tokens(HEADS, count)
    before = torch.randn(HEADS, D_V, D_K)
    _, pair = gated_delta_chunk(identity(HEADS), *first)
    read, pair = gated_delta_chunk(pair, *tokens)
    _, state = states_one_by_one(before, first)
    expected, state = states_one_by_one(state, tokens)
    actual = read[..., :D_K] @ before.mT + read[..., D_K:]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(before @ pair[:, :D_K] + pair[:, D_K:], state, rtol=1e-4, atol=1e-5)


def test_gated_delta_chunk_survives_strong_decay() -> None:
    """Tokens that forget all make no infinity of the decay between others, and do not blur it."""
    tokens = random_tokens(HEADS, 40)
    tokens[3][:, 3:9] = -900.0
    read, pair = gated_delta_chunk(identity(HEADS), *tokens)
    expected, state = states_one_by_one(torch.zeros(HEADS, D_V, D_K), tokens)
    torch.testing.assert_close(read[..., D_K:], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(pair[:, D_K:], state, rtol=1e-4, atol=1e-5)


def test_gated_delta_token() -> None:
    tokens = random_tokens(HEADS, 9)
    expected, expected_pair = gated_delta_chunk(identity(HEADS), *tokens)
    pair = identity(HEADS)
    for t in range(9):
        read, pair = gated_delta_token(pair, *(part[:, t] for part in tokens))
        torch.testing.assert_close(read, expected[:, t], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(pair, expected_pair, rtol=1e-4, atol=1e-5)


def test_gated_delta_chunk_ignores_padding() -> None:
    tokens = random_tokens(HEADS, 10)
    read, pair = gated_delta_chunk(identity(HEADS), *(part[:, :6] for part in tokens))
    tokens[3][:, 6:] = tokens[4][:, 6:] = 0
    padded_read, padded_pair = gated_delta_chunk(identity(HEADS), *tokens)
    torch.testing.assert_close(padded_read[:, :6], read)
    torch.testing.assert_close(padded_pair, pair)


def test_compose() -> None:
    """Two blocks joined are the block of all tokens; the identity changes nothing."""
    tokens = random_tokens(HEADS, 30)
    _, whole = gated_delta_chunk(identity(HEADS), *tokens)
    _, left = gated_delta_chunk(identity(HEADS), *(part[:, :11] for part in tokens))
    _, right = gated_delta_chunk(identity(HEADS), *(part[:, 11:] for part in tokens))
    torch.testing.assert_close(compose(left, right), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(compose(identity(HEADS), right), right)
    torch.testing.assert_close(compose(left, identity(HEADS)), left)


def test_read_through_chain_and_state_after_chain() -> None:
    """Chains of several lengths, nearest block first, the short ones padded with the identity."""
    pairs = torch.randn(6, HEADS, D_K + D_V, D_K) * 0.4
    pairs[0] = identity(HEADS)
    chain = torch.tensor([[3, 1, 5], [2, 0, 0], [0, 0, 0]])
    read = torch.randn(3, HEADS, D_K + D_V)
    states = []
    for slots in chain.tolist():
        state = torch.zeros(HEADS, D_V, D_K)
        for slot in reversed(slots):
            state = state @ pairs[slot, :, :D_K] + pairs[slot, :, D_K:]
        states.append(state)
    state = torch.stack(states)
    torch.testing.assert_close(state_after_chain(pairs, chain), state)
    expected = (state @ read[..., :D_K, None])[..., 0] + read[..., D_K:]
    torch.testing.assert_close(read_through_chain(pairs, chain, read), expected)


@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [70], [3, 1, 130, 1, 64, 65], [2, 200]], ids=str)
def test_gated_delta_over_view(counts: list[int]) -> None:
    """Requests of all lengths in one step, each over a chain of its own, in poisoned slots."""
    rng = random.Random(sum(counts))
    slots = rng.sample(range(1, 40), 39)
    pairs = torch.full((40, HEADS, D_K + D_V, D_K), torch.nan)
    pairs[0] = identity(HEADS)
    blocks = []  # (slot, its tokens): committed blocks
    for length in (1, 7, 30):
        tokens = random_tokens(HEADS, length)
        slot = slots.pop()
        _, pairs[slot] = gated_delta_chunk(identity(HEADS), *tokens)
        blocks.append((slot, tokens))
    chains = [rng.sample(blocks, rng.randint(0, 3)) for _ in counts]
    owns = [rng.choice([(0, None), *blocks]) for _ in counts]
    write = [slots.pop() for _ in counts]
    depth = max(len(chain) for chain in chains)
    chain_slots = [[slot for slot, _ in c] + [0] * (depth - len(c)) for c in chains]
    plan = plan_delta(
        torch.tensor([0, *counts]).cumsum(0),
        torch.tensor([slot for slot, _ in owns]),
        torch.tensor(write),
        torch.tensor(chain_slots, dtype=torch.int64).view(len(counts), depth),
    )
    step = random_tokens(sum(counts), HEADS)
    kept = pairs.clone()
    out = gated_delta_over_view(*step, pairs, plan)
    start = 0
    for count, chain, (_, own), slot in zip(counts, chains, owns, write, strict=True):
        state = torch.zeros(HEADS, D_V, D_K)
        for tokens in [tokens for _, tokens in reversed(chain)] + ([own] if own else []):
            _, state = states_one_by_one(state, tokens)
        mine = tuple(part[start : start + count].transpose(0, 1) for part in step)
        expected, state = states_one_by_one(state, mine)  # type: ignore[arg-type]
        torch.testing.assert_close(out[start : start + count], expected.transpose(0, 1), rtol=1e-4, atol=2e-5)
        joined = state_after_chain(pairs, torch.tensor([[slot] + [s for s, _ in chain]]))[0]
        torch.testing.assert_close(joined, state, rtol=1e-4, atol=2e-5)
        start += count
    others = [slot for slot in range(40) if slot not in write]
    torch.testing.assert_close(pairs[others], kept[others], rtol=0, atol=0, equal_nan=True)
