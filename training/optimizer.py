"""How weights move: Muon for the matrices of the layers, AdamW for everything else.

Knows parameters by shape and name. Knows no schedule: the learning rate is a tensor that somebody else
sets, so that a step can be captured as a CUDA graph and replayed with another rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

BETAS = (0.9, 0.98)
MOMENTUM = 0.95
EPS = 1e-10
DECAY = 0.1
CLIP = 1.0
ROUNDS = ((3.4445, -4.7750, 2.0315),) * 5
"""Coefficients of the Newton-Schulz rounds that bring all singular values near 1."""


def orthogonal(matrices: Tensor) -> Tensor:
    """U Vᵀ of each of [n, rows, columns], nearly: singular values end between 0.7 and 1.2."""
    wide = matrices.shape[1] <= matrices.shape[2]
    x = matrices if wide else matrices.transpose(1, 2)
    if x.device.type == "cuda":
        x = x.bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for a, b, c in ROUNDS:
        square = x @ x.transpose(1, 2)
        x = a * x + (b * square + c * square @ square) @ x
    turned_back: Tensor = x if wide else x.transpose(1, 2)
    return turned_back.to(matrices.dtype)


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon moves it: matrices between layers' features, not the embedding, not the narrow gates."""
    return parameter.dim() == 2 and "embed" not in name and min(parameter.shape) >= 64


class Optimizer:
    """Gradient clipping, Muon and AdamW in one step, without a word between device and host."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        named = list(named)
        self.parameters = [parameter for _, parameter in named]
        device = self.parameters[0].device
        self.rate = torch.zeros((), device=device)  # of AdamW, and of Muon in updates of AdamW's size
        self.count = torch.zeros((), device=device)  # steps so far
        self.norm = torch.zeros((), device=device)  # of the last gradient, before clipping
        self._others: list[Tensor] = [p for name, p in named if not is_matrix(name, p)]
        shapes: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for name, parameter in named:
            if is_matrix(name, parameter):
                shapes.setdefault(tuple(parameter.shape), []).append(parameter)
        self._groups = list(shapes.values())
        self._momentum = [torch.zeros(len(g), *g[0].shape, device=device) for g in self._groups]
        self._first = [torch.zeros_like(p) for p in self._others]
        self._second = [torch.zeros_like(p) for p in self._others]

    @torch.no_grad()
    def step(self) -> None:
        """Move all weights along their gradients; a gradient that is not finite moves nothing."""
        gradients = [_gradient(p) for p in self.parameters]
        norms = torch.stack(torch._foreach_norm(gradients))
        self.norm.copy_(norms.norm())
        scale = (CLIP / (self.norm + 1e-6)).clamp(max=1.0).nan_to_num(0.0)
        for gradient in gradients:
            gradient.nan_to_num_(0.0, 0.0, 0.0)
        torch._foreach_mul_(gradients, scale)
        self.count += 1
        self._move_matrices()
        self._move_others()

    def _move_matrices(self) -> None:
        for group, momentum in zip(self._groups, self._momentum, strict=True):
            gradient = torch.stack([_gradient(p) for p in group])
            momentum.lerp_(gradient, 1 - MOMENTUM)
            update = orthogonal(gradient.lerp(momentum, MOMENTUM))
            size = 0.2 * max(group[0].shape) ** 0.5  # the root mean square of AdamW's updates
            weights: list[Tensor] = [*group]
            torch._foreach_mul_(weights, 1 - self.rate * DECAY)
            torch._foreach_sub_(weights, list((update * (self.rate * size)).unbind()))

    def _move_others(self) -> None:
        gradients = [_gradient(p) for p in self._others]
        torch._foreach_lerp_(self._first, gradients, 1 - BETAS[0])
        torch._foreach_mul_(self._second, BETAS[1])
        torch._foreach_addcmul_(self._second, gradients, gradients, 1 - BETAS[1])
        scales = torch._foreach_sqrt(self._second)
        torch._foreach_mul_(scales, self._debias(BETAS[1]).sqrt())
        torch._foreach_add_(scales, EPS)
        updates: list[Tensor] = [*torch._foreach_div(self._first, scales)]
        torch._foreach_mul_(updates, self.rate * self._debias(BETAS[0]))
        torch._foreach_sub_(self._others, updates)

    def _debias(self, beta: float) -> Tensor:
        """What a running mean that began at 0 is multiplied with."""
        return 1 / (1 - torch.exp(self.count * math.log(beta)))

    def state(self) -> dict[str, Tensor]:
        """What a later run needs to go on; matrices' momentum in bfloat16, for its size."""
        state = {f"momentum.{i}": tensor.bfloat16() for i, tensor in enumerate(self._momentum)}
        state |= {f"first.{i}": tensor for i, tensor in enumerate(self._first)}
        state |= {f"second.{i}": tensor for i, tensor in enumerate(self._second)}
        return {**state, "count": self.count.reshape(1)}

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from a `state`."""
        for name, tensors in (("momentum", self._momentum), ("first", self._first), ("second", self._second)):
            for i, tensor in enumerate(tensors):
                tensor.copy_(state[f"{name}.{i}"])
        self.count.copy_(state["count"][0])


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
