// Colours and shapes of blocks, small DOM and canvas helpers. Knows no data.
//
// The lists are those of asyncllm_nb/markup.py: a block looks the same in every widget and every card.

export const COLOURS = ["#0072B2", "#D55E00", "#00875F", "#A3539B", "#A87400", "#6A6FD8", "#CC3D66", "#767C86"];
export const MARKS = ["●", "■", "▲", "◆", "★", "✚", "▼"];

export const blockColour = (id) => COLOURS[id % COLOURS.length];
export const blockMark = (id) => MARKS[id % MARKS.length];

/** An element. `h("b", {class: "x", onclick: f}, "text", child)`; false and null children are left out. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "style") element.style.cssText = value;
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** A block's mark in its colour, and its name. */
export function blockLabel(id, name) {
  return h("span", { class: "allm-block", title: `block ${id}` },
    h("span", { style: `color:${blockColour(id)}`, "aria-hidden": "true" }, blockMark(id)), ` ${name}`);
}

/** Set the text of an element only if it changes: selections and screen readers stay undisturbed. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Make a canvas `width` × `height` CSS pixels large and return its context, scaled and cleared. */
export function fit(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, hgt] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
  if (canvas.width !== w || canvas.height !== hgt) Object.assign(canvas, { width: w, height: hgt });
  Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/** The theme's colours, as the page has them now: {text, muted, line, ground, paper, accent, bad}. */
export function themeOf(element) {
  const style = getComputedStyle(element);
  const of = (name) => style.getPropertyValue(`--allm-${name}`).trim();
  return Object.fromEntries(["text", "muted", "line", "ground", "paper", "accent", "bad"].map((k) => [k, of(k)]));
}

/** Diagonal lines over a rectangle: the sign of pages that several blocks share, without colour. */
export function hatch(context, x, y, width, height, colour, gap = 4) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.beginPath();
  for (let at = x - height; at < x + width; at += gap) {
    context.moveTo(at, y + height);
    context.lineTo(at + height, y);
  }
  context.stroke();
  context.restore();
}

/** "1,234" */
export const count = (n) => Math.round(n).toLocaleString("en-US");

/** Seconds as people read them: "12 ms", "3.4 s". */
export const seconds = (s) => (s < 1 ? `${Math.round(s * 1000)} ms` : `${s.toFixed(s < 10 ? 2 : 1)} s`);

/** The end of a text, with a sign where something was left out. */
export const tail = (text, length) => (text.length <= length ? text : "…" + text.slice(1 - length));

export const visible = (text) => text.replaceAll("\n", "⏎");
