"""What reading shared blocks costs: how far next-token distributions are from those of a fresh encoding.

    python -m asyncllm_nb.evals.approximation --model tiny-hybrid --problems 60 --out result.json

Knows scenes (`reordering`), encodes each twice, as shared blocks and afresh in the order of the view, and
compares what the model says behind the two. Knows no texts.

The continuation is the model's own, greedy, behind the fresh encoding. Compared are the distributions after
each of its tokens: the Kullback-Leibler divergence from the fresh one to the other, in nats.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .commands import at_least_one, device_of, gathered, model_arguments, model_name, run_command
from .dealing import Tell, each
from .divergence import Divergence, Result
from .machine import describe
from .reordering import Scene, make_scenes

if TYPE_CHECKING:
    from torch import Tensor

    from ..engine.blocks import CacheBlock
    from ..engine.boundary import Boundary
    from ..llm import AsyncLLM

Continuations = dict[tuple[int, str], tuple[int, ...]]
"""Token ids by number of the problem and name of the scene."""


async def measure(
    llm: AsyncLLM,
    problem: int,
    scene: Scene,
    continuations: Continuations,
    *,
    length: int = 32,
    recomputes: bool = False,
) -> list[Divergence]:
    """Compare the variants of one scene that an engine can show. No block is left.

    `recomputes`: the engine was made with boundary="recomputed". The continuation of at most `length` tokens
    behind what is given is drawn if `continuations` has none, and kept there.
    """
    blocks: list[CacheBlock] = []
    try:
        fresh = await scene.as_fresh(llm)
        blocks += fresh
        key = (problem, scene.name)
        if key not in continuations:
            continuations[key] = await _continuation(llm, fresh, scene.given, length)
        ids = continuations[key]
        shared = await scene.as_shared(llm)
        blocks += shared
        views = {"as is": shared}
        if llm.config.is_hybrid:
            views["states"] = await _grafted(llm, fresh, shared)
            blocks += views["states"]
        if recomputes:
            views = {"recomputed": views["as is"], "states recomputed": views["states"]}
        else:
            views["one block"] = await scene.as_one(llm)
            blocks += views["one block"]
            if llm.config.is_hybrid:
                views["attention"] = await _grafted(llm, shared, fresh)
                blocks += views["attention"]
        expected = await _logits(llm, fresh, ids)
        return [
            _compared(problem, scene.name, name, expected, await _logits(llm, view, ids))
            for name, view in views.items()
        ]
    finally:
        for block in blocks:
            await llm.free_block(block)


async def run(
    llm: AsyncLLM,
    problems: int,
    continuations: Continuations,
    *,
    seed: int = 0,
    length: int = 32,
    concurrency: int = 4,
    recomputes: bool = False,
    progress: Callable[[int], None] | None = None,
) -> list[Divergence]:
    """Measure every scene of `problems` problems, `concurrency` at a time; see `measure`.

    Raises ValueError for a model without a tokenizer or a chat template. `progress` is called with the number
    of problems done.
    """
    found: list[Found] = []

    def add(one: Found) -> None:
        found.append(one)
        if progress is not None:
            progress(len(found))

    numbers = range(problems)
    await _runs(llm, numbers, continuations, seed, length, concurrency, recomputes, add)
    return _in_order(found)


Found = tuple[bool, int, list[Divergence]]
"""Does the engine recompute the boundary? Of which problem is this, and what was found."""


async def _runs(
    llm: AsyncLLM,
    numbers: Sequence[int],
    continuations: Continuations,
    seed: int,
    length: int,
    concurrency: int,
    recomputes: bool,
    tell: Callable[[Found], None],
) -> None:
    """Measure every scene of the problems with these numbers."""

    async def one(problem: int) -> None:
        made: list[Divergence] = []
        for scene in make_scenes(llm, seed * 1_000_003 + problem):
            made += await measure(llm, problem, scene, continuations, length=length, recomputes=recomputes)
        tell((recomputes, problem, made))

    await each(numbers, one, concurrency)


def _in_order(found: Iterable[Found]) -> list[Divergence]:
    return [run for _, _, runs in sorted(found, key=lambda one: one[:2]) for run in runs]


async def _continuation(
    llm: AsyncLLM, view: Sequence[CacheBlock], given: Sequence[int], length: int
) -> tuple[int, ...]:
    block = await llm.create_block("continuation")
    await llm.generate(list(given), [*view, block], max_tokens=length)
    ids = tuple(block.token_ids)
    await llm.free_block(block)
    return ids


async def _grafted(
    llm: AsyncLLM, attention: Iterable[CacheBlock], states: Iterable[CacheBlock]
) -> list[CacheBlock]:
    """Blocks with the keys and values of some and the states of others."""
    from ..engine.grafting import graft

    pairs = zip(attention, states, strict=True)
    return [await graft(llm._engine, one, other, f"{one.name} with states") for one, other in pairs]


async def _logits(llm: AsyncLLM, view: Sequence[CacheBlock], ids: Sequence[int]) -> Tensor:
    """Logits [n, vocab] after each of `ids` behind a view."""
    block = await llm.create_block("compared")
    output = await llm.forward(list(ids), [*view, block], logits="all")
    await llm.free_block(block)
    assert output.logits is not None
    return output.logits


def _compared(problem: int, scene: str, variant: str, expected: Tensor, actual: Tensor) -> Divergence:
    said, other = (logits.double().log_softmax(-1) for logits in (expected, actual))
    nats = (said.exp() * (said - other)).sum(-1).clamp(min=0)
    return Divergence(
        problem=problem,
        scene=scene,
        variant=variant,
        positions=len(nats),
        total=_rounded(nats.sum().item()),
        worst=_rounded(nats.max().item()),
        changed=int((said.argmax(-1) != other.argmax(-1)).sum()),
    )


def _rounded(value: float) -> float:
    """Six digits: more say nothing, and fill files."""
    return float(f"{value:.6g}")


# ---- the command line -------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m asyncllm_nb.evals.approximation", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    model_arguments(parser)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--problems", type=at_least_one, default=60, help="how many")
    parser.add_argument("--length", type=int, default=32, help="most tokens of a continuation")
    parser.add_argument("--seed", type=int, default=0, help="of the problems")
    parser.add_argument("--concurrency", type=at_least_one, default=4, help="at a time, in each process")
    parser.add_argument("--threads", type=int, help="of torch, in one process; default: as many as it takes")
    parser.add_argument("--as-written", action="store_true", help="no boundary is recomputed: a CPU can only")
    return parser


async def _work(options: argparse.Namespace, numbers: Sequence[int], tell: Tell) -> None:
    from ..llm import AsyncLLM

    continuations: Continuations = {}
    boundaries: list[Boundary] = ["written"] if options.as_written else ["written", "recomputed"]
    for boundary in boundaries:
        # One engine after the other, so that a large model is in memory once.
        async with AsyncLLM(options.model, device=device_of(options), boundary=boundary) as llm:
            if boundary == "recomputed" and not llm.config.is_hybrid:
                break
            await _runs(
                llm,
                numbers,
                continuations,
                options.seed,
                options.length,
                options.concurrency,
                boundary == "recomputed",
                tell,
            )


def _main(options: argparse.Namespace) -> Result:
    settings = {"model": model_name(options.model)}
    settings |= {name: getattr(options, name) for name in ("problems", "length", "seed")}
    result = Result(settings, machine=describe(options.processes))
    boundaries = 1 if options.as_written else 2
    result.runs = _in_order(gathered(options, _work, options.problems, boundaries * options.problems))
    if options.out is not None:
        result.to_json(options.out)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    from ..engine.boundary import check_boundary
    from ..engine.build import choose_device

    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        check_boundary("written" if options.as_written else "recomputed", choose_device(device_of(options)))
    except ValueError as error:
        parser.error(f"{error}, or leave what is recomputed out with --as-written")
    if options.threads:
        import torch

        torch.set_num_threads(options.threads)
    result = run_command(parser, lambda: _main(options))
    print("KL divergence, nats: mean (worst)", result.overview(), result.table(), sep="\n\n")


if __name__ == "__main__":
    main()
