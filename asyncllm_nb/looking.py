"""What the panels of attention and states need of an engine: what is measured while they are on screen,
and single readings that a view asks for.

Knows the engine's instruments, names of panels, and what people chose in them. How readings become
records is `engine.readings`'.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from .engine.engine import Engine
from .engine.measuring import PartReading
from .engine.readings import Fields, StepReading, states_fields, weights_fields
from .engine.trace import RowRecord

INTERVAL = 0.1  # s between two steps whose norms, tokens and states are measured for panels

Choices = Mapping[str, Any]


class Looking:
    """The panels that look into one engine's layers."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)

    def watched(self, panels: Collection[str], choices: Iterable[Choices]) -> None:
        """These panels are on screen, in widgets with these choices: measure for them what they show."""
        engine = self._engine()
        if engine is None or engine.closed:
            return
        if not {"attention", "states"} & set(panels):
            engine.instruments.unwatch("panels")
            return
        choices = list(choices)
        attention, states = "attention" in panels, "states" in panels
        engine.instruments.watch(
            "panels",
            shares=attention,
            tokens=attention and any(chosen.get("attention.tokens") for chosen in choices),
            norms=states,
            states=self._layers(engine, choices) if states else (),
            every=INTERVAL,
        )

    def _layers(self, engine: Engine, choices: Iterable[Choices]) -> list[int]:
        """The layers that are chosen somewhere; the first one where nothing is."""
        known = engine.instruments.linear_layers
        wanted = {int(chosen.get("states.layer", known[0])) for chosen in choices} if known else set()
        return sorted(wanted & set(known)) or known[:1]

    async def read(self, question: Mapping[str, Any]) -> Fields | None:
        """The record that answers a view's question; None if there is no such reading. Its ``kept`` says
        how many bytes of memory all readings take.

        question: ``what`` ("weights" or "states"), ``n`` (a step), ``exact`` (that step and no other), ``r``
        (a request), and of states ``layer`` and ``view`` (ids of blocks). Raises ValueError for others.
        """
        engine = self._engine()
        if engine is None or engine.closed:
            return None
        record = await self._read(engine, question)
        return None if record is None else {**record, "kept": engine.instruments.nbytes}

    async def _read(self, engine: Engine, question: Mapping[str, Any]) -> Fields | None:
        what, request = str(question["what"]), int(question["r"])
        if what == "states":
            layer = int(question["layer"])
            engine.instruments.check_linear(layer)
            if not question.get("exact"):
                return await self._states_now(engine, request, list(map(int, question["view"])), layer)
            kept = engine.instruments.reading(int(question["n"]))
            return None if kept is None else _record("states", states_fields(_only(kept, request), layer))
        if what == "weights":
            found = self._newest(engine, int(question["n"]), request, bool(question.get("exact")))
            return None if found is None else _record("weights", weights_fields(found))
        raise ValueError(f"no reading {what!r}; there are 'weights' and 'states'")

    def _newest(self, engine: Engine, step: int, request: int, exact: bool) -> StepReading | None:
        """The request's weights at `step`, or (not `exact`) the newest that are kept."""
        steps = [step] if exact else reversed(engine.instruments.steps)
        for number in steps:
            kept = engine.instruments.reading(number)
            found = None if kept is None else _only(kept, request)
            if found is not None and any(part.weights is not None for part in found.parts):
                return found
        return None

    async def _states_now(self, engine: Engine, request: int, view: list[int], layer: int) -> Fields | None:
        """The state after the blocks `view` (ids) as they are at this moment; None if one was freed."""
        live = {block.id: block for block in engine.blocks.values()}
        blocks = [live[number] for number in view if number in live]
        if not blocks or len(blocks) < len(view):
            return None
        found = await engine.instruments.states(blocks, layer)
        versions = tuple((block.name, block.version) for block in blocks)
        row = RowRecord("", "decode", blocks[-1].name, versions, 0, (), request)
        part = PartReading(tuple(block.num_tokens for block in blocks), states={layer: found})
        reading = StepReading(engine.server.stepper.num_steps, (row,), (part,))
        return _record("states", states_fields(reading, layer))


def _only(reading: StepReading, request: int) -> StepReading:
    """The rows of one request."""
    rows = [(row, part) for row, part in reading.named() if row.request == request]
    return StepReading(reading.step, tuple(row for row, _ in rows), tuple(part for _, part in rows))


def _record(kind: str, fields: Fields | None) -> Fields | None:
    return None if fields is None else {"t": kind, **fields}
