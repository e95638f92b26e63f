"""One decode step ahead: what the next step will be if every stream takes its most probable token.

Knows parts, states and where slots lie. Knows no tensors but numbers, and nothing of the GPU: it says
what to run and, when the engine asks for its next step, which rows of that are the ones asked for.

What runs ahead is read by nobody. Its keys and values lie beyond the committed length, or in a spare
page; its pairs in spare slots. A row that is asked for takes its spare slot over by swapping two
numbers; a row that is not is simply forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .batch import IDENTITY_SLOT
from .blocks import BlockState, Draft, Segment
from .layout import Part


@dataclass(frozen=True, slots=True)
class Spare:
    """Slots and pages behind those that the engine hands out, for rows that run ahead."""

    first_slot: int
    num_slots: int  # 0 without Gated DeltaNet layers
    first_page: int
    num_pages: int

    def serves(self, rows: int, is_hybrid: bool) -> bool:
        """Is there enough for this many rows?"""
        return rows <= self.num_pages and (not is_hybrid or rows <= self.num_slots)


NO_SPARE = Spare(0, 0, 0, 0)


class SlotPlaces:
    """Where in the pool each slot lies: as numbered, until rows that ran ahead swap places."""

    def __init__(self, num_slots: int) -> None:
        self._places = list(range(num_slots))

    def __getitem__(self, slot: int) -> int:
        return self._places[slot]

    def swap(self, slot: int, spare: int) -> None:
        """`slot`, taken and not written yet, gets what lies in `spare`; `spare` gets its place."""
        places = self._places
        places[slot], places[spare] = places[spare], places[slot]

    def state(self, state: BlockState) -> BlockState:
        """`state` with the slot's place instead of its number."""
        place = self._places[state.slot]
        return state if place == state.slot else replace(state, slot=place)

    def part(self, part: Part) -> Part:
        """`part` with places instead of numbers of slots."""
        draft = part.draft
        draft = replace(draft, base=self.state(draft.base), slot=self._places[draft.slot])
        return replace(part, view=tuple(map(self.state, part.view)), draft=draft)


def can_follow(parts: Sequence[Part]) -> bool:
    """Are these decode steps whose successors can be told?"""
    bases = {id(part.draft.base) for part in parts}
    return len(bases) == len(parts) and all(
        len(part.token_ids) == 1 and part.draft.num_tokens == 1 and part.draft.base.segments for part in parts
    )


def following(parts: Sequence[Part], spare: Spare) -> list[Part]:
    """The parts of the step after `parts`, if all of them are committed and all streams go on.

    Its tokens are not known yet and are given as 0.
    """
    committed = {id(part.draft.base): _committed(part.draft) for part in parts}
    result = []
    for row, part in enumerate(parts):
        base = committed[id(part.draft.base)]
        last = base.segments[-1]
        pages = last.pages if last.room else (*last.pages, spare.first_page + row)
        grown = Segment(pages, last.length + 1, last.offset)
        slot = spare.first_slot + row if base.slot != IDENTITY_SLOT else IDENTITY_SLOT
        draft = Draft(base, (*base.segments[:-1], grown), 1, slot, (), None, part.draft.memory)
        view = tuple(committed.get(id(state), state) for state in part.view)
        result.append(Part(view, draft, 0, [0], 0))
    return result


def is_as_expected(expected: Part, token_id: int, actual: Part) -> bool:
    """Is `actual` what ran ahead as `expected`, with `token_id` as its token?"""
    return (
        actual.num_done == 0
        and list(actual.token_ids) == [token_id]
        and actual.draft.num_tokens == 1
        and actual.draft.copy is None
        and _reads_same(actual.draft.base, expected.draft.base)
        and len(actual.view) == len(expected.view)
        and all(map(_reads_same, actual.view, expected.view))
    )


def key_of(part: Part) -> int:
    """The same for an expected part and the actual one: what they write behind."""
    return id(part.draft.base.segments)


def _committed(draft: Draft) -> BlockState:
    """What readers see of a block after `draft`."""
    base = draft.base
    return BlockState(draft.segments, base.num_tokens + 1, base.span + 1, draft.slot)


def _reads_same(one: BlockState, other: BlockState) -> bool:
    """Do readers get the same from both? By identity: after a clear, equal numbers may mean other
    tokens, but the segments of a write stay the same object when it is committed."""
    return one is other or (
        one.segments is other.segments and one.slot == other.slot and one.num_tokens == other.num_tokens
    )
