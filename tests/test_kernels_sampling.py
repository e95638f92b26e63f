"""`sample` against transformers' filters and the inverse of the cumulated distribution."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm_nb.kernels.sampling import BEGINNING, sample

PLAIN: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def draw(logits: Tensor, uniform: list[float], forbidden: tuple[int, ...] = (), **options: Any) -> Any:
    """`sample` with the same options in every row; ids and logprobs."""
    n = logits.shape[0]
    chosen = {**PLAIN, **options}
    per_row = {name: torch.tensor([value] * n) for name, value in chosen.items()}
    return sample(logits, forbidden=[forbidden] * n, uniform=torch.tensor(uniform), **per_row)


def filtered(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Probabilities of one row after transformers' filters, in its order."""
    from transformers.generation.logits_process import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    filters: list[Any] = [TemperatureLogitsWarper(temperature)]
    filters += [TopKLogitsWarper(top_k)] if top_k else []
    filters += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    filters += [MinPLogitsWarper(min_p)] if min_p else []
    scores = logits[None]
    for apply in filters:
        scores = apply(None, scores)
    return scores[0].double().softmax(-1)


def inverse(probs: Tensor, uniform: float) -> int:
    """The id at which the cumulated probabilities, most probable first, exceed `uniform`."""
    ordered, ids = probs.sort(descending=True, stable=True)
    return int(ids[int((ordered.cumsum(0) <= uniform).sum())])


@pytest.mark.parametrize("vocab", [37, 3 * BEGINNING + 5])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 5.0},
        {"top_k": 4},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"temperature": 3.0, "top_p": 0.9999},
        {"temperature": 2.0, "top_k": 9, "top_p": 0.8, "min_p": 0.1},
        {"top_k": 2 * BEGINNING},
        {"top_k": 2 * BEGINNING, "top_p": 0.5},
    ],
    ids=str,
)
def test_sample(vocab: int, options: dict[str, Any]) -> None:
    logits = torch.randn(1, vocab) * 2
    uniform = torch.linspace(0.001, 0.999, 101).tolist()
    ids, logprobs = draw(logits.expand(101, -1), uniform, **options)
    probs = filtered(logits[0], **{**PLAIN, **options})
    ordered = probs.sort(descending=True).values.cumsum(0)
    for u, token in zip(uniform, ids.tolist(), strict=True):
        if (ordered - u).abs().min() > 1e-6:  # no rounding decides
            assert token == inverse(probs, u)
    torch.testing.assert_close(logprobs, logits[0].log_softmax(-1)[ids])


def test_sample_takes_the_lowest_id_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 3.0]])
    assert draw(logits, [0.9], temperature=0.0)[0].tolist() == [1]
    assert draw(logits.expand(3, -1), [0.1, 0.5, 0.9], top_k=3)[0].tolist() == [1, 3, 4]


def test_sample_never_draws_what_is_forbidden() -> None:
    logits = torch.tensor([[9.0, 5.0, 1.0, 0.0]])
    assert draw(logits, [0.5], (0, 1), temperature=0.0)[0].tolist() == [2]
    ids, logprobs = draw(logits.expand(50, -1), torch.linspace(0, 0.999, 50).tolist(), (0, 2))
    assert set(ids.tolist()) == {1, 3}
    torch.testing.assert_close(logprobs, logits[0].log_softmax(-1)[ids])  # of the model's own


def test_sample_draws_each_row_by_itself() -> None:
    """The same row beside others, with other options, among them one that is sorted whole."""
    vocab = 4 * BEGINNING
    logits = torch.randn(8, vocab)
    options = {
        "temperature": torch.tensor([0.0, 1.0, 0.7, 4.0, 1.0, 0.0, 2.0, 1.0]),
        "top_k": torch.tensor([0, 0, 5, 0, 3000, 7, 0, 1]),
        "top_p": torch.tensor([1.0, 0.9, 1.0, 1.0, 0.99, 0.5, 1.0, 1.0]),
        "min_p": torch.tensor([0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.01, 0.0]),
    }
    uniform = torch.rand(8)
    forbidden = [(), (1, 2), (), (3,), (), (), (), (0,)]
    ids, logprobs = sample(logits, forbidden=forbidden, uniform=uniform, **options)
    for row in range(8):
        alone = {name: values[row : row + 1] for name, values in options.items()}
        one_id, one_logprob = sample(
            logits[row : row + 1],
            forbidden=forbidden[row : row + 1],
            uniform=uniform[row : row + 1],
            **alone,
        )
        assert one_id[0] == ids[row]
        torch.testing.assert_close(one_logprob[0], logprobs[row])


def test_sample_at_the_edges() -> None:
    """Numbers at both ends, a tiny temperature, and filters that leave one token."""
    logits = torch.randn(1, 50)
    best, worst = int(logits.argmax()), int(logits.argmin())
    assert draw(logits, [0.0])[0].tolist() == [best]
    assert draw(logits, [1.0])[0].tolist() == [worst]  # 1 - 1e-9 as float32
    for options in ({"temperature": 1e-30}, {"top_k": 1}, {"top_p": 1e-9}, {"min_p": 0.999999}):
        for u in (0.0, 0.999, 1.0):
            assert draw(logits, [u], **options)[0].tolist() == [best], options


def test_sample_leaves_its_arguments_alone() -> None:
    logits = torch.randn(2, 9)
    for temperature, forbidden in itertools.product((0.0, 1.0), ((), (1,))):
        before = logits.clone()
        draw(logits, [0.3, 0.6], forbidden, temperature=temperature)
        assert torch.equal(logits, before)
