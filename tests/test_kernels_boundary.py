"""First tokens in factored form: a state through blocks, and their place in a pair, token by token."""

from __future__ import annotations

import torch
from test_kernels_gdn import D_K, D_V, HEADS, identity, random_tokens, states_one_by_one

from asyncllm_nb.kernels.boundary import (
    FIRST,
    FirstTokens,
    append_first_tokens,
    append_to_state,
    convolve_first_tokens,
    join_over_boundary,
    keep_first_tokens,
    state_before_rows,
)
from asyncllm_nb.kernels.gdn import gated_delta_chunk


def test_append_to_state() -> None:
    _, key, value, log_decay, beta = tokens = random_tokens(HEADS, 5)
    state = before = torch.randn(HEADS, D_V, D_K)
    for t in range(5):
        state = append_to_state(state, key[:, t], value[:, t], log_decay[:, t], beta[:, t])
    torch.testing.assert_close(state, states_one_by_one(before, tokens)[1], rtol=1e-4, atol=1e-5)


def test_a_token_that_is_not_there_changes_nothing() -> None:
    _, key, value, _, _ = random_tokens(HEADS)
    state, nothing = torch.randn(HEADS, D_V, D_K), torch.zeros(HEADS)
    assert torch.equal(append_to_state(state, key, value, nothing, nothing), state)


def test_state_before_rows() -> None:
    """Two requests over two blocks and their own first tokens, against all tokens one by one."""
    requests, blocks, later = 2, 3, 7
    first = [x.unflatten(2, (FIRST, HEADS)) for x in random_tokens(requests, blocks, FIRST * HEADS)]
    rest = [random_tokens(HEADS, later) for _ in range(requests * (blocks - 1))]
    pairs = torch.stack(
        [identity(HEADS), *(gated_delta_chunk(identity(HEADS), *tokens)[1] for tokens in rest)]
    )
    slots = torch.tensor([[1, 2, 0], [3, 4, 0]])  # the pair of the written block is not read
    _, key, value, log_decay, beta = first
    state = state_before_rows(pairs, slots, key, value, log_decay, beta)
    for request in range(requests):
        expected = torch.zeros(HEADS, D_V, D_K)
        for block in range(blocks):
            few = tuple(x[request, block].transpose(0, 1) for x in first)
            _, expected = states_one_by_one(expected, few)
            if block < blocks - 1:
                _, expected = states_one_by_one(expected, rest[request * (blocks - 1) + block])
        torch.testing.assert_close(state[request], expected, rtol=1e-4, atol=1e-5)


def test_join_over_boundary() -> None:
    left, first, right = (random_tokens(HEADS, n) for n in (5, FIRST, 9))
    inputs = [x.transpose(0, 1)[None] for x in first[1:]]
    one = gated_delta_chunk(identity(HEADS), *left)[1][None]
    other = gated_delta_chunk(identity(HEADS), *right)[1][None]
    all_tokens = [torch.cat(parts, 1) for parts in zip(left, first, right, strict=True)]
    expected = gated_delta_chunk(identity(HEADS), *all_tokens)[1][None]
    key, value, log_decay, beta = inputs
    actual = join_over_boundary(one, other, key, value, log_decay, beta)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    begun = append_first_tokens(identity(1, HEADS), key, value, log_decay, beta)
    torch.testing.assert_close(begun[0], gated_delta_chunk(identity(HEADS), *first)[1])


def test_convolve_first_tokens() -> None:
    """Each sees the three rows before it: of its block, and of what stands before the block."""
    slots, channels = 5, 7
    first, newest = torch.randn(slots, 3, channels), torch.randn(slots, 3, channels)
    weight = torch.randn(4, channels)
    history = torch.tensor([[3 * 4 + 2, 3 * 1 + 1, 3 * 1 + 2]])
    actual = convolve_first_tokens(first, newest, weight, torch.tensor([2]), history)
    rows = torch.stack([newest[4, 2], newest[1, 1], newest[1, 2], *first[2]])
    for token in range(3):
        expected = torch.nn.functional.silu((rows[token : token + 4] * weight).sum(0))
        torch.testing.assert_close(actual[0, token], expected)


def test_keep_first_tokens() -> None:
    """New rows and old ones, also when a request reads the slot that it writes."""
    kept = FirstTokens(torch.randn(4, 3, 5), torch.randn(4, 3, 2, HEADS))
    rows, log_decay, beta = torch.randn(6, 5), torch.randn(6, HEADS), torch.rand(6, HEADS)
    before, gates_before = kept.rows.clone(), kept.gates.clone()
    new_rows = torch.tensor([[-1, 2, 3], [-1, -1, -1]])
    keep_first_tokens(
        kept, rows, log_decay, beta, torch.tensor([1, 2]), torch.tensor([1, 3]), new_rows
    )
    assert torch.equal(kept.rows[1], torch.stack([before[1, 0], rows[2], rows[3]]))
    assert torch.equal(kept.gates[1, 1], torch.stack([log_decay[2], beta[2]]))
    assert torch.equal(kept.gates[1, 0], gates_before[1, 0])
    assert torch.equal(kept.rows[3], before[2]) and torch.equal(kept.gates[3], gates_before[2])
    assert torch.equal(kept.rows[2], before[2]) and torch.equal(kept.rows[0], before[0])
