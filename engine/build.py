"""From a model folder to an engine: device, dtype, and the one budget of memory.

Knows how much memory there is and what pages and slots cost. Knows nothing of requests.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .ahead import Spare
from .batch import PAGE_TOKENS
from .blocks import Memory
from .boundary import BoundaryCache, check_boundary
from .checkpoint import tensor_shapes
from .config import ModelConfig
from .engine import Engine
from .memory import CacheTensors
from .model import Decoder
from .runner import Runner
from .text import Codec
from .weights import load_weights

CPU_SHARE = 0.25
"""At most this part of a CPU's free memory is for pages and slots; it is taken as it is written."""
CUDA_SHARE = 0.9
"""The same of what a GPU has left after the weights."""
SLOT_SHARE = 0.5
"""Of a hybrid model's budget, at most this part is for slots."""
MAX_SLOTS = 256
MAX_CACHE_TOKENS = 1 << 20
MAX_AHEAD = 32
"""Streams whose next token a GPU may compute while the engine's loop delivers the last one. What that
takes comes out of the share of the GPU that pages and slots leave free."""
MAX_BATCH_TOKENS = {"cuda": 2048, "cpu": 256}

_GROUP_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


@dataclass(frozen=True, slots=True)
class Budget:
    """How many pages and slots there are to hand out, and what one costs."""

    num_pages: int
    num_slots: int  # 0 without Gated DeltaNet layers
    page_bytes: int
    slot_bytes: int
    weights_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return self.num_pages * self.page_bytes + self.num_slots * self.slot_bytes


def choose_device(device: str | torch.device) -> torch.device:
    """``"auto"``: CUDA if there is one, else the CPU. Raises ValueError for a device without torch."""
    if str(device) == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError:  # how torch says that it has never heard of it
        chosen = None
    if chosen is None or chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda', not {str(device)!r}")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda' needs an NVIDIA GPU and a CUDA build of torch; use 'cpu'")
    return chosen


def choose_dtype(dtype: str | torch.dtype, config: ModelConfig, device: torch.device) -> torch.dtype:
    """``"auto"``: the checkpoint's on CUDA, float32 on a CPU."""
    if isinstance(dtype, torch.dtype):
        chosen: Any = dtype
    elif dtype == "auto":
        chosen = config.dtype if device.type == "cuda" else torch.float32
    else:
        chosen = getattr(torch, dtype, None)
    if chosen not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype must be 'auto', 'float32', 'bfloat16' or 'float16', not {dtype!r}")
    assert isinstance(chosen, torch.dtype)
    return chosen


def plan_budget(
    config: ModelConfig,
    dtype: torch.dtype,
    free_bytes: int,
    cache_tokens: int | None,
    max_blocks: int | None,
    boundary: str = "written",
) -> Budget:
    """Divide `free_bytes` into pages and slots, or take what the caller asks for.

    Raises ValueError for sizes below one page or one writer's two slots, and, with the arithmetic, if
    what was asked for is more than there is.
    """
    for name, value in (("cache_tokens", cache_tokens), ("max_blocks", max_blocks)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    if max_blocks is not None and not config.is_hybrid:
        raise ValueError(
            f"max_blocks is for models with Gated DeltaNet layers; a {config.family} model has none and "
            "needs no slots: leave it out"
        )
    page, slot = CacheTensors.page_bytes(config, dtype), CacheTensors.slot_bytes(config, dtype)
    if boundary == "recomputed":
        slot += BoundaryCache.first_tokens_bytes(config, dtype)
    slots = 0
    if config.is_hybrid:
        affordable = int(free_bytes * SLOT_SHARE) // slot
        slots = max_blocks if max_blocks is not None else max(2, min(MAX_SLOTS, affordable))
    if cache_tokens is not None:
        pages = -(-cache_tokens // PAGE_TOKENS)
    else:
        left = max(0, free_bytes - slots * slot)
        pages = max(1, min(MAX_CACHE_TOKENS // PAGE_TOKENS, left // page if page else 0))
    budget = Budget(pages, slots, page, slot)
    if budget.nbytes > free_bytes:
        raise ValueError(
            f"{pages} pages of {PAGE_TOKENS} tokens at {page:,} bytes"
            + (f" and {slots} slots at {slot:,} bytes" if slots else "")
            + f" need {budget.nbytes:,} bytes, and {free_bytes:,} are free for the cache: give a smaller "
            + ("cache_tokens or max_blocks" if slots else "cache_tokens")
        )
    return budget


def plan_spare(budget: Budget, device: torch.device) -> Spare:
    """Pages and slots behind those of the budget, for steps that run ahead on a GPU."""
    on_gpu = device.type == "cuda"
    slots = min(MAX_AHEAD, budget.num_slots // 3) if on_gpu else 0
    return Spare(
        first_slot=budget.num_slots + 1,
        num_slots=slots,
        first_page=budget.num_pages + 1,
        num_pages=MAX_AHEAD if on_gpu else 0,
    )


def check_weights_fit(config: ModelConfig, dtype: torch.dtype, free_bytes: int) -> None:
    """Raise ValueError, with the arithmetic, if the weights alone are more than `free_bytes`."""
    shapes = tensor_shapes(config).values()
    needed = sum(math.prod(shape) for shape in shapes) * dtype.itemsize
    if needed > free_bytes:
        raise ValueError(
            f"the weights need {needed:,} bytes in {str(dtype).removeprefix('torch.')}, and {free_bytes:,} "
            "are free on the GPU: close what else runs there, or take a smaller model or device='cpu'"
        )


def free_memory(device: torch.device) -> int:
    """Bytes of `device` that may be used for the cache.

    On a CPU: what is available, or what the control group leaves if that is less.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * CUDA_SHARE)
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass  # not Linux: what sysconf says is the best there is
    return min([available, *_group_memory()])


def _group_memory() -> list[int]:
    """What the control group still allows, where there is one with a limit."""
    free = []
    for limit_file, usage_file in _GROUP_LIMITS:
        try:
            limit, usage = Path(limit_file).read_text(), Path(usage_file).read_text()
        except OSError:
            continue
        if limit.strip().isdigit() and int(limit) < 1 << 60:
            free.append(max(0, int(limit) - int(usage)))
    return free


def load_tokenizer(folder: Path) -> Any | None:
    """The folder's tokenizer, or None if it has none."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if not any((folder / name).exists() for name in names):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def build_engine(
    folder: Path,
    *,
    model: str,
    name: str,
    device: str | torch.device,
    dtype: str | torch.dtype,
    cache_tokens: int | None,
    max_blocks: int | None,
    max_batch_tokens: int | None,
    seed: int,
    boundary: str = "written",
) -> tuple[Engine, Budget]:
    """Load a model and reserve its memory. Raises ModelError or ValueError before it takes any."""
    config = ModelConfig.from_folder(folder)
    chosen = choose_device(device)
    chosen_dtype = choose_dtype(dtype, config, chosen)
    check_boundary(boundary, chosen)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be a whole number, not {seed!r}")
    if max_batch_tokens is None:
        max_batch_tokens = MAX_BATCH_TOKENS[chosen.type]
    if max_batch_tokens < 1:
        raise ValueError(f"max_batch_tokens must be at least 1, not {max_batch_tokens}")
    if chosen.type == "cpu":
        free = int(free_memory(chosen) * CPU_SHARE)
        budget = plan_budget(config, chosen_dtype, free, cache_tokens, max_blocks, boundary)
        weights = load_weights(folder, config, chosen, chosen_dtype)
    else:
        check_weights_fit(config, chosen_dtype, torch.cuda.mem_get_info(chosen)[0])
        weights = load_weights(folder, config, chosen, chosen_dtype)
        free = free_memory(chosen)
        budget = plan_budget(config, chosen_dtype, free, cache_tokens, max_blocks, boundary)
    spare = plan_spare(budget, chosen)
    cache = CacheTensors.allocate(
        config,
        spare.first_page + spare.num_pages,
        spare.first_slot + spare.num_slots,
        chosen,
        chosen_dtype,
    )
    if boundary == "recomputed" and config.is_hybrid:
        cache = BoundaryCache.beside(cache)
    engine = Engine(
        config,
        Codec(load_tokenizer(folder)),
        Memory(budget.num_pages, budget.num_slots, config.is_hybrid),
        Runner(Decoder(config, weights), cache, chosen, spare),
        model=model,
        name=name,
        max_batch_tokens=max_batch_tokens,
        seed=seed,
    )
    return engine, replace(budget, weights_bytes=weights.nbytes)
