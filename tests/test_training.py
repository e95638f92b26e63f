"""How tiny-hybrid is trained: its arithmetic against transformers and PyTorch, its rows, and a run in pieces.

Sizes are tiny, except in the one run of the command, which makes three steps.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from torch import Tensor, nn

from asyncllm_nb import models
from asyncllm_nb.tasks import KINDS, make_example
from training.batches import GIVEN, PADDING, Feed, Marker, Rows, packed, packed_whole, training_rows
from training.checkpoint import load_progress, save_model, save_progress
from training.delta import CHUNK, gated_delta_rule
from training.held_out import held_out_rows
from training.model import Network, Sizes
from training.optimizer import CLIP, Optimizer, orthogonal
from training.step import Step, exact_examples, token_losses
from training.tokens import SIZE, Encoder, make_tokenizer
from training.train import parse

ROOT = Path(__file__).resolve().parent.parent
TOKENIZER = models.BUNDLED["tiny-hybrid"].folder / "tokenizer.json"
LENGTH = parse(["--out", "run", "--seconds", "1"]).length
"""Tokens in a row of the command."""
SMALL = Sizes(
    vocab=263,
    hidden=96,
    layers=5,
    intermediate=100,
    heads=6,
    kv_heads=3,
    head_dim=32,
    rotary_dim=16,
    linear_heads=3,
    linear_dim=24,
    positions=512,
)


def close(actual: Tensor, expected: Tensor, share: float) -> None:
    """Within a share of the largest."""
    error = (actual - expected).abs().max().item() / expected.abs().max().item()
    assert error <= share, f"off by {error:.3g} of the largest"


def tokens_of(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(SMALL.vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


# ---- arithmetic ---------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [1, 3])
def test_delta_rule_and_its_gradients_are_those_of_transformers(chunks: int) -> None:
    """transformers' rule goes token by token."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

    rows, heads, key_dim, value_dim, length = 2, 3, 5, 7, chunks * CHUNK
    query, key = torch.randn(2, rows, length, heads, key_dim)
    value, gates = torch.randn(rows, length, heads, value_dim), torch.randn(2, rows, length, heads)
    key = torch.nn.functional.normalize(key, dim=-1)
    inputs = [query, key, value, -torch.nn.functional.softplus(gates[0] - 2), gates[1].sigmoid()]
    weights = torch.randn(rows, length, heads, value_dim)

    def cut(x: Tensor) -> Tensor:  # [B, T, H, ...] -> [N, B * H, C, ...]
        chunked: Tensor = x.unflatten(1, (chunks, CHUNK)).movedim(3, 2).movedim(1, 0)
        return chunked.flatten(1, 2)

    def ours(*parts: Tensor) -> Any:
        q, k, v, decay, beta = map(cut, parts)
        out = gated_delta_rule(q * key_dim**-0.5, k, v, decay, beta)
        return out.unflatten(1, (rows, heads)).movedim(0, 1).movedim(2, 3).flatten(1, 2)

    def theirs(*parts: Tensor) -> Any:
        return torch_recurrent_gated_delta_rule(*parts)[0]

    results = []
    for rule in (ours, theirs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = rule(*leaves)
        (out * weights).sum().backward()
        results.append([out.detach(), *(x.grad for x in leaves)])
    for actual, expected in zip(*results, strict=True):
        assert actual is not None and expected is not None
        close(actual, expected, 2e-5)


UNUSED = SMALL.vocab - 1
"""A token that the tests leave out: transformers gives the padding token no gradient."""


def transformers_model(network: Network) -> Any:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**network.sizes.config(end=2, pad=UNUSED)))
    missing, unexpected = model.load_state_dict(network.state_dict(), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}  # tied
    model.tie_weights()
    return model


def test_network_and_its_gradients_are_those_of_transformers() -> None:
    network = Network(SMALL)
    for name, parameter in network.named_parameters():
        if name.endswith("norm.weight"):
            nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.3)
    tokens = tokens_of(2, 3 * CHUNK) % UNUSED
    model = transformers_model(network)
    logits, expected = network(tokens), model(tokens, use_cache=False).logits
    close(logits, expected, 2e-5)
    for result in (logits, expected):
        torch.nn.functional.cross_entropy(result.flatten(0, 1), tokens.flatten()).backward()
    gradients = dict(model.named_parameters())
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None and gradients[name].grad is not None
        close(parameter.grad, gradients[name].grad, 1e-3)


@pytest.mark.parametrize("shape", [(3, 65, 100), (1, 100, 64)])
def test_orthogonal_brings_singular_values_near_one(shape: tuple[int, int, int]) -> None:
    values = torch.linalg.svdvals(orthogonal(torch.randn(shape) * 100))
    assert values.min() > 0.5 and values.max() < 1.3


def named(*shapes: tuple[int, ...]) -> list[tuple[str, nn.Parameter]]:
    return [(f"weight{i}", nn.Parameter(torch.randn(shape))) for i, shape in enumerate(shapes)]


def test_optimizer_moves_vectors_as_adam_does() -> None:
    (mine,) = named((63,))
    other = nn.Parameter(mine[1].detach().clone())
    optimizer = Optimizer([mine])
    optimizer.rate.fill_(0.01)
    adam = torch.optim.Adam([other], lr=0.01, betas=(0.9, 0.98), eps=1e-10)
    for step in range(5):
        gradient = torch.randn(63, generator=torch.Generator().manual_seed(step))
        gradient *= 0.5 * CLIP / gradient.norm()  # is not clipped
        mine[1].grad, other.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        adam.step()
    close(mine[1].detach(), other.detach(), 1e-5)


def test_optimizer_clips_large_gradients_and_ignores_those_that_are_not_finite() -> None:
    parameters = named((64, 65), (65, 64), (7,))
    optimizer = Optimizer(parameters)
    optimizer.rate.fill_(0.1)
    before = [parameter.detach().clone() for _, parameter in parameters]
    for _, parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    parameters[2][1].grad = torch.full((7,), torch.nan)
    optimizer.step()
    for old, (_, parameter) in zip(before, parameters, strict=True):
        decay = 1 - 0.1 * 0.1 if parameter.dim() == 2 else 1.0
        assert torch.isfinite(parameter).all()
        close(parameter.detach(), decay * old, 1e-6)
    for _, parameter in parameters:
        parameter.grad = torch.full_like(parameter, 100.0)
    optimizer.step()
    assert optimizer.norm > 100
    total = torch.stack([p.grad.norm() for _, p in parameters if p.grad is not None]).norm()
    assert total.item() == pytest.approx(CLIP, rel=1e-4)


def test_step_trains_on_what_is_learned_and_never_on_padding() -> None:
    torch.manual_seed(3)
    network = Network(SMALL)
    step = Step(network, Optimizer(network.named_parameters()), 3, CHUNK, torch.float32)
    step.optimizer.rate.fill_(3e-3)
    tokens = tokens_of(3, CHUNK).short()
    marks = torch.ones(3, CHUNK, dtype=torch.uint8)
    marks[:, :20], marks[:, 50:] = GIVEN, PADDING
    losses = []
    for number in range(30):
        tokens[:, 50:] = tokens_of(3, CHUNK, number)[:, 50:].short()
        step.run(tokens, marks)
        sums, counts = step.take_sums()
        assert counts == [3 * 19.0, 3 * 30.0, 0, 0, 0, 0, 0, 0]
        losses.append((sums[0] / counts[0], sums[1] / counts[1]))
    assert losses[-1][1] < 0.3 * losses[0][1]
    assert losses[-1][1] < losses[-1][0]  # what is given counts less
    found, _ = token_losses(network, tokens, marks, torch.float32)
    assert found[:, 50:].mean() > 1.5 * losses[-1][1]


# ---- rows ---------------------------------------------------------------------------------------


def example_lists() -> st.SearchStrategy[list[tuple[list[int], list[int]]]]:
    one = st.integers(1, 30).flatmap(
        lambda n: st.tuples(
            st.lists(st.integers(1, 9), min_size=n, max_size=n),
            st.lists(st.integers(0, 7), min_size=n, max_size=n),
        )
    )
    return st.lists(one, max_size=60)


@settings(max_examples=60)
@given(example_lists())
def test_packed_rows_hold_every_example_whole(examples: list[tuple[list[int], list[int]]]) -> None:
    ends = [([*ids, 0], [*marks, GIVEN]) for ids, marks in examples]
    rows = packed_whole(ends, 33, 0)
    found = []
    for ids, marks in zip(rows.tokens.tolist(), rows.marks.tolist(), strict=True):
        used = [(token, mark) for token, mark in zip(ids, marks, strict=True) if mark != PADDING]
        assert all(mark == PADDING for mark in marks[len(used) :])
        begin = 0
        for place, (token, _) in enumerate(used):
            if token == 0:
                found.append(used[begin : place + 1])
                begin = place + 1
        assert begin == len(used)
    expected = [list(zip(ids, marks, strict=True)) for ids, marks in ends]
    assert sorted(found) == sorted(expected)
    assert rows.num_tokens == sum(len(ids) for ids, _ in ends)


def test_packed_rows_are_nearly_full_and_refuse_what_is_too_long() -> None:
    rng = random.Random(5)
    examples = [([1] * n, [1] * n) for n in (rng.randint(3, 60) for _ in range(3000))]
    blocks = list(packed(examples, 7, 100, 0))
    assert all(block.tokens.shape == block.marks.shape == (7, 100) for block in blocks)
    assert sum(block.num_tokens for block in blocks) > 0.97 * 700 * len(blocks)
    with pytest.raises(ValueError, match="101 tokens is longer than a row of 100"):
        list(packed([([1] * 101, [1] * 101)], 7, 100, 0))


def test_marked_tokens_are_the_pieces_in_order() -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    marker, encoder = Marker(tokenizer), Encoder(tokenizer)
    for kind in KINDS:
        pieces = make_example(random.Random(kind), kind)
        ids, marks = marker.mark(kind, pieces)
        assert tokenizer.decode(ids[:-1], skip_special_tokens=False) == "".join(p.text for p in pieces)
        assert (ids[-1], marks[-1]) == (marker.between, GIVEN) and len(ids) == len(marks)
        learned = [token for token, mark in zip(ids, marks, strict=True) if mark != GIVEN]
        assert set(marks) == {GIVEN, 1 + KINDS.index(kind)}
        assert tokenizer.decode(learned, skip_special_tokens=False) == "".join(
            piece.text for piece in pieces if piece.learned
        )
        assert all(encoder.encode(piece.text) == tokenizer.encode(piece.text).ids for piece in pieces)


def test_training_rows_follow_the_seed() -> None:
    made = [next(training_rows(seed, TOKENIZER, 3, LENGTH)) for seed in ("1/0", "1/0", "1/1")]
    assert (made[0].tokens == made[1].tokens).all() and (made[0].marks == made[1].marks).all()
    assert (made[0].tokens != made[2].tokens).any()
    assert set(np.unique(made[0].marks)) - {GIVEN, PADDING} <= set(range(1, 1 + len(KINDS)))


def test_a_row_has_room_for_the_longest_texts() -> None:
    """One in ten thousand aside. Not for much more, for a longer row costs more attention."""
    marker, longest = Marker(Tokenizer.from_file(str(TOKENIZER))), 0
    for kind in ("a", "b", "d"):  # the others are short
        rng = random.Random(f"longest/{kind}")
        lengths = [len(marker.mark(kind, make_example(rng, kind))[0]) for _ in range(700)]
        longest = max(longest, *lengths)
    assert 0.75 * LENGTH < longest <= LENGTH


def _two_rows(seed: str) -> Iterator[Rows]:
    yield packed_whole([([1, 2, 0], [1, 1, 0])], 5, 0)
    raise OSError("nothing is left")


def test_feed_says_why_a_worker_failed() -> None:
    with Feed(1, _two_rows, "seed") as feed:
        rows = feed.get(wait=True)
        assert rows is not None and rows.tokens.tolist() == [[1, 2, 0, 0, 0]]
        with pytest.raises(RuntimeError, match="OSError: nothing is left"):
            feed.get(wait=True)


def test_tokenizer_refuses_too_few_texts() -> None:
    with pytest.raises(ValueError, match=f"not {SIZE}: give more"):
        make_tokenizer(["one two"])


def test_exact_examples_counts_examples_without_a_fault() -> None:
    """A network cannot know random digits; it can be asked for what it says itself."""
    network = Network(SMALL)
    tokens = tokens_of(2, CHUNK).numpy().astype(np.int16)
    tokens[tokens == 7] = 8
    marks = np.zeros((2, CHUNK), np.uint8)
    tokens[:, 31], tokens[:, 63] = 7, 7  # between two examples
    for place in (10, 40):  # one learned token in each example, which the network itself would say
        marks[:, place] = 3
        said = network(torch.from_numpy(tokens).long()).argmax(-1)[:, place - 1]
        tokens[:, place] = torch.where(said == 7, 8, said).numpy()
        assert not (said == 7).any()
    counted = exact_examples(network, Rows(tokens, marks), torch.float32, between=7)
    assert counted["c"] == [4, 4] and counted["a"] == [0, 0]
    tokens[1, 40] += 1
    assert exact_examples(network, Rows(tokens, marks), torch.float32, between=7)["c"] == [3, 4]


def test_held_out_rows_hold_so_many_of_each_kind() -> None:
    rows = held_out_rows(TOKENIZER, LENGTH, 9)
    again = held_out_rows(TOKENIZER, LENGTH, 9)
    assert (rows.tokens == again.tokens).all()
    network = Network(Sizes(layers=1, interval=2, hidden=64, linear_heads=1))
    between: int = Marker(Tokenizer.from_file(str(TOKENIZER))).between
    counted = exact_examples(network, rows, torch.float32, between)
    assert [counted[kind][1] for kind in "abcdefg"] == [9, 0, 9, 0, 0, 0, 9]


# ---- files and runs -----------------------------------------------------------------------------


def test_progress_brings_everything_back(tmp_path: Path) -> None:
    def trained(steps: range, network: Network, optimizer: Optimizer) -> None:
        step = Step(network, optimizer, 2, CHUNK, torch.float32)
        optimizer.rate.fill_(1e-3)
        for number in steps:
            step.run(tokens_of(2, CHUNK, number).short(), torch.ones(2, CHUNK, dtype=torch.uint8))

    first = Network(SMALL)
    optimizer = Optimizer(first.named_parameters())
    trained(range(3), first, optimizer)
    save_progress(first, optimizer, {"steps": 3}, tmp_path)
    second = Network(SMALL)
    resumed = Optimizer(second.named_parameters())
    assert load_progress(second, resumed, tmp_path) == {"steps": 3}
    for name, tensor in second.state_dict().items():
        assert torch.equal(tensor, first.state_dict()[name]), name
    trained(range(3, 5), first, optimizer)
    trained(range(3, 5), second, resumed)
    for name, tensor in second.state_dict().items():
        close(tensor, first.state_dict()[name], 2e-2)  # momentum is kept in bfloat16
    assert optimizer.count == resumed.count == 5


def test_saved_model_is_read_by_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    network = Network(SMALL)
    save_model(network, tmp_path, end=2, pad=0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    network.load_state_dict({name: t.bfloat16() for name, t in network.state_dict().items()})
    tokens = tokens_of(1, CHUNK)
    with torch.no_grad():
        close(network(tokens), model(tokens, use_cache=False).logits, 2e-5)


def command(out: Path, *more: str) -> list[dict[str, Any]]:
    """The log of a run of the command: three steps on a CPU."""
    options = "--seconds 200 --device cpu --workers 1 --rows 1 --max-steps 3 --held-out 1"
    words = [sys.executable, "-m", "training.train", "--out", str(out), *options.split(), *more]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]


def test_command_trains_three_steps_and_three_more(tmp_path: Path) -> None:
    log = command(tmp_path / "1", "--total-seconds", "400")
    assert log[0]["device"] == "CPU" and (log[0]["rows"], log[0]["length"]) == (1, LENGTH)
    assert log[-1]["step"] == 3 and log[-1]["tokens"] > 2.5 * LENGTH
    assert log[-1]["held_out_exact"]["a"][1] == 1
    losses = [line["loss"]["given"] for line in log[1:] if line["loss"]]
    assert losses and all(4 < loss < 9 for loss in losses)

    progress = tmp_path / "1" / "progress"
    again = command(tmp_path / "2", "--total-seconds", "400", "--resume", str(progress))
    assert again[-1]["step"] == 6 and again[-1]["tokens"] > log[-1]["tokens"] + 2.5 * LENGTH
    assert again[-1]["seconds"] > log[-1]["seconds"]
    files = {str(path.relative_to(tmp_path / "2")) for path in (tmp_path / "2").rglob("*") if path.is_file()}
    assert files == {
        "log.jsonl",
        "model/config.json",
        "model/model.safetensors",
        "progress/optimizer.safetensors",
        "progress/progress.json",
        "progress/weights-1.safetensors",
        "progress/weights-2.safetensors",
    }
    config = json.loads((tmp_path / "2" / "model" / "config.json").read_text(encoding="utf-8"))
    bundled = models.BUNDLED["tiny-hybrid"].folder / "config.json"
    assert config == json.loads(bundled.read_text(encoding="utf-8"))
