// Controls: run, pause, step, speed; cancel a coroutine; put a message into a block. Knows the link.
//
// A button acts by a message to the kernel. It shows as queued at once, and what became of it when the
// kernel answers. In a replay there is nothing to control, and the panel says so.

import { h, setText } from "./palette.js";
import { PANELS } from "./shell.js";

const SPEEDS = [[0, "full speed"], [0.1, "10 steps/s"], [0.25, "4 steps/s"], [1, "1 step/s"], [3, "1 step in 3 s"]];

const LATE = 1500; // ms until it is said why a control may have to wait

/** A button that acts in the kernel; `words` say what it does to whom. */
export const controlButton = (label, words, action, name) =>
  h("button", { type: "button", "data-command": name, title: words, "aria-label": words, onclick: action }, label);

function say(ctx) {
  const { local, link } = ctx;
  const text = local.text.value;
  if (!text || !local.block.value) return;
  link.control("say", { block: Number(local.block.value), text });
  local.text.value = "";
  ctx.choose("text", "");
}

/** Options of a select, kept in step with a list of [value, label]; the choice stays if it is still there. */
function fillSelect(select, options) {
  const key = JSON.stringify(options);
  if (select.dataset.key === key) return;
  const chosen = select.value;
  select.dataset.key = key;
  select.replaceChildren(...options.map(([value, label]) => h("option", { value }, label)));
  if (options.some(([value]) => String(value) === chosen)) select.value = chosen;
}

function drawCancel(state, ctx) {
  const running = Object.values(state.tasks).filter((task) => ["running", "waiting"].includes(task.state));
  const key = running.map((task) => `${task.k} ${task.name}`).join();
  if (ctx.local.cancelKey === key) return;
  ctx.local.cancelKey = key;
  ctx.local.cancel.replaceChildren(h("span", { class: "allm-muted" }, running.length ? "Cancel:" : "No coroutine runs."),
    ...running.map((task) => controlButton(task.name, `Cancel coroutine ${task.name}`, () => ctx.link.control("cancel", { task: task.k }), "cancel")));
}

/** What became of a control: queued, done, or failed and why. */
export const controlWords = (entry, label = entry.command) => `${label}: ${entry.status}${entry.text ? `, ${entry.text}` : ""}`;

/** Why a control may have to wait, once one has waited for long; else "". */
export function lateWords({ link, store }) {
  const late = link?.controls.filter((entry) => entry.status === "queued" && Date.now() - entry.asked > LATE) ?? [];
  if (!late.length) return "";
  const waits = store.live.paused && late.every((entry) => entry.command === "say"); // to be encoded, in a step
  return `Still queued. ${waits ? "A message is written at the next step: press Run or Step." : store.meta.kernel_note || ""}`;
}

/** Keys pressed inside of an element are its own: the notebook has keys, too. */
export function keepKeys(el) {
  for (const type of ["keydown", "keypress", "keyup"]) el.addEventListener(type, (event) => event.stopPropagation());
}

PANELS.push({
  name: "controls",
  title: "Controls",
  mount(el, ctx) {
    const { local, link } = ctx;
    if (!link) return el.append(h("p", { class: "allm-muted" }, "A recording: there is nothing to control."));
    local.run = controlButton("▶ Run", "Run", () => link.control("run"), "run");
    local.pause = controlButton("▮▮ Pause", "Pause after the step that runs", () => link.control("pause"), "pause");
    local.step = controlButton("▶▮ Step", "Pause, and make one step", () => link.control("step", { n: 1 }), "step");
    local.speed = h("select", { "aria-label": "Speed", "data-command": "speed", onchange: () => link.control("speed", { interval: Number(local.speed.value) }) },
      SPEEDS.map(([interval, label]) => h("option", { value: interval }, label)));
    local.block = h("select", { "aria-label": "Block that gets the message", onchange: () => ctx.choose("block", local.block.value) });
    local.text = h("input", { type: "text", "aria-label": "Message", placeholder: "A message for the block (markers stay plain text)", oninput: () => ctx.choose("text", local.text.value) });
    local.text.value = ctx.choice("text", "");
    keepKeys(el);
    local.text.addEventListener("keydown", (event) => event.key === "Enter" && say(ctx));
    local.say = controlButton("Say", "Put the message into the block", () => say(ctx), "say");
    local.cancel = h("div", { class: "allm-line", "data-cancel": "" });
    local.note = h("div", { class: "allm-muted", role: "status", "data-note": "", hidden: true });
    local.log = h("div", { class: "allm-muted", role: "status", "data-answers": "" });
    el.append(h("div", { class: "allm-line" }, local.run, local.pause, local.step, local.speed), local.cancel,
      h("div", { class: "allm-line" }, local.text, local.block, local.say), local.log, local.note);
  },
  draw(shown, ctx) {
    const { local, link } = ctx;
    if (!link) return;
    const state = ctx.store.live; // controls act on what runs now, whatever moment is shown
    const dead = state.closed || link.status === "disconnected";
    for (const control of [local.run, local.pause, local.step, local.speed, local.say]) control.disabled = dead;
    local.run.setAttribute("aria-pressed", String(!state.paused));
    local.pause.setAttribute("aria-pressed", String(state.paused));
    if (document.activeElement !== local.speed && SPEEDS.some(([interval]) => interval === state.interval)) local.speed.value = String(state.interval);
    fillSelect(local.block, Object.values(state.blocks).map((block) => [block.id, block.name]));
    const chosen = ctx.choice("block", "");
    if (chosen && state.blocks[chosen] && local.block.value !== chosen) local.block.value = chosen;
    drawCancel(state, ctx);
    setText(local.log, link.controls.slice(-3).map((entry) => controlWords(entry)).join(" · "));
    setText(local.note, lateWords(ctx));
    local.note.hidden = !local.note.textContent;
    local.log.dataset.queued = link.controls.filter((entry) => entry.status === "queued").length;
  },
  summary(state, ctx) {
    if (!ctx.link) return "a recording: nothing to control";
    return ctx.store.live.closed ? "the engine is closed" : ctx.store.live.paused ? "paused" : "running";
  },
  table(state, ctx) {
    const rows = (ctx.link?.controls ?? []).map((entry) => [entry.command, entry.status, entry.text]);
    return { columns: ["asked for", "state", "answer"], rows };
  },
});
