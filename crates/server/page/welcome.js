// What stands where no message does: in a new chat, and at an address that names nothing.

import { $, h } from "./dom.js";
import * as models from "./models.js";
import { openHelp } from "./panels.js";
import { isLoopback } from "./route.js";
import { page } from "./state.js";

const EXAMPLES = ["Explain what a kiln does, as if to a friend.", "Write a Python function that finds the primes below n.", "Compare tea and coffee in a table."];

/** A new chat. `ask` sends a text. */
export function welcome(ask) {
  const here = isLoopback(location.hostname);
  const model = page.models.find((known) => known.id === $("model").value);
  const context = models.contextOf(page.talk);
  const facts = [page.engine?.model === model?.id && page.engine?.device, context && `${context.toLocaleString("en")} tokens of context`].filter(Boolean);
  const runs = model && !models.isLoaded(model) ? "It is loaded when you ask. " : facts.length && `It runs ${facts.length > 1 ? "on" : "with"} ${facts.join(", ")}. `;
  const privacy = here ? "Nothing you write leaves it, and conversations stay in this browser." : "What you write is sent there; conversations are kept in this browser.";
  const example = (text) => h("li", {}, h("button", { type: "button", onclick: () => ask(text) }, text));
  return h("div", { class: "welcome" },
    h("img", { src: "/page/icon.svg", alt: "", width: 56, height: 56 }),
    h("h2", {}, "What shall we make?"),
    h("p", {}, h("strong", {}, $("model").value || "The model"), " answers from ", here ? "this machine" : h("strong", {}, location.host), ". ", runs || "", privacy),
    h("ul", {}, EXAMPLES.map(example)),
    h("p", { class: "small" }, models.sees(page.talk) ? "Attach, paste or drop pictures, PDF and text files. " : "Attach or drop PDF and text files. ", "Edit a message to branch. ", h("button", { type: "button", class: "link", onclick: () => openHelp() }, "All keys, and the address for programs")));
}

/** An address that names no conversation of this browser. */
export function missing(begin) {
  return h("div", { class: "welcome" },
    h("h2", {}, "This conversation is not here"),
    h("p", {}, "The address names a conversation that this browser does not have. It was deleted, or it was held in another browser: conversations stay in the one that began them."),
    h("p", {}, h("button", { type: "button", class: "main", onclick: begin }, "New chat")));
}
