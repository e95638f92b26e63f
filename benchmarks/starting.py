"""Seconds to the first token in a new process, beside transformers in another.

Knows how to start Python. Files are in the operating system's cache: somebody read them before.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from .rounds import Compared, in_turns

OURS = """
import time; began = time.perf_counter()
import asyncio, json, sys
from asyncllm_nb import AsyncLLM
called = time.perf_counter()

async def main():
    llm = AsyncLLM(sys.argv[1])
    async for token in llm.generate(llm.chat_prompt("Hello"), max_tokens=1):
        now = time.perf_counter()
        print(json.dumps([now - called, now - began]))

asyncio.run(main())
"""

THEIRS = """
import time; began = time.perf_counter()
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
called = time.perf_counter()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
inputs = tokenizer.apply_chat_template(
    [{"role": "user", "content": "Hello"}],
    add_generation_prompt=True, return_tensors="pt", return_dict=True,
)
out = model.generate(**inputs, max_new_tokens=1, do_sample=False, pad_token_id=0)
tokenizer.decode(out[0, -1:])
now = time.perf_counter()
print(json.dumps([now - called, now - began]))
"""


@dataclass(frozen=True)
class FirstToken:
    """Seconds to the first token, from the call that loads the model and from the first import."""

    from_call: Compared
    from_import: Compared


async def compare_first_token(folder: Path, model: str, *, rounds: int) -> FirstToken:
    """Start each side in new processes, one at a time. `model` is what AsyncLLM is called with."""
    imports: dict[str, list[float]] = {OURS: [], THEIRS: []}

    async def start(code: str, argument: str) -> float:
        from_call, from_import = await _run(code, argument)
        imports[code].append(from_import)
        return from_call

    calls = await in_turns(
        lambda: start(OURS, model), lambda: start(THEIRS, str(folder)), rounds, warm_up=False
    )
    return FirstToken(calls, Compared(tuple(imports[OURS]), tuple(imports[THEIRS])))


async def _run(code: str, argument: str) -> tuple[float, float]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, argument),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())},
    )
    out, errors = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"the new process failed: {errors.decode(errors='replace')}")
    from_call, from_import = json.loads(out.decode().splitlines()[-1])
    return from_call, from_import
