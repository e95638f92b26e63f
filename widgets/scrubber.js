// Scrubber: go back to any recorded step, mark it, return to live. Knows the store's cursor.

import { count, h, setText } from "./palette.js";
import { PANELS } from "./shell.js";

const PLAY = 100; // ms from one step to the next while a replay moves

function indexOf(store) {
  if (store.cursor === null) return store.steps.length - 1;
  const found = store.steps.findIndex((step) => step.n >= store.cursor);
  return found < 0 ? store.steps.length - 1 : found;
}

function go(ctx, index) {
  const { steps } = ctx.store;
  if (!steps.length) return;
  ctx.show(steps[Math.max(0, Math.min(steps.length - 1, index))].n);
}

function play(ctx) {
  const { local, store } = ctx;
  if (local.playing) {
    clearInterval(local.playing);
    local.playing = null;
    return ctx.redraw();
  }
  if (store.cursor === null || indexOf(store) === store.steps.length - 1) go(ctx, 0);
  local.playing = setInterval(() => {
    const next = indexOf(store) + 1;
    if (next >= store.steps.length) play(ctx);
    else go(ctx, next);
  }, PLAY);
  ctx.redraw();
}

PANELS.push({
  name: "scrubber",
  title: "Scrubber",
  mount(el, ctx) {
    const { local, link } = ctx;
    const button = (label, words, action) => h("button", { type: "button", "aria-label": words, title: words, onclick: action }, label);
    local.slider = h("input", { type: "range", min: "0", max: "0", "aria-label": "Step", oninput: () => go(ctx, Number(local.slider.value)) });
    local.where = h("span", { class: "allm-muted" });
    local.live = button("Live", "Return to live", () => ctx.show(null));
    local.play = button("▶", "Play the recording", () => play(ctx));
    local.mark = button("Mark", "Mark this step: keep all its readings", () => link.control("mark", { step: ctx.store.state.step }));
    local.mark.hidden = !link;
    local.close = () => clearInterval(local.playing);
    el.append(h("div", { class: "allm-line" },
      button("▮◀", "First step", () => go(ctx, 0)), button("◀▮", "One step back", () => go(ctx, indexOf(ctx.store) - 1)), local.play,
      button("▶▮", "One step on", () => go(ctx, indexOf(ctx.store) + 1)), local.slider, local.live, local.mark, local.where));
  },
  draw(state, ctx) {
    const { local, store } = ctx;
    if (store.meta.replay && !local.started && store.steps.length && store.next >= store.meta.records) {
      local.started = true;
      if (store.cursor === null) play(ctx);
    }
    const last = Math.max(0, store.steps.length - 1);
    local.slider.max = String(last);
    local.slider.value = String(Math.max(0, indexOf(store)));
    local.live.setAttribute("aria-pressed", String(store.cursor === null));
    local.live.disabled = store.cursor === null;
    setText(local.play, local.playing ? "▮▮" : "▶");
    setText(local.where, this.summary(state, ctx));
    local.slider.setAttribute("aria-valuetext", this.summary(state, ctx));
  },
  summary(state, ctx) {
    const { store } = ctx;
    const marks = state.marks.length ? `, marked: ${state.marks.map((one) => one.n).join(", ")}` : "";
    const where = store.cursor === null ? "live" : `step ${store.cursor} at ${state.at.toFixed(1)} s`;
    return `${where}, ${count(store.steps.length)} steps recorded${marks}`;
  },
  table(state) {
    return { columns: ["marked step", "note"], rows: state.marks.map((one) => [one.n, one.note]) };
  },
});
