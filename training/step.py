"""One training step over rows: the loss, its gradients, the optimizer. As a CUDA graph where there is one.

Knows tokens and marks as tensors of fixed shape. Knows no files, no clock and no processes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .batches import GIVEN, KINDS, PADDING, Rows
from .model import Network
from .optimizer import Optimizer

GIVEN_WEIGHT = 0.05
"""How much a token counts that is read and not learned, against one that is."""


class Step:
    """Trains a network on rows of one shape, and sums up the losses per kind."""

    def __init__(
        self, network: Network, optimizer: Optimizer, rows: int, length: int, dtype: torch.dtype
    ) -> None:
        self.network, self.optimizer, self.dtype = network, optimizer, dtype
        self.device = next(network.parameters()).device
        self.tokens = torch.zeros(rows, length, dtype=torch.int16, device=self.device)
        self.marks = torch.zeros(rows, length, dtype=torch.uint8, device=self.device)
        self.sums = torch.zeros(2, len(KINDS) + 1, device=self.device)  # losses and counts, given first
        self._graph: torch.cuda.CUDAGraph | None = None
        # Gradients remember the stream on which they were first made: warm up where the capture is.
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    @property
    def captured(self) -> bool:
        """Whether steps are replays of a CUDA graph."""
        return self._graph is not None

    def run(self, tokens: Tensor, marks: Tensor) -> None:
        """One step on tokens int16 and marks uint8, [rows, length] each; returns before it is done."""
        self.tokens.copy_(tokens, non_blocking=True)
        self.marks.copy_(marks, non_blocking=True)
        if self._graph is not None:
            self._graph.replay()
        else:
            self._train()

    def capture(self, warm_up: int = 3) -> str | None:
        """Train `warm_up` steps on the rows that were given last, then make a CUDA graph of the step.

        Returns what went wrong if that fails; steps then go on without a graph.
        """
        if self._stream is None:
            return "no CUDA device"
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            for _ in range(warm_up):  # so that all kernels are chosen
                self._train()
        for parameter in self.optimizer.parameters:
            parameter.grad = None
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                self._train()
        except RuntimeError as error:
            torch.cuda.synchronize()
            for parameter in self.optimizer.parameters:
                parameter.grad = None
            return f"{type(error).__name__}: {error}"
        self._graph = graph
        return None

    def take_sums(self) -> list[list[float]]:
        """Summed losses and counts of tokens (given, then each kind) since the last call. Waits."""
        sums: list[list[float]] = self.sums.tolist()
        self.sums.zero_()
        return sums

    def _train(self) -> None:
        for parameter in self.optimizer.parameters:
            parameter.grad = None
        losses, marks = token_losses(self.network, self.tokens, self.marks, self.dtype)
        weights = (marks != PADDING) * (1.0 - (1.0 - GIVEN_WEIGHT) * (marks == GIVEN))
        ((losses * weights).sum() / weights.sum()).backward()
        self.optimizer.step()
        with torch.no_grad():
            kinds = torch.arange(len(KINDS) + 1, device=self.device)[:, None]
            of_kind = (marks.flatten() == kinds).float()  # [kinds, B * T]
            self.sums += torch.stack([of_kind @ losses.detach().flatten(), of_kind.sum(1)])


def token_losses(
    network: Network, tokens: Tensor, marks: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """For each place of rows [B, T] the loss of the next token, float32, and the mark of that token."""
    wanted, marks = following(tokens, marks)
    logits = network(tokens.long(), dtype)
    losses = F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(), reduction="none")
    return losses.view(tokens.shape), marks


def following(tokens: Tensor, marks: Tensor) -> tuple[Tensor, Tensor]:
    """For each place of rows [B, T] the next token, int64, and its mark; behind the last comes padding."""
    marks = F.pad(marks[:, 1:], (0, 1), value=PADDING)
    return F.pad(tokens[:, 1:], (0, 1)).long(), marks


@torch.no_grad()
def exact_examples(network: Network, rows: Rows, dtype: torch.dtype, between: int) -> dict[str, list[int]]:
    """For each kind, how many examples of `rows` the network would write without a fault, and of how many.

    An example counts if each of its learned tokens is the likeliest one behind what stands before it.
    """
    device = next(network.parameters()).device
    tokens, marks = torch.from_numpy(rows.tokens).to(device), torch.from_numpy(rows.marks).to(device)
    wanted, marks = following(tokens, marks)
    parts = [network(part.long(), dtype, plain=True).argmax(-1) for part in tokens.split(64)]
    right = torch.cat(parts) == wanted
    learned = (marks != GIVEN) & (marks != PADDING)
    example = (tokens == between).cumsum(1)  # which example of its row each place predicts a token of
    found = {kind: [0, 0] for kind in KINDS}
    wrong = (learned & ~right).cpu()
    learned, marks, example = learned.cpu(), marks.cpu(), example.cpu()
    for row in range(len(tokens)):
        for number in example[row].unique():
            of_it = (example[row] == number) & learned[row]
            if of_it.any():
                counts = found[KINDS[int(marks[row][of_it][0]) - 1]]
                counts[1] += 1
                counts[0] += int(not (wrong[row] & of_it).any())
    return found
