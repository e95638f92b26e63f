// The connection of one page to the kernel: snapshot, deltas, acknowledgement, controls, and who is alive.
//
// Knows the messages of protocol.js and a model with on, send and get. No DOM.

import { withBytes } from "./protocol.js";

const PING = 2000; // ms of silence before the kernel is asked
const GONE = 5000; // ms without an answer until that is said

export class Link {
  constructor(model, store) {
    Object.assign(this, { model, store, client: Math.random().toString(36).slice(2, 10) });
    this.choices = { ...(model.get("choices") || {}) };
    this.listeners = new Set(); // of status and answers
    this.controls = []; // {id, command, status: queued | done | failed, text}
    this.errors = []; // of callbacks in the kernel
    this.status = "connecting"; // connecting, live, busy, silent, disconnected
    this._count = this._said = 0;
    this._questions = new Map(); // id -> resolve
    this._shown = new Map(); // view -> names of its panels on screen
    this._heard = this._asked = Date.now();
    this._complete = false; // is the snapshot here whole?
    this._lacks = false; // did a delta come that does not join on?
    this._onMessage = (message, buffers) => this._receive(message, buffers || []);
    model.on("msg:custom", this._onMessage);
    this._timer = setInterval(() => this._watch(), 500);
    this.ready();
  }

  close() {
    clearInterval(this._timer);
    this.model.off("msg:custom", this._onMessage);
  }

  ready() {
    this._complete = this._lacks = false;
    this._asked = Date.now();
    this._send({ type: "ready" });
    this._tellVisible();
  }

  /** Ask for something; it shows as queued at once. Returns its entry in `controls`. */
  control(command, more = {}) {
    const entry = { id: ++this._count, command, status: "queued", text: "", asked: Date.now() };
    this.controls = [...this.controls.slice(-19), entry];
    this._send({ type: "control", id: entry.id, command, ...more });
    this._tell();
    return entry;
  }

  /** Ask for a reading that the recording does not have. -> a promise of its record, or null. */
  read(question) {
    const id = ++this._count;
    this._send({ type: "read", id, ...question });
    return new Promise((resolve) => this._questions.set(id, resolve));
  }

  /** Remember a choice of the person's (zoom, pin, typed text), for other views and the next page. */
  choose(key, value) {
    if (JSON.stringify(this.choices[key]) === JSON.stringify(value)) return;
    this.choices[key] = value;
    clearTimeout(this._saving);
    this._saving = setTimeout(() => this._send({ type: "choose", choices: this.choices }), 300);
  }

  /** A view tells which of its panels are on screen; null: it is gone. */
  visible(view, panels) {
    if (panels === null) this._shown.delete(view);
    else this._shown.set(view, panels);
    this._tellVisible();
  }

  _tellVisible() {
    const panels = [...new Set([].concat(...this._shown.values()))].sort();
    this._send({ type: "visible", visible: panels.length > 0, panels });
  }

  _send(message) {
    try {
      this.model.send({ ...message, client: this.client, said: ++this._said });
    } catch (error) {
      this._setStatus("disconnected"); // the comm is closed
    }
  }

  _receive(message, buffers) {
    this._heard = Date.now();
    if (this.status !== "live") this._setStatus("live");
    if (message.type === "snapshot") this._snapshot(message, buffers);
    else if (message.type === "delta") this._delta(message, buffers);
    else if (message.type === "answer" && message.client === this.client) this._answer(message);
    else if (message.type === "who" && message.client === this.client) this._tellVisible();
    else if (message.type === "reading" && message.client === this.client) this._reading(message, buffers);
    else if (message.type === "error") {
      this.errors = [...this.errors.slice(-4), message.text];
      this._tell();
    }
  }

  _snapshot(message, buffers) {
    if (message.client !== this.client) return; // for another page
    if (message.part === 0) this.store.reset(message.first, message.base, message.meta);
    this.store.add(message.first, withBytes(message.records, buffers));
    this._complete = message.part === message.parts - 1;
    if (this._complete) this._acknowledge();
  }

  _delta(message, buffers) {
    if (!this._complete) return; // the snapshot on its way has it, or its last part does
    if (this.store.add(message.first, withBytes(message.records, buffers))) this._acknowledge();
    else this._lacks = true; // something was lost
    this._repair();
  }

  /** Ask anew for what was lost, but not at every message that comes meanwhile. */
  _repair() {
    if (this._lacks && Date.now() > this._asked + 1000) this.ready();
  }

  _acknowledge() {
    this._send({ type: "ack", next: this.store.next });
  }

  _reading(message, buffers) {
    const [record] = withBytes(message.records, buffers);
    this._questions.get(message.id)?.(record ?? null);
    this._questions.delete(message.id);
  }

  _answer(message) {
    const entry = this.controls.find((one) => one.id === message.id);
    if (entry) Object.assign(entry, { status: message.ok ? "done" : "failed", text: message.text || "" });
    this._tell();
  }

  /** The kernel's own word for how it is, where the host tells it; else undefined. */
  get kernelStatus() {
    const kernel = this.model.widget_manager?.kernel;
    if (!kernel) return undefined;
    if (kernel.isDisposed) return "dead";
    return kernel.connectionStatus === "disconnected" ? "dead" : kernel.status;
  }

  _watch() {
    if (this.status === "disconnected") return;
    const kernel = this.kernelStatus;
    if (["dead", "terminating", "restarting", "autorestarting"].includes(kernel)) return this._setStatus("disconnected");
    if (this.controls.some((entry) => entry.status === "queued")) this._tell(); // says why after a while
    this._repair();
    const silent = Date.now() - this._heard;
    if (silent > PING && this._shown.size && Date.now() - this._asked > PING) {
      this._asked = Date.now();
      this._send({ type: "ping", next: this.store.next });
      if (!this._complete) this.ready();
    }
    // A host that knows its kernel says when it dies. It may call it idle while a cell computes.
    if (silent > GONE && this._shown.size) this._setStatus(kernel === undefined ? "silent" : "busy");
  }

  _setStatus(status) {
    if (this.status === status) return;
    this.status = status;
    this._tell();
  }

  /** The kernel asks for another pin than the one that the person has chosen. */
  pinned(edge) {
    this.choices.pin = edge;
    this._tell("pin");
  }

  _tell(what) {
    for (const listener of this.listeners) listener(what);
  }
}

export const STATUS_TEXT = {
  connecting: "waiting for the kernel",
  live: "live",
  busy: "busy: no answer until the running cell gives way",
  silent: "5 s without an answer: busy or gone",
  disconnected: "disconnected: the kernel is gone or was restarted",
};
