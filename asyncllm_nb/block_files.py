"""Files of blocks: what they hold, written whole or not at all, and read back only by the same model.

Knows the format: one safetensors file. Its tensors are the pages and slots that the blocks take, their
token ids and the logits kept with them; its metadata is JSON that says which block has which. Knows
nothing of agents, whose text may ride along, and nothing of how memory is copied (`engine.storing`).
No byte of a file is ever run or unpickled.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from . import __version__
from .engine.batch import PAGE_TOKENS
from .engine.blocks import BlockState, CacheBlock, KeptLogits, Segment
from .engine.boundary import BoundaryCache
from .engine.engine import Engine
from .engine.identity import model_identity
from .engine.stored import Stored, StoredBlock, check
from .engine.storing import store

FORMAT = "asyncllm_nb.blocks"
FORMAT_VERSION = 1
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a file says about the model whose memory it holds, and an engine about its own."""

    name: str
    identity: str  # see `engine.identity`
    dtype: str  # of keys, values and the arithmetic
    boundary: str  # see `engine.boundary`: what is kept depends on it
    page_tokens: int = PAGE_TOKENS

    @staticmethod
    def of(engine: Engine) -> ModelFacts:
        """Those of an engine's model. The first time this reads all weights."""
        cache = engine.runner.cache
        boundary = "recomputed" if isinstance(cache, BoundaryCache) else "written"
        dtype = str(cache.keys.dtype).removeprefix("torch.")
        return ModelFacts(engine.trace.model, model_identity(engine.runner.decoder), dtype, boundary)


# ---- blocks and files -------------------------------------------------------------------------------


async def save(
    engine: Engine, file: str | os.PathLike[str], blocks: Sequence[CacheBlock], agent: Any = None
) -> Path:
    """Write what `blocks` hold at one moment, as `storing.store` takes it. Streams go on meanwhile.

    Returns the path. Raises ValueError for a wrong block and OSError for a place that cannot be written;
    an earlier file is as it was then.
    """
    engine.check_usable()
    path = check_place(file)
    model = await facts(engine)
    stored = await store(engine, blocks)
    await asyncio.to_thread(write, path, stored, model, agent)
    return path


async def opened(engine: Engine, file: str | os.PathLike[str]) -> tuple[Stored, Any]:
    """What a file holds, for `storing.restore`, and the agent's part of it (None: it has none).

    Raises OSError and ValueError as `read` does, and ValueError for what the engine's model cannot hold.
    Changes nothing.
    """
    engine.check_usable()
    path = Path(file)
    stored, agent = await asyncio.to_thread(read, path, await facts(engine), engine.name)
    try:
        check(stored, engine.runner.cache, engine.config)
    except ValueError as error:
        raise ValueError(f"{path} does not fit together: {error}") from error
    return stored, agent


async def facts(engine: Engine) -> ModelFacts:
    """Those of an engine's model. The first time all weights are read, on the worker thread."""
    return await asyncio.wrap_future(engine.executor.submit(ModelFacts.of, engine))


# ---- writing ----------------------------------------------------------------------------------------


def check_place(file: str | os.PathLike[str]) -> Path:
    """The path of a file to be written. Raises OSError where none can be."""
    path = Path(file)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a file, such as {path / 'agent.safetensors'}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent}: make it first")
    return path


def write(path: Path, stored: Stored, model: ModelFacts, agent: Any = None) -> None:
    """Write blocks, and what an agent wants to remember (`agent`: what JSON knows; None: no agent).

    An earlier file of that name is replaced at the end, in one change.
    """
    tensors = dict(stored.tensors)
    logits: dict[int, int] = {}  # id of a tensor -> its number: forks keep the same ones
    blocks = []
    for number, block in enumerate(stored.blocks):
        tensors[f"tokens.{number}"] = torch.tensor(block.tokens, dtype=torch.int64)
        kept = block.state.kept
        if kept is not None and id(kept.logits) not in logits:
            tensors[f"logits.{len(logits)}"] = kept.logits
            logits[id(kept.logits)] = len(logits)
        blocks.append(_plain_block(block, logits))
    text = json.dumps(
        {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "package": __version__,
            "model": asdict(model),
            "blocks": blocks,
            "agent": agent,
        }
    )
    metadata = {"asyncllm_nb": text, "sha256": _digest(text, tensors)}
    unfinished = path.with_name(f".{path.name}.{os.getpid()}-{next(_numbers)}.part")
    try:
        save_file(tensors, unfinished, metadata)
        os.replace(unfinished, path)
    except SafetensorError as error:  # how it reports a full disk
        raise OSError(f"{path} could not be written: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _plain_block(block: StoredBlock, logits: dict[int, int]) -> dict[str, Any]:
    state, kept = block.state, block.state.kept
    plain: dict[str, Any] = {
        "id": block.id,
        "name": block.name,
        "version": state.version,
        "span": state.span,
        "slot": state.slot,
        "segments": [[list(s.pages), s.length, s.offset] for s in state.segments],
    }
    if kept is not None:
        number = logits[id(kept.logits)]
        plain["kept"] = {"logits": number, "view": list(kept.view), "filled": sorted(kept.filled)}
    return plain


def _digest(text: str, tensors: dict[str, Tensor]) -> str:
    """sha256 over the text and all tensors: names, shapes, dtypes, bytes."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


# ---- reading ----------------------------------------------------------------------------------------


def read(path: Path, engine_model: ModelFacts, engine_name: str) -> tuple[Stored, Any]:
    """What `write` wrote: the blocks, and the agent's part (None: there is no agent).

    Raises OSError for a file that cannot be opened, and ValueError for one that is not of this format or
    of another version of it, is damaged, or holds the memory of another model than the engine's.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            text = metadata.get("asyncllm_nb", "")
            head = _head(path, text)
            _check_model(path, head["model"], engine_model, engine_name)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except SafetensorError as error:
        raise ValueError(f"{path} is cut short, or no file of saved blocks: {error}") from error
    if metadata.get("sha256") != _digest(text, tensors):
        raise ValueError(f"{path} is damaged: its bytes are not those that were written")
    try:
        return _parsed(head["blocks"], tensors), head["agent"]
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{path} is not as version {FORMAT_VERSION} of the format is: {error!r}") from error


def _head(path: Path, text: str) -> dict[str, Any]:
    """What the metadata say, if they are of this format and version."""
    try:
        head: dict[str, Any] = json.loads(text)
        if head["format"] != FORMAT:
            raise KeyError("format")
        version, package = head["version"], head["package"]
        head["model"] = ModelFacts(**head["model"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a file of saved blocks") from error
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has version {version} of the format, written by asyncllm_nb {package}; this is "
            f"{__version__}, which reads version {FORMAT_VERSION}: load it with the version that wrote it"
        )
    return head


def _check_model(path: Path, saved: ModelFacts, own: ModelFacts, engine_name: str) -> None:
    """Raise ValueError unless both are the same model, in the same arithmetic."""
    for option in ("dtype", "boundary"):
        theirs, ours = getattr(saved, option), getattr(own, option)
        if theirs != ours:
            raise ValueError(
                f"{path} holds memory of an engine with {option}={theirs!r}, and engine {engine_name!r} has "
                f"{option}={ours!r}: make the engine with {option}={theirs!r}"
            )
    if saved.identity != own.identity:
        raise ValueError(
            f"{path} holds the memory of another model: it was saved with {saved.name!r}, and engine "
            f"{engine_name!r} runs {own.name!r}, whose config or weights differ: load it into an engine of "
            "the model that it was saved with"
        )
    if saved.page_tokens != own.page_tokens:
        raise ValueError(
            f"{path} has pages of {saved.page_tokens} tokens, and this version has pages of "
            f"{own.page_tokens}: load it with the version that wrote it"
        )


def _parsed(blocks: Sequence[dict[str, Any]], tensors: dict[str, Tensor]) -> Stored:
    """Blocks of what JSON knows. Takes their tokens and logits out of `tensors`."""
    tokens = [tensors.pop(f"tokens.{number}").tolist() for number in range(len(blocks))]
    numbers = {block["kept"]["logits"] for block in blocks if "kept" in block}
    logits = {number: tensors.pop(f"logits.{number}") for number in numbers}
    return Stored(
        tuple(_block(plain, ids, logits) for plain, ids in zip(blocks, tokens, strict=True)), tensors
    )


def _block(plain: dict[str, Any], tokens: list[int], logits: dict[int, Tensor]) -> StoredBlock:
    kept = None
    if "kept" in plain:
        view, filled = _integers(plain["kept"]["view"]), _integers(plain["kept"]["filled"])
        kept = KeptLogits(view, frozenset(filled), logits[plain["kept"]["logits"]])
    segments = tuple(
        Segment(_integers(pages), *_integers([length, offset])) for pages, length, offset in plain["segments"]
    )
    span, slot, version, number = _integers([plain[key] for key in ("span", "slot", "version", "id")])
    if not isinstance(plain["name"], str):
        raise TypeError(f"name {plain['name']!r}")
    state = BlockState(segments, len(tokens), span, slot, kept, version)
    return StoredBlock(number, plain["name"], tuple(tokens), state)


def _integers(values: Sequence[Any]) -> tuple[int, ...]:
    if not all(isinstance(value, int) for value in values):
        raise TypeError(f"whole numbers are expected, not {values!r}")
    return tuple(values)
