"""How a step runs on a GPU: recorded if it is a decode step that fits, else kernel by kernel; and one
decode step ahead, so that the GPU works while the engine's loop delivers tokens.

Knows parts, the fused decoder, its recordings and CUDA events. Knows no requests; of sampling, the
most probable token. What may run ahead and what becomes of it is `ahead`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..kernels.pages import copy_pages
from .ahead import SlotPlaces, Spare, can_follow, following, is_as_expected, key_of
from .fused import FusedDecoder
from .graphs import DecodeGraphs, greedy
from .layout import Part, make_batch
from .memory import CacheTensors
from .model import Decoder
from .packed import describe, pack


@dataclass
class Launched:
    """A step that was started, row by row of its parts' last wanted logits."""

    logits: list[Tensor]  # of each part: [wanted rows, vocab] float32 on the device
    ids: Tensor  # [parts] int64 on the device: the most probable token after each part
    is_recorded: bool  # as a CUDA graph; else kernel by kernel
    _tokens: Tensor  # [2, parts] float64 on the host, once `_done`: ids, log-probabilities
    _done: torch.cuda.Event
    _read: list[tuple[int, float]] = field(default_factory=list)

    def tokens(self) -> list[tuple[int, float]]:
        """(id, log-probability) after each part. Waits for this step, not for what came after."""
        if not self._read:
            self._done.synchronize()
            ids, logprobs = self._tokens.tolist()
            self._read = [(int(token), logprob) for token, logprob in zip(ids, logprobs, strict=True)]
        return self._read


@dataclass(frozen=True)
class Row:
    """A part of a step that was started."""

    step: Launched
    index: int

    @property
    def logits(self) -> Tensor:
        return self.step.logits[self.index]

    @property
    def token(self) -> tuple[int, float]:
        return self.step.tokens()[self.index]

    @property
    def is_recorded(self) -> bool:
        return self.step.is_recorded


@dataclass(frozen=True)
class _Ahead:
    """A decode step that nobody has asked for yet."""

    parts: list[Part]  # as expected
    before: list[Row]  # whose tokens it encodes, in this order
    step: Launched


class Launcher:
    """Runs steps on one GPU. Used by one thread, under inference mode."""

    def __init__(
        self,
        decoder: Decoder,
        cache: CacheTensors,
        device: torch.device,
        places: SlotPlaces,
        spare: Spare,
    ) -> None:
        self._fused = FusedDecoder(decoder, device)
        self._graphs = DecodeGraphs(self._fused, cache, device)
        self._cache = cache
        self._device = device
        self._places = places
        self._spare = spare
        self._is_hybrid = decoder.config.is_hybrid
        self._ahead: _Ahead | None = None

    def run(self, parts: Sequence[Part], goes_on: bool) -> list[Row]:
        """Start a step, as far as it has not run ahead. `goes_on`: every stream in it will take its most
        probable token if nothing unforeseen happens, so the step after it may run ahead."""
        rows: dict[int, Row] = self._take_ahead(parts)
        rest = [index for index in range(len(parts)) if index not in rows]
        if rest:
            step = self._start([parts[index] for index in rest])
            rows |= {index: Row(step, number) for number, index in enumerate(rest)}
        found = [rows[index] for index in range(len(parts))]
        if goes_on and can_follow(parts) and self._spare.serves(len(parts), self._is_hybrid):
            self._run_ahead(following(parts, self._spare), found)
        return found

    def _start(self, parts: Sequence[Part], ids: Tensor | None = None) -> Launched:
        """Start a step. `ids` [parts] on the device replace the parts' tokens."""
        batch = make_batch(list(map(self._places.part, parts)), self._is_hybrid, torch.device("cpu"))
        counts = [len(part.token_ids) - part.wanted_from for part in parts]
        is_decode = all(count == 1 == len(part.token_ids) for count, part in zip(counts, parts, strict=True))
        result = self._graphs.run(batch, ids) if is_decode else None
        is_recorded = result is not None
        if result is not None:
            # The next recorded step overwrites these: each row gets memory of its own, in one launch.
            rows = [torch.empty_like(row) for row in result.logits.unbind()]
            torch._foreach_copy_(rows, list(result.logits.unbind()))
            logits = [row[None] for row in rows]
        else:
            grouping = self._fused.grouping(batch.num_rows)
            fields = pack(describe(batch, grouping), self._device)
            if ids is not None:
                fields["token_ids"].copy_(ids)
            all_logits = self._fused.forward(fields, self._cache, grouping.group)
            logits = list(all_logits.split(counts))
            result = greedy(torch.stack([_last(part) for part in logits]))
        tokens = torch.stack((result.ids.double(), result.logprobs.double()))
        host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        host.copy_(tokens, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return Launched(logits, tokens[0].long(), is_recorded, host, done)

    # ---- one step ahead -------------------------------------------------------------------------

    def _run_ahead(self, parts: list[Part], before: list[Row]) -> None:
        steps = {id(row.step) for row in before}
        if len(steps) > 1:  # tokens of several launches: they are in one from the next step on
            return
        step = before[0].step
        indices = [row.index for row in before]
        ids = step.ids
        if indices != list(range(ids.shape[0])):
            ids = ids.index_select(0, torch.tensor(indices, device=self._device))
        self._ahead = _Ahead(parts, before, self._start(parts, ids))

    def _take_ahead(self, parts: Sequence[Part]) -> dict[int, Row]:
        """Those of `parts` that ran ahead, by their index. What is not asked for now is forgotten."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return {}
        expected = {key_of(part): row for row, part in enumerate(ahead.parts)}
        found, copies = {}, []
        for index, actual in enumerate(parts):
            row = expected.get(key_of(actual))
            if row is None or not is_as_expected(ahead.parts[row], ahead.before[row].token[0], actual):
                continue
            found[index] = Row(ahead.step, row)
            draft, wrote = actual.draft, ahead.parts[row].draft
            if draft.slot:
                self._places.swap(draft.slot, wrote.slot)
            if wrote.segments[-1].pages[-1] >= self._spare.first_page:
                copies.append((wrote.segments[-1].pages[-1], draft.segments[-1].pages[-1]))
        if copies:
            source, target = torch.tensor(copies, device=self._device).t()
            copy_pages(self._cache.keys, self._cache.values, source, target)
        return found

    def release(self) -> None:
        """Forget what ran ahead, and give the recordings' memory back."""
        self._ahead = None
        torch.cuda.synchronize(self._device)
        self._graphs.release()


def _last(logits: Tensor) -> Tensor:
    """A part's last row; a part without wanted rows (a chunk before the last) has none: zeros."""
    return logits[-1] if logits.shape[0] else logits.new_zeros(logits.shape[1])
