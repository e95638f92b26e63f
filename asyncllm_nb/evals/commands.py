"""What the command lines of the evaluations share: arguments, how far a run is, and what is said of mistakes.

Knows arguments, files and clocks. Knows nothing of what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import sys
import time
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..engine.errors import ModelError
from .cases import Case, arithmetic_cases, load_jsonl
from .protocol import Setup
from .results import Result
from .scoring import SCORINGS

if TYPE_CHECKING:
    from ..llm import AsyncLLM

T = TypeVar("T")


def parse_ks(text: str) -> list[int | None]:
    """ "0,4,never" as numbers and None."""
    try:
        return [None if part.strip() == "never" else int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers and 'never', as in 0,16,never") from None


class Saver:
    """Writes the result every now and then, and says how far it is."""

    def __init__(self, out: Path | None = None, seconds: float = 20.0) -> None:
        self.out, self.seconds = out, seconds
        self.result: Result | None = None
        self.done = 0  # runs of it that were there before
        self.began = self.last = time.monotonic()

    def __call__(self, result: Result, total: int) -> None:
        now = time.monotonic()
        if result is not self.result:  # the first, or the next of several
            self.result, self.done, self.began = result, len(result.runs) - 1, self.last
        if now - self.last < self.seconds and len(result.runs) < total:
            return
        self.last = now
        if self.out is not None:
            result.to_json(self.out)
        rate = (len(result.runs) - self.done) / (now - self.began)
        left = (total - len(result.runs)) / rate
        print(f"{len(result.runs)} of {total} runs, {left:.0f} s left", file=sys.stderr, flush=True)


def at_least_one(text: str) -> int:
    """A number of something, as an argument."""
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, at least 1")


def run_command(parser: argparse.ArgumentParser, command: Coroutine[Any, Any, T]) -> T:
    """What `command` gives. What is wrong with its arguments and files is said in a line; errors of running
    streams come in groups, and keep their traces."""
    try:
        return asyncio.run(command)
    except (ValueError, OSError, ModelError) as error:
        parser.error(str(error))


def common_parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """What the evaluations on problems have in common."""
    parser = argparse.ArgumentParser(prog=f"python -m asyncllm_nb.evals.{name}", description=about)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    fields = (inspect.getdoc(load_jsonl) or "").partition("\n\nRaises")[0]
    parser.epilog = f"A dataset: {fields}"
    parser.add_argument("--model", default="tiny-hybrid", help="a bundled name, a hub id, or a folder")
    parser.add_argument("--problems", type=at_least_one, help="default: 300, or all of the dataset")
    parser.add_argument("--dataset", type=Path, help="JSON lines; its fields: see below")
    parser.add_argument("--seed", type=int, default=0, help="of the made-up problems")
    parser.add_argument("--scoring", choices=SCORINGS, help="default: integer, or boxed for a dataset")
    parser.add_argument("--concurrency", type=at_least_one, default=32, help="problems at a time")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16, float16 or auto")
    parser.add_argument("--max-blocks", type=int, help="slots of the engine, for a larger concurrency")
    for name, most in (("--max-thinking", Setup.max_thinking), ("--max-answer", Setup.max_answer)):
        parser.add_argument(name, type=at_least_one, default=most, help=f"tokens (default: {most})")
    parser.add_argument("--system", help="a system prompt")
    return parser


def patterns_parser(
    name: str, about: str | None, patterns: Iterable[str], problems: int
) -> argparse.ArgumentParser:
    """What the commands have in common that measure ready-made agents; `problems`: of each, if not said."""
    parser = argparse.ArgumentParser(prog=f"python -m asyncllm_nb.evals.{name}", description=about)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", default="tiny-hybrid", help="a bundled name, a hub id, or a folder")
    parser.add_argument("--pattern", default="all", choices=["all", *patterns])
    parser.add_argument("--problems", type=at_least_one, default=problems, help="of each pattern")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--concurrency", type=at_least_one, default=16, help="problems at a time")
    parser.add_argument("--out", type=Path, help="JSON file")
    return parser


def engine_of(options: argparse.Namespace, max_batch_tokens: int) -> AsyncLLM:
    """The engine that a command line asks for."""
    from ..llm import AsyncLLM

    return AsyncLLM(
        options.model,
        device=options.device,
        dtype=options.dtype,
        max_batch_tokens=max_batch_tokens,
        max_blocks=options.max_blocks,
    )


def cases_of(options: argparse.Namespace) -> list[Case]:
    """The problems that a command line asks for."""
    if options.dataset is not None:
        return load_jsonl(options.dataset)[: options.problems]
    return arithmetic_cases(300 if options.problems is None else options.problems, options.seed)


def setup_of(options: argparse.Namespace) -> Setup:
    """How thinker and writer work, as a command line asks for."""
    return Setup(max_thinking=options.max_thinking, max_answer=options.max_answer, system=options.system)


def scoring_of(options: argparse.Namespace) -> str:
    """The name of the scoring that a command line asks for."""
    return str(options.scoring or ("integer" if options.dataset is None else "boxed"))
