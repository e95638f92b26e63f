"""The package's own test helpers: the same bytes each time, and folders that transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncllm_nb.engine.errors import ModelError
from asyncllm_nb.testing import FAMILIES, MARKERS, assert_close_logits, make_checkpoint


@pytest.mark.parametrize("family", FAMILIES)
def test_make_checkpoint_writes_the_same_bytes(family: str, tmp_path: Path) -> None:
    folders = [
        make_checkpoint(tmp_path / name, family, seed) for name, seed in (("a", 5), ("b", 5), ("c", 6))
    ]
    first, again, other = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert first == again != other


def test_make_checkpoint_lets_half_of_the_heads_remember(tmp_path: Path) -> None:
    tensors = load_file(make_checkpoint(tmp_path, "qwen3_5") / "model.safetensors")
    rates = torch.cat([t for name, t in tensors.items() if name.endswith("A_log")]).exp()
    assert int((rates < 0.1).sum()) * 2 == len(rates)
    assert rates.max() > 1


@pytest.mark.parametrize("nested", [False, True])
def test_make_checkpoint_is_loaded_by_transformers(nested: bool, tmp_path: Path) -> None:
    """All families are elsewhere; here the forms: shards, the nested text tower, a dtype."""
    from transformers import AutoModelForCausalLM

    make_checkpoint(tmp_path, "qwen3_5", shards=2, nested=nested, dtype=torch.bfloat16)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    model, info = loaded
    assert model.dtype == torch.bfloat16
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_make_checkpoint_with_a_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(make_checkpoint(tmp_path, tokenizer=True))
    text = "Zoë said:\n  “grüß 蜜蜂”"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text
    assert [tokenizer.convert_tokens_to_ids(marker) for marker in MARKERS] == [256, 257, 258]
    chat: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False
    )
    shown = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(chat) == shown and chat.count(257) == 2


def test_make_checkpoint_refuses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'gpt2' is none of llama"):
        make_checkpoint(tmp_path, "gpt2")
    with pytest.raises(ValueError, match="only qwen3_5"):
        make_checkpoint(tmp_path, "llama", nested=True)
    with pytest.raises(ModelError, match="num_key_value_heads"):
        make_checkpoint(tmp_path, "llama", num_key_value_heads=2)


def test_assert_close_logits() -> None:
    expected = torch.tensor([[1.0, -4.0, 2.0]])
    assert_close_logits(expected + 4e-5, expected)
    assert_close_logits(expected + 4e-4, expected, trained=True)
    for wrong in (expected + 1e-4, expected[0], expected * torch.nan):
        with pytest.raises(AssertionError):
            assert_close_logits(wrong, expected)
