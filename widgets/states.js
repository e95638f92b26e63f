// GDN states: the state of a coroutine's view in one layer, head by head, what each block has left in it, and
// how much of the past each block lets through. Knows "states" and "norms" (readings.js) and the state.

import { frameBox, makeSelect, paintHeat, signedRoot, strength } from "./heat.js";
import { blockColour, blockMark, fit, h, setText } from "./palette.js";
import { keptWords, range, readingOrAsk, readingsOf, requestsWith, unpackState, unpackTable } from "./readings.js";
import { PANELS } from "./shell.js";

const STATE_HEADS = 8; // shown at once
const STATE_SIDE = 128; // px of a map, at most
const STATE_LABEL = 92; // px at the left of the maps
const NORM_COLUMN = 4; // px of a step
const NORM_CELL = 8; // px of a head

/** What is shown now: {r, name, view, layers, layer, block, first (head)}; null without any reading. */
function lookUpState(state, ctx) {
  const { store } = ctx;
  const layers = store.meta.linear_layers || [];
  if (!layers.length) return null;
  const known = requestsWith(store, "norms").filter((r) => readingsOf(store, "norms", r, state.step, 1).length);
  const streams = Object.values(state.requests).filter((one) => one.kind === "stream").map((one) => one.r);
  const all = [...new Set([...known, ...streams])].filter((r) => store.requests.has(r));
  const wanted = Number(ctx.choice("request", 0));
  const r = all.includes(wanted) ? wanted : (all.findLast((one) => one > 0) ?? all.at(-1)); // > 0: a stream
  if (r === undefined) return null;
  const { name, view } = store.requests.get(r);
  const layer = layers.includes(Number(ctx.choice("layer", layers[0]))) ? Number(ctx.choice("layer", layers[0])) : layers[0];
  const block = Math.min(Number(ctx.choice("block", view.length - 1)), view.length - 1);
  return { r, all, name, view, layers, layer, block, first: Number(ctx.choice("first", 0)) };
}

/** The newest norms of the coroutine up to the step that is shown, unpacked: {n, at(block, head), heads}. */
function normsNow(found, state, ctx) {
  const last = readingsOf(ctx.store, "norms", found.r, state.step, 1).at(-1);
  if (!last) return null;
  const table = unpackTable(last.row);
  const layer = found.layers.indexOf(found.layer);
  return { n: last.n, heads: table.heads, at: (block, head) => table.at(layer, block, head) };
}

/** The size of what a block has left, against the largest: the root of the sum of squares. */
function sizesOf(row) {
  const [blocks, heads] = row.shape;
  const size = (block) => Math.sqrt(range(heads).reduce((sum, head) =>
    sum + row.peak[head] ** 2 * unpackState(row, block, head).reduce((a, x) => a + x * x, 0), 0));
  return range(blocks).map(size);
}

function drawStateChoices(found, heads, ctx) {
  const { local, store } = ctx;
  local.request.set(found.all.slice(-60).map((r) => [String(r), store.requests.get(r).name]), found.r);
  local.layer.set(found.layers.map((layer) => [String(layer), String(layer)]), found.layer);
  const pages = range(Math.ceil(heads / STATE_HEADS)).map((page) => page * STATE_HEADS);
  local.first.set(pages.map((first) => [String(first), `${first} – ${Math.min(heads, first + STATE_HEADS) - 1}`]), found.first);
  local.first.el.hidden = pages.length < 2;
  local.block.set(found.view.map((id, index) => [String(index), store.nameOf(id)]), found.block);
}

/** A row of maps for each block, and one for their sum; a column for each head. */
function drawStateMaps(found, row, shift, ctx) {
  const [blocks, heads, values, keys] = row.shape;
  const theme = ctx.theme();
  const shown = Math.min(STATE_HEADS, heads - (found.first - shift));
  const side = Math.max(16, Math.min(STATE_SIDE, Math.floor((ctx.width() - STATE_LABEL) / shown) - 4, 320 / (blocks + 1)));
  const context = fit(ctx.local.maps, ctx.width(), (blocks + 1) * (side + 4) + 14);
  context.font = "11px sans-serif";
  const rows = [...found.view.slice(0, blocks).map((id) => `${blockMark(id)} ${ctx.store.nameOf(id)}`), "∑ the state"];
  rows.forEach((label, index) => {
    const y = 14 + index * (side + 4);
    context.fillStyle = index < blocks ? blockColour(found.view[index]) : theme.text;
    context.fillRect(0, y, 3, side);
    context.fillStyle = theme.text;
    context.fillText(label, 7, y + side / 2 + 4, STATE_LABEL - 10);
    for (const head of range(shown)) {
      const at = found.first - shift + head;
      const box = { x: STATE_LABEL + head * (side + 4), y, width: side, height: side };
      const state = unpackState(row, index < blocks ? index : null, at);
      paintHeat(context, box, values, keys, (v, k) => state[v * keys + k], signedRoot);
      frameBox(context, box, theme.line);
      if (index === 0) context.fillText(`head ${found.first + head}`, box.x, 10, side);
    }
  });
}

/** One block's norms over time: heads down, steps across; the darker, the more of the past gets through. */
function drawNorms(found, state, ctx) {
  const list = readingsOf(ctx.store, "norms", found.r, state.step, Math.floor((ctx.width() - STATE_LABEL) / NORM_COLUMN));
  ctx.local.norms.hidden = !list.length;
  if (!list.length) return;
  const tables = list.map(({ row }) => unpackTable(row));
  const layer = found.layers.indexOf(found.layer);
  const heads = tables.at(-1).heads;
  const height = heads * NORM_CELL;
  const context = fit(ctx.local.norms, ctx.width(), height + 4);
  const theme = ctx.theme();
  const id = found.view[found.block];
  const box = { x: STATE_LABEL, y: 2, width: list.length * NORM_COLUMN, height };
  const at = (head, step) => tables[step].at(layer, found.block, heads === tables[step].heads ? head : null);
  paintHeat(context, box, heads, list.length, at, strength(blockColour(id)));
  frameBox(context, { ...box, width: ctx.width() - STATE_LABEL }, theme.line);
  context.font = "11px sans-serif";
  context.fillStyle = theme.text;
  context.fillText("past let through", 0, 12, STATE_LABEL - 6);
  context.fillText(`by ${ctx.store.nameOf(id)}`, 0, 26, STATE_LABEL - 6);
}

const stateReading = (found, state, ctx) =>
  readingOrAsk(ctx, "states", state.step, found.r, { layer: found.layer, view: found.view });

PANELS.push({
  name: "states",
  title: "Gated DeltaNet states",
  mount(el, ctx) {
    const { local } = ctx;
    const choose = (key) => (value) => {
      ctx.choose(key, value);
      ctx.redraw();
    };
    for (const [key, label] of [["request", "coroutine"], ["layer", "layer"], ["first", "heads"], ["block", "over time: block"]])
      local[key] = makeSelect(h, label, choose(key));
    local.maps = h("canvas", { role: "img", hidden: true });
    local.norms = h("canvas", { role: "img", hidden: true });
    local.note = h("div", { class: "allm-free" });
    el.append(h("div", { class: "allm-choices" }, local.request.el, " ", local.layer.el, " ", local.first.el), local.maps,
      local.note, h("div", { class: "allm-choices" }, local.block.el), local.norms);
  },
  draw(state, ctx) {
    const { local } = ctx;
    const found = lookUpState(state, ctx);
    for (const one of [local.request, local.layer, local.first, local.block]) one.el.hidden = !found;
    if (!found) {
      local.maps.hidden = local.norms.hidden = true;
      return setText(local.note, this.summary(state, ctx));
    }
    const reading = stateReading(found, state, ctx);
    const heads = reading?.row.heads ?? reading?.row.shape[1] ?? 1;
    drawStateChoices(found, heads, ctx);
    drawNorms(found, state, ctx);
    local.maps.hidden = !reading;
    const key = JSON.stringify([reading?.n, found, ctx.width(), ctx.theme()]);
    if (reading && (local.drawn !== key || local.row !== reading.row)) {
      drawStateMaps(found, reading.row, reading.row.from ?? 0, ctx);
      Object.assign(local, { drawn: key, row: reading.row, sizes: sizesOf(reading.row) });
    }
    const strengths = reading ? " · an entry's colour is as strong as its root" : "";
    setText(local.note, this.summary(state, ctx) + strengths + keptWords(ctx));
    for (const canvas of [local.maps, local.norms]) canvas.setAttribute("aria-label", this.summary(state, ctx));
  },
  summary(state, ctx) {
    if (!(ctx.store.meta.linear_layers || []).length) return "This model has no Gated DeltaNet layers";
    const found = lookUpState(state, ctx);
    if (!found) return "No coroutine has read a stream yet";
    const reading = stateReading(found, state, ctx);
    const norms = normsNow(found, state, ctx);
    const through = (block) => (norms ? `, lets ${(norms.at(block, null) * 100).toFixed(0)} % through` : "");
    const sizes = reading && ctx.local.sizes ? ctx.local.sizes : [];
    const parts = found.view.map((id, block) =>
      `${ctx.store.nameOf(id)}${sizes[block] === undefined ? "" : ` ${sizes[block].toPrecision(2)}`}${through(block)}`);
    const when = reading ? `at step ${reading.n}` : `(${ctx.local.missing || "waiting for it"})`;
    return `${found.name}, layer ${found.layer}, state ${when}; size left by: ${parts.join("; ")}`;
  },
  table(state, ctx) {
    const found = lookUpState(state, ctx);
    const norms = found && normsNow(found, state, ctx);
    const rows = (found?.view ?? []).map((id, block) => [
      ctx.store.nameOf(id), ctx.local.sizes?.[block]?.toPrecision(3) ?? "–",
      ...(norms ? range(norms.heads).map((head) => norms.at(block, head).toFixed(2)) : []),
    ]);
    const heads = norms ? range(norms.heads).map((head) => `head ${head} lets through`) : [];
    return { columns: ["block", "size in the state", ...heads], rows };
  },
});
