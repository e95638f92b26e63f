"""The training run: rows in, steps, a learning rate that follows the clock, a log, checkpoints.

Knows one network and one feed of rows. Knows nothing about how rows are made or what a step computes.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from .batches import KINDS, Feed, Rows
from .checkpoint import load_progress, save_model, save_progress
from .model import Network, Sizes
from .optimizer import Optimizer
from .step import Step, exact_examples

MODEL, PROGRESS, LOG = "model", "progress", "log.jsonl"
SAVING_SECONDS = 4.0
"""What the last score and the files are given."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Plan:
    """What a run is asked for. Times in seconds of training, without the start."""

    out: Path
    rows: int
    length: int
    seconds: float  # of this piece
    total_seconds: float | None = None  # of all pieces: the rate ends at 0 there; None: this is the last
    deadline: float | None = None  # of `time.monotonic`: the piece is cut short to be saved by then
    compile_limit: float = 0.0  # seconds that compiling may take; 0: layers run as they are
    rate: float = 3e-3
    warm_up: int = 100  # steps
    seed: int = 0
    device: str = "cuda"
    dtype: str = "bfloat16"
    end: int = 0  # token ids
    pad: int = 0
    resume: Path | None = None
    max_steps: int | None = None
    log_every: float = 2.0
    save_every: float = 60.0
    score_every: float = 30.0
    sizes: Sizes = field(default_factory=Sizes)


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError inside after so many seconds. For the main thread."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"not ready after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again, should the first one go unheard
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


class Supply:
    """Rows on the device: fresh ones if there are any, else some that were seen before."""

    def __init__(self, feed: Feed, device: torch.device, seed: int) -> None:
        self._feed, self._device = feed, device
        self._seen: list[tuple[Tensor, Tensor, int]] = []
        self._generator = torch.Generator().manual_seed(seed)
        self.fresh = self.again = 0  # blocks given out

    def next(self) -> tuple[Tensor, Tensor, int]:
        """Tokens, marks, and how many tokens are no padding."""
        rows = self._feed.get(wait=not self._seen)
        if rows is None:
            self.again += 1
            return self._seen[int(torch.randint(len(self._seen), (), generator=self._generator))]
        self.fresh += 1
        self._seen.append((self._moved(rows.tokens), self._moved(rows.marks), rows.num_tokens))
        return self._seen[-1]

    def _moved(self, array: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(array)
        if self._device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)  # else the host would wait


class Run:
    """One piece of a training run."""

    def __init__(self, plan: Plan, feed: Feed, held_out: Rows) -> None:
        self.plan, self.held_out = plan, held_out
        torch.manual_seed(plan.seed)
        torch.set_float32_matmul_precision("high")
        self.device, self.dtype = torch.device(plan.device), DTYPES[plan.dtype]
        self.network = Network(plan.sizes).to(self.device)
        self.optimizer = Optimizer(self.network.named_parameters())
        before = load_progress(self.network, self.optimizer, plan.resume) if plan.resume else {}
        self.steps, self.tokens = int(before.get("steps", 0)), int(before.get("tokens", 0))
        self.seconds = self._seconds_before = float(before.get("seconds", 0.0))
        self.supply = Supply(feed, self.device, plan.seed + self.steps)
        self.total_seconds = plan.total_seconds or 0.0  # known when the clock starts
        self.step = Step(self.network, self.optimizer, plan.rows, plan.length, self.dtype)
        self._stop = False
        plan.out.mkdir(parents=True, exist_ok=True)

    def train(self) -> dict[str, Any]:
        """Train for the planned time, save, and return the numbers of the last log line."""
        handlers = {s: signal.signal(s, self._ask_to_stop) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            self._start()
            self._loop()
            last = self._log(scored=True)
            self.save()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return last

    def save(self) -> None:
        """Write the model and what a later piece goes on from."""
        plan = self.plan
        save_model(self.network, plan.out / MODEL, end=plan.end, pad=plan.pad)
        numbers = {"steps": self.steps, "tokens": self.tokens, "seconds": round(self.seconds, 2)}
        save_progress(self.network, self.optimizer, numbers, plan.out / PROGRESS)

    def _ask_to_stop(self, *_: object) -> None:
        self._stop = True

    def _start(self) -> None:
        """Make the first steps, which choose kernels, and the graph; the clock starts behind them."""
        began = time.monotonic()
        self.optimizer.rate.fill_(self.plan.rate / self.plan.warm_up)
        tokens, marks, _ = self.supply.next()
        compiled = self._compile(tokens, marks)
        self.step.run(tokens, marks)
        problem = self.step.capture()
        self.step.take_sums()
        self._clock = time.monotonic()
        self._piece_seconds = self.plan.seconds
        if self.plan.deadline is not None:
            left = self.plan.deadline - SAVING_SECONDS - self._clock
            self._piece_seconds = max(1.0, min(self._piece_seconds, left))
        self.total_seconds = self.plan.total_seconds or self._seconds_before + self._piece_seconds
        cuda = self.device.type == "cuda"
        started = {
            "device": torch.cuda.get_device_name(self.device) if cuda else "CPU",
            "rows": self.plan.rows,
            "length": self.plan.length,
            "highest_rate": self.plan.rate,
            "started_in": round(self._clock - began, 1),
            "seconds_planned": round(self._piece_seconds),
        }
        self._write({**started, "compiled": compiled or "yes", "graph": problem or "captured"})

    def _compile(self, tokens: Tensor, marks: Tensor) -> str | None:
        """Compile the layers and run them once; says why they run as they are, if they do."""
        if not self.plan.compile_limit:
            return "not asked for"
        layers = self.network.model.layers
        for layer in layers:
            layer.compile(dynamic=False)
        try:
            with _time_limit(self.plan.compile_limit):
                self.step.run(tokens, marks)
                self.step.take_sums()  # waits, so that what fails fails here
        except Exception as error:  # whatever it is, training goes on without
            for layer in layers:
                layer._compiled_call_impl = None
            torch.compiler.reset()
            return f"{type(error).__name__}: {error}"[:2000]
        return None

    def _loop(self) -> None:
        plan, first = self.plan, self.steps
        logged = saved = scored = time.monotonic()
        self._logged_tokens, self._logged_at = self.tokens, logged
        done = [torch.cuda.Event() for _ in range(3)] if self.device.type == "cuda" else []
        while not self._stop and self.seconds < self.total_seconds:
            if self.seconds - self._seconds_before >= self._piece_seconds:
                break
            if plan.max_steps is not None and self.steps - first >= plan.max_steps:
                break
            warm = min(1.0, (self.steps - first + 1) / plan.warm_up)
            self.optimizer.rate.fill_(plan.rate * warm * (1 - self.seconds / self.total_seconds))
            tokens, marks, count = self.supply.next()
            if done:  # the host runs at most two steps ahead, so that the rate follows the clock
                done[self.steps % 3].synchronize()
            self.step.run(tokens, marks)
            if done:
                done[self.steps % 3].record()
            self.steps += 1
            self.tokens += count
            now = time.monotonic()
            self.seconds = self._seconds_before + now - self._clock
            if now - logged >= plan.log_every:
                due = now - scored >= plan.score_every
                self._log(scored=due)
                logged, scored = time.monotonic(), time.monotonic() if due else scored
            if now - saved >= plan.save_every:
                self.save()
                saved = time.monotonic()

    def _log(self, scored: bool) -> dict[str, Any]:
        """Write one line: losses per kind since the last one, and now and then the held-out examples."""
        losses, counts = self.step.take_sums()
        now = time.monotonic()
        speed = (self.tokens - self._logged_tokens) / max(1e-9, now - self._logged_at)
        self._logged_tokens, self._logged_at = self.tokens, now
        names = ["given", *KINDS]
        line: dict[str, Any] = {
            "step": self.steps,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 1),
            "tokens_per_second": round(speed),
            "rate": float(f"{float(self.optimizer.rate):.3g}"),
            "gradient": float(f"{float(self.optimizer.norm):.3g}"),
            "fresh": round(self.supply.fresh / max(1, self.supply.fresh + self.supply.again), 3),
            "loss": {n: round(a / b, 4) for n, a, b in zip(names, losses, counts, strict=True) if b},
        }
        if scored:
            found = exact_examples(self.network, self.held_out, self.dtype, self.plan.pad)
            line["held_out_exact"] = {kind: pair for kind, pair in found.items() if pair[1]}
        self._write(line)
        return line

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line)
        with (self.plan.out / LOG).open("a", encoding="utf-8") as file:
            file.write(text + "\n")
        print(text, flush=True)
