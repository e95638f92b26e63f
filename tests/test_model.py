"""`Decoder` against transformers: the logits are the same however a sequence lies in memory."""

from __future__ import annotations

import dataclasses
import functools
import random
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laid_out import Laid, Memory, Request, encode, pieces
from torch import Tensor

from asyncllm_nb.engine.config import ModelConfig
from asyncllm_nb.engine.model import Decoder
from asyncllm_nb.engine.weights import load_weights
from asyncllm_nb.testing import FAMILIES, assert_close_logits, make_checkpoint

HYBRID = "qwen3_5"
LENGTH = 211


@functools.cache
def folder(family: str) -> Path:
    return make_checkpoint(mkdtemp(), family, seed=7)


@functools.cache
def decoder(family: str, dtype: torch.dtype = torch.float32) -> Decoder:
    config = ModelConfig.from_folder(folder(family))
    return Decoder(config, load_weights(folder(family), config, "cpu", dtype))


@functools.cache
def sequence(family: str, seed: int = 0) -> tuple[int, ...]:
    vocab = decoder(family).config.vocab_size
    return tuple(random.Random(seed).choices(range(vocab), k=LENGTH))


@functools.cache
def transformers_model(family: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder(family), dtype=torch.float32).eval()
    return model


@functools.cache
def expected(family: str, seed: int = 0) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = transformers_model(family)(torch.tensor([sequence(family, seed)])).logits
    return logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_of_a_whole_sequence(family: str) -> None:
    memory = Memory(decoder(family))
    actual = encode(memory, sequence(family), [LENGTH], [LENGTH])
    assert_close_logits(actual, expected(family))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("blocks", "chunks"),
    [([1, 2, 3, 4], [1]), ([65, 130], [63, 64, 2]), ([48, 1, 100], [48]), ([17, 1, 1, 2], [5, 1])],
    ids=str,
)
def test_forward_over_blocks(family: str, blocks: list[int], chunks: list[int]) -> None:
    memory = Memory(decoder(family), num_pages=200, num_slots=120)
    tokens = sequence(family)[:150]
    assert_close_logits(encode(memory, tokens, blocks, chunks), expected(family)[:150])


sizes = st.lists(st.integers(1, 4) | st.integers(5, 140), min_size=1, max_size=5)


@settings(max_examples=15, deadline=None)
@given(blocks=sizes, chunks=sizes, seed=st.integers(0, 99))
@pytest.mark.parametrize("family", ["llama", HYBRID])
def test_forward_over_random_blocks(family: str, blocks: list[int], chunks: list[int], seed: int) -> None:
    tokens = sequence(family)[:90]
    memory = Memory(decoder(family), seed, num_pages=200, num_slots=200)
    assert_close_logits(encode(memory, tokens, blocks, chunks), expected(family)[:90])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(3))
def test_forward_of_several_requests_in_one_batch(family: str, seed: int) -> None:
    """Six sequences advance side by side, by one row or by many; three share their first block."""
    rng = random.Random(seed)
    memory = Memory(decoder(family), seed, num_pages=300, num_slots=120)
    shared = Laid()
    memory.step([Request([shared], sequence(family)[:37])])
    views = [[shared, Laid()] for _ in range(3)] + [[Laid(), Laid()] for _ in range(3)]
    names = [0, 0, 0, 1, 2, 3]  # which sequence each view holds
    done = [37] * 3 + [0] * 3
    for index in range(3, 6):
        memory.step([Request(views[index][:1], sequence(family, names[index])[:5])])
        done[index] = 5
    for _ in range(12):
        chosen = rng.sample(range(6), rng.randint(1, 6))
        counts = [rng.choice([1, 1, 2, 3, 20]) for _ in chosen]
        requests = [
            Request(views[i], sequence(family, names[i])[done[i] : done[i] + n])
            for i, n in zip(chosen, counts, strict=True)
            if done[i] + n <= LENGTH
        ]
        kept = [(i, n) for i, n in zip(chosen, counts, strict=True) if done[i] + n <= LENGTH]
        for (i, n), actual in zip(kept, memory.step(requests), strict=True):
            assert_close_logits(actual, expected(family, names[i])[done[i] : done[i] + n])
            done[i] += n


@pytest.mark.parametrize("family", ["qwen3", HYBRID])
def test_forward_over_merged_blocks(family: str) -> None:
    """Blocks of several runs, read by others and written on."""
    memory, tokens = Memory(decoder(family)), sequence(family)
    a, b, c = Laid(), Laid(), Laid()
    memory.step([Request([a], tokens[:19])])
    memory.step([Request([a, b], tokens[19:21])])
    memory.step([Request([a, b, c], tokens[21:58])])
    merged = memory.merged(memory.merged(a, b), c)
    (actual,) = memory.step([Request([merged, Laid()], tokens[58:61])])
    assert_close_logits(actual, expected(family)[58:61])
    longer = memory.continued(merged)
    for piece in pieces(40, [1, 2, 30]):
        part = [tokens[58 + i] for i in piece]
        (actual,) = memory.step([Request([longer], part)])
        assert_close_logits(actual, expected(family)[58 + piece.start : 58 + piece.stop])


def test_forward_with_positions_of_three_axes() -> None:
    """Rows of an image share their first axis; a second block starts behind the span."""
    tokens = sequence(HYBRID)[:60]
    text = torch.arange(7).expand(3, -1)
    grid = torch.stack((torch.full((20,), 7), 7 + torch.arange(20) // 5, 7 + torch.arange(20) % 5))
    after = torch.arange(12, 12 + 33).expand(3, -1)
    positions = torch.cat((text, grid, after), dim=1)
    with torch.inference_mode():
        model = transformers_model(HYBRID)
        whole = model(torch.tensor([tokens]), position_ids=positions[:, None]).logits[0]
        plain = model(torch.tensor([tokens])).logits[0]
    assert (whole - plain).abs().max() > 0.01 * whole.abs().max(), "the axes make no difference"
    memory, view = Memory(decoder(HYBRID)), [Laid(), Laid()]
    (first,) = memory.step([Request(view[:1], tokens[:30], positions[:, :30])])
    span = view[0].span
    (second,) = memory.step([Request(view, tokens[30:59], positions[:, 30:59] - span)])
    (third,) = memory.step([Request(view, tokens[59:], positions[:, 59:] - span)])
    assert span == 15
    assert_close_logits(torch.cat((first, second, third)), whole)


@pytest.mark.parametrize("family", ["llama", HYBRID])
def test_forward_shares(family: str) -> None:
    """The shares of a row's blocks are positive and sum to 1, however many rows the batch has."""
    memory, tokens = Memory(decoder(family)), sequence(family)
    a, b, c = Laid(), Laid(), Laid()
    memory.step([Request([a], tokens[:70])])
    memory.step([Request([a, b], tokens[70:72])])
    alone: list[Tensor] = []
    memory.step([Request([a, b, c], tokens[72:73])], alone)
    again, other = Laid(), Laid()
    together: list[Tensor] = []
    memory.step([Request([other], tokens[:3]), Request([a, b, again], tokens[72:73])], together)
    config = decoder(family).config
    assert len(alone) == len(together) == config.num_attention_layers
    for one, many in zip(alone, together, strict=True):
        assert one.shape == (1, 3, config.num_heads) and many.shape == (4, 3, config.num_heads)
        torch.testing.assert_close(many.sum(1), torch.ones(4, config.num_heads))
        torch.testing.assert_close(one[0], many[3])
        torch.testing.assert_close(many[:3, 0], torch.ones(3, config.num_heads))
        assert (one > 0).all() and one[0, 0].mean() > one[0, 1].mean()


def test_forward_writes_only_where_the_batch_says() -> None:
    memory, tokens = Memory(decoder(HYBRID)), sequence(HYBRID)
    a, b, c = Laid(), Laid(), Laid()
    memory.step([Request([a], tokens[:20]), Request([b], tokens[:2])])
    before = [pool.clone() for pool in (memory.cache.pairs, memory.cache.conv_rows)]
    keys = memory.cache.keys.flatten(2, 3).clone()
    requests = [Request([a, b], tokens[20:21]), Request([a, c], tokens[5:12])]
    batch, slots = memory.lay_out(requests)
    memory.decoder.forward(batch, memory.cache)
    for old, new in zip(before, (memory.cache.pairs, memory.cache.conv_rows), strict=True):
        changed = [slot for slot in range(old.shape[1]) if not equal_or_both_nan(old[:, slot], new[:, slot])]
        assert changed == sorted(slots)
    after = memory.cache.keys.flatten(2, 3)
    changed = [i for i in range(keys.shape[2]) if not equal_or_both_nan(keys[:, :, i], after[:, :, i])]
    assert changed == sorted(batch.store_index.tolist())


def equal_or_both_nan(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(nan=12345.0), b.nan_to_num(nan=12345.0))


@pytest.mark.parametrize("rows", [[2, 8], [0], []], ids=str)
def test_forward_of_wanted_rows_only(rows: list[int]) -> None:
    memory = Memory(decoder("llama"))
    batch, _ = memory.lay_out([Request([Laid()], sequence("llama")[:9])])
    wanted = torch.tensor(rows, dtype=torch.int64)
    actual = memory.decoder.forward(dataclasses.replace(batch, logit_rows=wanted), memory.cache)
    assert actual.shape == (len(rows), decoder("llama").config.vocab_size)
    torch.testing.assert_close(actual, expected("llama")[rows], rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_in_bfloat16(family: str) -> None:
    memory = Memory(decoder(family, torch.bfloat16), dtype=torch.bfloat16)
    actual = encode(memory, sequence(family)[:90], [40, 3], [33, 1])
    assert actual.dtype == torch.float32
    assert_close_logits(actual, expected(family)[:90], torch.bfloat16)
