"""The ledger against a run that really passes text: transformers, with a cache for each writer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers import checkpoint, engine, tokens
from transformers import AutoModelForCausalLM, DynamicCache

from asyncllm_nb import AsyncLLM
from asyncllm_nb.engine.trace import RowRecord, StepRecord

Ids = tuple[int, ...]


@dataclass
class TextPasser:
    """Repeats the rows of a trace by passing text. Counts the tokens that the model really embeds.

    It knows texts and not versions: a writer's cache is used as long as its text is how the new one starts,
    whole; otherwise the whole text is encoded again.
    """

    model: Any
    embedded: int = 0
    caches: dict[Any, tuple[Ids, DynamicCache]] = field(default_factory=dict)
    blocks: dict[tuple[int, int], Ids] = field(default_factory=dict)  # (block, version) -> text
    inputs: dict[int, Ids] = field(default_factory=dict)  # request -> what is encoded of its input

    def __post_init__(self) -> None:
        self.model.get_input_embeddings().register_forward_hook(self._count)

    def _count(self, _module: Any, _inputs: Any, output: torch.Tensor) -> None:
        self.embedded += output.shape[1]

    def repeat(self, steps: Iterable[StepRecord]) -> int:
        for step in steps:
            for row in step.rows:
                self._row(row)
        return self.embedded

    def _row(self, row: RowRecord) -> None:
        versions = [version for _, version in row.view]
        texts = [self.blocks.get(key, ()) for key in zip(row.view_ids, versions, strict=True)]
        done = self.inputs.get(row.request, ()) if row.kind != "decode" else ()
        context = (*(token for text in texts for token in text), *done)
        writer = row.view_ids if row.block is None else row.view_ids[-1]
        self._encode(writer, context, row.token_ids, keeps=row.block is not None)
        self.inputs[row.request] = (*done, *row.token_ids)
        if row.commit:
            written = self.inputs[row.request] if row.kind != "decode" else row.token_ids
            key = (row.view_ids[-1], row.commit[0])
            self.blocks[key] = (*texts[-1], *written)

    def _encode(self, writer: Any, context: Ids, new: Ids, keeps: bool) -> None:
        held, cache = self.caches.get(writer, ((), DynamicCache()))
        if held != context or not held:
            held, cache = (), DynamicCache()
        with torch.no_grad():
            ids = torch.tensor([[*context, *new][len(held) :]])
            self.model(ids, past_key_values=cache, use_cache=True)
        if not keeps:
            cache.crop(-len(new))
        self.caches[writer] = ((*context, *(new if keeps else ())), cache)


@pytest.fixture(scope="module")
def passer() -> TextPasser:
    return TextPasser(AutoModelForCausalLM.from_pretrained(checkpoint("llama")))


async def think_and_write(llm: AsyncLLM) -> None:
    prompt, thinker, writer = await llm.create_blocks("prompt", "thinker", "writer")
    await llm.forward(tokens(50), [prompt])
    thoughts = llm.generate(tokens(3), [prompt, thinker], max_tokens=25)
    words = llm.generate(tokens(4), [prompt, thinker, writer], max_tokens=12)
    async for _ in thoughts:
        if len(thoughts.token_ids) == 8:
            async for _ in words:
                pass
    await llm.probe(tokens(5), [prompt, thinker], choices=("a",))
    await llm.probe(tokens(6), [prompt, thinker], choices=("a",))
    await llm.generate(None, [prompt, thinker], max_tokens=4)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
async def test_ledger_counts_what_a_real_run_that_passes_text_encodes(passer: TextPasser) -> None:
    async with engine("llama", max_batch_tokens=24) as llm:
        await think_and_write(llm)
        await llm.drain()
        ledger = llm.trace.ledger
        assert ledger.encoded == llm.stats()["tokens_encoded"]
        assert ledger.resent == passer.repeat(llm.trace.steps)
        assert ledger.resent > 1.5 * ledger.encoded


async def test_a_single_writer_saves_nothing() -> None:
    async with engine("llama", max_batch_tokens=16) as llm:
        block = (await llm.forward(tokens(40))).block
        await llm.generate(tokens(3), [block], max_tokens=9)
        await llm.drain()
        assert llm.trace.ledger.resent == llm.trace.ledger.encoded == 52


async def test_a_text_of_the_same_length_is_another_text() -> None:
    async with engine("llama") as llm:
        left, right, other = await llm.create_blocks("left", "right", "other")
        await llm.forward(tokens(10), [left])
        await llm.forward(tokens(5), [left, right])  # 10 + 5
        await llm.forward(tokens(6, seed=1), [other])
        await llm.replace(left, tokens(10, seed=2))
        before = llm.trace.ledger.resent
        await llm.forward(tokens(1), [left, right])
        assert llm.trace.ledger.resent - before == 16
        await llm.clear(right)
        await llm.append_block(right, other)
        await llm.forward(tokens(1), [left, right])
        assert llm.trace.ledger.resent - before == 16 + 17


async def test_a_changed_block_is_encoded_again_with_all_that_follows() -> None:
    async with engine("llama") as llm:
        left, right = await llm.create_blocks("left", "right")
        await llm.forward(tokens(10), [left])
        await llm.forward(tokens(5), [left, right])  # 10 + 5
        await llm.forward(tokens(2), [left])  # 2
        await llm.forward(tokens(1), [left, right])  # 12 + 5 + 1
        await llm.forward(tokens(1), [left, right])  # 1
        assert llm.trace.ledger.resent == 10 + 15 + 2 + 18 + 1
        assert llm.trace.ledger.encoded == 10 + 5 + 2 + 1 + 1
