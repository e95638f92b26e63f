"""What may run one step ahead, and which rows of it are the ones that were asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncllm_nb.engine.ahead import SlotPlaces, Spare, can_follow, following, is_as_expected, key_of
from asyncllm_nb.engine.blocks import EMPTY, BlockState, Memory
from asyncllm_nb.engine.build import check_weights_fit
from asyncllm_nb.engine.config import ModelConfig
from asyncllm_nb.engine.layout import Part
from asyncllm_nb.testing import make_checkpoint

SPARE = Spare(first_slot=31, num_slots=8, first_page=201, num_pages=8)


def block(memory: Memory, length: int) -> BlockState:
    return memory.draft(EMPTY, length).commit(None)


def step(memory: Memory, views: list[tuple[BlockState, ...]], token: int = 7) -> list[Part]:
    """A decode step: each view's last block gets a token."""
    return [Part(view[:-1], memory.draft(view[-1], 1), 0, [token], 0) for view in views]


def commit(parts: list[Part]) -> list[BlockState]:
    """The states after a step, as the engine makes them: a new version of the draft's state."""
    return [replace(part.draft.commit(None), version=9) for part in parts]


@pytest.mark.parametrize("lengths", [(5, 30), (16, 31), (15, 32)])
def test_following_is_what_the_engine_asks_for(lengths: tuple[int, int]) -> None:
    """Two streams that read each other, with and without a new page."""
    memory = Memory(200, 30, is_hybrid=True)
    prompt, a, b = block(memory, 20), block(memory, lengths[0]), block(memory, lengths[1])
    first = step(memory, [(prompt, b, a), (prompt, a, b)])
    assert can_follow(first)
    expected = following(first, SPARE)
    a, b = commit(first)
    actual = step(memory, [(prompt, b, a), (prompt, a, b)], token=3)
    for row, (want, got) in enumerate(zip(expected, actual, strict=True)):
        assert key_of(want) == key_of(got)
        assert is_as_expected(want, 3, got) and not is_as_expected(want, 4, got)
        assert want.draft.slot == SPARE.first_slot + row
        assert want.draft.segments[-1].length == got.draft.segments[-1].length
        *same, last = got.draft.segments[-1].pages
        has_new_page = len(got.draft.segments[-1].pages) > len(got.draft.base.segments[-1].pages)
        ahead = SPARE.first_page + row if has_new_page else last
        assert want.draft.segments[-1].pages == (*same, ahead)


def test_what_others_wrote_is_not_as_expected() -> None:
    memory = Memory(200, 30, is_hybrid=True)
    prompt, a = block(memory, 20), block(memory, 5)
    first = step(memory, [(prompt, a)])
    (expected,) = following(first, SPARE)
    (a,) = commit(first)
    longer = memory.draft(prompt, 4).commit(None)
    (read_more,) = step(memory, [(longer, a)])
    assert not is_as_expected(expected, 7, read_more)
    appended = memory.draft(a, 1).commit(None)
    (wrote_more,) = step(memory, [(prompt, appended)])
    assert not is_as_expected(expected, 7, wrote_more)


def test_equal_numbers_are_not_enough() -> None:
    """A block that was cleared and written anew may get the same pages and slot."""
    memory = Memory(200, 30, is_hybrid=True)
    first = step(memory, [(block(memory, 5),)])
    (expected,) = following(first, SPARE)
    (a,) = commit(first)
    twin = replace(a, segments=tuple(replace(segment) for segment in a.segments))
    assert twin == a
    (actual,) = step(memory, [(twin,)])
    assert not is_as_expected(expected, 7, actual)


def test_a_copied_page_is_not_as_expected() -> None:
    """A fork shares the last page: the next token goes to a copy of it."""
    memory = Memory(200, 30, is_hybrid=False)
    first = step(memory, [(block(memory, 5),)])
    (expected,) = following(first, SPARE)
    (a,) = commit(first)
    memory.own(a)
    (actual,) = step(memory, [(a,)])
    assert actual.draft.copy is not None and not is_as_expected(expected, 7, actual)


def test_can_follow_decodes_only() -> None:
    memory = Memory(200, 30, is_hybrid=True)
    a = block(memory, 5)
    assert not can_follow([Part((), memory.draft(a, 3), 0, [1, 2, 3], 0)])
    assert not can_follow([Part((), memory.draft(EMPTY, 1), 0, [1], 0)])


def test_slot_places_swap() -> None:
    memory = Memory(200, 30, is_hybrid=True)
    places = SlotPlaces(40)
    (part,) = step(memory, [(block(memory, 4), block(memory, 5))])
    assert places.part(part) == part
    taken = part.draft.slot
    places.swap(taken, 33)
    moved = places.part(part)
    assert (moved.draft.slot, places[33]) == (33, taken)
    assert moved.view == part.view and moved.draft.base == part.draft.base
    places.swap(taken, 33)
    assert places.part(part) == part


def test_check_weights_fit(tmp_path_factory: pytest.TempPathFactory) -> None:
    config = ModelConfig.from_folder(make_checkpoint(tmp_path_factory.mktemp("m"), "qwen3"))
    check_weights_fit(config, config.dtype, 10**9)
    with pytest.raises(ValueError, match=r"weights need [\d,]+ bytes in float32, and 1,000 are free"):
        check_weights_fit(config, config.dtype, 1000)
