// Ledger: tokens encoded, tokens that passing text instead would have encoded, passes, tokens per second.
//
// The two totals are counted in the kernel (engine/ledger.py says how) and stand in each step.

import { count, h, setText } from "./palette.js";
import { PANELS } from "./shell.js";

const WINDOW = 32; // steps over which tokens per second are measured

/** Tokens per second over the last steps before and at the state's own. */
export function rate(store, state) {
  const end = store.cursor === null ? store.steps.length : store.steps.findIndex((one) => one.n > state.step);
  const last = store.steps.slice(Math.max(0, (end < 0 ? store.steps.length : end) - WINDOW), end < 0 ? undefined : end);
  if (last.length < 2) return 0;
  const tokens = last.slice(1).reduce((sum, one) => sum + one.record.rows.reduce((n, row) => n + row.n, 0), 0);
  return tokens / Math.max(1e-6, last.at(-1).record.at - last[0].record.at);
}

function ratio(state) {
  const value = state.encoded ? state.resent / state.encoded : 1;
  return `${value < 10 ? value.toFixed(1) : Math.round(value)}×`;
}

PANELS.push({
  name: "ledger",
  title: "Ledger",
  picture: true,
  mount(el, ctx) {
    ctx.local.big = h("span", { class: "allm-big" });
    ctx.local.small = h("span", { class: "allm-muted" });
    el.append(h("div", { class: "allm-facts" }, ctx.local.big, ctx.local.small));
  },
  draw(state, ctx) {
    setText(ctx.local.big, `${count(state.encoded)} · ${count(state.resent)} · ${ratio(state)}`);
    setText(ctx.local.small, `tokens encoded · if text were passed instead · ratio — ${count(state.passes)} forward passes, ${count(rate(ctx.store, state))} tokens/s`);
  },
  summary(state, ctx) {
    return `${count(state.encoded)} tokens encoded; passing text instead would have encoded ${count(state.resent)}, ${ratio(state)}; ${count(state.passes)} forward passes; ${count(rate(ctx.store, state))} tokens per second`;
  },
  table(state, ctx) {
    return {
      columns: ["what", "number"],
      rows: [
        ["tokens encoded", count(state.encoded)], ["tokens if text were passed", count(state.resent)], ["ratio", ratio(state)],
        ["forward passes", count(state.passes)], ["seconds in forward passes", state.seconds.toFixed(2)], ["tokens per second", count(rate(ctx.store, state))],
      ],
    };
  },
});
