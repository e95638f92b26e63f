"""Who looks at attention and states, what is measured for them, and which readings are kept.

Knows steps by number and readings as arrays; how they are measured is `measuring`'s, how they are
drawn is the widgets'. Everything here runs on the engine's loop.

Nobody looking costs one test a step. What watchers want is measured at each step and told to
listeners; a ring keeps the last readings, and a marked step keeps its own for good.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

import numpy as np

from .blocks import BlockState, CacheBlock
from .measuring import Floats, Halves, PartReading, Wanted, attention_layers, linear_layers
from .trace import RowRecord
from .transactions import current_transaction, visible_state

if TYPE_CHECKING:
    from .engine import Engine

RING_STEPS = 64
RING_BYTES = 64 * 2**20
"""The ring drops its oldest readings beyond either."""


@dataclass(frozen=True, slots=True)
class StepReading:
    """What was measured at one step: a reading for each of its rows, in the order of its record."""

    step: int
    rows: tuple[RowRecord, ...]
    parts: tuple[PartReading, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def part(self, name: str) -> PartReading | None:
        """The reading of the row that stream or request `name` had, if it had one."""
        named = zip(self.rows, self.parts, strict=True)
        return next((part for row, part in named if row.name == name), None)


class Instruments:
    """An engine's instruments. Layers are numbered as in the model, from 0."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self.attention_layers = attention_layers(engine.config)
        self.linear_layers = linear_layers(engine.config)
        self.listeners: list[Callable[[StepReading], None]] = []
        self.fault = ""  # why measuring failed, if it did; the step itself went well
        self.held: list[BlockState] = []  # read by `states` just now
        self._watchers: dict[Hashable, Wanted] = {}
        self._ring: OrderedDict[int, StepReading] = OrderedDict()
        self._marked: dict[int, StepReading] = {}
        self._marks_next = False

    # ---- who looks ------------------------------------------------------------------------------

    def watch(
        self,
        who: Hashable = "python",
        *,
        shares: bool = False,
        norms: bool = False,
        tokens: bool = False,
        states: Sequence[int] = (),
    ) -> None:
        """From the next step on, measure this for `who`, instead of what `who` wanted before.

        `shares` of attention per block, layer and head; `norms` of transitions; attention to single
        `tokens`; `states` after a view, of these layers. Raises ValueError for a layer without one.
        """
        for layer in states:
            self.check_linear(layer)
        self._watchers[who] = Wanted(shares, norms, tokens, frozenset(states))

    def unwatch(self, who: Hashable = "python") -> None:
        """`who` looks no longer."""
        self._watchers.pop(who, None)

    def mark(self, step: int | None = None) -> bool:
        """Keep all readings of `step` for good. Returns whether there are any yet.

        They are there if the ring still has that step. None: measure everything at the next step,
        and keep that.
        """
        if step is None:
            self._marks_next = True
            return False
        reading = self.reading(step)
        if reading is None:
            return False
        self._ring.pop(step, None)
        self._marked[step] = reading
        return True

    def unmark(self, step: int) -> None:
        """Give the readings of a marked step back."""
        self._marked.pop(step, None)

    def check_linear(self, layer: int) -> None:
        """Raise ValueError unless `layer` is a Gated DeltaNet layer."""
        if layer not in self.linear_layers:
            known = ", ".join(map(str, self.linear_layers)) or "none in this model"
            raise ValueError(f"layer {layer} has no state: Gated DeltaNet layers are {known}")

    # ---- what was measured ----------------------------------------------------------------------

    def reading(self, step: int) -> StepReading | None:
        """What is kept of a step; None if it was not measured or is gone."""
        return self._marked.get(step) or self._ring.get(step)

    @property
    def steps(self) -> list[int]:
        """Steps with readings, ascending."""
        return sorted({*self._ring, *self._marked})

    @property
    def marked(self) -> list[int]:
        """Marked steps that have readings, ascending."""
        return sorted(self._marked)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that all readings take."""
        return sum(r.nbytes for r in (*self._ring.values(), *self._marked.values()))

    async def states(self, view: Sequence[CacheBlock], layer: int) -> Floats:
        """The state of a Gated DeltaNet layer after `view` as it is now, block by block.

        -> float32 [B, H, d_v, d_k]: what each block wrote, carried through the blocks after it. The
        sum over B is the state. Changes nothing; raises ValueError for a layer without a state.
        """
        self.check_linear(layer)
        engine = self._engine()
        assert engine is not None, "an engine owns its instruments"
        engine.check_usable()
        reader = current_transaction(engine)
        states = [visible_state(block._record, reader) for block in view]
        slots = [state.slot for state in states]
        for state in states:
            engine.memory.hold(state)
        self.held += states
        try:
            work = engine.executor.submit(engine.runner.read_states, slots, [layer])
            found = await asyncio.wrap_future(work)
        finally:
            for state in states:
                self.held.remove(state)
                engine.memory.drop(state)
        return found[layer]

    # ---- the engine's side ----------------------------------------------------------------------

    def wanted(self) -> Wanted | None:
        """What to measure at the next step; None if nobody looks."""
        if self._marks_next:
            return Wanted(True, True, True, frozenset(self.linear_layers))
        if not self._watchers:
            return None
        return reduce(or_, self._watchers.values())

    def take(self, step: int, rows: Sequence[RowRecord], parts: Sequence[PartReading]) -> None:
        """A step was measured: keep its readings and tell the listeners."""
        reading = StepReading(step, tuple(rows), tuple(parts))
        if self._marks_next:
            self._marks_next = False
            self._marked[step] = reading
        else:
            self._ring[step] = reading
        size = sum(kept.nbytes for kept in self._ring.values())
        while self._ring and (size > RING_BYTES or len(self._ring) > RING_STEPS):
            size -= self._ring.popitem(last=False)[1].nbytes
        for listener in list(self.listeners):
            listener(reading)

    def failed(self, error: Exception) -> None:
        """Measuring failed. It is not tried again until somebody looks anew."""
        self.fault = f"{type(error).__name__}: {error}"
        self._watchers.clear()
        self._marks_next = False


def over_blocks(weights: Halves, lengths: Sequence[int]) -> list[Halves]:
    """Attention to single tokens [L_a, H, tokens], cut into the blocks of the view."""
    borders = np.cumsum(lengths)[:-1]
    return [part for part in np.split(weights, borders, axis=-1)]
