// Pin: keeps a view at an edge of the window while the notebook scrolls. Knows elements, no data.
//
// A pinned view stands in the page's body. Inside of its cell it would vanish as soon as the notebook stops
// drawing that cell, which it does for all that are scrolled away.

const pinned = new Map(); // owner (a link) -> the pin that is out: two views of one widget do not pile up

export class Pin {
  /** `root` is moved; `home` is where it stands otherwise. */
  constructor(root, home, owner) {
    Object.assign(this, { root, home, owner, edge: "" });
  }

  /** Go to an edge ("right", "bottom"), or back home (""). Another view of the same widget goes home. */
  set(edge) {
    const other = pinned.get(this.owner);
    if (edge && other && other !== this) other.set("");
    if (edge) pinned.set(this.owner, this);
    else if (other === this) pinned.delete(this.owner);
    this.edge = edge;
    this.root.dataset.pin = edge;
    (edge ? document.body : this.home).append(this.root);
    this.refresh();
    this._makeRoom();
  }

  /** The notebook's cells end where the view begins, and the last one can be scrolled out from under it. */
  _makeRoom() {
    const cells = this.document?.querySelector(".jp-WindowedPanel-viewport");
    if (!cells) return;
    cells.style.paddingRight = cells.style.paddingBottom = "";
    const [box, view] = [cells.parentElement.getBoundingClientRect(), this.root.getBoundingClientRect()];
    if (this.edge === "right") cells.style.paddingRight = `${Math.max(0, box.right - view.left)}px`;
    if (this.edge === "bottom") cells.style.paddingBottom = `${view.height}px`;
  }

  /** May a view that opens now be pinned at once? */
  get isFree() {
    return !pinned.has(this.owner);
  }

  /** Out of sight while another document is in front of its notebook. */
  refresh() {
    if (!this.document) {
      this.document = this.home.closest(".jp-Document, .jp-NotebookPanel"); // none before the home is in the page
      if (this.document && this.edge) this._makeRoom();
    }
    const notebook = this.document;
    this.root.hidden = Boolean(this.edge && notebook && (!notebook.isConnected || notebook.classList.contains("lm-mod-hidden")));
  }

  close() {
    this.edge = "";
    this._makeRoom();
    if (pinned.get(this.owner) === this) pinned.delete(this.owner);
    this.root.remove();
  }
}
