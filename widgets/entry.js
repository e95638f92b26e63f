// What a host calls: one store and one link for each widget, one view for each place where it is shown.

import { Link } from "./link.js";
import { mountView } from "./shell.js";
import { Store } from "./store.js";

export default () => {
  const store = new Store();
  let link;
  return {
    initialize({ model }) {
      link = new Link(model, store);
      model.on("change:pin", () => link.pinned(model.get("pin")));
      return () => link.close();
    },
    render({ model, el }) {
      return mountView(el, store, link, {
        panels: model.get("panels"), pin: model.get("pin"), theme: model.get("theme"),
      });
    },
  };
};
