// From records to the state of a moment. Knows the records of protocol.js; no DOM, no messages.
//
// The same rules are written in Python in engine/reducer.py, and tests/test_recording.py holds the two
// together. Cloning a state is cheap: lists of token texts are shared between clones and only ever grow,
// by tokens that every replay of the same records adds again; whatever cuts a list starts a new one.

/** The state before any record. */
export function emptyState() {
  return {
    step: 0, at: 0, passes: 0, seconds: 0, encoded: 0, resent: 0, error: "",
    paused: false, closed: false, interval: 0, pages: null, slots: null,
    blocks: {}, requests: {}, tasks: {}, waiting: [], marks: [], agents: {}, calls: {},
  };
}

/** A copy that later records can be applied to while the original stays as it is. */
export function cloneState(state) {
  const copy = { ...state, blocks: {}, requests: {}, tasks: {}, agents: { ...state.agents }, calls: { ...state.calls } };
  for (const id in state.blocks) copy.blocks[id] = { ...state.blocks[id] };
  for (const r in state.requests) copy.requests[r] = { ...state.requests[r] };
  for (const k in state.tasks) copy.tasks[k] = { ...state.tasks[k] };
  return copy;
}

/** Change `state` by one record. */
export function apply(state, record) {
  state.at = record.at;
  const rule = RULES[record.t];
  if (rule) rule(state, record);
}

export const ENDED_KEPT = 64; // streams, coroutines and tool calls that have ended and are still shown

const RULES = {
  block: (s, e) => {
    s.blocks[e.id] = { id: e.id, name: e.name, version: 0, n: 0, texts: [], pages: [], tx: [], writer: null };
  },
  change: (s, e) => {
    const block = s.blocks[e.id];
    if (!block) return;
    const read = [].concat(...e.from.map(([id, version, n]) => contentOf(s, id, version).slice(0, n)));
    const own = e.op === "append" ? block.texts.slice(0, block.n) : [];
    setContent(block, own.concat(read, e.x ?? []), e.version, e.pages);
  },
  free: (s, e) => { delete s.blocks[e.id]; },
  begin: (s, e) => {
    for (const id of e.blocks) {
      const block = s.blocks[id];
      if (!block) continue;
      const saved = { version: block.version, texts: block.texts, n: block.n, pages: block.pages };
      block.tx = [...block.tx, { tx: e.tx, saved }];
    }
  },
  end: (s, e) => {
    for (const id in s.blocks) {
      const block = s.blocks[id];
      const mine = block.tx.find((one) => one.tx === e.tx);
      if (!mine) continue;
      block.tx = block.tx.filter((one) => one !== mine);
      const back = e.restored.find(([other]) => other === block.id);
      if (back) setContent(block, mine.saved.texts.slice(0, mine.saved.n), back[1], back[2]);
    }
  },
  request: (s, e) => {
    s.requests[e.r] = {
      r: e.r, kind: e.kind, name: e.name, view: e.view, block: e.block, task: e.task, state: "queued",
      read: [], input: [], text: "", tokens: 0, reason: "", error: "", begun: e.at, ended: null,
    };
  },
  token: (s, e) => {
    const request = s.requests[e.r];
    if (!request) return;
    request.text += e.x;
    request.tokens += 1;
    request.state = "body";
    const block = s.blocks[request.block];
    if (!block) return;
    addTexts(block, [e.x]);
    block.writer = e.r;
  },
  stream: (s, e) => { if (s.requests[e.r]) s.requests[e.r].state = e.state; },
  ended: (s, e) => {
    const request = s.requests[e.r];
    if (!request) return;
    if (request.kind !== "stream") delete s.requests[e.r];
    Object.assign(request, { state: "ended", reason: e.reason, error: e.error, ended: e.at });
    request.text += e.x;
    const block = s.blocks[request.block];
    if (block && block.writer === e.r) block.writer = null;
    prune(s.requests, (one) => one.state === "ended");
  },
  task: (s, e) => {
    s.tasks[e.k] = { k: e.k, name: e.name, state: e.state, line: e.line, error: e.error };
    prune(s.tasks, (one) => ["done", "failed", "cancelled"].includes(one.state));
  },
  step: (s, e) => {
    Object.assign(s, {
      step: e.n, pages: e.pages, slots: e.slots, encoded: e.encoded, resent: e.resent,
      waiting: e.wait, error: e.err, seconds: s.seconds + e.s, passes: s.passes + (e.err ? 0 : 1),
    });
    if (!e.err) for (const row of e.rows) applyRow(s, row);
  },
  pause: (s) => { s.paused = true; },
  resume: (s) => { s.paused = false; },
  speed: (s, e) => { s.interval = e.interval; },
  close: (s) => { s.closed = true; },
  mark: (s, e) => { s.marks = [...s.marks, { n: e.n, note: e.note }]; },
  agent: (s, e) => {
    const table = (s.agents ??= {});
    const { a, name, state, version, k, error } = e;
    if (state === "removed") delete table[`${a}.${name}`];
    else table[`${a}.${name}`] = { a, name, state, version, k, error };
  },
  tool: (s, e) => {
    const table = (s.calls ??= {});
    const { a, c, name, by, args, state, reason, at } = e;
    const key = `${a}.${c}`;
    table[key] = { a, c, name, by, args, state, reason, begun: table[key]?.begun ?? at, at };
    const ended = Object.keys(table).filter((one) => !["gate", "asking", "running"].includes(table[one].state));
    for (const one of ended.slice(0, -ENDED_KEPT)) delete table[one];
  },
};

function applyRow(state, row) {
  const request = state.requests[row.r];
  if (request) {
    request.read = row.v;
    if (row.k === "prefill") request.input = request.input.concat(row.x);
  }
  if (!row.c) return;
  const block = state.blocks[row.b];
  if (block) {
    if (row.k === "prefill" && request) {
      if (request.kind === "replace") Object.assign(block, { texts: [], n: 0 });
      addTexts(block, request.input);
    }
    block.version = row.c[0];
    if (row.c.length > 1) block.pages = block.pages.slice(0, row.c[1]).concat(row.c[2]);
  }
  if (request && request.kind !== "stream") delete state.requests[row.r];
}

function addTexts(block, texts) {
  // A replay finds the tokens there already; see the top of this file.
  if (block.texts.length === block.n) for (const text of texts) block.texts.push(text);
  block.n += texts.length;
}

function setContent(block, texts, version, pages) {
  Object.assign(block, { texts, n: texts.length, version, pages });
}

/** Texts of a block as it was at `version`: now, or when a transaction began that still goes on. */
function contentOf(state, id, version) {
  const block = state.blocks[id];
  if (!block) return [];
  const saved = block.tx.map((one) => one.saved).find((one) => one.version === version);
  const { texts, n } = block.version === version || !saved ? block : saved;
  return texts.slice(0, n);
}

/** Forget the oldest ended ones beyond ENDED_KEPT. */
function prune(table, isEnded) {
  const ended = Object.values(table).filter(isEnded).sort((a, b) => (a.r ?? a.k) - (b.r ?? b.k));
  for (const one of ended.slice(0, -ENDED_KEPT)) delete table[one.r ?? one.k];
}
