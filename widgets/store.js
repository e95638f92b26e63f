// The recording as a page has it: records in order, the live state, and the state at any step.
//
// Knows records and the reducer; no DOM, no messages. Scrubbing back replays from the nearest checkpoint.

import { apply, cloneState, emptyState } from "./reducer.js";

const CHECKPOINT = 512; // records from one kept state to the next
const KEPT = 120000; // records; beyond this the oldest are forgotten, as the kernel forgets them

export class Store {
  constructor(checkpoint = CHECKPOINT) {
    this.checkpoint = checkpoint;
    this.listeners = new Set();
    this.meta = { name: "", model: "" };
    this.reset(0, emptyState());
  }

  /** Start anew with the state before record `first`. */
  reset(first, base, meta) {
    if (meta) this.meta = meta;
    this.first = first;
    this.records = [];
    this.live = cloneState(base);
    this.checkpoints = [{ next: first, state: cloneState(base) }];
    this.steps = []; // {n, at: number of its record, record}
    this.requests = new Map(Object.values(base.requests).map((r) => [r.r, r]));
    this.names = new Map(Object.values(base.blocks).map((b) => [b.id, b.name]));
    this.byType = new Map(); // records that do not change the state, by type
    this.cursor = null; // step that is shown; null: live
    this._shown = null;
  }

  get next() {
    return this.first + this.records.length;
  }

  /** Add records from number `first` on. Those that are here already are skipped; false if some lack. */
  add(first, records) {
    if (first > this.next) return false;
    for (const record of records.slice(this.next - first)) this._push(record);
    if (this.records.length > KEPT) this._forget();
    this.changed();
    return true;
  }

  _push(record) {
    const number = this.next;
    this.records.push(record);
    if (record.t === "step") this.steps.push({ n: record.n, at: number, record });
    else if (record.t === "request") this.requests.set(record.r, record);
    else if (record.t === "block") this.names.set(record.id, record.name);
    else if (!STATE_TYPES.has(record.t)) {
      if (!this.byType.has(record.t)) this.byType.set(record.t, []);
      this.byType.get(record.t).push(record);
    }
    apply(this.live, record);
    if (this.next % this.checkpoint === 0) this.checkpoints.push({ next: this.next, state: cloneState(this.live) });
  }

  _forget() {
    const keep = this.checkpoints.findIndex((one) => one.next >= this.next - KEPT * 0.8);
    this.checkpoints.splice(0, keep);
    const dropped = this.checkpoints[0].next - this.first;
    this.records.splice(0, dropped);
    this.first += dropped;
    this.steps = this.steps.filter((step) => step.at >= this.first);
  }

  /** Records of a type that does not change the state (shares, norms, …), oldest first. */
  readings(type) {
    return this.byType.get(type) || [];
  }

  /** The step with number `n`, or undefined. A failed step may share its number: the last one counts. */
  step(n) {
    let [low, high] = [0, this.steps.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.steps[middle].n <= n) low = middle + 1;
      else high = middle;
    }
    const found = this.steps[low - 1];
    return found && found.n === n ? found : undefined;
  }

  /** Show step `n` from now on; null: live. */
  show(n) {
    this.cursor = n;
    this.changed();
  }

  /** The state to draw: live, or just after the shown step. */
  get state() {
    const step = this.cursor === null ? null : this.step(this.cursor);
    if (!step) return this.live;
    if (!this._shown || this._shown.at !== step.at) this._shown = { at: step.at, state: this.stateBefore(step.at + 1) };
    return this._shown.state;
  }

  /** The state before record number `next`. */
  stateBefore(next) {
    let from = this.checkpoints[0];
    for (const one of this.checkpoints) if (one.next <= next) from = one;
    const state = cloneState(from.state);
    for (let i = from.next; i < next; i++) apply(state, this.records[i - this.first]);
    return state;
  }

  nameOf(id) {
    return this.names.get(id) ?? `block ${id}`;
  }

  changed() {
    for (const listener of this.listeners) listener();
  }
}

const STATE_TYPES = new Set([
  "block", "change", "free", "begin", "end", "request", "token", "stream", "ended", "task", "step",
  "pause", "resume", "speed", "close", "mark", "agent", "tool",
]);
