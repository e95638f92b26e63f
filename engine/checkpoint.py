"""A model folder's safetensors files: which tensors a family has, and reading them one by one.

Knows the names and shapes that checkpoints in Hugging Face format use, and where shards lie. Knows
nothing about how the decoder arranges what it reads; that is `weights`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from .config import FULL_ATTENTION, ModelConfig
from .errors import ModelError

TEXT_PREFIXES = ("model.language_model.", "model.")
"""Where a file keeps its decoder; `tensor_shapes` uses the last, a file may use the first."""

IGNORED_PREFIXES = ("model.visual.", "visual.", "mtp.")
"""Parts of a checkpoint that the decoder has no use for: the image tower, draft layers."""

IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Buffers of old files that are computed today."""

Shape = tuple[int, ...]


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Name and shape of every tensor that a checkpoint of this model holds, in a text-only file."""
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for index, layer_type in enumerate(config.layer_types):
        mixer = _attention(config) if layer_type == FULL_ATTENTION else _delta_net(config)
        for name, shape in {**_block(config), **mixer}.items():
            shapes[f"model.layers.{index}.{name}"] = shape
    return shapes


def _linear(name: str, rows: int, columns: int, bias: bool) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (rows, columns)}
    return {**weight, f"{name}.bias": (rows,)} if bias else weight


def _block(config: ModelConfig) -> dict[str, Shape]:
    """What every layer has: two norms and the MLP."""
    hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    return {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        **_linear("mlp.gate_proj", inner, hidden, bias),
        **_linear("mlp.up_proj", inner, hidden, bias),
        **_linear("mlp.down_proj", hidden, inner, bias),
    }


def _attention(config: ModelConfig) -> dict[str, Shape]:
    hidden, bias = config.hidden_size, config.attention_bias
    query_rows = config.query_size * (2 if config.traits.output_gate else 1)
    shapes = {
        **_linear("self_attn.q_proj", query_rows, hidden, bias),
        **_linear("self_attn.k_proj", config.kv_size, hidden, bias),
        **_linear("self_attn.v_proj", config.kv_size, hidden, bias),
        **_linear("self_attn.o_proj", hidden, config.query_size, config.output_bias),
    }
    if config.traits.qk_norm:
        shapes["self_attn.q_norm.weight"] = (config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def _delta_net(config: ModelConfig) -> dict[str, Shape]:
    hidden, heads, channels = config.hidden_size, config.linear_value_heads, config.conv_channels
    return {
        **_linear("linear_attn.in_proj_qkv", channels, hidden, False),
        **_linear("linear_attn.in_proj_z", config.linear_value_size, hidden, False),
        **_linear("linear_attn.in_proj_b", heads, hidden, False),
        **_linear("linear_attn.in_proj_a", heads, hidden, False),
        **_linear("linear_attn.out_proj", hidden, config.linear_value_size, False),
        "linear_attn.conv1d.weight": (channels, 1, config.conv_width),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (config.linear_value_dim,),
    }


class Checkpoint:
    """The open, memory-mapped safetensors files of a folder. A context manager.

    Tensors go by the names of `tensor_shapes`, whatever prefix the files use.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}  # name in the file -> the open file that holds it
        self._prefix = TEXT_PREFIXES[-1]

    def __enter__(self) -> Checkpoint:
        with ExitStack() as stack:
            for path in _shards(self.folder):
                file = stack.enter_context(_open(path))
                self._files.update((name, file) for name in file.keys())  # noqa: SIM118 (no mapping)
            self._stack = stack.pop_all()
        for prefix in TEXT_PREFIXES:
            if f"{prefix}embed_tokens.weight" in self._files:
                self._prefix = prefix
                break
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._files.clear()
        self._stack.close()

    def check(self, config: ModelConfig) -> None:
        """Raise ModelError that names what is missing, of a wrong shape, or not expected."""
        expected = {self._in_file(name): shape for name, shape in tensor_shapes(config).items()}
        missing = [name for name in expected if name not in self._files]
        if missing:
            raise ModelError(f"{self.folder}: missing {_listed(missing)}")
        for name, shape in expected.items():
            found = tuple(self._files[name].get_slice(name).get_shape())
            if found != shape:
                raise ModelError(
                    f"{self.folder}: {name} has shape {list(found)}, but config.json asks for {list(shape)}"
                )
        unexpected = [name for name in self._files if name not in expected and not _ignored(name, config)]
        if unexpected:
            raise ModelError(
                f"{self.folder}: {_listed(unexpected)} not known to family {config.family};"
                " is config.json of another model?"
            )

    def read(self, name: str) -> Tensor:
        """A tensor as it is in the file, on the CPU, backed by the mapped file."""
        name = self._in_file(name)
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def _in_file(self, name: str) -> str:
        common = TEXT_PREFIXES[-1]
        return self._prefix + name.removeprefix(common) if name.startswith(common) else name


def _shards(folder: Path) -> list[Path]:
    """The files to open: those of the index where there is one, else all that lie there."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index} is not a safetensors index: {error!r}") from error
        paths = [folder / name for name in names]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    for path in paths:
        if not path.exists():
            raise ModelError(f"{index} names {path.name}, which is not there; fetch the folder again")
    if not paths:
        raise ModelError(f"{folder} holds no *.safetensors file")
    return paths


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is not a readable safetensors file: {error}") from error


def _ignored(name: str, config: ModelConfig) -> bool:
    tied_head = config.tie and name == "lm_head.weight"
    return tied_head or name.startswith(IGNORED_PREFIXES) or name.endswith(IGNORED_SUFFIXES)


def _listed(names: Iterable[str], shown: int = 5) -> str:
    """The first few names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - shown} more tensors" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
