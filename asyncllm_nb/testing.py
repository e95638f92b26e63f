"""For tests, ours and yours: small seeded checkpoints, and the one table of tolerances.

Knows how model folders in Hugging Face format look. Knows no engine: what it writes, transformers
can load too, and that comparison is what it is for.

Random checkpoints need care. With small embeddings float32 noise grows so large that it hides real
faults, so embeddings are of unit scale and projections of 0.5 / √fan-in. Gated DeltaNets that
forget at once hide faults in what is remembered, so half of their heads decay slowly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from .engine.checkpoint import TEXT_PREFIXES, tensor_shapes
from .engine.config import ModelConfig

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest logit error as a share of the largest logit, for checkpoints of `make_checkpoint`."""

TRAINED_TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 1e-1, torch.float16: 3e-2}
"""The same for trained checkpoints."""

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_5")

COMMON: dict[str, Any] = {
    "vocab_size": 263,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": None,
    "eos_token_id": 258,
}
"""What all small checkpoints have in common. 263 ids: 256 bytes, 3 markers, 4 that mean nothing."""

SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 16,
    },
    "qwen2": {
        "hidden_size": 80,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "hidden_size": 64,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 24,
    },
    "qwen3_5": {
        "hidden_size": 64,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 5,  # full attention is the fourth, the others are Gated DeltaNets
        "full_attention_interval": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_conv_kernel_dim": 4,
    },
}
"""Odd sizes on purpose: no count of heads or elements may be taken for another."""

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
}

MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 256, 257 and 258 of the small tokenizer; 0 to 255 are bytes."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def assert_close_logits(
    actual: Tensor,
    expected: Tensor,
    dtype: torch.dtype = torch.float32,
    *,
    trained: bool = False,
) -> None:
    """Assert that logits agree, in shape and within the table for a model computed in `dtype`."""
    assert actual.shape == expected.shape, f"shapes {actual.shape} and {expected.shape}"
    assert torch.isfinite(actual).all(), "logits that are not finite"
    table = TRAINED_TOLERANCE if trained else TOLERANCE
    allowed = table[dtype] * expected.abs().max().item()
    error = (actual.double() - expected.double()).abs().max().item()
    assert error <= allowed, f"largest logit error {error:.3g}, allowed {allowed:.3g}"


def make_checkpoint(
    folder: str | Path,
    family: str = "llama",
    seed: int = 0,
    *,
    shards: int = 1,
    nested: bool = False,
    tokenizer: bool = False,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """Write a small random model of a `family` into `folder`, and return the folder.

    The same arguments give the same bytes. `overrides` replace fields of ``config.json``. `shards`
    > 1 splits the weights over that many files with an index. `nested` (qwen3_5) writes the text
    tower as part of a conditional-generation checkpoint. `tokenizer` adds a byte-level one with a
    chat template. Raises ValueError for an unknown family, ModelError for fields that no model can
    have.
    """
    if family not in FAMILIES:
        raise ValueError(f"family {family!r} is none of {', '.join(FAMILIES)}")
    if nested and family != "qwen3_5":
        raise ValueError("only qwen3_5 has nested checkpoints")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(family, nested, dtype, overrides)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = random_tensors(ModelConfig.from_dict(config), seed)
    prefix = TEXT_PREFIXES[0] if nested else TEXT_PREFIXES[-1]
    _save(
        folder,
        {name.replace(TEXT_PREFIXES[-1], prefix, 1): tensor.to(dtype) for name, tensor in tensors.items()},
        shards,
    )
    if tokenizer:
        _write_tokenizer(folder)
    return folder


def random_tensors(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """The float32 tensors of a well-conditioned random checkpoint, by their names in the file."""
    generator = torch.Generator().manual_seed(seed)
    return {name: _random(name, shape, config, generator) for name, shape in tensor_shapes(config).items()}


def _random(name: str, shape: tuple[int, ...], config: ModelConfig, generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    uniform = torch.rand(shape, generator=generator)
    if name.endswith("embed_tokens.weight"):
        return noise
    if name.endswith("norm.weight"):  # around the neutral value: 0 where the decoder adds 1
        added = config.traits.zero_centred and not name.endswith("linear_attn.norm.weight")
        return 0.2 * noise if added else 1.0 + 0.2 * noise
    if name.endswith("conv1d.weight"):
        return 0.5 * noise
    if name.endswith("A_log"):  # every other head remembers for long, the rest as transformers draws
        slow = torch.arange(shape[0]) % 2 == 0
        return torch.where(slow, 0.001 + 0.099 * uniform, 0.01 + 15.99 * uniform).log()
    if name.endswith("dt_bias"):
        return 1.0 + 0.3 * noise
    if name.endswith("bias"):
        return 0.2 * noise
    return noise * (0.5 / math.sqrt(shape[-1]))


def _config(family: str, nested: bool, dtype: torch.dtype, overrides: dict[str, Any]) -> dict[str, Any]:
    name = str(dtype).removeprefix("torch.")
    text = {**COMMON, **SIZES[family], **overrides, "dtype": name}
    if not nested:
        model_type = "qwen3_5_text" if family == "qwen3_5" else family
        return {"architectures": [ARCHITECTURES[family]], "model_type": model_type, **text}
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": name,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": {"model_type": "qwen3_5_text", **text},
    }


def _save(folder: Path, tensors: dict[str, Tensor], shards: int) -> None:
    """One file, or `shards` files dealt round robin, so that a layer is spread over several."""
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    place = {name: files[i % shards] for i, name in enumerate(tensors)}
    for file in files:
        part = {name: tensor for name, tensor in tensors.items() if place[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": place}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_tokenizer(folder: Path) -> None:
    """A tokenizer whose first 256 ids are bytes, in the order that byte-level tokenizers use."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet: Iterable[str] = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in MARKERS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": MARKERS[2],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
