"""Counts memory from the holders' side: every page and slot must be counted once per holder.

Knows all holders: live blocks, yielded tokens and running requests with what they read, and open
transactions. For tests and for the doubtful.
"""

from __future__ import annotations

from collections import Counter

from .engine import Engine


def check_integrity(engine: Engine) -> None:
    """Assert that exactly what the holders hold is taken from the pools. Only when no step runs."""
    stepper, memory = engine.server.stepper, engine.memory
    assert not stepper.in_step, "check_integrity is for moments when no step runs"
    if not engine.closed:
        engine.clean()
    owners: Counter[int] = Counter()
    slots: Counter[int] = Counter()
    for record in engine.records.values():
        owners.update(record.state.pages)
        slots.update([record.state.slot])
    for draft in stepper.drafts():
        owners.update(draft.taken)
        slots.update([draft.slot])
    pages = Counter(owners)
    for state in stepper.held_states():
        pages.update(state.pages)
        slots.update([state.slot])
    del slots[0]  # the constant slot of empty blocks
    memory.pages.check(dict(pages))
    memory.slots.check(dict(slots))
    actual = {page: count for page, count in enumerate(memory.pages.owners) if count}
    assert actual == dict(owners), f"owners: counted {actual}, expected {dict(owners)}"
