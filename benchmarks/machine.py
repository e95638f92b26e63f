"""What a measurement ran on, said as the evaluations say it. Knows where that stands."""

from __future__ import annotations

from asyncllm_nb.evals.machine import describe

__all__ = ["describe"]
