// Views: for each coroutine the blocks that it reads, in order, growing as they grow; the written one outlined.

import { blockColour, blockMark, count, fit, h, tail } from "./palette.js";
import { PANELS } from "./shell.js";

const VIEW_ROW = 24;
const VIEW_LABEL = 120;
const VIEW_ROWS = 48; // with a row of their own; the table has all

/** The newest stream of each coroutine, and other requests that run: [{name, request, parts: [{id, n, written}]}]. */
export function viewsOf(state) {
  const newest = new Map();
  for (const request of Object.values(state.requests)) {
    const key = request.kind === "stream" && request.task ? `t${request.task}` : `r${request.r}`;
    const known = newest.get(key);
    if (!known || request.begun >= known.begun) newest.set(key, request);
  }
  return [...newest.values()].map((request) => ({
    name: request.name, request,
    parts: request.view.filter((id) => state.blocks[id]).map((id) => ({ id, n: state.blocks[id].n, written: id === request.block })),
  }));
}

const lengthOf = (view) => view.parts.reduce((sum, part) => sum + part.n, 0);

function paintView(context, view, y, width, scale, theme, store) {
  const ended = view.request.state === "ended";
  context.globalAlpha = ended ? 0.5 : 1;
  context.fillStyle = theme.text;
  context.fillText(tail(view.name, 16), 0, y + 15);
  let x = VIEW_LABEL;
  for (const part of view.parts) {
    const w = Math.max(3, part.n * scale);
    context.fillStyle = blockColour(part.id);
    context.fillRect(x, y + 3, w - 1, VIEW_ROW - 8);
    if (part.written) {
      context.strokeStyle = theme.text;
      context.lineWidth = 2;
      context.strokeRect(x + 1, y + 4, Math.max(2, w - 3), VIEW_ROW - 10);
    }
    const label = `${blockMark(part.id)} ${store.nameOf(part.id)} ${part.n}`;
    if (context.measureText(label).width < w - 8) {
      context.fillStyle = ended ? theme.text : "#fff";
      context.fillText(label, x + 5, y + 15);
    }
    x += w;
  }
  context.globalAlpha = 1;
}

PANELS.push({
  name: "views",
  title: "Views",
  picture: true,
  mount(el, ctx) {
    ctx.local.canvas = h("canvas");
    el.append(ctx.local.canvas);
  },
  draw(state, ctx) {
    const views = viewsOf(state).slice(0, VIEW_ROWS);
    const width = ctx.width();
    const context = fit(ctx.local.canvas, width, Math.max(1, views.length) * VIEW_ROW);
    context.font = "12px system-ui, sans-serif";
    const theme = ctx.theme();
    const scale = (width - VIEW_LABEL) / Math.max(32, ...views.map(lengthOf));
    if (!views.length) {
      context.fillStyle = theme.muted;
      context.fillText("Nobody reads anything yet.", 0, 15);
    }
    views.forEach((view, index) => paintView(context, view, index * VIEW_ROW, width, scale, theme, ctx.store));
  },
  summary(state, ctx) {
    const words = viewsOf(state).map((view) => `${view.name} reads ${view.parts.map((p) => `${ctx.store.nameOf(p.id)} (${p.n}${p.written ? ", written" : ""})`).join(", ") || "nothing"}`);
    return words.join("; ") || "no views yet";
  },
  table(state, ctx) {
    return {
      columns: ["who", "state", "reads, in order (tokens)", "tokens in all"],
      rows: viewsOf(state).map((view) => [view.name, view.request.state, view.parts.map((p) => `${ctx.store.nameOf(p.id)} (${count(p.n)})${p.written ? " ✎" : ""}`).join(" → "), count(lengthOf(view))]),
    };
  },
});
