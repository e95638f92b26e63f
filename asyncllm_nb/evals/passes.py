"""What steps are made while a block of code runs, and how many each of several runs took part in.

Knows the trace, which keeps only the latest steps; hence they are counted while they are made. A run is
known by the block that stands first in all of its views: no other run reads it.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import islice
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from ..engine.blocks import CacheBlock
    from ..engine.trace import StepRecord
    from ..llm import AsyncLLM


class NewSteps:
    """``with NewSteps(llm):`` gives `count` each step that is committed meanwhile, in order."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._seen = llm.trace.num_steps

    def __enter__(self) -> Self:
        self._stop = self._llm.observe(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _look(self) -> None:
        trace = self._llm.trace
        new = trace.num_steps - self._seen
        self._seen = trace.num_steps
        for step in reversed(list(islice(reversed(trace.steps), new))):
            if not step.error:
                self.count(step)

    def count(self, step: StepRecord) -> None:
        """Take a step of the trace."""
        raise NotImplementedError


class Passes(NewSteps):
    """``with Passes(llm) as passes:`` counts; `of` and `until` give a run's numbers, `forget` drops them."""

    def __init__(self, llm: AsyncLLM) -> None:
        super().__init__(llm)
        self._steps: dict[int, list[int]] = {}  # numbers of steps, by the id of the first block

    def count(self, step: StepRecord) -> None:
        for first in {row.view_ids[0] for row in step.rows if row.view_ids}:
            self._steps.setdefault(first, []).append(step.number)

    def of(self, first: CacheBlock) -> int:
        """Forward passes that had a row of the run whose views begin with `first`."""
        return len(self._steps.get(first.id, ()))

    def until(self, first: CacheBlock, step: int) -> int:
        """The same, up to the step of this number."""
        return bisect_right(self._steps.get(first.id, ()), step)

    def forget(self, first: CacheBlock) -> None:
        """A run is over."""
        self._steps.pop(first.id, None)
