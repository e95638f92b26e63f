// What an exported page calls: the same panels over a recording that the page holds, with no kernel behind.

import { withBytes } from "./protocol.js";
import { mountView } from "./shell.js";
import { Store } from "./store.js";

/** Show the recording that stands, compressed, in the script element `data` inside `root`. */
export default async function showPage(root, data, panels) {
  const bytes = Uint8Array.from(atob(data.textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const recording = await new Response(stream).json();
  const store = new Store();
  store.reset(recording.first, recording.base, recording.meta);
  store.add(recording.first, withBytes(recording.records));
  mountView(root, store, null, { panels, pin: "", theme: "auto", choices: {} });
}
