"""Runs work on the worker thread: a step, the drawing of tokens, and what block operations compute.

Knows the model, the tensors and the device. Knows nothing of queues or coroutines: it gets parts whose
memory is taken, and gives logits back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels import pages as page_kernels
from ..kernels import sampling as sampling_kernels
from ..kernels import transitions
from ..kernels.dispatch import why_not_fused
from .ahead import NO_SPARE, SlotPlaces, Spare
from .batch import PAGE_TOKENS, Batch
from .blocks import BlockState, Segment
from .boundary import BoundaryCache, Source, with_boundary
from .boundary import join_slots as join_over_boundary
from .layout import Part, make_batch, newest_rows
from .looks import joined
from .measuring import Floats, Measurement, PartReading, Wanted, read_states
from .memory import CacheTensors
from .model import Decoder
from .sampling import Choice

if TYPE_CHECKING:
    from .launching import Launcher
    from .trace import Ran


@dataclass(frozen=True, slots=True)
class Draw:
    """A token to draw: from which row of the step's logits (or from kept ones), and how."""

    choice: Choice
    logits: Tensor | None = None  # [vocab]; None: the part's last row


@dataclass(frozen=True, slots=True)
class StepResult:
    """Logits of each part's wanted rows, the tokens drawn (id, logprob), the seconds it took, what
    was measured of each part (nothing unless it was asked for), and how the step ran."""

    logits: list[Tensor]  # one [wanted, vocab] float32 per part
    drawn: list[tuple[int, float] | None]
    seconds: float
    readings: list[PartReading] | Exception  # an error of measuring does not fail the step
    measuring: float = 0.0  # s that it took longer for that
    ran: Ran = ""


class Runner:
    """The only place that runs the model. All methods but `close` run on the one worker thread."""

    def __init__(
        self, decoder: Decoder, cache: CacheTensors, device: torch.device, spare: Spare = NO_SPARE
    ) -> None:
        self.decoder = decoder
        self.cache = cache
        self.device = device
        self._is_hybrid = decoder.config.is_hybrid
        self._places = SlotPlaces(cache.pairs.shape[1])
        self._launcher: Launcher | None = None
        if device.type == "cuda" and not why_not_fused(device):
            from .launching import Launcher  # imports Triton

            self._launcher = Launcher(decoder, cache, device, self._places, spare)

    @property
    def is_fused(self) -> bool:
        """Do steps run in fused kernels? The step behind one that is measured does not run ahead."""
        return self._launcher is not None

    @torch.inference_mode()
    def step(
        self,
        parts: Sequence[Part],
        draws: Sequence[Draw | None],
        wanted: Wanted | None = None,
    ) -> StepResult:
        """One forward pass over all parts, and one token drawn for each part with a `Draw`.

        `wanted`: what to measure; None, as when nobody looks, measures nothing.
        """
        started = time.perf_counter()
        copies = [p.draft.copy for p in parts if p.draft.copy and p.num_done == 0]
        if copies:
            source, target = (self._tensor(column) for column in zip(*copies, strict=True))
            page_kernels.copy_pages(self.cache.keys, self.cache.values, source, target)
        drawn: list[tuple[int, float] | None] = [None] * len(parts)
        measurement = Measurement(wanted) if wanted else None
        batch: Batch | None = None
        ran: Ran = ""
        if self._launcher is not None:
            logits, ran = self._launch(self._launcher, parts, draws, drawn, measurement)
        else:
            batch = make_batch(parts, self._is_hybrid, self.device)
            logits = self._run_plain(batch, parts, measurement)
            self._draw_into(drawn, draws, logits, [i for i, draw in enumerate(draws) if draw])
            ran = "eager" if self.device.type == "cuda" else ran
        readings: list[PartReading] | Exception = []
        measuring = 0.0
        if measurement is not None:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # what the step takes does not count as measuring
            computed = time.perf_counter()
            try:
                placed = list(map(self._places.part, parts))
                batch = batch or make_batch(placed, self._is_hybrid, self.device)
                readings = measurement.readings(placed, batch, self.decoder, self.cache)
            except Exception as error:  # an instrument takes no step down: the loop reports it
                readings = error
            measuring = time.perf_counter() - computed
        return StepResult(logits, drawn, time.perf_counter() - started, readings, measuring, ran)

    def _run_plain(
        self, batch: Batch, parts: Sequence[Part], measurement: Measurement | None
    ) -> list[Tensor]:
        """A step in plain PyTorch: the wanted logits of each part."""
        if isinstance(self.cache, BoundaryCache):
            batch = with_boundary(batch, parts)
        if measurement is None:
            rows = self.decoder.forward(batch, self.cache)
        else:
            rows = self.decoder.forward(
                batch, self.cache, shares=measurement.shares, queries=measurement.queries
            )
        return list(rows.split(_counts(parts)))

    def _launch(
        self,
        launcher: Launcher,
        parts: Sequence[Part],
        draws: Sequence[Draw | None],
        drawn: list[tuple[int, float] | None],
        measurement: Measurement | None,
    ) -> tuple[list[Tensor], Ran]:
        """A step in fused kernels. Tokens come with it; the GPU is asked once for them all. It counts as
        recorded if all of it was: some rows may have run ahead of the others."""
        fits = [draw is not None and draw.choice.fits_in_step for draw in draws]
        choices = [
            draw.choice if draw and fit and not draw.choice.params.takes_best else None
            for draw, fit in zip(draws, fits, strict=True)
        ]
        looks = measurement is not None and measurement.wanted.looks
        # Readings would wait for a step that runs ahead.
        rows = launcher.run(parts, choices, goes_on=all(fits) and measurement is None, looks=looks)
        logits = [row.logits for row in rows]
        if measurement is not None and looks:
            measurement.saw(*joined([row.seen for row in rows]))
        others = []
        for index, draw in enumerate(draws):
            if draw is not None:
                drawn[index] = rows[index].token if fits[index] else None
                if drawn[index] is None:
                    others.append(index)
        self._draw_into(drawn, draws, logits, others)
        return logits, "graph" if all(row.is_recorded for row in rows) else "eager"

    def _draw_into(
        self,
        drawn: list[tuple[int, float] | None],
        draws: Sequence[Draw | None],
        logits: Sequence[Tensor],
        indices: Sequence[int],
    ) -> None:
        """Draw the tokens of the parts `indices` from their last rows."""
        wanted = [replace(draw, logits=logits[i][-1]) for i in indices if (draw := draws[i])]
        for index, token in zip(indices, self.draw(wanted), strict=True):
            drawn[index] = token

    @torch.inference_mode()
    def read_states(self, sources: Sequence[Source], layers: Sequence[int]) -> dict[int, Floats]:
        """The state after a view whose blocks have these slots, block by block; see `measuring`."""
        places = [(self._places[slot], rows) for slot, rows in sources]
        return read_states(self.decoder, self.cache, places, layers)

    def places(self, slots: Sequence[int]) -> Tensor:
        """Where in the pool these slots lie just now: [n] int64 on the device."""
        return self._tensor([self._places[slot] for slot in slots])

    @torch.inference_mode()
    def draw(self, draws: Sequence[Draw]) -> list[tuple[int, float]]:
        """Draw one token from each distribution. Returns (id, log-probability in nats)."""
        if not draws:
            return []
        rows = [draw.logits for draw in draws if draw.logits is not None]
        assert len(rows) == len(draws)
        params = [draw.choice.params for draw in draws]
        ids, logprobs = sampling_kernels.sample(
            torch.stack(rows),
            temperature=self._floats([p.temperature for p in params]),
            top_k=self._tensor([p.top_k for p in params]),
            top_p=self._floats([p.top_p for p in params]),
            min_p=self._floats([p.min_p for p in params]),
            forbidden=[p.forbidden for p in params],
            uniform=self._floats([draw.choice.uniform for draw in draws]),
        )
        return list(zip(ids.tolist(), logprobs.tolist(), strict=True))

    @torch.inference_mode()
    def join_slots(self, left: BlockState, right: BlockState, target: int) -> None:
        """Write to slot `target` the pair and the raw rows of `left` followed by `right`."""
        pairs, rows = self.cache.pairs, self.cache.conv_rows
        left, right = self._places.state(left), self._places.state(right)
        target = self._places[target]
        if isinstance(self.cache, BoundaryCache):
            decoder = self.decoder
            join_over_boundary(decoder.config, decoder.weights, self.cache, left, right, target)
        else:
            pairs[:, target] = transitions.compose(pairs[:, left.slot], pairs[:, right.slot])
        newest = newest_rows([(right.slot, right.num_rows), (left.slot, left.num_rows)])
        rows[:, target] = rows.flatten(1, 2)[:, self._tensor(newest)]

    @torch.inference_mode()
    def compact(self, segments: Sequence[Segment], target: Segment) -> None:
        """Copy all tokens of `segments` to the pages of `target`, keys rotated to its positions."""
        source = [
            s.pages[i // PAGE_TOKENS] * PAGE_TOKENS + i % PAGE_TOKENS
            for s in segments
            for i in range(s.length)
        ]
        goal = [target.pages[i // PAGE_TOKENS] * PAGE_TOKENS + i % PAGE_TOKENS for i in range(target.length)]
        shift = [s.offset - target.offset for s in segments for _ in range(s.length)]
        page_kernels.move_tokens(
            self.cache.keys,
            self.cache.values,
            self._tensor(source),
            self._tensor(goal),
            self._tensor(shift),
            self.decoder.rotary,
        )

    def close(self) -> None:
        """Give all storage back at once, whoever still holds a tensor of it."""
        if self._launcher is not None:
            self._launcher.release()
        self.cache.release()
        self.decoder.release()

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _floats(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device)


def _counts(parts: Sequence[Part]) -> list[int]:
    """How many rows of each part have wanted logits."""
    return [len(part.token_ids) - part.wanted_from for part in parts]
