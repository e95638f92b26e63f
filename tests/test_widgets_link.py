"""The browser's side of the connection, in node: what a page does with what it hears, or does not hear."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="needs node")

SETUP = """
const { Link } = await import("ROOT/widgets/link.js");
const { Store } = await import("ROOT/widgets/store.js");
const { emptyState } = await import("ROOT/widgets/reducer.js");
let now = 1000;
Date.now = () => now;
globalThis.setInterval = () => 0; // the test calls _watch itself
const said = [];
const kernel = { status: "idle", connectionStatus: "connected", isDisposed: false };
let hear;
const model = {
  widget_manager: { kernel },
  get: () => ({}), on: (_, f) => { hear = f; }, off: () => {}, send: (m) => said.push(m),
};
const store = new Store(), link = new Link(model, store), client = link.client;
const step = (n) => ({
  t: "step", at: n, n, s: 0, rows: [], wait: [], err: "", pages: 1, slots: 1, encoded: n, resent: n,
});
const snapshot = (first, records, more = {}) => hear({
  type: "snapshot", client, part: 0, parts: 1, first, records,
  base: emptyState(), meta: { name: "x" }, ...more,
});
const types = () => said.splice(0).map((m) => m.type);
const wait = (seconds) => { now += 1000 * seconds; link._watch(); };
const out = [];
"""


def in_node(script: str) -> list[Any]:
    """What the script pushed to `out`."""
    assert NODE is not None
    code = SETUP.replace("ROOT", str(ROOT)) + script + ";console.log(JSON.stringify(out)); process.exit(0)"
    done = subprocess.run(
        [NODE, "--input-type=module", "-e", code], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def test_a_page_asks_for_a_snapshot_and_acknowledges_what_it_has() -> None:
    found = in_node(
        """
        out.push(types());
        snapshot(4, [step(1)]);
        out.push(store.next, said.splice(0).map((m) => [m.type, m.next]), link.status);
        hear({ type: "delta", first: 5, records: [step(2), step(3)] });
        out.push(store.live.step, said.splice(0).map((m) => m.next));
        """
    )
    assert found == [["ready", "visible"], 5, [["ack", 5]], "live", 3, [7]]


def test_snapshots_of_others_and_deltas_too_early_change_nothing() -> None:
    found = in_node(
        """
        hear({ type: "delta", first: 0, records: [step(1)] });
        snapshot(0, [step(9)], { client: "other" });
        out.push(store.next, types().includes("ack"));
        snapshot(0, [step(1)], { parts: 2 });
        hear({ type: "delta", first: 2, records: [step(3)] });
        out.push(store.live.step, types().includes("ack"));
        hear({ type: "snapshot", client, part: 1, parts: 2, first: 1, records: [step(2)] });
        out.push(store.live.step);
        """
    )
    assert found == [0, False, 1, False, 2]


def test_a_gap_is_noticed_and_records_that_come_twice_are_skipped() -> None:
    found = in_node(
        """
        snapshot(0, [step(1), step(2)]);
        hear({ type: "delta", first: 1, records: [step(2), step(3)] });
        out.push(store.next, store.live.passes);
        types(); wait(2);
        hear({ type: "delta", first: 9, records: [step(10)] });
        out.push(types().includes("ready"), store.next);
        """
    )
    assert found == [3, 3, True, 3]


@pytest.mark.parametrize(
    ("kernel", "status"),
    [
        ('kernel.status = "busy"', "busy"),
        ('kernel.status = "idle"', "busy"),  # what a host may call a kernel that computes
        ("delete model.widget_manager", "silent"),
        ('kernel.status = "restarting"', "disconnected"),
        ('kernel.connectionStatus = "disconnected"', "disconnected"),
        ("kernel.isDisposed = true", "disconnected"),
    ],
)
def test_silence_is_named_within_5_seconds(kernel: str, status: str) -> None:
    found = in_node(
        f"""
        snapshot(0, []); link.visible("view", ["streams"]); types();
        wait(1); out.push(types());
        {kernel};
        wait(1.5); out.push(types());
        wait(1); wait(1); wait(0.6); out.push(link.status);
        hear({{ type: "pong" }}); out.push(link.status);
        """
    )
    pings = [] if status == "disconnected" else ["ping"]
    assert found == [[], pings, status, "live"]


def test_a_page_that_shows_nothing_asks_nothing() -> None:
    assert in_node("snapshot(0, []); types(); wait(9); out.push(types(), link.status)") == [[], "live"]


def test_controls_are_queued_then_done_or_failed() -> None:
    found = in_node(
        """
        snapshot(0, []); types();
        const a = link.control("pause"), b = link.control("say", { block: 2, text: "x" });
        out.push(a.status, said.map((m) => [m.command, m.id, m.block ?? null]));
        hear({ type: "answer", client: "other", id: 1, ok: true, text: "not mine" });
        hear({ type: "answer", client, id: 2, ok: false, text: "freed" });
        hear({ type: "answer", client, id: 1, ok: true, text: "paused" });
        out.push([a.status, a.text, b.status, b.text]);
        hear({ type: "error", text: "broken" });
        out.push(link.errors);
        hear({ type: "who", client });
        out.push(said.at(-1).type);
        """
    )
    assert found == [
        "queued",
        [["pause", 1, None], ["say", 2, 2]],
        ["done", "paused", "failed", "freed"],
        ["broken"],
        "visible",
    ]
