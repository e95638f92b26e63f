"""The same shape in transformers, eager, with flash-linear-attention where it is installed.

Knows transformers. Random weights of the same scale; a prefix of its own for each row, since its cache
shares nothing.
"""

from __future__ import annotations

import time
from importlib.util import find_spec
from typing import Any

import torch

from .shapes import QWEN35_9B


@torch.inference_mode()
def decode_steps(rows: int, context: int, steps: int = 16) -> dict[str, Any]:
    """Milliseconds of a decode step of `rows` rows behind `context` tokens each."""
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3_5 import Qwen3_5TextConfig

    config = Qwen3_5TextConfig(**{**QWEN35_9B, "eos_token_id": None})
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = AutoModelForCausalLM.from_config(config).eval()
        torch.set_default_dtype(torch.float32)
    results = {}
    for count in [count for count in (1, 4, 8, 16, 32) if count <= rows]:
        ids = torch.randint(0, 200_000, (count, context), device="cuda")
        out = model(ids[:, :-1], use_cache=True, logits_to_keep=1)
        cache, token = out.past_key_values, ids[:, -1:]
        spans = []
        for _ in range(steps):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            out = model(token, past_key_values=cache, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
            torch.cuda.synchronize()
            spans.append((time.perf_counter() - begin) * 1e3)
        median = sorted(spans[4:])[len(spans[4:]) // 2]
        results[str(count)] = {"step_ms": median, "tokens_per_s": count / median * 1e3}
        del out, cache
    return {"fla": find_spec("fla") is not None, "context": context, "decode": results}
