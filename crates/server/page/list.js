// The list of conversations. Only the rows in sight are elements, and they stay as they are while they are right: a turn touches the row
// that changed, however many there are.

import { h } from "./dom.js";
import { addressOf } from "./route.js";

/** Rows beyond the edges that are drawn, too, so that scrolling shows no gap. */
const BEYOND = 8;

function when(time) {
  const days = Math.floor((new Date().setHours(0, 0, 0, 0) - new Date(time).setHours(0, 0, 0, 0)) / 86_400_000);
  return days <= 0 ? "Today" : days === 1 ? "Yesterday" : days < 7 ? "This week" : days < 31 ? "This month" : "Older";
}

/** One conversation of the list. */
class Row {
  constructor(id, actions) {
    Object.assign(this, { id, actions, shown: "" });
    this.label = h("span", { class: "label", dir: "auto" });
    this.tags = h("span", { class: "tags" });
    this.mark = h("span", { class: "mark", hidden: true });
    this.link = h("a", { class: "open", href: addressOf(id), onkeydown: (event) => this.key(event) }, this.label, this.tags, this.mark);
    this.more = h("button", { type: "button", class: "quiet more", icon: "more", title: "More", "aria-haspopup": "menu", onclick: () => actions.menu(this) });
    this.element = h("li", { class: "row" }, this.link, this.more);
  }

  /** Brings the row up to date. `state` is "busy", "unread" or nothing. */
  show(head, current, state) {
    const title = head.title || "Untitled";
    const wanted = JSON.stringify([title, current, state, head.pinned, head.tags]);
    if (wanted === this.shown) return;
    this.shown = wanted;
    this.title = head.title;
    this.element.classList.toggle("current", current);
    if (current) this.link.setAttribute("aria-current", "page");
    else this.link.removeAttribute("aria-current");
    this.label.textContent = title;
    this.tags.textContent = (head.tags ?? []).map((tag) => `#${tag}`).join(" ");
    this.mark.hidden = !state;
    this.mark.className = `mark ${state}`;
    this.mark.replaceChildren(...(state ? [h("span", { class: "unseen" }, state === "busy" ? ", is being answered" : ", has a new answer")] : []));
    this.more.setAttribute("aria-label", `More for ${title}`);
  }

  key(event) {
    const does = { F2: () => this.edit(), Delete: () => this.actions.forget(this.id), ArrowDown: () => this.actions.step(this, 1), ArrowUp: () => this.actions.step(this, -1) }[event.key];
    if (!does || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    does();
  }

  /** Lets the reader write another title. */
  edit() {
    this.write("Title of the conversation", this.title, (name) => this.actions.rename(this.id, name));
  }

  /** Lets the reader write tags. */
  editTags() {
    this.write("Tags, with spaces between", this.tags.textContent, (text) => this.actions.tag(this.id, text));
  }

  /** Lets the reader write something in the row's place; `take` gets it, where it is something else than before. */
  write(label, before, take) {
    if (this.input) return;
    const input = h("input", { type: "text", class: "title", value: before, maxLength: 200, "aria-label": label, placeholder: label, autocomplete: "off" });
    this.input = input;
    const done = (name) => {
      if (!this.input) return;
      this.input = null;
      input.replaceWith(this.link);
      if (name !== null && name !== before) take(name);
    };
    input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      if (event.isComposing) return;
      event.preventDefault();
      // Escape means the title here, and no answer.
      event.stopPropagation();
      done(event.key === "Enter" ? input.value : null);
      this.link.focus();
    });
    input.addEventListener("blur", () => done(input.value));
    this.link.replaceWith(input);
    input.focus();
    input.select();
  }
}

export class List {
  /** `actions` are `rename(id, name)`, `tag(id, text)`, `forget(id)` and `menu(row)`. */
  constructor(element, actions) {
    this.element = element;
    this.actions = { ...actions, step: (row, by) => this.step(row, by) };
    this.rows = new Map();
    this.groups = new Map();
    this.none = h("li", { class: "none" });
    /** They have the height of the rows above and below those that are drawn. */
    this.gaps = [h("li", { class: "gap", "aria-hidden": "true" }), h("li", { class: "gap", "aria-hidden": "true" })];
    /** Heads, and the names of the groups between them. */
    this.items = [];
    let drawing = 0;
    const later = () => (drawing ||= requestAnimationFrame(() => {
      drawing = 0;
      this.draw();
    }));
    element.addEventListener("scroll", later, { passive: true });
    new ResizeObserver(later).observe(element);
  }

  row(id) {
    if (!this.rows.has(id)) this.rows.set(id, new Row(id, this.actions));
    return this.rows.get(id);
  }

  group(name) {
    if (!this.groups.has(name)) this.groups.set(name, h("li", { class: "group" }, name));
    return this.groups.get(name);
  }

  /** Shows the heads. `stateOf` says whether one is busy or unread; `note` stands below them. */
  show(heads, current, stateOf, note) {
    Object.assign(this, { current, stateOf });
    this.items = [];
    let group = "";
    for (const head of heads) {
      const now = head.pinned ? "Pinned" : when(head.changed);
      if (now !== group) this.items.push(now);
      group = now;
      this.items.push(head);
    }
    this.none.textContent = note;
    this.draw();
  }

  get height() {
    return parseFloat(getComputedStyle(this.element).getPropertyValue("--row"));
  }

  draw() {
    const { element, items, height } = this;
    const from = Math.max(0, Math.min(items.length, Math.floor(element.scrollTop / height) - BEYOND));
    const to = Math.min(items.length, Math.ceil((element.scrollTop + element.clientHeight) / height) + BEYOND);
    const drawn = new Set();
    const elements = items.slice(from, to).map((item) => {
      if (typeof item === "string") return this.group(item);
      const row = this.row(item.id);
      row.show(item, item.id === this.current, this.stateOf(item.id));
      drawn.add(item.id);
      return row.element;
    });
    for (const [id, row] of this.rows) if (!drawn.has(id) && !row.input) this.rows.delete(id);
    if (this.none.textContent && to === items.length) elements.push(this.none);
    const [above, below] = this.gaps;
    above.style.height = `${from * height}px`;
    below.style.height = `${(items.length - to) * height}px`;
    arrange(element, [above, ...elements, below]);
  }

  /** Scrolls to a conversation, where it is out of sight. */
  reveal(id) {
    const at = this.items.findIndex((item) => item.id === id) * this.height;
    const { scrollTop, clientHeight } = this.element;
    if (at < 0 || (at >= scrollTop && at + this.height <= scrollTop + clientHeight)) return;
    this.element.scrollTop = at - clientHeight / 2;
    this.draw();
  }

  /** The conversation before or behind one. */
  beside(id, by) {
    const heads = this.items.filter((item) => typeof item !== "string");
    return heads[heads.findIndex((head) => head.id === id) + by]?.id;
  }

  first() {
    return this.items.find((item) => typeof item !== "string")?.id;
  }

  /** Leads the focus to a conversation. */
  focus(id) {
    this.reveal(id);
    this.rows.get(id)?.link.focus();
  }

  step(row, by) {
    const to = this.beside(row.id, by);
    if (to) this.focus(to);
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
