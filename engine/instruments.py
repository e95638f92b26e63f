"""Who looks at attention and states, what is measured for them, and which readings are kept.

Knows steps by number and readings as arrays; how they are measured is `measuring`'s, how they are
drawn is the widgets'. Everything here runs on the engine's loop.

Nobody looking costs one test a step. What watchers want is measured at each step: shares and norms
are recorded with the run, attention to tokens and states only of marked steps. A ring keeps the last
readings whole, and a marked step keeps its own for good.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

from .blocks import BlockState, CacheBlock
from .measuring import Floats, PartReading, Wanted, attention_layers, linear_layers
from .readings import (
    MARK_BYTES,
    Fields,
    StepReading,
    norms_fields,
    shares_fields,
    states_fields,
    weights_fields,
)
from .trace import RowRecord
from .transactions import current_transaction, visible_state

if TYPE_CHECKING:
    from .engine import Engine

RING_STEPS = 64
RING_BYTES = 64 * 2**20
"""The ring drops its oldest readings beyond either."""

COST_SHARE = 0.02
"""Of the time, that measuring for panels may take …"""
LONGEST_PAUSE = 3.0
"""… but somebody who looks does not wait longer than this many seconds for something new."""


class _Watcher:
    """What somebody wants to see, and how often: `every` s at most, 0: at each step, whatever it costs."""

    def __init__(self, wanted: Wanted, every: float) -> None:
        self.wanted = wanted
        self.every = every
        self._last = float("-inf")  # s, when all of it was measured

    def due(self, now: float, cost: float) -> bool:
        """Is all of it to be measured at a step that begins `now`? It took `cost` s the last time."""
        pause = min(max(self.every, cost / COST_SHARE), LONGEST_PAUSE) if self.every else 0.0
        if now < self._last + pause:
            return False
        self._last = now
        return True


class Instruments:
    """An engine's instruments. Layers are numbered as in the model, from 0."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self.attention_layers = attention_layers(engine.config)
        self.linear_layers = linear_layers(engine.config)
        self.listeners: list[Callable[[StepReading], None]] = []
        self.clock: Callable[[], float] = time.monotonic
        self.fault = ""  # why measuring failed, if it did; the step itself went well
        self.held: list[BlockState] = []  # read by `states` just now
        self._watchers: dict[Hashable, _Watcher] = {}
        self._ring: OrderedDict[int, StepReading] = OrderedDict()
        self._marked: dict[int, StepReading] = {}
        self._marks_next = False
        self._cost = 0.0  # s, of measuring a step

    # ---- who looks ------------------------------------------------------------------------------

    def watch(
        self,
        who: Hashable = "python",
        *,
        shares: bool = False,
        norms: bool = False,
        tokens: bool = False,
        states: Sequence[int] = (),
        every: float = 0.0,
    ) -> None:
        """From the next step on, measure this for `who`, instead of what `who` wanted before.

        `shares` of attention per block, layer and head; `norms` of transitions; attention to single
        `tokens`; `states` after a view, of these layers. `every`: seconds from one measured step to the
        next at least, and so many more that measuring takes 2 % of the time; 0: at each step. Two
        things are measured at each step in any case: shares where they cost nothing (without fused
        kernels), and all of it while the engine is paused and steps are made by hand.

        Raises ValueError for a layer without a state.
        """
        for layer in states:
            self.check_linear(layer)
        self._watchers[who] = _Watcher(Wanted(shares, norms, tokens, frozenset(states)), every)

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
        if self._ring.pop(step, None) is not None:
            self._keep(reading)
        return True

    def unmark(self, step: int) -> None:
        """Give the readings of a marked step back."""
        self._marked.pop(step, None)

    def check_linear(self, layer: int) -> None:
        """Raise ValueError unless `layer` is a Gated DeltaNet layer."""
        if layer not in self.linear_layers:
            known = ", ".join(map(str, self.linear_layers)) or "none in this model"
            raise ValueError(f"layer {layer} has no state: Gated DeltaNet layers are {known}")

    @property
    def watched(self) -> Wanted:
        """What somebody wants to see."""
        return reduce(or_, (watcher.wanted for watcher in self._watchers.values()), Wanted())

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

    def __repr__(self) -> str:
        kept = (
            f"{len(self.steps)} steps kept, {len(self._marked)} of them marked, {self.nbytes / 2**20:.1f} MB"
        )
        return f"<Instruments: {kept}{f'; {self.fault}' if self.fault else ''}>"

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
        sources = [(state.slot, state.num_rows) for state in states]
        for state in states:
            engine.memory.hold(state)
        self.held += states
        try:
            work = engine.executor.submit(engine.runner.read_states, sources, [layer])
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
        wanted = reduce(or_, map(self._due, self._watchers.values()))
        return None if wanted == Wanted() else wanted

    def _due(self, watcher: _Watcher) -> Wanted:
        """What a watcher gets of the next step."""
        engine = self._engine()
        assert engine is not None, "an engine owns its instruments"
        if engine.paused or watcher.due(self.clock(), self._cost):
            return watcher.wanted
        return Wanted(shares=watcher.wanted.shares and not engine.runner.is_fused)

    def take(self, step: int, rows: Sequence[RowRecord], parts: Sequence[PartReading], cost: float) -> None:
        """A step was measured, which took `cost` s: keep its readings and tell the listeners."""
        self._cost = max(cost, self._cost * 0.9)  # that of the dearest kind, slowly forgotten
        reading = StepReading(step, tuple(rows), tuple(parts))
        if self._marks_next:
            self._marks_next = False
            self._keep(reading)
        else:
            self._ring[step] = reading
        size = sum(kept.nbytes for kept in self._ring.values())
        while self._ring and (size > RING_BYTES or len(self._ring) > RING_STEPS):
            size -= self._ring.popitem(last=False)[1].nbytes
        self._add("shares", shares_fields(reading))
        self._add("norms", norms_fields(reading))
        for listener in list(self.listeners):
            listener(reading)

    def _keep(self, reading: StepReading) -> None:
        """A step is marked: what it has goes into the recording too, as far as that has room."""
        self._marked[reading.step] = reading
        weights = weights_fields(reading)
        if weights is not None and weights["bin"] <= MARK_BYTES:
            self._add("weights", weights)
        room = MARK_BYTES
        for layer in reading.layers:
            states = states_fields(reading, layer)
            if states is None or states["bin"] > room:
                break
            room -= states["bin"]
            self._add("states", states)

    def _add(self, kind: str, fields: Fields | None) -> None:
        engine = self._engine()
        if fields is not None and engine is not None:
            engine.trace.add(kind, **fields)

    def failed(self, error: Exception) -> None:
        """Measuring failed. It is not tried again until somebody looks anew."""
        self.fault = f"{type(error).__name__}: {error}"
        self._watchers.clear()
        self._marks_next = False
