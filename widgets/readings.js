// Readings of instruments: found by step and request, unpacked from bytes, and asked for where they are not
// part of the recording. Knows the records "shares", "norms", "weights" and "states"; draws nothing.

const readingIndices = new WeakMap(); // list of records -> what is known of it
const ASK_AGAIN = 300; // ms between two questions of one place

/** Records of a type by step, request and layer. Grows with the list; a new list starts a new index. */
function readingIndex(store, type) {
  const list = store.readings(type);
  let index = readingIndices.get(list);
  if (!index) readingIndices.set(list, (index = { count: 0, byStep: new Map(), byRequest: new Map() }));
  for (; index.count < list.length; index.count++) {
    const record = list[index.count];
    for (const row of record.rows) {
      index.byStep.set(readingKey(record.n, row.r, record.layer), row);
      if (!index.byRequest.has(row.r)) index.byRequest.set(row.r, []);
      index.byRequest.get(row.r).push({ n: record.n, layer: record.layer, row });
    }
  }
  return index;
}

const readingKey = (n, r, layer) => `${n}/${r}/${layer ?? ""}`;

/** Numbers of the requests that have readings of a type, oldest first. */
export function requestsWith(store, type) {
  return [...readingIndex(store, type).byRequest.keys()];
}

/** Readings of a request up to step n, oldest first, the last `limit` ones: [{n, row}]. */
export function readingsOf(store, type, r, n, limit) {
  const list = readingIndex(store, type).byRequest.get(r) || [];
  let end = list.length;
  while (end > 0 && list[end - 1].n > n) end--;
  return list.slice(Math.max(0, end - limit), end);
}

/** The row of request r at step n in the recording, or undefined. */
export function readingAt(store, type, n, r, layer) {
  return readingIndex(store, type).byStep.get(readingKey(n, r, layer));
}

/** Where the person can find such readings: the recorded steps that lie nearest. */
function othersWith(store, type, n, r, layer) {
  const steps = readingIndex(store, type).byRequest.get(r)?.filter((one) => one.layer === layer).map((one) => one.n) ?? [];
  steps.sort((a, b) => Math.abs(a - n) - Math.abs(b - n));
  return steps.length ? ` (it is at ${steps.slice(0, 4).join(", ")})` : "";
}

/** The row of request r at step n, {n, row}: from the recording, else from the kernel, which is asked.
 * Live, the newest one that the kernel has will do. Null while there is none; `ctx.local.missing` says why. */
export function readingOrAsk(ctx, type, n, r, more = {}) {
  const recorded = readingAt(ctx.store, type, n, r, more.layer);
  if (recorded) return { n, row: recorded };
  const live = ctx.store.cursor === null;
  const asked = (ctx.local.asked ??= { key: "", at: 0, waiting: false, found: null });
  const key = JSON.stringify([type, r, more, live ? "live" : n]);
  if (asked.key !== key) Object.assign(asked, { key, at: 0, waiting: false, found: null, n: -1 });
  const nowhere = `not recorded at this step${othersWith(ctx.store, type, n, r, more.layer)}`;
  const canAsk = ctx.link && !ctx.store.meta.replay;
  ctx.local.missing = canAsk ? "" : nowhere;
  if (!canAsk) return null;
  if (asked.n !== n && !asked.waiting && Date.now() >= asked.at + ASK_AGAIN) {
    Object.assign(asked, { at: Date.now(), waiting: true, n });
    ctx.link.read({ what: type, n, exact: !live, r, ...more }).then((record) => {
      if (asked.key !== key) return;
      asked.waiting = false;
      if (record) ctx.local.kept = record.kept;
      const row = record?.rows.find((one) => one.r === r);
      asked.found = row ? { n: record.n, row } : live ? asked.found : null;
      asked.empty = !asked.found;
      ctx.redraw();
    });
  } else if (asked.n !== n && !asked.waiting) setTimeout(() => ctx.redraw(), ASK_AGAIN);
  if (asked.empty) ctx.local.missing = nowhere;
  return asked.found;
}

/** How much memory the kernel's readings take, in words; "" where nobody has said. */
export const keptWords = (ctx) => (ctx.local.kept ? ` · ${(ctx.local.kept / 2 ** 20).toFixed(1)} MB of readings kept` : "");

/** A table [layers, blocks, heads] of bytes; at(layer, block, head) in 0 … 1, null meaning the average. */
export function unpackTable(row) {
  const blocks = row.mean.length;
  const { layers, heads, q } = row;
  const cell = (layer, block, head) => q[(layer * blocks + block) * heads + head] / 255;
  const span = (chosen, count) => (chosen === null || chosen >= count ? range(count) : [chosen]);
  return {
    layers, blocks, heads,
    at(layer, block, head) {
      if (layer === null && head === null) return row.mean[block];
      const values = span(layer, layers).flatMap((l) => span(head, heads).map((one) => cell(l, block, one)));
      return values.reduce((sum, value) => sum + value, 0) / values.length;
    },
  };
}

/** Attention to single tokens, 0 … 1: Float32Array over all tokens of the view. */
export function unpackWeights(row, layer, head) {
  const tokens = row.lengths.reduce((sum, length) => sum + length, 0);
  const total = new Float32Array(tokens);
  let rows = 0;
  for (let l = 0; l < row.layers; l++)
    for (let one = 0; one < row.heads; one++) {
      if ((layer !== null && layer !== l) || (head !== null && head !== one)) continue;
      const at = l * row.heads + one;
      for (let t = 0; t < tokens; t++) total[t] += (row.q[at * tokens + t] / 255) * row.peak[at];
      rows++;
    }
  return total.map((weight) => weight / Math.max(1, rows));
}

/** The state of one head, [d_v, d_k] row after row in −1 … 1 of the head's peak: of one block, or (null)
 * of the whole view, which may exceed 1. */
export function unpackState(row, block, head) {
  const [blocks, heads, values, keys] = row.shape;
  const size = values * keys;
  const signed = new Int8Array(row.q.buffer, row.q.byteOffset, row.q.byteLength);
  const out = new Float32Array(size);
  for (const b of block === null ? range(blocks) : [block]) {
    const from = (b * heads + head) * size;
    for (let i = 0; i < size; i++) out[i] += signed[from + i] / 127;
  }
  return out;
}

export const range = (count) => Array.from({ length: count }, (_, index) => index);
