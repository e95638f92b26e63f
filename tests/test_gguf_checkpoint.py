"""Conversion of a GGUF llama, against transformers' own reading of the same file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_gguf import MARKERS, write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncllm_nb import ModelError, gguf_checkpoint
from asyncllm_nb.gguf_checkpoint import convert, rotated_by_halves, tensor_name, to_bfloat16


def ignore(done: int, total: int) -> None:
    pass


@pytest.mark.parametrize("tied", [True, False])
def test_convert_gives_the_weights_that_transformers_reads(
    tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_checkpoint, "ROWS_AT_ONCE", 63)  # no matrix has a multiple of it
    write_gguf(tmp_path / "tiny.gguf", tied=tied)
    convert(tmp_path / "tiny.gguf", tmp_path / "converted", ignore)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", dtype=torch.float32
    )
    expected = reference.state_dict()
    found = load_file(tmp_path / "converted" / "model.safetensors")
    if tied:
        del expected["lm_head.weight"]
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name].bfloat16(), rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("tied", [True, False])
def test_convert_gives_a_folder_with_the_same_logits(tmp_path: Path, tied: bool) -> None:
    write_gguf(tmp_path / "tiny.gguf", tied=tied)
    convert(tmp_path / "tiny.gguf", tmp_path / "converted", ignore)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", dtype=torch.float32
    )
    rounded = {name: value.bfloat16().float() for name, value in reference.state_dict().items()}
    reference.load_state_dict(rounded)
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "converted", dtype=torch.float32)
    ids = torch.randint(0, reference.config.vocab_size, (1, 37))
    with torch.inference_mode():
        expected, found = reference(ids).logits, converted(ids).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_convert_writes_what_ends_a_text(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    convert(tmp_path / "tiny.gguf", tmp_path / "converted", ignore)
    settings = json.loads((tmp_path / "converted" / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [MARKERS.index("<|im_end|>"), MARKERS.index("<|endoftext|>")]
    config = json.loads((tmp_path / "converted" / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5 and config["dtype"] == "bfloat16"


def test_convert_reports_every_byte_once(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    seen: list[tuple[int, int]] = []
    convert(tmp_path / "tiny.gguf", tmp_path / "converted", lambda *now: seen.append(now))
    done = [now for now, _ in seen]
    assert done == sorted(set(done)) and {total for _, total in seen} == {done[-1]}


def test_write_tokenizer_agrees_with_transformers_except_before_digits(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    convert(tmp_path / "tiny.gguf", tmp_path / "converted", ignore)
    reference = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "converted")
    for text in ("hello  world\n\n\tdon't", "<|im_start|>hello<|im_end|>", "π 日本語 👍🏽", ""):
        ids = tokenizer(text)["input_ids"]
        assert ids == reference(text)["input_ids"], text
        assert tokenizer.decode(ids) == text
    # The two newlines are one token, as in training; without the digit rule they are two.
    assert tokenizer.convert_ids_to_tokens(tokenizer("\n\n12")["input_ids"]) == ["ĊĊ", "1", "2"]
    assert len(reference("\n\n12")["input_ids"]) == 4
    message = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == "<|im_start|>hello<|im_end|>"


def test_convert_refuses_another_tokenizer(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tokenizer="llama-bpe")
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre 'llama-bpe'"):
        convert(tmp_path / "tiny.gguf", tmp_path / "converted", ignore)
    assert not (tmp_path / "converted").exists()


@pytest.mark.parametrize(
    "name", ["blk.0.ffn_gate_exps.weight", "rope_freqs.weight", "blk.x.attn_q.weight"]
)
def test_tensor_name_refuses_what_a_llama_lacks(name: str) -> None:
    with pytest.raises(ModelError, match=name):
        tensor_name(name)


def test_to_bfloat16_rounds_as_torch_does() -> None:
    bits = torch.randint(-(2**31), 2**31, (100_003,), dtype=torch.int64).to(torch.int32)
    bits[::3] &= ~0xFFFF  # exactly representable
    bits[1::3] = (bits[1::3] & ~0xFFFF) | 0x8000  # exactly between two
    values = bits.view(torch.float32)
    values = values[values.isfinite()]
    found = torch.from_numpy(to_bfloat16(values.numpy()).astype(np.int32))
    expected = values.bfloat16().view(torch.int16).to(torch.int32) & 0xFFFF
    assert torch.equal(found, expected)


def test_rotated_by_halves_puts_pairs_half_a_head_apart() -> None:
    rows = np.arange(12)[:, None]  # 2 heads of 6 rows, pairs side by side
    expected = [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert rotated_by_halves(rows, 2)[:, 0].tolist() == expected
