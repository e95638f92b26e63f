// Streams: the text of each coroutine as it comes, and what the coroutine does now. Knows the state.

import { blockColour, blockLabel, h, setText, tail } from "./palette.js";
import { PANELS } from "./shell.js";

const SHOWN = 4000; // characters of a coroutine's text that are kept in the page
export const SIGNS = { running: "▶", waiting: "◷", queued: "…", memory: "▦", done: "✓", failed: "✗", cancelled: "⊘", idle: "·" };

/** Coroutines in order, each with its streams: {key, name, state, line, error, streams}. */
export function coroutines(state) {
  const groups = new Map();
  for (const task of Object.values(state.tasks)) groups.set(`t${task.k}`, { key: `t${task.k}`, k: task.k, ...task, streams: [] });
  for (const stream of Object.values(state.requests)) {
    if (stream.kind !== "stream") continue;
    const key = groups.has(`t${stream.task}`) ? `t${stream.task}` : `s${stream.r}`;
    if (!groups.has(key)) groups.set(key, { key, k: 0, name: stream.name, state: "", line: "", error: "", streams: [] });
    groups.get(key).streams.push(stream);
  }
  return [...groups.values()].map(withState);
}

/** What it does in one word, from its task and its newest stream. */
function withState(group) {
  const stream = group.streams.at(-1);
  const open = group.streams.filter((one) => one.state !== "ended");
  const failed = [...group.streams].reverse().find((one) => one.error);
  let state = group.state;
  if (!state) state = stream.state === "ended" ? (stream.reason === "error" ? "failed" : "done") : "running";
  if (state === "running" && open.some((one) => one.state === "waiting")) state = "memory";
  else if (state === "running" && open.length && open.every((one) => one.state === "queued")) state = "queued";
  return { ...group, state, error: group.error || (state !== "done" && failed ? failed.error : "") };
}

export function stateWords({ state, line, error }) {
  const words = { memory: "waiting for memory", queued: "queued" }[state] || state;
  if (state === "failed") return `failed: ${error || "see its cell"}`;
  return line && state === "waiting" ? `waiting at ${line}` : words;
}

/** Runs of its text, the newest SHOWN characters: {kind: input or output, text}. */
function runsOf(group) {
  const runs = [];
  let left = SHOWN;
  for (const stream of [...group.streams].reverse()) {
    for (const [kind, text] of [["output", stream.text], ["input", stream.input.join("")]]) {
      if (!text || left <= 0) continue;
      runs.unshift({ kind, text: tail(text, left), r: stream.r });
      left -= text.length;
    }
  }
  return runs;
}

function makeCard(key) {
  const card = {
    name: h("strong"), badge: h("span", { class: "allm-badge" }), block: h("span"),
    text: h("pre", { class: "allm-text", tabindex: "0" }), error: h("div", { class: "allm-error", hidden: true }), spans: [],
  };
  card.el = h("article", { class: "allm-card", "data-key": key }, h("div", {}, card.name, " ", card.badge, " ", card.block), card.text, card.error);
  return card;
}

function drawCard(card, group, ctx) {
  setText(card.name, group.name);
  setText(card.badge, `${SIGNS[group.state] || "·"} ${group.state === "failed" ? "failed" : stateWords(group)}`);
  card.badge.dataset.state = group.state;
  const stream = group.streams.at(-1);
  const written = stream ? stream.block : null;
  if (card.written !== written) {
    card.written = written;
    card.block.replaceChildren(...(written === null ? [] : ["writes ", blockLabel(written, ctx.store.nameOf(written))]));
    card.el.style.borderLeftColor = written === null ? "" : blockColour(written);
  }
  setText(card.error, [group.error, group.state === "failed" && group.line].filter(Boolean).join("\n"));
  card.error.hidden = !group.error;
  const atEnd = card.text.scrollTop + card.text.clientHeight >= card.text.scrollHeight - 8;
  if (drawRuns(card, runsOf(group)) && atEnd) card.text.scrollTop = card.text.scrollHeight;
}

/** Text nodes are kept and grow in place: a selection in them stays. Returns whether anything changed. */
function drawRuns(card, runs) {
  let changed = false;
  runs.forEach((run, index) => {
    let span = card.spans[index];
    if (!span || span.kind !== run.kind) {
      card.spans.splice(index).forEach((old) => old.el.remove());
      span = card.spans[index] = { kind: run.kind, el: h("span", { class: `allm-${run.kind}` }), text: "" };
      card.text.append(span.el);
    }
    if (span.text === run.text) return;
    const grown = span.text && run.text.startsWith(span.text) && span.el.lastChild;
    if (grown) span.el.lastChild.appendData(run.text.slice(span.text.length));
    else setText(span.el, run.text);
    span.text = run.text;
    changed = true;
  });
  card.spans.splice(runs.length).forEach((old) => old.el.remove());
  return changed;
}

PANELS.push({
  name: "streams",
  title: "Streams",
  mount(el, ctx) {
    ctx.local.cards = new Map();
    ctx.local.empty = h("p", { class: "allm-muted" }, "No coroutine has read a stream yet.");
    ctx.local.list = h("div", { class: "allm-cards" });
    el.append(ctx.local.empty, ctx.local.list);
  },
  draw(state, ctx) {
    const { cards, list, empty } = ctx.local;
    const groups = coroutines(state);
    empty.hidden = groups.length > 0;
    for (const [key, card] of cards) {
      if (groups.some((group) => group.key === key)) continue;
      card.el.remove();
      cards.delete(key);
    }
    for (const group of groups) {
      if (!cards.has(group.key)) {
        cards.set(group.key, makeCard(group.key));
        list.append(cards.get(group.key).el);
      }
      drawCard(cards.get(group.key), group, ctx);
    }
  },
  summary(state) {
    const groups = coroutines(state);
    return groups.length ? groups.map((group) => `${group.name}: ${stateWords(group)}`).join("; ") : "no streams yet";
  },
  table(state, ctx) {
    const rows = coroutines(state).map((group) => {
      const stream = group.streams.at(-1);
      const tokens = group.streams.reduce((sum, one) => sum + one.tokens, 0);
      return [group.name, stateWords(group), stream ? ctx.store.nameOf(stream.block) : "", tokens, stream ? tail(stream.text, 200) : ""];
    });
    return { columns: ["coroutine", "state", "writes", "tokens", "end of its text"], rows };
  },
});
