"""The gated delta rule over whole rows, fast to differentiate with plain PyTorch in eager mode.

Knows one operation: from queries, keys, values and gates of a row to its outputs, in chunks of 64 tokens.
Knows no parameters and no layers. All chunks of all rows are computed at once, except for the states
between them, which take one matrix product a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 64


class _UnitInverse(torch.autograd.Function):
    """(I + A)⁻¹ of strictly lower triangular A, by blocks that double: each step is exact."""

    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:  # [..., C, C]
        size = lower.shape[-1]
        index = torch.arange(size, device=lower.device)
        row, column = index[:, None], index[None, :]
        inverse = torch.eye(size, dtype=lower.dtype, device=lower.device)
        width = 1
        while width < size:
            # The lower left quarter of each diagonal block of twice the width.
            quarter = (row // width == column // width + 1) & (row // (2 * width) == column // (2 * width))
            part = lower * quarter
            inverse = inverse - (part if width == 1 else inverse @ part @ inverse)
            width *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        turned = inverse.transpose(-1, -2)
        gradient: Tensor = -(turned @ gradients[0] @ turned)
        return gradient


class _States(torch.autograd.Function):
    """S₀ = 0 and Sₙ₊₁ = Mₙ Sₙ + Rₙ; gives the state before each chunk."""

    @staticmethod
    def forward(ctx: Any, factor: Tensor, added: Tensor) -> Tensor:  # [N, B, K, K], [N, B, K, V]
        before = [torch.zeros_like(added[0])]
        for n in range(added.shape[0] - 1):
            before.append(torch.baddbmm(added[n], factor[n], before[n]))
        states = torch.stack(before)
        ctx.save_for_backward(factor, states)
        return states

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        factor, states = ctx.saved_tensors
        count = states.shape[0]
        after = [torch.zeros_like(states[0])]  # gradients of the state after each chunk, last first
        for n in range(count - 1, 0, -1):
            after.append(torch.baddbmm(gradients[0][n], factor[n].transpose(1, 2), after[-1]))
        back = torch.stack(after[::-1])
        return back @ states.transpose(-1, -2), back


def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Outputs of Sₜ = Sₜ₋₁ αₜ (I - βₜ kₜ kₜᵀ) + βₜ vₜ kₜᵀ, oₜ = Sₜ qₜ, from S = 0 at the start of each row.

    Args:
        query, key: [N, B, C, K], N chunks of C tokens in order; B runs over rows and heads. Normalised,
            and the query scaled.
        value: [N, B, C, V].
        decay: [N, B, C], log α, at most 0.
        beta: [N, B, C].

    Returns: [N, B, C, V]. Everything is float32.
    """
    size = query.shape[2]
    above = torch.ones(size, size, dtype=torch.bool, device=query.device).triu(1)
    total = decay.cumsum(-1)  # [N, B, C]
    between = (total[..., :, None] - total[..., None, :]).masked_fill(above, -torch.inf).exp()
    grown = total.exp()[..., None]
    scale = beta[..., None]  # [N, B, C, 1]
    keys = key.transpose(-1, -2)

    lower = (key @ keys * between * scale).tril(-1)
    inverse: Tensor = _UnitInverse.apply(lower)  # type: ignore[no-untyped-call] # torch's; [N, B, C, C]
    values = inverse @ (value * scale)
    read = inverse @ (key * (scale * grown))  # what the state before the chunk already holds for them
    written = (key * (total[..., -1:] - total).exp()[..., None]).transpose(-1, -2)  # [N, B, K, C]

    kept = torch.diag_embed(grown[..., -1, :].expand(-1, -1, key.shape[-1]))
    factor, added = kept - written @ read, written @ values
    states: Tensor = _States.apply(factor, added)  # type: ignore[no-untyped-call] # torch's; [N, B, K, V]
    attended = (query @ keys) * between
    return (query * grown) @ states + attended @ (values - read @ states)
