// The frame around panels: titles, tables behind pictures, status line, pin, and when to paint.
//
// Knows panels by this interface, and nothing of what they show:
//   {name, title, picture, mount(el, ctx), draw(state, ctx), summary(state, ctx), table(state, ctx)}
// picture: true if it draws on canvases (announced as one image with its summary). table gives
// {columns, rows} of strings and numbers. Each place where a panel stands has its own ctx:
//   store, link (null in a replay: nothing can be controlled), view, el, local (the panel's own things),
//   width(), theme(), choice(key, otherwise), choose(key, value), redraw(), show(step or null)
// A new panel registers itself: PANELS.push(panel).

import { h, setText, themeOf } from "./palette.js";
import { STATUS_TEXT } from "./link.js";
import { Pin } from "./pin.js";

export const PANELS = [];

const FRAME = 50; // ms from one paint to the next at least

/** Mount panels into `home`. options: {panels: names in order, pin, theme}. Returns a function that ends it. */
export function mountView(home, store, link, options) {
  const view = new View(home, store, link, options);
  return () => view.close();
}

class View {
  constructor(home, store, link, options) {
    Object.assign(this, { store, link, options, root: h("div") });
    this.pin = new Pin(this.root, home, link || store);
    home.append(this.root);
    this.choices = link ? link.choices : { ...options.choices };
    this.painted = 0;
    this.places = [];
    this._build();
    this._onChange = () => this.redraw();
    this._onLink = (what) => (what === "pin" ? this._setPin(this.choices.pin) : this.redraw());
    store.listeners.add(this._onChange);
    if (link) link.listeners.add(this._onLink);
    this._observers = [new ResizeObserver(this._onChange), this._watchVisible()];
    this._observers[0].observe(this.root);
    this._themes = new MutationObserver(this._onChange);
    this._themes.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "class"] });
    this._clock = setInterval(() => this._drawStatus(), 1000);
    this.root.__asyncllm_debug = this;
    this.redraw();
  }

  close() {
    this.closed = true;
    this.store.listeners.delete(this._onChange);
    if (this.link) {
      this.link.listeners.delete(this._onLink);
      this.link.visible(this, null);
    }
    for (const observer of [...this._observers, this._themes]) observer.disconnect();
    clearInterval(this._clock);
    clearTimeout(this._timer);
    for (const place of this.places) place.ctx.local.close?.();
    this.pin.close();
  }

  _build() {
    this.root.classList.add("allm");
    this.root.dataset.theme = this.options.theme || "auto";
    this.status = h("span", { class: "allm-status", role: "status" });
    this.pinButtons = ["right", "bottom"].map((edge) =>
      h("button", { type: "button", "data-pin": edge, title: `Keep at the ${edge} edge`, onclick: () => this._pin(edge) }, `Pin ${edge}`));
    const bar = h("header", { class: "allm-bar" }, h("strong", {}, this.store.meta.name), this.status,
      h("span", { class: "allm-pins" }, this.pinButtons));
    const forget = () => this.link && (this.link.errors = []) && this.redraw();
    this.errors = h("div", { class: "allm-error", role: "alert", hidden: true, title: "Click to dismiss", onclick: forget });
    this.name = bar.firstChild;
    this.root.replaceChildren(bar, this.errors);
    for (const name of this.options.panels) {
      const panel = PANELS.find((one) => one.name === name);
      if (panel) this._place(panel);
    }
    if (this.pin.isFree) this._setPin(this.choices.pin ?? this.options.pin ?? "");
  }

  _place(panel) {
    const body = h("div", { class: "allm-body" });
    const table = h("div", { class: "allm-table", hidden: true });
    const fault = h("div", { class: "allm-error", role: "alert", hidden: true });
    const button = panel.table && h("button", {
      type: "button", class: "allm-flip", "aria-pressed": "false", "aria-label": `${panel.title} as a table`,
      onclick: () => this._flip(place),
    }, "Table");
    const section = h("section", { class: "allm-panel", "data-panel": panel.name, "aria-label": panel.title },
      h("header", {}, h("h4", {}, panel.title), button), body, fault, table);
    const place = { panel, section, body, table, button, fault, visible: true, ctx: this._context(panel, body) };
    this.root.append(section);
    this.places.push(place);
    this._guard(place, () => panel.mount(body, place.ctx));
    if (this.choices.tables?.includes(panel.name)) this._flip(place);
  }

  _context(panel, el) {
    return {
      store: this.store, link: this.link, view: this, el, local: {},
      width: () => Math.max(120, el.clientWidth),
      theme: () => (this._theme ??= themeOf(this.root)),
      choice: (key, otherwise) => this.choices[`${panel.name}.${key}`] ?? otherwise,
      choose: (key, value) => this._choose(`${panel.name}.${key}`, value),
      redraw: () => this.redraw(),
      show: (n) => this.store.show(n),
    };
  }

  _choose(key, value) {
    if (this.link) this.link.choose(key, value);
    else this.choices[key] = value;
  }

  _flip(place) {
    place.table.hidden = !place.table.hidden;
    place.button.setAttribute("aria-pressed", String(!place.table.hidden));
    this._choose("tables", this.places.filter((one) => !one.table.hidden).map((one) => one.panel.name));
    this.redraw();
  }

  _pin(edge) {
    this._setPin(this.pin.edge === edge ? "" : edge);
    this._choose("pin", this.pin.edge);
    this.redraw();
  }

  _setPin(edge) {
    if (this.pin.edge !== edge) this.pin.set(edge);
    for (const button of this.pinButtons) button.setAttribute("aria-pressed", String(button.dataset.pin === edge));
  }

  _watchVisible() {
    const observer = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const place = this.places.find((one) => one.section === entry.target);
        if (place) place.visible = entry.isIntersecting;
      }
      if (!this.closed) this.link?.visible(this, this.visiblePanels());
      this.redraw();
    });
    for (const place of this.places) observer.observe(place.section);
    return observer;
  }

  visiblePanels() {
    return this.places.filter((place) => place.visible).map((place) => place.panel.name);
  }

  /** Paint soon: at most every FRAME ms, with the newest state. */
  redraw() {
    if (this._timer || this.closed) return;
    const wait = Math.max(0, (this._last ?? 0) + FRAME - performance.now());
    this._timer = setTimeout(() => requestAnimationFrame(() => this._paint()), wait);
  }

  _paint() {
    this._timer = null;
    if (this.closed) return;
    this._last = performance.now();
    this._theme = null;
    const state = this.store.state;
    for (const place of this.places) if (place.visible) this._guard(place, () => this._draw(place, state));
    this._drawStatus();
    this.painted += 1;
    this.lag = performance.now() - this._last;
  }

  _draw({ panel, body, table, ctx }, state) {
    panel.draw(state, ctx);
    const summary = panel.summary(state, ctx);
    if (body.getAttribute("aria-label") !== summary) {
      body.setAttribute("role", panel.picture ? "img" : "group");
      body.setAttribute("aria-label", summary);
    }
    if (panel.table && !table.hidden) fillTable(table, panel.table(state, ctx));
  }

  /** Run something of a panel; what it throws is shown in its place. */
  _guard({ fault, panel }, action) {
    try {
      action();
      fault.hidden = true;
    } catch (error) {
      fault.hidden = false;
      setText(fault, `${panel.title} cannot be drawn: ${error.message}`);
      console.error(error);
    }
  }

  _drawStatus() {
    const { store, link } = this;
    const state = store.state;
    this.pin.refresh();
    const live = store.cursor === null || !store.step(store.cursor);
    const engine = state.closed ? "closed" : state.paused ? "paused" : "";
    const words = [link ? STATUS_TEXT[link.status] : "replay", engine, live ? "" : `showing step ${store.cursor}`];
    setText(this.name, store.meta.name);
    setText(this.status, words.filter(Boolean).join(" · "));
    this.status.dataset.status = link ? link.status : "replay";
    setText(this.errors, link ? link.errors.join("\n") : "");
    this.errors.hidden = !this.errors.textContent;
  }
}

function fillTable(element, { columns, rows }) {
  const cells = (tag, list) => h("tr", {}, list.map((cell) => h(tag, {}, String(cell))));
  const text = JSON.stringify([columns, rows]);
  if (element.dataset.text === text) return;
  element.dataset.text = text;
  element.replaceChildren(h("table", {}, h("thead", {}, cells("th", columns)), h("tbody", {}, rows.map((row) => cells("td", row)))));
}
