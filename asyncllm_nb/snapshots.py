"""An engine at one moment as plain numbers and strings: what a dashboard draws.

Knows the engine; knows nothing of drawing. Texts are cut to their ends: a dashboard shows what is new.
"""

from __future__ import annotations

from typing import Any

from .engine.batch import PAGE_TOKENS
from .engine.blocks import BlockRecord, CacheBlock
from .engine.build import Budget
from .engine.engine import Engine
from .engine.streams import TokenStream

TEXT_TAIL = 400
"""Characters of a text's end that a snapshot holds."""
TOKEN_TAIL = 160
"""Tokens that are decoded for that."""


def stats(engine: Engine, model: str, budget: Budget) -> dict[str, Any]:
    """Numbers of this moment: memory (bytes, pages, slots), steps, tokens, what waits."""
    memory, stepper, scheduler = engine.memory, engine.server.stepper, engine.scheduler
    return {
        "model": model,
        "device": str(engine.runner.device),
        "dtype": str(engine.runner.cache.keys.dtype).removeprefix("torch."),
        "weights_bytes": budget.weights_bytes,
        "cache_tokens": budget.num_pages * PAGE_TOKENS,
        "max_blocks": budget.num_slots,
        "max_batch_tokens": engine.max_batch_tokens,
        "page_tokens": PAGE_TOKENS,
        "page_bytes": budget.page_bytes,
        "slot_bytes": budget.slot_bytes,
        "pages": memory.pages.size,
        "pages_free": memory.pages.num_free,
        "slots": memory.slots.size,
        "slots_free": memory.slots.num_free,
        "blocks": len(engine.blocks),
        "steps": stepper.num_steps,
        "tokens_encoded": stepper.num_encoded,
        "tokens_generated": engine.num_generated,
        "streams": len(scheduler.streams),
        "queued": len(scheduler.requests),
        "waiting_for_memory": sum(1 for _ in scheduler.memory_waiters()),
        "paused": engine.paused,
        "closed": engine.closed,
    }


def snapshot(engine: Engine) -> dict[str, Any]:
    """Blocks, streams and pools of `engine` now."""
    memory = engine.memory
    return {
        "name": engine.name,
        "model": engine.trace.model,
        "step": engine.server.stepper.num_steps,
        "paused": engine.paused,
        "closed": engine.closed,
        "blocks": [_block(engine, block) for block in engine.blocks.values()],
        "streams": [_stream(stream) for stream in engine.recent_streams()],
        "waiting": [request.name for request in engine.scheduler.requests],
        "pools": {
            "pages_total": memory.pages.size,
            "pages_free": memory.pages.num_free,
            "slots_total": memory.slots.size,
            "slots_free": memory.slots.num_free,
            "page_tokens": PAGE_TOKENS,
        },
    }


def _block(engine: Engine, block: CacheBlock) -> dict[str, Any]:
    record = block._record
    return {
        "id": record.id,
        "name": record.name,
        "tokens": record.num_tokens,
        "span": record.span,
        "version": record.state.version,
        "pages": len(record.state.pages),
        "slot": record.state.slot,
        "text": _tail(engine, record),
        "writer": record.stream.name if record.stream else None,
        "readers": [s.name for s in engine.scheduler.streams if block in s.view[:-1]],
    }


def _tail(engine: Engine, record: BlockRecord) -> str:
    final = record.stream is None
    return engine.codec.decode(record.tokens[-TOKEN_TAIL:], final=final)[-TEXT_TAIL:]


def _stream(stream: TokenStream) -> dict[str, Any]:
    return {
        "name": stream.name,
        "state": stream.state,
        "reason": _reason(stream),
        "tokens": len(stream.logprobs),
        "text": stream.full_text[-TEXT_TAIL:],
        "block": stream.block.name,
        "view": [block.name for block in stream.view],
    }


def _reason(stream: TokenStream) -> str:
    """Why it waits, or how it ended."""
    if stream.stop_reason == "error":
        return f"error: {stream.failure}" if stream.failure else "error"
    if stream.stop_reason is not None:
        return stream.stop_reason
    return "memory" if stream.state == "waiting" else ""
