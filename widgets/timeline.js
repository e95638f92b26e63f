// Timeline: one column per step, one cell per request in it. Zoom, pan, follow; a click opens the step.
//
// Only the columns on screen are painted. Rows of the picture are requests' lanes: one per coroutine or kind.

import { WAITS, agentWords } from "./agents.js";
import { blockColour, count, fit, h, hatch, seconds, setText, tail, visible } from "./palette.js";
import { PANELS } from "./shell.js";

const LANE = 16, LANE_LABEL = 120, MAX_LANES = 24, FOOT = 14;
const ZOOMS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 36]; // CSS pixels per step
const KINDS = { decode: "decode", prefill: "prefill chunk", probe: "probe" };
const CALLS = "tool calls"; // the lane of all that wait, or waited in vain
const WAYS = { graph: " as a CUDA graph", eager: " kernel by kernel" }; // how a step ran, if on a GPU

/** Lanes by name, in the order of first appearance. Names end "·2" only while two are alive. */
function laneOf(local, name) {
  if (!local.lanes.has(name)) local.lanes.set(name, local.lanes.size);
  return Math.min(local.lanes.get(name), MAX_LANES - 1);
}

const took = (record) => seconds(record.s) + (WAYS[record.ran] ?? "");

const rowName = (store, row) => store.requests.get(row.r)?.name ?? `request ${row.r}`;

/** Which columns are on screen: {zoom, first, last (not included), follow, columns}. */
function windowOf(ctx) {
  const steps = ctx.store.steps.length;
  const zoom = ZOOMS[ctx.choice("zoom", 4)];
  const columns = Math.max(1, Math.floor((ctx.width() - LANE_LABEL) / zoom));
  const follow = ctx.choice("follow", true);
  const most = Math.max(0, steps - columns);
  const first = follow ? most : Math.min(most, Math.max(0, ctx.choice("first", 0)));
  return { zoom, columns, first, last: Math.min(steps, first + columns), follow, most };
}

function paintCell(context, row, x, y, width, theme) {
  const block = row.b ?? 0;
  context.fillStyle = row.b === null ? theme.muted : blockColour(block);
  const full = LANE - 3;
  if (row.k === "decode") context.fillRect(x, y + full / 4, width, full / 2);
  else if (row.k === "prefill") {
    const height = Math.max(4, full * Math.min(1, 0.35 + Math.log2(row.n + 1) / 12));
    context.fillRect(x, y + full - height, width, height);
    hatch(context, x, y + full - height, width, height, theme.paper, 5);
  } else {
    context.strokeStyle = theme.text;
    context.lineWidth = 1;
    context.strokeRect(x + 0.5, y + 1.5, Math.max(1, width - 1), full - 2);
  }
}

function paintStep(context, ctx, { record }, x, width, lanes, theme, height) {
  if (record.err) {
    context.fillStyle = theme.bad;
    context.fillRect(x, 0, width, height - FOOT);
  }
  for (const row of record.rows) paintCell(context, row, x, laneOf(ctx.local, rowName(ctx.store, row)) * LANE + 1, width, theme);
  if (record.wait.length) {
    context.fillStyle = theme.bad;
    context.fillRect(x, height - FOOT + 1, width, 3);
  }
}

/** From the records that are new: everybody's lane, whether on screen now or not, and where there were pauses. */
function noteRecords(local, store) {
  if (local.seen > store.next || local.seen < store.first) Object.assign(local, { seen: store.first, pauses: new Set(), calls: new Map(), waits: new Map(), lastStep: 0 });
  for (; local.seen < store.next; local.seen++) {
    const record = store.records[local.seen - store.first];
    if (record.t === "step") {
      if (!local.lastStep && local.calls.has(0)) local.calls.set(record.n, local.calls.get(0));
      local.lastStep = record.n;
      for (const row of record.rows) laneOf(local, rowName(store, row));
    } else if (record.t === "pause") local.pauses.add(local.lastStep);
    else if (record.t === "tool") noteCall(local, record);
  }
}

/** A tool call that waits, was denied or timed out: its sign at the step after which that was. */
function noteCall(local, { a, c, name, args, state }) {
  const key = `${a}.${c}`;
  const n = local.lastStep;
  const waits = WAITS.includes(state);
  if (waits || ["denied", "timeout"].includes(state)) {
    laneOf(local, CALLS);
    if (!local.calls.has(n)) local.calls.set(n, new Map());
    local.calls.get(n).set(key, [agentWords(state)[0], `${name}(${args}) ${agentWords(state)}`]);
  }
  const wait = local.waits.get(key);
  if (waits && !wait) local.waits.set(key, { from: n, to: Infinity });
  else if (wait && !waits) wait.to = Math.min(wait.to, n);
}

const callsAt = (local, n) => [...(local.calls.get(n)?.values() ?? [])];

function paintCalls(context, { local }, n, x, width, theme) {
  if (!local.calls.size) return;
  const y = laneOf(local, CALLS) * LANE;
  context.fillStyle = theme.text;
  for (const { from, to } of local.waits.values())
    if (from < n && n <= to) {
      context.fillRect(x, y + LANE / 2, width, 1);
      break;
    }
  context.fillText(callsAt(local, n).map(([sign]) => sign).join(""), x, y + 12);
}

function paint(state, ctx) {
  const { local, store } = ctx;
  const theme = ctx.theme();
  const span = windowOf(ctx);
  const shown = store.steps.slice(span.first, span.last);
  const lanes = Math.max(1, Math.min(MAX_LANES, local.lanes.size));
  const [width, height] = [ctx.width(), lanes * LANE + FOOT];
  const context = fit(local.canvas, width, height);
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = theme.ground;
  context.fillRect(LANE_LABEL, 0, width - LANE_LABEL, lanes * LANE);
  context.fillStyle = theme.text;
  for (const [name, lane] of local.lanes) if (lane < MAX_LANES) context.fillText(tail(name, 18), 0, lane * LANE + 12);
  const cell = Math.max(1, span.zoom - (span.zoom > 3 ? 1 : 0));
  shown.forEach((step, index) => {
    const x = LANE_LABEL + index * span.zoom;
    paintStep(context, ctx, step, x, cell, lanes, theme, height);
    paintCalls(context, ctx, step.n, x, span.zoom, theme);
    if (local.pauses.has(step.n)) {
      context.fillStyle = theme.accent;
      context.fillRect(x + span.zoom - 1, 0, 1, lanes * LANE);
    }
    if (step.n === local.selected || step.n === store.cursor) {
      context.strokeStyle = theme.text;
      context.strokeRect(x - 0.5, 0.5, span.zoom, lanes * LANE - 1);
    }
  });
  paintFoot(context, shown, span, height, theme);
  local.span = span;
  if (state.paused) {
    context.fillStyle = theme.accent;
    context.fillText("▮▮ paused", Math.min(width - 60, LANE_LABEL + shown.length * span.zoom + 6), 12);
  }
}

function paintFoot(context, shown, span, height, theme) {
  context.fillStyle = theme.muted;
  const every = Math.max(1, Math.ceil(60 / span.zoom));
  for (let index = 0; index < shown.length; index += every)
    context.fillText(String(shown[index].n), LANE_LABEL + index * span.zoom, height - 2);
}

function detail(ctx) {
  const { local, store } = ctx;
  const step = local.selected === null ? undefined : store.step(local.selected);
  const calls = step ? callsAt(local, step.n).map(([, words]) => words).join("; ") : "";
  const key = step && `${step.at} ${calls}`;
  if (local.detailed === key) return;
  local.detailed = key;
  local.detail.hidden = !step;
  if (!step) return;
  const { record } = step;
  const rows = record.rows.map((row) => {
    const request = store.requests.get(row.r);
    const view = (request?.view ?? []).map((id, i) => `${store.nameOf(id)} v${row.v[i]}`).join(" → ");
    return [rowName(store, row), KINDS[row.k], row.b === null ? "" : store.nameOf(row.b), view, row.m, row.n, tail(visible(row.x.join("")), 160), tail(row.i.join(" "), 60)];
  });
  const cells = (tag, list) => h("tr", {}, list.map((cell) => h(tag, {}, String(cell))));
  local.detail.replaceChildren(
    h("div", {}, h("strong", {}, `Step ${record.n}`), ` began at ${record.b.toFixed(2)} s, took ${took(record)}; ${record.pages} pages free`,
      record.wait.length ? `; waiting: ${record.wait.join(", ")}` : "", record.err ? `; failed: ${record.err}` : "", " ",
      h("button", { type: "button", onclick: () => ctx.show(record.n) }, "Show this moment"), " ",
      h("button", { type: "button", onclick: () => select(ctx, null) }, "Close")),
    calls && h("div", {}, `Then: ${calls}`),
    h("table", {}, cells("th", ["who", "kind", "writes", "reads", "tokens before", "tokens", "text", "ids"]), rows.map((row) => cells("td", row))));
}

function select(ctx, n) {
  ctx.local.selected = n;
  ctx.redraw();
}

function move(ctx, by) {
  const { local, store } = ctx;
  const at = store.steps.findIndex((step) => step.n === local.selected);
  const next = at < 0 ? store.steps.length - 1 : Math.min(store.steps.length - 1, Math.max(0, at + by));
  if (!store.steps[next]) return;
  select(ctx, store.steps[next].n);
  const { first, columns, follow, most } = windowOf(ctx);
  if (next < first || next >= first + columns) pan(ctx, Math.min(most, Math.max(0, next - (columns >> 1))), follow);
}

function pan(ctx, first) {
  const { most } = windowOf(ctx);
  ctx.choose("follow", first >= most);
  ctx.choose("first", Math.max(0, Math.min(most, Math.round(first))));
  ctx.redraw();
}

function zoom(ctx, by) {
  const before = windowOf(ctx);
  ctx.choose("zoom", Math.max(0, Math.min(ZOOMS.length - 1, ctx.choice("zoom", 4) + by)));
  const { columns } = windowOf(ctx);
  if (!before.follow) pan(ctx, before.first + (before.columns - columns) / 2);
  ctx.redraw();
}

function listen(canvas, ctx) {
  const { local } = ctx;
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, first: windowOf(ctx).first, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag || Math.abs(event.clientX - drag.x) < 4) return;
    drag.moved = true;
    pan(ctx, drag.first - (event.clientX - drag.x) / local.span.zoom);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (drag && !drag.moved) clickAt(ctx, event.offsetX);
    drag = null;
  });
  canvas.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) zoom(ctx, event.deltaY < 0 ? 1 : -1);
    else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(ctx, windowOf(ctx).first + (event.deltaX || event.deltaY) / local.span.zoom);
    else return;
    event.preventDefault();
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const keys = {
      ArrowLeft: () => move(ctx, -1), ArrowRight: () => move(ctx, 1), PageUp: () => move(ctx, -20), PageDown: () => move(ctx, 20),
      Home: () => move(ctx, -1e9), End: () => move(ctx, 1e9), "+": () => zoom(ctx, 1), "-": () => zoom(ctx, -1),
      Enter: () => local.selected !== null && ctx.show(local.selected), Escape: () => select(ctx, null),
    };
    if (!keys[event.key]) return;
    keys[event.key]();
    event.preventDefault();
    event.stopPropagation(); // the notebook has keys of its own
  });
}

function clickAt(ctx, x) {
  const { span } = ctx.local;
  const step = ctx.store.steps[span.first + Math.floor((x - LANE_LABEL) / span.zoom)];
  if (step && x >= LANE_LABEL) select(ctx, step.n);
}

PANELS.push({
  name: "timeline",
  title: "Timeline",
  mount(el, ctx) {
    const { local } = ctx;
    Object.assign(local, { lanes: new Map(), selected: null, detailed: undefined, seen: -1 });
    local.legend = h("span", { class: "allm-muted", hidden: true }, "calls: ◷ wait for gate  ? for approval  ⊘ denied  ✗ timed out");
    local.canvas = h("canvas", { tabindex: "0", role: "img", "data-timeline": "", style: "touch-action:none" });
    local.detail = h("div", { class: "allm-detail", hidden: true });
    local.follow = h("button", { type: "button", onclick: () => pan(ctx, windowOf(ctx).follow ? windowOf(ctx).first - 1 : 1e9) }, "Follow");
    const button = (label, words, action) => h("button", { type: "button", "aria-label": words, title: words, onclick: action }, label);
    el.append(local.canvas, h("div", { class: "allm-line" },
      button("−", "Zoom out", () => zoom(ctx, -1)), button("+", "Zoom in", () => zoom(ctx, 1)),
      button("◀", "Earlier", () => pan(ctx, windowOf(ctx).first - windowOf(ctx).columns / 2)), button("▶", "Later", () => pan(ctx, windowOf(ctx).first + windowOf(ctx).columns / 2)),
      local.follow, h("span", { class: "allm-muted" }, "▬ decode  ▨ prefill chunk  ▭ probe  red foot: waiting for memory  │ paused"), local.legend), local.detail);
    listen(local.canvas, ctx);
  },
  draw(state, ctx) {
    const { local } = ctx;
    if (local.first !== undefined && local.first !== ctx.store.first && ctx.store.steps.length === 0) local.lanes.clear();
    local.first = ctx.store.first;
    noteRecords(local, ctx.store);
    paint(state, ctx);
    local.follow.setAttribute("aria-pressed", String(local.span.follow));
    local.canvas.setAttribute("aria-label", this.summary(state, ctx));
    local.legend.hidden = !local.calls.size;
    detail(ctx);
  },
  summary(state, ctx) {
    const { store, local } = ctx;
    const span = local.span ?? windowOf(ctx);
    const [from, to] = [store.steps[span.first], store.steps[span.last - 1]];
    const calls = Object.values(state.calls ?? {}).filter((one) => WAITS.includes(one.state)).map((one) => `, ${one.name}(${one.args}) ${agentWords(one.state)}`);
    const waiting = (state.waiting.length ? `, waiting for memory: ${state.waiting.join(", ")}` : "") + calls.join("");
    return from ? `${count(store.steps.length)} steps, ${from.n} to ${to.n} shown, ${local.lanes.size} lanes${state.paused ? ", paused" : ""}${waiting}` : "no steps yet";
  },
  table(state, ctx) {
    const { store, local } = ctx;
    const rows = store.steps.slice(local.span.first, local.span.last).slice(-100).map(({ record }) => [
      record.n, took(record), record.rows.map((row) => `${rowName(store, row)}: ${KINDS[row.k]} ${row.n}`).join("; "),
      tail(visible(record.rows.map((row) => row.x.join("")).join(" | ")), 120), [...record.wait, ...callsAt(local, record.n).map(([, words]) => words)].join(", "), record.err,
    ]);
    return { columns: ["step", "took", "batch", "tokens", "waiting", "error"], rows };
  },
});
