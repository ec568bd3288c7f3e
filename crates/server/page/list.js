// The list of conversations. Rows stay as they are while they are right: a turn touches the row that changed, however many there are.

import { h } from "./dom.js";
import { addressOf } from "./route.js";

function when(time) {
  const days = Math.floor((new Date().setHours(0, 0, 0, 0) - new Date(time).setHours(0, 0, 0, 0)) / 86_400_000);
  return days <= 0 ? "Today" : days === 1 ? "Yesterday" : days < 7 ? "This week" : days < 31 ? "This month" : "Older";
}

/** One conversation of the list. */
class Row {
  constructor(talk, actions) {
    Object.assign(this, { talk, actions, shown: "" });
    this.label = h("span", { class: "label" });
    this.mark = h("span", { class: "mark", hidden: true });
    this.link = h("a", { class: "open", href: addressOf(talk) }, this.label, this.mark);
    this.pen = h("button", { type: "button", class: "quiet rename", icon: "edit", title: "Rename", onclick: () => this.edit() });
    this.bin = h("button", { type: "button", class: "quiet delete", icon: "bin", title: "Delete", onclick: () => actions.forget(talk) });
    this.element = h("li", { class: "row" }, this.link, this.pen, this.bin);
  }

  /** Brings the row up to date. `state` is "busy", "unread" or nothing. */
  show(current, state) {
    const title = this.talk.title || "Untitled";
    const wanted = JSON.stringify([title, current, state]);
    if (wanted === this.shown) return;
    this.shown = wanted;
    this.element.classList.toggle("current", current);
    if (current) this.link.setAttribute("aria-current", "page");
    else this.link.removeAttribute("aria-current");
    this.label.textContent = title;
    this.mark.hidden = !state;
    this.mark.className = `mark ${state}`;
    this.mark.replaceChildren(...(state ? [h("span", { class: "unseen" }, state === "busy" ? ", is being answered" : ", has a new answer")] : []));
    this.pen.setAttribute("aria-label", `Rename ${title}`);
    this.bin.setAttribute("aria-label", `Delete ${title}`);
  }

  /** Lets the reader write another title. */
  edit() {
    if (this.input) return;
    const input = h("input", { type: "text", class: "title", value: this.talk.title, maxLength: 200, "aria-label": "Title of the conversation", autocomplete: "off" });
    this.input = input;
    const done = (name) => {
      if (!this.input) return;
      this.input = null;
      input.replaceWith(this.link);
      if (name !== null && name !== this.talk.title) this.actions.rename(this.talk, name);
    };
    input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      if (event.isComposing) return;
      event.preventDefault();
      // Escape means the title here, and no answer.
      event.stopPropagation();
      done(event.key === "Enter" ? input.value : null);
      this.pen.focus();
    });
    input.addEventListener("blur", () => done(input.value));
    this.link.replaceWith(input);
    input.focus();
    input.select();
  }
}

export class List {
  /** `actions` are `rename(talk, name)` and `forget(talk)`. */
  constructor(element, actions) {
    Object.assign(this, { element, actions });
    this.rows = new Map();
    this.groups = new Map();
    this.none = h("li", { class: "none" });
  }

  row(talk) {
    const known = this.rows.get(talk.id);
    // The same id may mean another conversation after an import.
    if (known?.talk === talk) return known;
    const row = new Row(talk, this.actions);
    this.rows.set(talk.id, row);
    return row;
  }

  group(name) {
    if (!this.groups.has(name)) this.groups.set(name, h("li", { class: "group" }, name));
    return this.groups.get(name);
  }

  /** Shows the conversations that hold the wanted text. `stateOf` says whether one is busy or unread. */
  show(talks, current, wanted, stateOf) {
    const has = (talk) => talk.title.toLowerCase().includes(wanted) || Object.values(talk.nodes).some((node) => node.content.toLowerCase().includes(wanted));
    const found = talks.filter((talk) => !wanted || has(talk)).sort((a, b) => b.changed - a.changed);
    const elements = [];
    let group = "";
    for (const talk of found) {
      const now = when(talk.changed);
      if (now !== group) elements.push(this.group(now));
      group = now;
      const row = this.row(talk);
      row.show(talk === current, stateOf(talk));
      elements.push(row.element);
    }
    if (!found.length) {
      this.none.textContent = wanted ? "Nothing found" : "Conversations will be listed here.";
      elements.push(this.none);
    }
    const known = new Set(talks.map((talk) => talk.id));
    for (const id of this.rows.keys()) if (!known.has(id)) this.rows.delete(id);
    arrange(this.element, elements);
  }
}

/** Gives an element these children, and moves no child that stands where it should. */
export function arrange(parent, children) {
  const wanted = new Set(children);
  for (const child of [...parent.childNodes]) if (!wanted.has(child)) child.remove();
  let at = parent.firstChild;
  for (const child of children) {
    if (child === at) at = at.nextSibling;
    else parent.insertBefore(child, at);
  }
}
