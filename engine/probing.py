"""Probes: forward passes whose tokens are thrown away; only probabilities are kept.

Knows how a question and its choices become encodings, and how their logits become probabilities.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .blocks import CacheBlock
from .requests import Encoding

if TYPE_CHECKING:
    from .engine import Engine


async def probe(
    engine: Engine,
    question: list[int],
    view: tuple[CacheBlock, ...],
    choices: Sequence[list[int]],
) -> list[float]:
    """Probability of each of `choices` (token ids) behind `question` under `view`; sums to 1.

    A choice of several tokens is scored by the product of its tokens' probabilities. All rows read one
    snapshot of the view; no block changes, and the pages are back on return.
    """
    order, transaction = engine.next_order(), engine.current_transaction()
    # One row of logits scores the first token of every choice; each longer choice needs its own rows.
    bodies: list[list[int]] = [[]]
    bodies += [choice[:-1] for choice in choices if len(choice) > 1]
    if all(len(choice) > 1 for choice in choices):
        del bodies[0]
    encodings = [
        Encoding(
            name="probe",
            order=order,
            transaction=transaction,
            future=engine.loop.create_future(),
            writes=(),
            kind="probe",
            tokens=question + body,
            view=view,
            target=None,
            last_rows=len(body) + 1,
        )
        for body in bodies
    ]
    for encoding in encodings:
        encoding.siblings = tuple(encodings)
        engine.submit(encoding)
    answers = asyncio.gather(*(encoding.future for encoding in encodings))
    try:
        logits: list[Tensor] = await engine.wait(answers)
    finally:
        for encoding in encodings:
            encoding.siblings = ()  # a cycle otherwise, which would keep the view's blocks alive
        engine.wake()
    short = logits.pop(0).log_softmax(-1)[-1] if not bodies[0] else None
    scores = []
    for choice in choices:
        if len(choice) == 1:
            assert short is not None
            scores.append(short[choice[0]])
        else:
            rows = logits.pop(0).log_softmax(-1)
            scores.append(rows.gather(1, rows.new_tensor(choice, dtype=torch.int64)[:, None]).sum())
    return [float(p) for p in torch.stack(scores).double().softmax(0)]
