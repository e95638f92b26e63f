// What a recording is made of, and what kernel and view say to each other. The one place that lists both.
//
// A RECORDING is a list of small records, oldest first, numbered from 0. `engine/trace.py` writes it,
// `reducer.js` (and its twin `engine/reducer.py`) turns its beginning into the state of a moment.
// Every record has t (its type) and at (s since the engine was made); the rest by type:
//
//   block    id, name                     a block is made, empty
//   change   id, op, version, pages, from an operation changed it: "merge" and "fork" (its first content),
//            x                            "append" (behind what it has), "clear", "load". from: [[block,
//                                         version, tokens]], what was read; x: texts that a file gave, if any
//   free     id                           the block is no more
//   begin    tx, blocks                   a transaction takes blocks; others go on reading them as they are
//   end      tx, restored                 and ends. restored: [[block, version, pages]] if it was undone
//   request  r, kind, name, view, block,  a stream, forward, replace or probe begins. view: ids of blocks in
//            task                         order, the written one last; block: the written one, or null
//   token    r, id, x                     a stream yields a token: it is in its block. x: its text
//   stream   r, state                     new state of a stream: queued, waiting (for memory), running, body
//   ended    r, reason, error, x          a stream ends: stop, eos, length, cancelled or error; another
//                                         request did not finish. x: text that was held back for an unfinished character
//   task     k, name, state, line, error  a coroutine that reads streams: running, waiting (line: where),
//                                         done, failed, cancelled
//   step     n, s, rows, wait, pages,     a forward pass of s seconds that began at b. pages, slots: free after
//            slots, err, encoded, resent, it. encoded, resent: the ledger after it (`engine/ledger.py`). ran, on a
//            ran                          GPU only: "graph" (recorded CUDA graphs) or "eager" (kernel by kernel)
//     row:   r, k, b, n, m, v, i, x, c    k: decode, prefill or probe; b: written block or null; n tokens with
//                                         ids i and texts x; m tokens before them are read; v: version read of
//                                         each block in the request's view. c, if the row committed: [version]
//                                         the block has now; [version, keep, new] if its pages changed: the
//                                         first `keep` ones, then `new`; [] for a probe that is done. With c a
//                                         request that is no stream has ended
//   pause, resume, close
//   speed    interval                     s from one step to the next at least; 0: as fast as it can
//   control  what, answer, ok             what a person asked for in a view, and what became of it
//   mark     n, note                      a person marked step n
//   agent    a, name, state, version, k,  a coroutine of agent a: new, running, ending (told to stop), replacing
//            error                        (the same, and starts anew then), done, failed, stopped, removed.
//                                         version: of its code; k: of the task that runs it, or ran it last
//   tool     a, c, name, by, args, state, call c of a tool of agent a by its coroutine `by` ("": a cell): gate
//            reason                       (waits for it), asking (for approval), running, done, failed, denied,
//                                         timeout, cancelled. args: as text; reason: of the last four
//   others                                do not change the state; panels read them by store.readings(t):
//   shares   n, rows, bin                 attention per block at step n. Row: r, layers, heads, mean (per block),
//                                         q: bytes [layers, blocks, heads], 255 is 1. heads 1: averaged
//   norms    the same                     how much of the past each block lets through, per GDN layer
//   weights  n, rows, bin                 attention of a row's last token to each token. Row: r, lengths (tokens
//                                         of each block), layers, heads, peak [layers * heads], q: bytes
//                                         [layers, heads, tokens], 255 is the peak
//   states   n, layer, rows, bin          the state after the view. Row: r, shape [blocks, heads, d_v, d_k], peak
//                                         [heads], q: signed bytes, 127 is the peak; the sum over blocks is it
//   bin says that a record holds bytes, and how many.
//
// A record with bytes in it says bin: how many. In a message each is {$b: i}, buffer i of the message; in
// a file {$base64: "…"}.
//
// META, said once: name, model, page_tokens, pages, slots (pool sizes), attention_layers, linear_layers.
//
// A VIEW SAYS                             (custom messages; never synchronised traits). Each also has said: 1, 2, …,
//                                         since some kernels handle messages of one page out of order.
//   {type: "ready", client}               this page has opened the widget: send a snapshot
//   {type: "ack", client, next}           it has all records before number `next`
//   {type: "visible", client, visible, panels}  panels: names of those on screen
//   {type: "control", client, id, command, …}   see asyncllm_nb/controls.py
//   {type: "read", client, id, what, n, exact, r, layer, view}  a reading that the recording has not: "weights" or
//                                         "states" of request r at step n, or (not exact) the newest one
//   {type: "choose", choices}             zoom, pin, typed text: kept in the kernel for the next page
//   {type: "ping", client, next}          after a silence; it still has all records before number `next`
//
// THE KERNEL SAYS
//   {type: "snapshot", client, part, parts, first, records, meta, base}  base: the state before `first`;
//                                         meta and base come with part 0
//   {type: "delta", first, records}       for everybody; a view that lacks records before `first` says "ready"
//   {type: "answer", client, id, ok, text}  a control is done, or why not
//   {type: "reading", client, id, records}  the record that answers a "read"; none: there is no such reading
//   {type: "who", client}                 the kernel had given this page up: say again what is visible
//   {type: "error", text}                 a callback in the kernel failed
//   {type: "pong"}

/** Replace {$b: i} and {$base64: s} anywhere inside records by Uint8Arrays. Only records that say `bin`
 * are looked at, so that most cost nothing. */
export function withBytes(records, buffers = []) {
  for (const record of records) if (record.bin) walkBytes(record, buffers);
  return records;
}

function walkBytes(value, buffers) {
  for (const key of Object.keys(value)) {
    const inner = value[key];
    if (inner === null || typeof inner !== "object") continue;
    if (inner.$b !== undefined) value[key] = asBytes(buffers[inner.$b]);
    else if (inner.$base64 !== undefined)
      value[key] = Uint8Array.from(atob(inner.$base64), (c) => c.charCodeAt(0));
    else walkBytes(inner, buffers);
  }
}

function asBytes(buffer) {
  if (buffer instanceof ArrayBuffer) return new Uint8Array(buffer);
  return new Uint8Array(buffer.buffer, buffer.byteOffset, buffer.byteLength);
}
