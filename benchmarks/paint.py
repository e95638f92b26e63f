"""How late a browser shows what happens: from a message that is due to the end of the frame that shows it.

Knows Chromium, the widgets' code as text, and the records of a run. Knows no engine: the run is made up,
and a stand-in for the kernel in the page feeds its messages to the real code of the dashboard. It counts
from the moment a message was due, so that one that waits for a busy page counts whole.

    python -m benchmarks.paint [--keep]

`--keep` writes `results/paint.json`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from asyncllm_nb.evals.machine import describe
from asyncllm_nb.widgets import dashboard
from asyncllm_nb.widgets.base import Widget
from asyncllm_nb.widgets.bundle import bundle, style

from .rounds import percentile

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WIDTH, TALL = 1500, 6000  # px; the page is made as tall as its panels once they are drawn
FILE = Path(__file__).parent / "results" / "paint.json"

STREAMS, STEPS = 8, 625  # 5,000 cells
UPDATES, INTERVAL = 100, 100  # ms
LAYERS, HEADS = 6, 8  # of attention shares and of norms
SIDE = 128  # of a state
BLOCKS = 3  # of a view
LATEST, LARGEST = 100.0, 100_000  # what is aimed at: ms for 95 % of the updates, bytes of a widget

Record = dict[str, Any]


@dataclass(frozen=True)
class Painted:
    """What one run of updates gave; times in ms, one a update."""

    maps: int
    cells: int  # of the timeline that were on screen at the end
    panels: list[str]
    frame: list[float]  # until the frame's own work on the page's thread is done
    following: list[float]  # until the frame after it begins: the picture has left the page's thread
    script: list[float]  # of that, the panels' drawing
    long_tasks: list[float]  # tasks of more than 50 ms


# ---- a run that is made up ----------------------------------------------------------------------


def beginning() -> Iterator[Record]:
    """Two blocks that all read, and a stream with a block of its own for each coroutine."""
    for block in range(2 + STREAMS):
        yield {"t": "block", "at": 0, "id": block, "name": f"block {block}"}
    for r in range(1, STREAMS + 1):
        task = {"t": "task", "at": 0, "k": r, "name": f"coroutine {r}", "state": "running"}
        yield {**task, "line": "", "error": ""}
        request = {"t": "request", "at": 0, "r": r, "kind": "stream", "name": f"stream {r}"}
        yield {**request, "view": [0, 1, r + 1], "block": r + 1, "task": r}


def step(n: int) -> Iterator[Record]:
    """A forward pass with a token for each stream, and what the instruments read at it."""
    at = n / 10
    times = {"at": at, "n": n, "b": at - 0.05, "s": 0.05}
    memory = {"wait": [], "pages": 2048, "slots": 32, "encoded": n * STREAMS, "resent": 9 * n * STREAMS}
    yield {"t": "step", **times, **memory, "rows": [_row(n, r) for r in _streams()], "err": ""}
    for r in _streams():
        yield {"t": "token", "at": at, "r": r, "id": n, "x": f" w{n}"}
    for kind in ("shares", "norms"):
        rows = [_reading(r) for r in _streams()]
        yield {"t": kind, "at": at, "n": n, "rows": rows, "bin": STREAMS * LAYERS * BLOCKS * HEADS}


def _streams() -> range:
    return range(1, STREAMS + 1)


def _row(n: int, r: int) -> Record:
    commit = [n, n // 16, [n // 16 * STREAMS + r]] if n % 16 == 1 else [n]
    text = {"i": [n], "x": [f" w{n}"]}
    return {"r": r, "k": "decode", "b": r + 1, "n": 1, "m": n, "v": [1, 1, n - 1], **text, "c": commit}


def _reading(r: int) -> Record:
    """Bytes are made in the page: {"$make": how many}."""
    q = {"$make": LAYERS * BLOCKS * HEADS}
    return {"r": r, "layers": LAYERS, "heads": HEADS, "mean": [0.5, 0.3, 0.2], "q": q}


def states(n: int, heads: int) -> Record:
    """A state of stream 1. The panel draws a map a head for each block and one for their sum."""
    size = BLOCKS * heads * SIDE * SIDE
    shape = [BLOCKS, heads, SIDE, SIDE]
    row = {"r": 1, "shape": shape, "peak": [1.0] * heads, "q": {"$make": size}}
    return {"t": "states", "at": n / 10, "n": n, "layer": 0, "rows": [row], "bin": size}


# ---- the page -----------------------------------------------------------------------------------

PAGE = """<!doctype html><meta charset="utf-8"><style>{style}</style><main></main>
<script type="module">
{code}
{feed}
</script>"""

FEED = """
let seed = 1; // xorshift: the same bytes each time
function made(count) {
  const bytes = new Uint8Array(count);
  for (let i = 0; i < count; i++) {
    seed ^= seed << 13;
    seed ^= seed >>> 17;
    seed ^= seed << 5;
    bytes[i] = seed;
  }
  return bytes.buffer;
}

/** A message as it comes: text, and its bytes apart from it. */
function pack(message) {
  const buffers = [];
  const text = JSON.stringify(message, (key, value) => value?.$make === undefined ? value
    : { $b: buffers.push(new DataView(made(value.$make))) - 1 });
  return { text, buffers, next: message.first + message.records.length };
}

/** The kernel, as the widget's model: it answers "ready" with the snapshot. */
class Model {
  constructor(traits, snapshot) { Object.assign(this, { traits, snapshot, handlers: new Set() }); }
  get(name) { return this.traits[name]; }
  on(name, handler) { if (name === "msg:custom") this.handlers.add(handler); }
  off(name, handler) { this.handlers.delete(handler); }
  send(message) {
    if (message.type !== "ready") return;
    queueMicrotask(() => this.tell(pack({ ...this.snapshot, client: message.client })));
  }
  tell({ text, buffers }) { for (const handler of this.handlers) handler(JSON.parse(text), buffers); }
}

window.open_ = (traits, snapshot) => {
  snapshot.base = emptyState();
  window.model = new Model(traits, snapshot);
  const made = widget();
  const el = document.querySelector("main");
  made.initialize({ model });
  made.render({ model, el });
  window.view = document.querySelector(".allm").__asyncllm_debug;
};

const local = (name) => view.places.find((one) => one.panel.name === name).ctx.local;

/** Have the panels drawn the snapshot? */
window.drawn = () => Boolean(local("states").row && local("timeline").span?.last > 1);

window.feed = async (deltas, interval) => {
  const messages = deltas.map(pack);
  const found = { frame: [], following: [], script: [], long_tasks: [] };
  const observer = new PerformanceObserver((list) => {
    for (const { duration } of list.getEntries()) found.long_tasks.push(duration);
  });
  observer.observe({ type: "longtask" });
  const waiting = [];
  const paint = view._paint;
  view._paint = function () { // runs in an animation frame
    paint.call(view);
    const shown = waiting.splice(0, waiting.findLastIndex((one) => one.next <= view.store.next) + 1);
    const note = (times) => shown.forEach(({ due }) => times.push(performance.now() - due));
    for (const _ of shown) found.script.push(view.lag);
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => note(found.frame);
    port2.postMessage(0); // handled after the frame
    requestAnimationFrame(() => note(found.following));
  };
  const start = performance.now() + 5 * interval; // the page has come to rest
  for (const [index, message] of messages.entries()) {
    const due = start + index * interval;
    await new Promise((done) => setTimeout(done, Math.max(0, due - performance.now())));
    waiting.push({ due, next: message.next });
    model.tell(message);
  }
  while (found.following.length < messages.length) await new Promise(requestAnimationFrame);
  await new Promise((done) => setTimeout(done, interval));
  observer.disconnect();
  const { first, last } = local("timeline").span;
  found.cells = view.store.steps.slice(first, last).reduce((sum, { record }) => sum + record.rows.length, 0);
  const [blocks, heads] = local("states").row.shape;
  found.maps = (blocks + 1) * heads;
  found.panels = view.visiblePanels();
  found.faults = view.places.filter((one) => !one.fault.hidden).map((one) => one.fault.textContent);
  return found;
};
"""


def measure(page: Any, heads: int) -> Painted:
    """Open the dashboard in a new page and feed it."""
    panels = dashboard.Dashboard.PANELS
    code = bundle("entry", panels).replace("export default", "const widget =")
    page.set_content(PAGE.format(style=style(), code=code, feed=FEED))
    choices = {"timeline.zoom": 1, "states.request": 1}  # 2 px a step
    traits = {"panels": list(panels), "pin": "", "theme": "light", "choices": choices}
    steps = [record for n in range(1, STEPS + 1) for record in step(n)]
    records = [*beginning(), *steps, states(STEPS, heads)]
    layers = {"attention_layers": [*range(LAYERS)], "linear_layers": [*range(LAYERS)]}
    pool = {"page_tokens": 16, "pages": 4096, "slots": 64}
    meta = {"name": "made up", "model": "made up", **pool, **layers}
    first = {"type": "snapshot", "part": 0, "parts": 1, "first": 0, "records": records, "meta": meta}
    page.evaluate("text => open_(...JSON.parse(text))", json.dumps([traits, first]))
    page.wait_for_function("() => drawn()")
    height = page.evaluate("() => Math.ceil(view.root.getBoundingClientRect().bottom) + 100")
    page.set_viewport_size({"width": WIDTH, "height": height})
    deltas, at = [], len(records)
    for n in range(STEPS + 1, STEPS + 1 + UPDATES):
        new = [*step(n), states(n, heads)]
        deltas.append({"type": "delta", "first": at, "records": new})
        at += len(new)
    found = page.evaluate("text => feed(...JSON.parse(text))", json.dumps([deltas, INTERVAL]))
    faults = found.pop("faults")
    assert not faults and len(found["frame"]) == UPDATES, faults
    page.close()
    return Painted(**found)


def opening_bytes() -> dict[str, int]:
    """Bytes of the message that opens a widget of each class."""
    kinds = [kind for kind in vars(dashboard).values() if isinstance(kind, type) and issubclass(kind, Widget)]
    states = {kind.__name__: kind().get_state() for kind in kinds if kind is not Widget}
    return {name: len(json.dumps(state, default=repr).encode()) for name, state in states.items()}


# ---- what is said -------------------------------------------------------------------------------


def summary(times: list[float]) -> dict[str, float]:
    found = {"p50": percentile(times, 0.5), "p95": percentile(times, 0.95), "max": max(times)}
    return {name: round(value, 1) for name, value in found.items()}


def line(what: str, times: dict[str, float], aim: str = "") -> str:
    return f"  {what:<34}" + "".join(f"{value:>8.1f}" for value in times.values()) + f"  {aim}"


def report(painted: Painted) -> str:
    following = summary(painted.following)
    aim = f"aim: p95 <= {LATEST:.0f}: {'met' if following['p95'] <= LATEST else 'MISSED'}"
    return "\n".join(
        [
            f"{painted.maps} maps of {SIDE} x {SIDE}, {painted.cells:,} cells, {UPDATES} updates; ms:"
            "       p50     p95     max",
            line("due to end of the frame", summary(painted.frame)),
            line("due to beginning of the next one", following, aim if painted.maps == 8 else ""),
            line("the panels' drawing", summary(painted.script)),
            f"  long tasks: {len(painted.long_tasks)}, {sum(painted.long_tasks):.0f} ms in all",
            f"  on screen: {', '.join(painted.panels)}",
        ]
    )


def result(painted: Painted) -> dict[str, Any]:
    """As the file has it: summaries beside single times."""
    plain = asdict(painted)
    times = {name: plain.pop(name) for name in ("frame", "following", "script", "long_tasks")}
    summaries = {name: summary(times[name]) for name in ("frame", "following", "script")}
    long = {"long_tasks": len(painted.long_tasks), "long_tasks_ms": round(sum(painted.long_tasks), 1)}
    return {**plain, **summaries, **long, "following_ms": [round(time, 1) for time in painted.following]}


def main() -> None:
    parser = argparse.ArgumentParser(description="How late a browser shows what happens.")
    parser.add_argument("--keep", action="store_true", help=f"write {FILE.name}")
    keep = parser.parse_args().keep
    if not CHROMIUM.exists():
        raise SystemExit(f"skipped: no browser at {CHROMIUM}; on Debian: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    about = describe()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        about["versions"] |= {"chromium": browser.version, "playwright": version("playwright")}
        size: Any = {"width": WIDTH, "height": TALL}
        runs = [measure(browser.new_page(viewport=size), heads) for heads in (2, 8)]
        browser.close()
    sizes = opening_bytes()
    print("\n".join(map(report, runs)))
    met = "met" if max(sizes.values()) < LARGEST else "MISSED"
    print(f"bytes that open a widget (aim: < {LARGEST:,}: {met})")
    print("\n".join(f"  {name:<34}{number:>8,}" for name, number in sizes.items()))
    if keep:
        found = {"machine": about, "painting": [result(run) for run in runs], "opening_bytes": sizes}
        FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
