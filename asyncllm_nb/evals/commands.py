"""What the command lines of the evaluations share: arguments, how far a run is, and what is said of mistakes.

Knows arguments, files, clocks and processes. Knows nothing of what is measured.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..engine.errors import ModelError
from .cases import Case, arithmetic_cases, load_jsonl
from .dealing import Tell, gather
from .protocol import Setup
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


class Progress:
    """Says every now and then how far the runs of an evaluation are, and calls `save` each time."""

    def __init__(
        self, total: int, done: int = 0, *, save: Callable[[], object] | None = None, seconds: float = 20.0
    ) -> None:
        self.total, self.done, self.save, self.seconds = total, done, save, seconds
        self.before = done  # what an earlier evaluation has made
        self.began = self.last = time.monotonic()

    def one_more(self) -> None:
        """Another one is done."""
        self.done += 1
        now = time.monotonic()
        if now - self.last < self.seconds and self.done < self.total:
            return
        self.last = now
        if self.save is not None:
            self.save()
        print(f"{self.done} of {self.total} runs{self._left(now)}", file=sys.stderr, flush=True)

    def _left(self, now: float) -> str:
        """ ", 40 s left"; "" while so few are made that most of the time went into starting."""
        made, left = self.done - self.before, self.total - self.done
        if left and 20 * made < self.total - self.before:
            return ""
        return f", {left * (now - self.began) / made:.0f} s left"


def gathered(
    options: argparse.Namespace,
    work: Callable[[argparse.Namespace, Sequence[int], Tell], Coroutine[Any, Any, None]],
    problems: int,
    runs: int,
) -> list[Any]:
    """Do the work of so many problems; all that is told, as it came. Says how many of the runs are done."""
    found: list[Any] = []
    progress = Progress(runs)

    def add(one: Any) -> None:
        found.append(one)
        progress.one_more()

    gather(partial(work, options), range(problems), options.processes, add)
    return found


def at_least_one(text: str) -> int:
    """A number of something, as an argument."""
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, at least 1")


def run_command(parser: argparse.ArgumentParser, command: Callable[[], T]) -> T:
    """What `command` gives. What is wrong with its arguments and files is said in a line; errors of running
    streams come in groups, and keep their traces."""
    try:
        return command()
    except (ValueError, OSError, ModelError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        parser.exit(130, "stopped\n")


def model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, and what it runs on."""
    parser.add_argument("--model", default="tiny-hybrid", help="a bundled name, a hub id, or a folder")
    run_on(parser)


def run_on(parser: argparse.ArgumentParser) -> None:
    """What a model runs on."""
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument(
        "--processes",
        type=at_least_one,
        default=1,
        help="that share the work, with a model and a thread each; those are on a CPU if --device is auto",
    )


def common_parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """What the evaluations on problems have in common."""
    parser = argparse.ArgumentParser(prog=f"python -m asyncllm_nb.evals.{name}", description=about)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    fields = (inspect.getdoc(load_jsonl) or "").partition("\n\nRaises")[0]
    parser.epilog = f"A dataset: {fields}"
    model_arguments(parser)
    parser.add_argument("--problems", type=at_least_one, help="default: 300, or all of the dataset")
    parser.add_argument("--dataset", type=Path, help="JSON lines; its fields: see below")
    parser.add_argument("--seed", type=int, default=0, help="of the made-up problems")
    parser.add_argument(
        "--scoring",
        choices=SCORINGS,
        help="what an answer is: the last whole number, or what stands in \\boxed{}; default: integer, or "
        "boxed for a dataset",
    )
    parser.add_argument("--concurrency", type=at_least_one, default=32, help="at a time, in each process")
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
    model_arguments(parser)
    parser.add_argument("--pattern", default="all", choices=["all", *patterns])
    parser.add_argument("--problems", type=at_least_one, default=problems, help="of each pattern")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--concurrency", type=at_least_one, default=16, help="at a time, in each process")
    parser.add_argument("--out", type=Path, help="JSON file")
    return parser


def patterns_of(options: argparse.Namespace, patterns: Iterable[str]) -> list[str]:
    """Those that a command line of `patterns_parser` asks for."""
    return list(patterns) if options.pattern == "all" else [options.pattern]


def engine_of(options: argparse.Namespace, max_batch_tokens: int, **more: Any) -> AsyncLLM:
    """The engine that a command line asks for; `more` goes to it too."""
    from ..llm import AsyncLLM

    return AsyncLLM(options.model, device=device_of(options), max_batch_tokens=max_batch_tokens, **more)


def device_of(options: argparse.Namespace) -> str:
    """Several processes are for the cores of a CPU: a GPU is shared by those who ask for it only."""
    return "cpu" if options.processes > 1 and options.device == "auto" else str(options.device)


def model_name(model: str) -> str:
    """What a result calls it: the last part of a folder or of a hub id."""
    return Path(model).name or model


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
