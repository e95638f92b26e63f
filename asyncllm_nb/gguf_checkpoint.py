"""A llama model in one GGUF file becomes a folder that transformers and the engine read.

Knows the GGUF names of a llama, the safetensors layout and byte-level BPE tokenizers. Knows nothing
about downloads, caches or the engine, and imports neither torch nor transformers.

A tensor is dequantised, rounded to bfloat16 and written before the next one is read, a few thousand
rows at a time, so memory stays far below the size of the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from .engine.errors import ModelError

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

ROWS_AT_ONCE = 4096
"""Rows of a matrix that are held as float32 at the same time."""

CONTROL_TOKEN = 3
"""The `tokenizer.ggml.token_type` of a marker such as <|im_end|>."""

TENSOR_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

LAYER_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


Progress = Callable[[int, int], None]
"""Called with the bytes of weights written so far and their number in all."""


def convert(source: Path, folder: Path, progress: Progress) -> None:
    """Writes config, bfloat16 weights and tokenizer of a GGUF file into a new folder.

    Args:
        source: a GGUF file of the llama architecture with a GPT-2 style tokenizer inside.
        folder: created here; must not exist.
        progress: called after every few thousand rows of weights.

    Raises:
        ModelError: the file holds another architecture, tokenizer or tensor.
    """
    from gguf import GGUFReader

    reader = GGUFReader(source)
    _require(reader, "general.architecture", "llama")
    _require(reader, "tokenizer.ggml.model", "gpt2")
    _require(reader, "tokenizer.ggml.pre", "smollm")
    folder.mkdir()
    _write_json(folder / "config.json", model_config(reader))
    _write_json(folder / "generation_config.json", generation_config(reader))
    write_tokenizer(reader, folder)
    with (folder / "model.safetensors").open("wb") as file:
        write_weights(reader, file, progress)


def model_config(reader: GGUFReader) -> dict[str, Any]:
    """The content of `config.json`, with the keys that transformers 5 itself writes."""
    heads = _value(reader, "llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": _value(reader, "llama.vocab_size"),
        "hidden_size": _value(reader, "llama.embedding_length"),
        "intermediate_size": _value(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _value(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _value(reader, "llama.attention.head_count_kv"),
        "head_dim": _value(reader, "llama.embedding_length") // heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": _value(reader, "llama.context_length"),
        "rms_norm_eps": _decimal(_value(reader, "llama.attention.layer_norm_rms_epsilon")),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": _decimal(_value(reader, "llama.rope.freq_base")),
        },
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "bos_token_id": _value(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _value(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _value(reader, "tokenizer.ggml.padding_token_id"),
    }


def generation_config(reader: GGUFReader) -> dict[str, Any]:
    """The content of `generation_config.json`: a turn's end or a document's ends a text."""
    document_end = _value(reader, "tokenizer.ggml.tokens").index("<|endoftext|>")
    return {
        "bos_token_id": _value(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": [_value(reader, "tokenizer.ggml.eos_token_id"), document_end],
        "pad_token_id": _value(reader, "tokenizer.ggml.padding_token_id"),
    }


def write_tokenizer(reader: GGUFReader, folder: Path) -> None:
    """Writes `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`.

    SmolLM2 splits off every digit before anything else. The tokenizer that transformers 5.24 makes
    of the same GGUF file does not, which gives "\\n\\n1." other tokens than the model was trained
    on (a numbered list of 155 tokens then costs 31 nats more).
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = _value(reader, "tokenizer.ggml.tokens")
    kinds = _value(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _value(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))

    roles = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    settings: dict[str, Any] = {
        f"{role}_token": tokens[_value(reader, f"tokenizer.ggml.{key}_token_id")]
        for role, key in roles.items()
    }
    settings["clean_up_tokenization_spaces"] = False
    settings["model_max_length"] = _value(reader, "llama.context_length")
    settings["tokenizer_class"] = "TokenizersBackend"
    _write_json(folder / "tokenizer_config.json", settings)
    template = _value(reader, "tokenizer.chat_template")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def write_weights(reader: GGUFReader, file: BinaryIO, progress: Progress) -> None:
    """Writes all tensors as bfloat16 in the safetensors format: header, then one after another."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in reader.tensors:
        begin, end = end, end + 2 * int(tensor.n_elements)
        # GGUF names the innermost dimension first.
        shape = [int(size) for size in reversed(tensor.shape)]
        header[tensor_name(tensor.name)] = {
            "dtype": "BF16",
            "shape": shape,
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write(len(encoded).to_bytes(8, "little") + encoded)
    heads = {
        "attn_q": _value(reader, "llama.attention.head_count"),
        "attn_k": _value(reader, "llama.attention.head_count_kv"),
    }
    written = 0
    for tensor in reader.tensors:
        part = tensor.name.split(".")[-2]
        for rows in _float32_rows(tensor, heads.get(part)):
            written += file.write(to_bfloat16(rows).tobytes())
            progress(written, end)
    assert written == end


def tensor_name(name: str) -> str:
    """The transformers name of a llama tensor: "blk.3.attn_q.weight" -> "model.layers.3...".

    Raises:
        ModelError: a llama has no tensor of that name.
    """
    if name in TENSOR_NAMES:
        return TENSOR_NAMES[name]
    prefix, _, rest = name.partition(".")
    layer, _, rest = rest.partition(".")
    part, _, kind = rest.partition(".")
    known = prefix == "blk" and layer.isdecimal() and part in LAYER_TENSOR_NAMES
    if not known or kind != "weight":
        raise ModelError(f"the GGUF file holds a tensor {name!r}, which a llama does not have")
    return f"model.layers.{layer}.{LAYER_TENSOR_NAMES[part]}.weight"


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of `values` (finite, any shape) rounded to bfloat16, ties to even."""
    bits = values.view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def rotated_by_halves(rows: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Undoes llama.cpp's order of the rows of a query or key matrix ([heads * head_dim, ...]).

    GGUF stores the two coordinates of a rotation side by side (0, 1), (2, 3), ...; transformers
    pairs coordinate i of a head with i + head_dim / 2.
    """
    head_dim = rows.shape[0] // heads
    return rows.reshape(heads, head_dim // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _float32_rows(tensor: ReaderTensor, heads: int | None) -> Iterator[npt.NDArray[np.float32]]:
    """The tensor's values, at most ROWS_AT_ONCE rows at a time; `heads` for queries and keys."""
    from gguf import dequantize

    rows = tensor.data if heads is None else rotated_by_halves(tensor.data, heads)
    for begin in range(0, len(rows), ROWS_AT_ONCE):
        values = dequantize(rows[begin : begin + ROWS_AT_ONCE], tensor.tensor_type)
        yield np.ascontiguousarray(values, dtype=np.float32)


def _value(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ModelError(f"the GGUF file does not say {key!r}")
    return field.contents()


def _require(reader: GGUFReader, key: str, expected: str) -> None:
    found = _value(reader, key)
    if found != expected:
        raise ModelError(f"the GGUF file has {key} {found!r}; only {expected!r} can be converted")


def _decimal(value: float) -> float:
    """The short decimal that was meant by a float32 (1e-05 for 9.999999747378752e-06)."""
    return float(str(np.float32(value)))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
