"""How a step runs on a GPU: recorded if it is one of few rows that fits, else kernel by kernel; and one
decode step ahead, so that the GPU works while the engine's loop delivers tokens.

Knows parts, how their tokens are chosen, the fused decoder, its recordings and CUDA events. Knows no
requests. What may run ahead and what becomes of it is `ahead`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.pages import copy_pages
from .ahead import SlotPlaces, Spare, can_follow, following, is_as_expected, key_of
from .batch import Batch
from .fused import FusedDecoder
from .graphs import DecodeGraphs, Options, StepTokens, greedy, sampled
from .layout import Part, make_batch
from .looks import Looks, Seen, see
from .memory import CacheTensors
from .mixed_graphs import MixedGraphs
from .model import Decoder
from .packed import Integers, describe, pack
from .sampling import MOST_PROBABLE, Choice

Choices = Sequence[Choice | None]
"""How the token after each part is chosen; None: the most probable one."""


class Token(NamedTuple):
    """What a step chose after a part, and what the step after it went on with if it ran ahead."""

    id: int
    logprob: float
    is_decided: bool  # if not, the right token has to be drawn from the logits


@dataclass
class Launched:
    """A step that was started, row by row of its parts' last wanted logits."""

    logits: list[Tensor]  # of each part: [wanted rows, vocab] float32 on the device
    ids: Tensor  # [parts] int64 on the device: the token after each part
    is_recorded: bool  # as a CUDA graph; else kernel by kernel
    _choices: Choices
    _numbers: Tensor  # [2 or 3, parts] float64 on the host, once `_done`: ids, log-probabilities, decided
    _done: torch.cuda.Event
    _last: Integers  # [parts] the last row of each
    _looks: Looks | None
    _entries: tuple[Integers, Integers]  # row and block of each entry that `_looks` is about
    seen: Seen | None = None
    _tokens: list[Token] = field(default_factory=list)

    def tokens(self) -> list[Token]:
        """The token after each part. Waits for this step, not for what came after."""
        if not self._tokens:
            self._done.synchronize()
            ids, logprobs, *decided = self._numbers.tolist()
            flags = decided[0] if decided else [1.0] * len(ids)
            self._tokens = [
                Token(int(token), logprob, bool(flag))
                for token, logprob, flag in zip(ids, logprobs, flags, strict=True)
            ]
        return self._tokens

    def chose_as(self, row: int, choice: Choice | None) -> bool:
        """Was the token after part `row` chosen as `choice` says?"""
        return self._choices[row] == choice

    @property
    def can_look(self) -> bool:
        """Is there what `look` needs?"""
        return self._looks is not None or self.seen is not None

    def look(self) -> None:
        """Make `seen`: before another step runs, which may overwrite what it is made of."""
        if self.seen is None:
            assert self._looks is not None
            self.seen = see(self._looks, self._last, *self._entries)
            self._looks = None


@dataclass(frozen=True)
class Row:
    """A part of a step that was started."""

    step: Launched
    index: int
    choice: Choice | None  # how its token is to be chosen

    @property
    def logits(self) -> Tensor:
        return self.step.logits[self.index]

    @property
    def token(self) -> tuple[int, float] | None:
        """(id, log-probability) after it; None if that has to be drawn from its logits."""
        token = self.step.tokens()[self.index]
        if token.is_decided and self.step.chose_as(self.index, self.choice):
            return token.id, token.logprob
        return None

    @property
    def encoded(self) -> int:
        """The token that a step which ran ahead went on with."""
        return self.step.tokens()[self.index].id

    @property
    def is_recorded(self) -> bool:
        return self.step.is_recorded

    @property
    def seen(self) -> Seen:
        """What its last row saw, if `look` was asked for."""
        assert self.step.seen is not None
        return self.step.seen.part(self.index)


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
        self._mixed_graphs = MixedGraphs(self._fused, cache, device, self._graphs.pool)
        self._cache = cache
        self._device = device
        self._places = places
        self._spare = spare
        self._is_hybrid = decoder.config.is_hybrid
        self._ahead: _Ahead | None = None

    def run(self, parts: Sequence[Part], choices: Choices, goes_on: bool, looks: bool = False) -> list[Row]:
        """Start a step, as far as it has not run ahead. `goes_on`: every stream in it takes the token that
        is chosen for it if nothing unforeseen happens, so the step after it may run ahead. `looks`:
        keep what instruments read of it."""
        rows: dict[int, Row] = self._take_ahead(parts, choices, looks)
        if looks:  # before another step runs
            for row in rows.values():
                row.step.look()
        rest = [index for index in range(len(parts)) if index not in rows]
        if rest:
            step = self._start([parts[index] for index in rest], [choices[index] for index in rest], looks)
            if looks:
                step.look()
            rows |= {index: Row(step, number, choices[index]) for number, index in enumerate(rest)}
        found = [rows[index] for index in range(len(parts))]
        if goes_on and can_follow(parts) and self._spare.serves(len(parts), self._is_hybrid):
            self._run_ahead(following(parts, self._spare), found)
        return found

    def _start(
        self, parts: Sequence[Part], choices: Choices, looks: bool = False, ids: Tensor | None = None
    ) -> Launched:
        """Start a step. `ids` [parts] on the device replace the parts' tokens."""
        batch = make_batch(list(map(self._places.part, parts)), self._is_hybrid, torch.device("cpu"))
        counts = [len(part.token_ids) - part.wanted_from for part in parts]
        options = _options(choices)
        is_decode = all(count == 1 == len(part.token_ids) for count, part in zip(counts, parts, strict=True))
        result = self._graphs.run(batch, ids, options) if is_decode else None
        if not is_decode and max(counts) <= 1:
            result = self._mixed_graphs.run(batch, options)
        is_recorded = result is not None
        if result is not None:
            # The next recorded step overwrites these: each row gets memory of its own, in one launch.
            rows = [torch.empty_like(row) for row in result.logits.unbind()]
            torch._foreach_copy_(rows, list(result.logits.unbind()))
            logits = [row[None][:count] for row, count in zip(rows, counts, strict=True)]
        else:
            result, all_logits = self._run_unrecorded(batch, counts, options, looks, ids)
            logits = list(all_logits.split(counts))
        numbers = [result.ids.double(), result.logprobs.double()]
        if result.decided is not None:
            numbers.append(result.decided.double())
        found = torch.stack(numbers)
        host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        host.copy_(found, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        assert result.fields is not None
        return Launched(
            logits,
            found[0].long(),
            is_recorded,
            choices,
            host,
            done,
            batch.row_start.numpy()[1:] - 1,
            result.looks,
            (result.fields["entry_row"], result.fields["entry_block"]),
        )

    def _run_unrecorded(
        self, batch: Batch, counts: Sequence[int], options: Options | None, looks: bool, ids: Tensor | None
    ) -> tuple[StepTokens, Tensor]:
        """A step kernel by kernel: its tokens, and all wanted logits."""
        grouping = self._fused.grouping(batch.num_rows)
        plan = describe(batch, grouping)
        fields = pack(plan, self._device)
        if ids is not None:
            fields["token_ids"].copy_(ids)
        kept = Looks() if looks else None
        all_logits = self._fused.forward(fields, self._cache, grouping.group, kept)
        last = torch.stack([_last(part) for part in all_logits.split(counts)])
        if options is None:
            result = greedy(last)
        else:
            result = sampled(last, torch.tensor(options, dtype=torch.float64, device=self._device))
        return replace(result, looks=kept, fields=plan), all_logits

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
        choices = [row.choice.following if row.choice else None for row in before]
        self._ahead = _Ahead(parts, before, self._start(parts, choices, ids=ids))

    def _take_ahead(self, parts: Sequence[Part], choices: Choices, looks: bool) -> dict[int, Row]:
        """Those of `parts` that ran ahead, by their index. What is not asked for now is forgotten, and
        what cannot be looked at if that is wanted."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or (looks and not ahead.step.can_look):
            return {}
        expected = {key_of(part): row for row, part in enumerate(ahead.parts)}
        found, copies = {}, []
        for index, actual in enumerate(parts):
            row = expected.get(key_of(actual))
            if row is None or not is_as_expected(ahead.parts[row], ahead.before[row].encoded, actual):
                continue
            found[index] = Row(ahead.step, row, choices[index])
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
        self._mixed_graphs.release()


def _last(logits: Tensor) -> Tensor:
    """A part's last row; a part without wanted rows (a chunk before the last) has none: zeros."""
    return logits[-1] if logits.shape[0] else logits.new_zeros(logits.shape[1])


def _options(choices: Choices) -> Options | None:
    """The rows of options of a step; None if all its tokens are the most probable ones."""
    if all(choice is None for choice in choices):
        return None
    return [(choice or MOST_PROBABLE).options for choice in choices]
