// Attention: the share of each block of a coroutine's view over time, per layer and head at a step, and how
// one token looks at the tokens of the blocks. Knows "shares" and "weights" (readings.js) and the state.

import { frameBox, makeSelect, paintHeat, strength } from "./heat.js";
import { blockColour, blockMark, fit, h, setText } from "./palette.js";
import { keptWords, range, readingOrAsk, readingsOf, requestsWith, unpackTable, unpackWeights } from "./readings.js";
import { PANELS } from "./shell.js";

const SHARES_HEIGHT = 110; // px
const SHARE_COLUMN = 4; // px of a step
const SHARE_CELL = 7; // px of a layer and head
const LOOKED_AT = 400; // of a block, the last ones

const AVERAGE = ["", "average"];
const chosenNumber = (ctx, key) => (ctx.choice(key, "") === "" ? null : Number(ctx.choice(key, "")));
const asPercent = (share) => `${(share * 100).toFixed(share < 0.095 ? 1 : 0)} %`;

/** What is shown now: {r, name, view, list (readings up to the step), last, layer, head}; null: nothing yet. */
function lookUpShares(state, ctx) {
  const { store } = ctx;
  const known = requestsWith(store, "shares");
  const wanted = Number(ctx.choice("request", 0));
  const limit = Math.floor(ctx.width() / SHARE_COLUMN);
  const begun = known.filter((one) => readingsOf(store, "shares", one, state.step, 1).length);
  const r = known.includes(wanted) ? wanted : (begun.findLast((one) => one > 0) ?? begun.at(-1)); // > 0: a stream
  if (r === undefined) return null;
  const list = readingsOf(store, "shares", r, state.step, limit);
  const request = store.requests.get(r) || { name: `request ${r}`, view: [] };
  const last = list.at(-1);
  return { r, known, list, last, name: request.name, view: request.view, layer: chosenNumber(ctx, "layer"), head: chosenNumber(ctx, "head") };
}

const blockNameOf = (ctx, id) => ctx.store.nameOf(id);

function drawShareChoices(found, ctx) {
  const { request, layer, head } = ctx.local;
  const { store } = ctx;
  request.set(found.known.slice(-60).map((r) => [String(r), `${store.requests.get(r)?.name ?? r}`]), found.r);
  if (!found.last) return;
  const { layers, heads } = found.last.row;
  const numbers = store.meta.attention_layers || range(layers);
  layer.set([AVERAGE, ...range(layers).map((one) => [String(one), `${numbers[one]}`])], found.layer ?? "");
  head.set([AVERAGE, ...(heads > 1 ? range(heads).map((one) => [String(one), `${one}`]) : [])], found.head ?? "");
}

/** Shares stacked from the bottom in the order of the view, one column per step. */
function drawSharesOverTime(found, ctx) {
  const width = ctx.width();
  const context = fit(ctx.local.time, width, SHARES_HEIGHT);
  const theme = ctx.theme();
  found.list.forEach(({ row }, index) => {
    const table = unpackTable(row);
    let y = SHARES_HEIGHT;
    for (const block of range(table.blocks)) {
      const height = table.at(found.layer, block, found.head) * SHARES_HEIGHT;
      y -= height;
      context.fillStyle = blockColour(found.view[block] ?? 7);
      context.fillRect(index * SHARE_COLUMN, y, SHARE_COLUMN - 0.5, height);
      context.fillStyle = theme.paper;
      context.fillRect(index * SHARE_COLUMN, y, SHARE_COLUMN - 0.5, 0.75);
    }
  });
  frameBox(context, { x: 0, y: 0, width, height: SHARES_HEIGHT }, theme.line);
}

/** For each block a map of layers (down) and heads (across). */
function drawShareMaps(found, ctx) {
  const table = unpackTable(found.last.row);
  const theme = ctx.theme();
  const cell = Math.max(3, Math.min(SHARE_CELL, Math.floor((ctx.width() / table.blocks - 14) / table.heads)));
  const [width, height] = [Math.max(table.heads * cell, 70), table.layers * cell];
  const context = fit(ctx.local.maps, ctx.width(), height + 18);
  ctx.local.boxes = range(table.blocks).map((block) => ({ x: block * (width + 14), y: 16, width: table.heads * cell, height }));
  context.font = "11px sans-serif";
  ctx.local.boxes.forEach((box, block) => {
    const id = found.view[block];
    context.fillStyle = theme.text;
    const share = asPercent(table.at(found.layer, block, found.head));
    context.fillText(`${blockMark(id)} ${blockNameOf(ctx, id)} ${share}`, box.x, 11, width + 10);
    paintHeat(context, box, table.layers, table.heads, (l, one) => table.at(l, block, one), strength(blockColour(id)));
    frameBox(context, box, theme.line);
    if (found.layer === null && found.head === null) return;
    const [x, w] = found.head === null ? [0, table.heads] : [found.head, 1];
    const [y, d] = found.layer === null ? [0, table.layers] : [found.layer, 1];
    frameBox(context, { x: box.x + x * cell, y: box.y + y * cell, width: w * cell, height: d * cell }, theme.text);
  });
  ctx.local.cell = cell;
}

/** A click on a map chooses its layer and head; on the chosen one, the average again. */
function pickCell(event, ctx) {
  const box = (ctx.local.boxes || []).find(({ x, y, width, height }) =>
    event.offsetX >= x && event.offsetX < x + width && event.offsetY >= y && event.offsetY < y + height);
  if (!box) return;
  const head = String(Math.floor((event.offsetX - box.x) / ctx.local.cell));
  const layer = String(Math.floor((event.offsetY - box.y) / ctx.local.cell));
  const same = ctx.choice("layer", "") === layer && ctx.choice("head", "") === head;
  ctx.choose("layer", same ? "" : layer);
  ctx.choose("head", same ? "" : head);
  ctx.redraw();
}

/** The tokens of every block, each on a ground as strong as the attention that it gets. */
function drawLookedAt(found, state, ctx) {
  const { tokens, toggle } = ctx.local;
  const wanted = Boolean(ctx.choice("tokens", false));
  toggle.setAttribute("aria-pressed", String(wanted));
  tokens.hidden = !wanted;
  if (!wanted) return;
  const reading = readingOrAsk(ctx, "weights", ctx.store.cursor === null ? found.last.n : state.step, found.r);
  const key = JSON.stringify([reading?.n, found.r, found.layer, found.head, ctx.local.missing, ctx.theme().text]);
  if (tokens.dataset.key === key) return;
  tokens.dataset.key = key;
  if (!reading) return tokens.replaceChildren(ctx.local.missing || "…");
  const weights = unpackWeights(reading.row, found.layer, found.head);
  const most = weights.reduce((a, b) => Math.max(a, b), 0) || 1;
  let from = 0;
  const rows = reading.row.lengths.map((length, block) => {
    const own = weights.subarray(from, (from += length));
    return tokenRow(found.view[block], own, most, state, ctx);
  });
  tokens.replaceChildren(`Its last token at step ${reading.n} looks at${keptWords(ctx)}:`, ...rows);
}

function tokenRow(id, weights, most, state, ctx) {
  const texts = state.blocks[id]?.texts;
  const start = Math.max(0, weights.length - LOOKED_AT);
  const spans = range(weights.length - start).map((index) => {
    const at = start + index;
    const alpha = Math.round((weights[at] / most) * 200).toString(16).padStart(2, "0");
    const text = texts?.[at] ?? "▯";
    return h("span", { style: `background:${blockColour(id)}${alpha}`, title: `${asPercent(weights[at])} · token ${at}` }, text);
  });
  return h("div", {}, h("b", {}, `${blockMark(id)} ${blockNameOf(ctx, id)} `), start ? "… " : "", ...spans);
}

PANELS.push({
  name: "attention",
  title: "Attention",
  mount(el, ctx) {
    const { local } = ctx;
    const choose = (key) => (value) => {
      ctx.choose(key, value);
      ctx.redraw();
    };
    for (const key of ["request", "layer", "head"])
      local[key] = makeSelect(h, key === "request" ? "coroutine" : key, choose(key));
    local.toggle = h("button", { type: "button", onclick: () => choose("tokens")(!ctx.choice("tokens", false)) }, "Tokens");
    local.time = h("canvas", { role: "img" });
    local.maps = h("canvas", { role: "img", "aria-label": "share per layer and head; choose them above", onclick: (event) => pickCell(event, ctx) });
    local.tokens = h("div", { class: "allm-tokens", style: "white-space:pre-wrap;font-size:90%;line-height:1.6", hidden: true });
    local.note = h("div", { class: "allm-free" });
    local.choices = h("div", { class: "allm-choices" }, local.request.el, " ", local.layer.el, " ", local.head.el, " ", local.toggle);
    el.append(local.choices, local.time, local.note, local.maps, local.tokens);
  },
  draw(state, ctx) {
    const { local } = ctx;
    const found = lookUpShares(state, ctx);
    setText(local.note, this.summary(state, ctx));
    for (const one of [local.choices, local.time, local.maps]) one.hidden = !found?.last;
    if (!found) return;
    drawShareChoices(found, ctx);
    if (!found.last) return;
    drawSharesOverTime(found, ctx);
    drawShareMaps(found, ctx);
    drawLookedAt(found, state, ctx);
    local.time.setAttribute("aria-label", this.summary(state, ctx));
  },
  summary(state, ctx) {
    const found = lookUpShares(state, ctx);
    if (!found?.last) return "Attention: not recorded up to this step (it is measured while this panel is on the screen)";
    const table = unpackTable(found.last.row);
    const shares = range(table.blocks).map((b) => `${blockNameOf(ctx, found.view[b])} ${asPercent(table.at(found.layer, b, found.head))}`);
    const numbers = ctx.store.meta.attention_layers || range(table.layers);
    const where = [found.layer === null ? "" : `layer ${numbers[found.layer]}`, found.head === null ? "" : `head ${found.head}`];
    return `${found.name} at step ${found.last.n}: ${shares.join(", ")} (${where.filter(Boolean).join(", ") || "average of all layers and heads"})`;
  },
  table(state, ctx) {
    const found = lookUpShares(state, ctx);
    const rows = (found?.list ?? []).slice(-200).reverse().flatMap(({ n, row }) => {
      const table = unpackTable(row);
      return range(table.blocks).map((b) => [n, found.name, blockNameOf(ctx, found.view[b]), asPercent(table.at(found.layer, b, found.head))]);
    });
    return { columns: ["step", "coroutine", "block", "share of attention"], rows };
  },
});
