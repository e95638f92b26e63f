// Agents: their coroutines and tool calls, what each does now, and buttons that start, stop, restart, approve
// and deny. Knows the state (agents, calls, tasks) and the link.
//
// Rows are kept by key, so that focus and a typed reason survive what changes around them. Buttons act on
// what runs now: they rest while an earlier moment is shown, and a replay has none.

import { controlButton, controlWords, keepKeys, lateWords } from "./controls.js";
import { h, setText } from "./palette.js";
import { PANELS } from "./shell.js";
import { SIGNS, coroutines, stateWords } from "./streams.js";

const CALLS_ENDED = 6; // of an agent, the last ones; the table has all that are kept

const AGENT_WORDS = {
  new: "· not started", ending: "◐ told to stop", replacing: "◐ being replaced", stopped: "⊘ stopped", failed: "✗ failed",
  gate: "◷ waits for its gate", asking: "? waits for approval", denied: "⊘ denied", timeout: "✗ timed out",
};

const STARTS = ["new", "ending", "done", "failed", "stopped"]; // states in which a button can do something
const STOPS = ["running", "ending", "replacing"];
export const WAITS = ["gate", "asking"];
const AGENT_BUTTONS = {
  agent: [["start_agent", "Start all", STARTS], ["stop_agent", "Stop all", STOPS]],
  coroutine: [["start_agent", "Start", STARTS], ["stop_agent", "Stop", STOPS], ["restart_coroutine", "Restart", [...STARTS, ...STOPS]]],
  call: [["approve", "Approve", WAITS], ["deny", "Deny", WAITS]],
};

/** Sign and words of a state of a coroutine or call. */
export const agentWords = (state) => AGENT_WORDS[state] ?? `${SIGNS[state] ?? "⊘"} ${state}`;

/** What stands in the panel, top down: {key, kind, title, words, states, about, error, target}. */
function agentRows(state, ctx) {
  const tasks = new Map(coroutines(state).map((group) => [group.k, group]));
  const agents = Object.values(state.agents ?? {});
  const calls = Object.values(state.calls ?? {});
  const only = ctx.choice("agent", "");
  return [...new Set([...agents, ...calls].map((one) => one.a))].filter((a) => !only || a === only).flatMap((a) => {
    const rows = agents.filter((one) => one.a === a).map((one) => coroutineRow(one, tasks.get(one.k)));
    const mine = calls.filter((one) => one.a === a);
    const ended = mine.filter((one) => !WAITS.includes(one.state) && one.state !== "running");
    const old = ended.slice(0, -CALLS_ENDED);
    const states = rows.flatMap((row) => row.states);
    const head = { key: a, kind: "agent", title: a, words: agentWords(summaryState(states)), states, about: "", target: { agent: a } };
    return [head, ...rows, ...mine.filter((one) => !old.includes(one)).map(callRow)];
  });
}

/** The state of an agent, from those of its coroutines. */
function summaryState(states) {
  if (states.includes("replacing")) return "running";
  return ["running", "ending", "failed", "new", "stopped"].find((one) => states.includes(one)) ?? "done";
}

function coroutineRow({ a, name, state, version, k, error }, task) {
  const does = state === "running" && task ? `${SIGNS[task.state] ?? "▶"} ${stateWords(task)}` : agentWords(state);
  const at = state === "failed" && task?.line ? `\n${task.line}` : "";
  return { key: `${a}.${name}`, kind: "coroutine", title: name, words: does, states: [state], about: `v${version}`,
    error: error && error + at, turn: [state, version, k].join(), target: { agent: a, coroutine: name } };
}

function callRow({ a, c, name, by, args, state, reason }) {
  return { key: `${a}#${c}`, kind: "call", title: `${name}(${args})`, words: agentWords(state) + (reason && reason !== state ? `: ${reason}` : ""), states: [state],
    about: by && `by ${by}`, turn: state, target: { agent: a, call: c } };
}

function makeAgentRow({ kind, title, target }, ctx) {
  const row = { name: h(kind === "call" ? "code" : "strong"), badge: h("span", { class: "allm-badge" }), about: h("span", { class: "allm-numbers" }),
    note: h("span", { class: "allm-muted", role: "status" }), error: h("div", { class: "allm-error", role: "alert" }) };
  const press = (command, label) => {
    row.asked = { label, turn: row.turn, entry: ctx.link.control(command, { ...target, reason: row.reason?.value }) };
  };
  row.buttons = AGENT_BUTTONS[kind].map(([command, label, states]) => [controlButton(label, `${label} ${title}`, () => press(command, label), command), states]);
  if (kind === "call") {
    row.reason = h("input", { type: "text", "aria-label": `Reason to deny ${title}`, placeholder: "why not (optional)" });
    row.reason.addEventListener("keydown", (event) => event.key === "Enter" && !row.decided && press("deny", "Deny"));
  }
  row.el = h("div", { class: "allm-line", "data-kind": kind, role: "group", "aria-label": title },
    row.name, " ", row.badge, " ", row.about, " ", row.buttons.map(([button]) => button), row.reason, row.note, row.error);
  return row;
}

function drawAgentRow(row, one, ctx, past) {
  const { link, store } = ctx;
  row.turn = one.turn;
  setText(row.name, one.title);
  setText(row.badge, one.words);
  row.badge.dataset.state = one.states.length === 1 ? one.states[0] : "";
  setText(row.about, one.about);
  setText(row.error, one.error || "");
  row.error.hidden = !one.error;
  const { entry, label, turn } = row.asked ?? {};
  const shown = entry && (entry.status === "queued" || turn === one.turn);
  setText(row.note, shown ? controlWords(entry, label) : "");
  row.decided = entry?.status === "queued" || (one.kind === "call" && entry?.status === "done");
  const dead = past || store.live.closed || link?.status === "disconnected";
  const waits = one.kind !== "call" || WAITS.includes(one.states[0]);
  for (const [button, states] of row.buttons) {
    button.hidden = !link || !waits;
    button.disabled = dead || row.decided || !one.states.some((state) => states.includes(state));
  }
  if (row.reason) row.reason.hidden = !link || !waits;
}

PANELS.push({
  name: "agents",
  title: "Agents",
  mount(el, ctx) {
    ctx.local.rows = new Map();
    ctx.local.list = h("div");
    ctx.local.note = h("div", { class: "allm-muted", role: "status" });
    keepKeys(el);
    el.append(ctx.local.list, ctx.local.note);
  },
  draw(state, ctx) {
    const { rows, list, note } = ctx.local;
    const wanted = agentRows(state, ctx);
    for (const [key, row] of rows) {
      if (wanted.some((one) => one.key === key)) continue;
      row.el.remove();
      rows.delete(key);
    }
    wanted.forEach((one, index) => {
      if (!rows.has(one.key)) rows.set(one.key, makeAgentRow(one, ctx));
      const row = rows.get(one.key);
      if (list.children[index] !== row.el) list.insertBefore(row.el, list.children[index] ?? null);
      drawAgentRow(row, one, ctx, state !== ctx.store.live);
    });
    setText(note, wanted.length ? lateWords(ctx) : "No agent has been made yet.");
  },
  summary(state, ctx) {
    return agentRows(state, ctx).map((one) => `${one.title}: ${one.words}`).join("; ") || "no agents yet";
  },
  table(state, ctx) {
    const rows = agentRows(state, ctx).map((one) => [one.target.agent, one.kind, one.title, one.words, one.about, one.error ?? ""]);
    return { columns: ["agent", "what", "name", "state", "code version, caller", "error"], rows };
  },
});
