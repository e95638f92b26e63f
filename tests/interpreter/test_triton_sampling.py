"""Draws without sorting, in Triton's interpreter, against the plain draws that sort."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import Options, assert_drawn, combinations, reference, table
from torch import Tensor

from asyncllm_nb.kernels import sampling
from asyncllm_nb.kernels.sampling_triton import sample_all, search

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def short_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most rows are left to the search."""
    monkeypatch.setattr(sampling, "BEGINNING", 3)


def searched(logits: Tensor, rows: list[Options], share: int, passes: int) -> tuple[Tensor, Tensor]:
    """Ids, and whether each is decided."""
    options = table(rows, CPU)
    ids, decided, probs, total, peak = sampling.look_at_beginning(logits, options)
    search(probs, total, peak, options, ids, decided, share=share, passes=passes)
    return ids, decided


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "few values"])
@pytest.mark.parametrize(("vocab", "share", "passes"), [(1031, 2048, 9), (1031, 512, 3), (700, 256, 24)])
def test_search(vocab: int, share: int, passes: int, kind: str) -> None:
    """Filters and their combinations, with ties and without; one program for a row or several, which do a
    part of the search or all of it."""
    turn = ("float32", "bfloat16", "few values").index(kind)  # a few of the combinations each time
    rows = combinations(600, (0.0, 0.61, 1 - 1e-9))[turn + passes % 2 :: 4]
    logits = torch.randn(len(rows), vocab)
    if kind == "bfloat16":
        logits = (3 * logits).bfloat16().float()
    elif kind == "few values":
        logits = logits.round()
    ids, decided = searched(logits, rows, share, passes)
    assert decided.all()
    assert assert_drawn(ids, logits, rows) <= 1


def test_search_leaves_decided_rows_alone() -> None:
    logits = torch.randn(3, 1031)
    rows = [Options(), Options(0.0), Options(0.01, top_k=2)]
    options = table(rows, CPU)
    ids, decided, probs, total, peak = sampling.look_at_beginning(logits, options)
    assert decided.tolist() == [False, True, True]
    ids[1:] = torch.tensor([7, 8])
    search(probs, total, peak, options, ids, decided, share=512, passes=2)
    assert ids[1:].tolist() == [7, 8]
    assert_drawn(ids[:1], logits[:1], rows[:1])


@torch.inference_mode()
def test_sample_all() -> None:
    """Rows that are cold, forbidden, infinite or not numbers, beside one that is drawn; log-probabilities."""
    logits = torch.randn(7, 263)
    best = logits.argmax(-1).tolist()
    logits[1, 40:] = -torch.inf
    logits[3] = torch.nan
    logits[4, 9] = torch.inf
    logits[6] = 1.0
    rows = [
        Options(0.0, forbidden=(best[0],)),
        Options(2.0, uniform=1 - 1e-9, forbidden=(0, 1)),
        Options(forbidden=(best[2],), uniform=0.0),
        Options(),
        Options(),
        Options(1.7, uniform=0.25),
        Options(uniform=0.75, top_k=200),
    ]
    before = logits.clone()
    ids, logprobs, decided = sample_all(logits, table(rows, CPU))
    assert decided.tolist() == [True, True, True, False, False, True, True]
    assert ((ids >= 0) & (ids < 263)).all()
    assert ids[6] == 150  # of 200 equals
    finite = [0, 1, 2, 5, 6]
    _, expected = reference(logits, rows)
    assert assert_drawn(ids[finite], logits[finite], [rows[i] for i in finite]) == 0
    torch.testing.assert_close(logprobs[finite], expected[finite])
    torch.testing.assert_close(logits, before, equal_nan=True, rtol=0, atol=0)


NUMBERS = st.sampled_from([0.0, 1e-9, 0.25, 1 / 3, 0.5, 0.999, 1 - 1e-9]) | st.floats(0, 1, exclude_max=True)


@settings(max_examples=40)
@given(
    logits=st.lists(
        st.sampled_from([-torch.inf, -90.0, -1.0, 0.0, 0.5]) | st.floats(-5, 5, width=32),
        min_size=4,
        max_size=70,
    ),
    temperature=st.sampled_from([0.01, 0.7, 1.0, 20.0]),
    top_k=st.integers(0, 75),
    top_p=st.sampled_from([1.0, 0.999, 0.5, 1e-9]) | st.floats(0.01, 1),
    min_p=st.sampled_from([0.0, 0.0, 0.3, 0.999]),
    uniform=NUMBERS,
    forbidden=st.sets(st.integers(1, 3)),
    share=st.sampled_from([16, 128]),
)
def test_any_draw(
    logits: list[float],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    uniform: float,
    forbidden: set[int],
    share: int,
) -> None:
    logits[0] = 0.1  # something is left to draw
    rows = [Options(temperature, top_k, top_p, min_p, uniform, tuple(sorted(forbidden)))]
    ids, decided = searched(torch.tensor([logits]), rows, share, passes=3)
    assert decided.all()
    assert_drawn(ids, torch.tensor([logits]), rows)
