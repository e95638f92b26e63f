"""Rotations against transformers' own, and moving stored tokens by them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asyncllm_nb.kernels.pages import copy_pages, move_tokens
from asyncllm_nb.kernels.rotary import Rotary, rotate

DIM, HALF = 22, 5


def rotary(scaling: float = 1.0, axes: Tensor | None = None) -> Rotary:
    """Heads of 22 elements whose first 10 are turned."""
    frequencies = 1.0 / 50.0 ** (torch.arange(HALF) / HALF)
    return Rotary(frequencies, torch.zeros(HALF, dtype=torch.int64) if axes is None else axes, DIM, scaling)


def at(positions: list[int]) -> Tensor:
    return torch.tensor(positions).expand(3, -1)


def test_rotate_is_that_of_transformers() -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import apply_rotary_pos_emb

    positions = [0, 1, 7, 300]
    x = torch.randn(4, 3, DIM)
    angles = torch.tensor(positions)[:, None] * rotary().frequencies
    both = torch.cat((angles, angles), dim=-1)[None]
    expected, _ = apply_rotary_pos_emb(
        x.transpose(0, 1)[None], x.transpose(0, 1)[None], both.cos(), both.sin()
    )
    actual = rotate(x, rotary().to_positions(at(positions)))
    torch.testing.assert_close(actual, expected[0].transpose(0, 1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(actual[..., 2 * HALF :], x[..., 2 * HALF :], rtol=0, atol=0)


def test_rotate_depends_on_distance_only() -> None:
    query, key = torch.randn(1, 1, DIM), torch.randn(1, 1, DIM)

    def score(i: int, j: int) -> Tensor:
        turned = (
            rotate(query, rotary().to_positions(at([i]))),
            rotate(key, rotary().to_positions(at([j]))),
        )
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(9, 4), score(1005, 1000), rtol=1e-4, atol=1e-5)
    assert not torch.isclose(score(9, 4), score(9, 5))


def test_to_positions_is_exact_far_away() -> None:
    """A float32 angle would be off by 0.03 radians here."""
    position = 1_000_003
    turned = rotary().to_positions(at([position]))
    for i, frequency in enumerate(rotary().frequencies.tolist()):
        assert math.isclose(float(turned.cos[0, 0, i]), math.cos(position * frequency), abs_tol=1e-6)


def test_to_positions_takes_each_frequency_from_its_axis() -> None:
    axes = torch.tensor([0, 1, 2, 0, 1])
    positions = torch.tensor([[5], [11], [2]])
    turned = rotary(axes=axes).to_positions(positions)
    for i, axis in enumerate(axes.tolist()):
        alone = rotary().to_positions(positions[axis].expand(3, -1))
        assert turned.cos[0, 0, i] == alone.cos[0, 0, i]
        assert turned.sin[0, 0, HALF + i] == alone.sin[0, 0, HALF + i]


def test_by_shift_moves_on_what_is_turned_already() -> None:
    """The scaling of yarn is on a stored key once, however often it moves."""
    turn, x = rotary(scaling=1.3), torch.randn(2, 3, DIM)
    stored = rotate(x, turn.to_positions(at([4, 40])))
    moved = rotate(stored, turn.by_shift(torch.tensor([17, -6])))
    torch.testing.assert_close(moved, rotate(x, turn.to_positions(at([21, 34]))))


def test_move_tokens() -> None:
    """Five tokens to other pages and positions, in two layers; nothing else is touched."""
    raw, values = torch.randn(2, 3, 5, DIM), torch.randn(2, 3, 5, DIM)
    keys_pool = torch.full((2, 3, 6, 16, DIM), torch.nan)
    values_pool = keys_pool.clone()
    source, target = torch.tensor([33, 34, 35, 20, 21]), torch.tensor([64, 65, 66, 80, 67])
    old, shift = torch.tensor([0, 1, 2, 0, 1]), torch.tensor([0, 0, 0, 3, 3])
    turn = rotary()
    for layer in range(2):
        stored = rotate(raw[layer].transpose(0, 1), turn.to_positions(old.expand(3, -1)))
        keys_pool[layer].flatten(1, 2)[:, source] = stored.transpose(0, 1)
        values_pool[layer].flatten(1, 2)[:, source] = values[layer]
    move_tokens(keys_pool, values_pool, source, target, shift, turn)
    for layer in range(2):
        expected = rotate(raw[layer].transpose(0, 1), turn.to_positions((old + shift).expand(3, -1)))
        moved = keys_pool[layer].flatten(1, 2)[:, target].transpose(0, 1)
        torch.testing.assert_close(moved, expected)
        moved = values_pool[layer].flatten(1, 2)[:, target]
        torch.testing.assert_close(moved, values[layer], rtol=0, atol=0)
    assert int((~keys_pool.isnan()).sum()) == 2 * 3 * 10 * DIM


def test_copy_pages() -> None:
    keys, values = torch.randn(2, 3, 6, 16, DIM), torch.randn(2, 3, 6, 16, DIM)
    before = keys.clone(), values.clone()
    copy_pages(keys, values, torch.tensor([1, 4]), torch.tensor([5, 2]))
    for pool, old in zip((keys, values), before, strict=True):
        torch.testing.assert_close(pool, old[:, :, [0, 1, 4, 3, 4, 1]], rtol=0, atol=0)
