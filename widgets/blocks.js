// Blocks: each a lane of its pages in its colour, with who writes and reads it. Knows the state.

import { blockColour, blockLabel, count, fit, h, hatch, setText, tail } from "./palette.js";
import { PANELS } from "./shell.js";

const LANES = 40; // blocks with a lane of their own; the table has all
const TEXT = 600; // characters of a block's text that its lane shows on demand
const HEIGHT = 14;

/** Names of the streams that read a block without writing it. */
export function readersOf(state, id) {
  return Object.values(state.requests)
    .filter((one) => one.state !== "ended" && one.view.includes(id) && one.block !== id)
    .map((one) => one.name);
}

const writerOf = (state, block) => state.requests[block.writer]?.name ?? "";

/** How many blocks hold each page. */
function pageOwners(state) {
  const owners = new Map();
  for (const block of Object.values(state.blocks))
    for (const page of new Set(block.pages)) owners.set(page, (owners.get(page) || 0) + 1);
  return owners;
}

function makeLane(block) {
  const lane = {
    label: blockLabel(block.id, block.name), numbers: h("span", { class: "allm-numbers" }),
    canvas: h("canvas", { class: "allm-lane", role: "img" }), text: h("pre", { class: "allm-peek" }), drawn: "",
  };
  lane.el = h("div", { class: "allm-row", tabindex: "0", "data-block": block.id }, lane.label, lane.canvas, lane.numbers, lane.text);
  const look = (event) => {
    lane.looked = event.type === "focus" || event.type === "mouseenter";
    lane.ctx.redraw();
  };
  for (const type of ["mouseenter", "mouseleave", "focus", "blur"]) lane.el.addEventListener(type, look);
  return lane;
}

function drawLane(lane, block, state, ctx, scale, owners) {
  lane.ctx = ctx;
  const writer = writerOf(state, block);
  const readers = readersOf(state, block.id);
  const share = ctx.store.meta.pages ? block.pages.length / ctx.store.meta.pages : 0;
  setText(lane.numbers, [
    `${count(block.n)} tokens`, `v${block.version}`, `${(share * 100).toFixed(1)} %`,
    writer && `✎ ${writer}`, readers.length && `read by ${readers.join(", ")}`, block.tx.length && "in a transaction",
  ].filter(Boolean).join(" · "));
  if (lane.looked) setText(lane.text, tail(block.texts.slice(0, block.n).join("").slice(-TEXT * 2), TEXT) || "(empty)");
  lane.text.hidden = !lane.looked;
  const width = Math.max(60, lane.canvas.parentElement.clientWidth * 0.38);
  const shared = block.pages.filter((page) => owners.get(page) > 1).length;
  const key = [block.n, block.pages.length, shared, width, scale, ctx.theme().text].join();
  if (key === lane.drawn) return;
  lane.drawn = key;
  lane.canvas.setAttribute("aria-label", `${block.pages.length} pages, ${shared} of them shared`);
  paintPages(lane.canvas, block, width, scale, owners, ctx);
}

/** A cell per page while they are wide enough to be told apart; the last one filled as far as it is. */
function paintPages(canvas, block, width, scale, owners, ctx) {
  const context = fit(canvas, width, HEIGHT);
  const theme = ctx.theme();
  const cell = width / scale;
  const gap = cell > 4 ? 1 : 0;
  const size = ctx.store.meta.page_tokens || 16;
  context.fillStyle = theme.ground;
  context.fillRect(0, 0, width, HEIGHT);
  block.pages.forEach((page, index) => {
    const last = index === block.pages.length - 1;
    const part = last && block.n % size ? (block.n % size) / size : 1;
    context.fillStyle = blockColour(block.id);
    context.globalAlpha = 0.35;
    context.fillRect(index * cell, 0, cell - gap, HEIGHT);
    context.globalAlpha = 1;
    context.fillRect(index * cell, 0, (cell - gap) * part, HEIGHT);
    if (owners.get(page) > 1) hatch(context, index * cell, 0, cell - gap, HEIGHT, theme.paper);
  });
}

PANELS.push({
  name: "blocks",
  title: "Blocks",
  mount(el, ctx) {
    ctx.local.lanes = new Map();
    ctx.local.list = h("div", { class: "allm-rows" });
    ctx.local.free = h("div", { class: "allm-free" });
    el.append(ctx.local.list, ctx.local.free);
  },
  draw(state, ctx) {
    const { lanes, list, free } = ctx.local;
    const blocks = Object.values(state.blocks).slice(0, LANES);
    for (const [id, lane] of lanes) {
      if (state.blocks[id]) continue;
      lane.el.remove();
      lanes.delete(id);
    }
    const owners = pageOwners(state);
    const scale = Math.max(8, ...blocks.map((block) => block.pages.length));
    for (const block of blocks) {
      if (!lanes.has(block.id)) {
        lanes.set(block.id, makeLane(block));
        list.append(lanes.get(block.id).el);
      }
      drawLane(lanes.get(block.id), block, state, ctx, scale, owners);
    }
    setText(free, this.summary(state, ctx));
  },
  summary(state, ctx) {
    const { meta } = ctx.store;
    const number = Object.keys(state.blocks).length;
    const more = number > LANES ? ` (${number - LANES} more in the table)` : "";
    const pages = state.pages === null ? meta.pages : state.pages;
    const slots = meta.slots ? `, ${count(state.slots ?? meta.slots)} of ${count(meta.slots)} slots` : "";
    return `${number} blocks${more} · free: ${count(pages ?? 0)} of ${count(meta.pages ?? 0)} pages of ${meta.page_tokens} tokens${slots}`;
  },
  table(state) {
    const rows = Object.values(state.blocks).map((block) => [
      block.name, block.n, block.version, block.pages.length, writerOf(state, block), readersOf(state, block.id).join(", "),
      tail(block.texts.slice(Math.max(0, block.n - 100), block.n).join(""), 200),
    ]);
    return { columns: ["block", "tokens", "version", "pages", "written by", "read by", "end of its text"], rows };
  },
});
