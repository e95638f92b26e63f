"""The command that trains tiny-hybrid, whole or in pieces.

    python -m training.train --out DIR --seconds 230
    python -m training.train --out DIR2 --resume DIR/progress --seconds 230 --total-seconds 460

Knows the command line and the order of the start: workers first, then torch. DIR gets `log.jsonl`,
`model/` (what transformers reads, beside a tokenizer) and `progress/` (what --resume reads).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from tokenizers import Tokenizer

from .batches import Feed, training_rows
from .held_out import held_out_rows
from .tokens import BETWEEN, END, marker_id

BUNDLE = Path(__file__).resolve().parent.parent / "asyncllm_nb" / "tiny_hybrid"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m training.train", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="where results go")
    parser.add_argument("--seconds", type=float, required=True, help="how long this piece trains")
    parser.add_argument("--total-seconds", type=float, help="of all pieces (default: this one is the last)")
    parser.add_argument("--within", type=float, help="seconds from the start until everything is saved")
    parser.add_argument("--resume", type=Path, help="the progress folder of the piece before")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: bfloat16 on cuda")
    parser.add_argument(
        "--compile-limit", type=float, default=0.0, help="seconds that compiling the layers may take"
    )
    parser.add_argument("--threads", type=int, default=1, help="of the host's own arithmetic")
    parser.add_argument("--workers", type=int, default=14, help="processes that make rows")
    parser.add_argument("--rows", type=int, default=64, help="in a step")
    parser.add_argument("--length", type=int, default=768, help="tokens in a row")
    parser.add_argument("--rate", type=float, default=3e-3, help="the highest learning rate")
    parser.add_argument("--warm-up", type=int, default=100, help="steps until that")
    parser.add_argument("--max-steps", type=int, help="stop after so many steps of this piece")
    parser.add_argument("--held-out", type=int, default=240, help="examples of a kind that are scored")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", type=Path, default=BUNDLE, help="folder with tokenizer.json")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run one piece; returns the exit status."""
    began = time.monotonic()
    chosen = parse(arguments)
    file = chosen.tokenizer / "tokenizer.json"
    steps = 0
    if chosen.resume:
        steps = json.loads((chosen.resume / "progress.json").read_text(encoding="utf-8"))["steps"]
    shape = (chosen.rows, chosen.length)
    # The piece is part of the seed: a later one sees other rows.
    with Feed(chosen.workers, training_rows, f"{chosen.seed}/{steps}", file, *shape) as feed:
        held_out = held_out_rows(file, chosen.length, chosen.held_out)
        import torch  # may start threads: after the workers

        from .loop import Plan, Run

        torch.set_num_threads(chosen.threads)
        tokenizer = Tokenizer.from_file(str(file))
        plan = Plan(
            out=chosen.out,
            rows=chosen.rows,
            length=chosen.length,
            seconds=chosen.seconds,
            total_seconds=chosen.total_seconds,
            deadline=None if chosen.within is None else began + chosen.within,
            compile_limit=chosen.compile_limit,
            rate=chosen.rate,
            warm_up=chosen.warm_up,
            seed=chosen.seed,
            device=chosen.device,
            dtype=chosen.dtype or ("float32" if chosen.device == "cpu" else "bfloat16"),
            end=marker_id(tokenizer, END),
            pad=marker_id(tokenizer, BETWEEN),
            resume=chosen.resume,
            max_steps=chosen.max_steps,
        )
        Run(plan, feed, held_out).train()
    return 0


if __name__ == "__main__":
    sys.exit(main())
