// The messages of a conversation on the screen.

import { canContinue } from "./answers.js";
import { stateOf, visible } from "./calls.js";
import { $, copy, h } from "./dom.js";
import { arrange } from "./list.js";
import { Live } from "./markdown.js";
import * as pictures from "./pictures.js";
import { page } from "./state.js";
import { children, path } from "./tree.js";

/** A JSON text with line ends, if it is one. */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** What an answer that is not complete says of itself. */
const ENDED = {
  stopped: "Stopped",
  length: "The answer was cut off: it reached its longest length, or the context is full.",
  lost: "The connection was lost.",
  left: "The page was left while this was written.",
  failed: "The server could not answer.",
};
/** Ends that are no fault. */
const QUIET = ["stopped", "length", "left"];

const button = (icon, label, onclick) => h("button", { type: "button", class: "quiet", icon, "aria-label": label, title: label, onclick });

/** One message. What it shows follows the node; `refresh` brings it up to date. */
class Message {
  constructor(talk, node, actions) {
    Object.assign(this, { talk, node, actions });
    const who = { user: "You", assistant: "Model", tool: "Tool result" }[node.role];
    this.body = h("div", { class: "body" });
    this.foot = h("div", { class: "foot" });
    this.element = h("article", { class: node.role, "aria-label": who }, h("h2", { class: "unseen" }, who), this.body, this.foot);
    this.element.dataset.id = node.id;
    if (node.role === "assistant") this.assistant();
    else if (node.role === "tool" && node.parts) this.result();
    else this.person();
    this.refresh();
  }

  person() {
    const all = this.node.files ?? [];
    const shown = all.filter((file) => file.picture).map((file) => h("img", { src: pictures.address(file), alt: file.name, title: file.name }));
    const files = all.filter((file) => !file.picture).map((file) => h("details", { class: "file" }, h("summary", { icon: "file" }, h("span", {}, file.name), h("small", {}, size(file.text))), h("pre", { tabIndex: 0, role: "region", "aria-label": file.name }, file.text)));
    if (shown.length) this.body.append(h("div", { class: "pictures" }, shown));
    this.body.append(...files, ...(this.node.content ? [h("div", { class: "words" }, this.node.content)] : []));
  }

  /** What a tool of the server gave: texts as they are, pictures, links that say where they lead. */
  result() {
    const { node } = this;
    const name = visible(node.name);
    const shown = node.parts.map((part) => {
      if (part.type === "picture" && pictures.isResultPicture(part)) {
        const file = { picture: `data:${part.mime};base64,${part.data}` };
        return h("div", { class: "pictures" }, h("img", { src: pictures.address(file), alt: `A picture of ${name}` }));
      }
      if (part.type === "link" && /^https?:/.test(part.url)) {
        const link = h("a", { href: part.url, target: "_blank", rel: "noopener noreferrer" }, visible(part.url));
        return h("p", { class: "lead" }, part.name && `${visible(part.name)}: `, link);
      }
      const text = visible(part.text ?? "");
      return h("pre", { tabIndex: 0, role: "region", dir: "ltr", "aria-label": `Result of ${name}` }, text);
    });
    const facts = [node.failed && "failed", Number.isFinite(node.seconds) && seconds(Math.round(node.seconds * 1000))].filter(Boolean).join(", ");
    const cut = node.cut && h("p", { class: "mark-end" }, `Cut: ${visible(node.cut)}.`);
    const open = node.parts.length > 0;
    this.body.append(h("details", { class: node.failed ? "call failed" : "call", open }, h("summary", { icon: "tool" }, h("span", {}, "Result of ", h("code", {}, name)), h("small", {}, facts)), shown, cut));
  }

  assistant() {
    this.thought = h("div", { class: "thought prose" });
    this.thinking = h("details", { class: "thinking" }, h("summary", {}, "Thinking"), this.thought);
    this.words = h("div", { class: "prose" });
    this.calls = h("div", { class: "calls" });
    this.note = h("p", { role: "alert" });
    this.end = h("div", { class: "end", hidden: true }, this.note);
    this.body.append(this.thinking, this.words, this.calls, this.end);
    this.live = { thought: new Live(this.thought), words: new Live(this.words) };
  }

  refresh() {
    const { node } = this;
    if (node.role === "assistant") {
      const busy = Boolean(node.busy);
      this.element.setAttribute("aria-busy", String(busy));
      this.element.classList.toggle("waiting", busy && !node.content && !node.reasoning);
      this.thinking.hidden = !node.reasoning;
      this.thinking.firstChild.textContent = busy && !node.content ? "Thinking…" : `Thought${node.stats?.thought ? ` for ${seconds(node.stats.thought)}` : ""}`;
      this.live.thought.set(node.reasoning ?? "");
      this.live.words.set(node.content);
      this.showCalls();
      this.showEnd();
    }
    this.showFoot();
  }

  get isLast() {
    return path(this.talk).at(-1)?.id === this.node.id && !this.node.busy;
  }

  /** How the answer ended, and what can be done about it. */
  showEnd() {
    const { node, actions } = this;
    const text = node.note || (node.end ? ENDED[node.end] : "");
    const more = canContinue(node) && this.isLast;
    const state = JSON.stringify([text, node.end, more]);
    if (state === this.endShown) return;
    this.endShown = state;
    const buttons = [];
    if (more) buttons.push(h("button", { type: "button", class: "continue", onclick: () => actions.resume(node) }, "Continue"));
    if (node.end && !QUIET.includes(node.end)) buttons.push(h("button", { type: "button", class: "retry", onclick: () => actions.retry(node) }, "Retry"));
    this.end.hidden = !text || Boolean(node.busy);
    this.note.className = QUIET.includes(node.end) ? "mark-end" : "note";
    this.note.textContent = text;
    this.end.replaceChildren(this.note, ...buttons);
  }

  showCalls() {
    const calls = this.node.calls ?? [];
    const last = this.isLast && !this.node.end;
    const states = calls.map((call) => stateOf(call, page.tools));
    const state = JSON.stringify([calls, states, last]);
    if (state === this.callsShown) return;
    this.callsShown = state;
    const focused = document.activeElement?.dataset?.say;
    this.calls.replaceChildren(...calls.map((call, i) => this.call(call, last ? states[i] : "")));
    // The reader's own tools: who answers for them says what they gave.
    const own = calls.filter((_, i) => states[i] === "write");
    if (own.length && last) this.calls.append(this.results(own));
    if (focused) this.calls.querySelector(`[data-say="${focused}"]`)?.focus();
  }

  call(call, state) {
    const tool = page.tools.find(call.name);
    const name = visible(call.name);
    const said = call.running ? "running…" : state === "ask" ? "waits for you" : state === "done" ? "has its result" : "";
    const parts = [
      h("summary", { icon: "tool" }, h("span", {}, "Calls ", h("code", {}, name)), said && h("small", {}, said)),
      tool?.server && h("p", { class: "of" }, "A tool of the MCP server ", h("code", {}, visible(tool.server)), tool.description && `, which says of it: “${visible(tool.description).slice(0, 600)}”`),
      h("pre", { tabIndex: 0, role: "region", dir: "ltr", "aria-label": `Arguments of ${name}` }, visible(pretty(call.arguments))),
    ];
    if ((state === "ask" || state === "make") && tool && !call.running) parts.push(this.question(call, tool));
    return h("details", { class: call.running ? "call running" : "call", open: true }, parts);
  }

  /** Whether a call may be made. */
  question(call, tool) {
    const choice = (say, label, main) => {
      const pressed = h("button", { type: "button", class: main ? "main" : "", onclick: () => this.actions.decide(this.node, call, say) }, label);
      pressed.dataset.say = say;
      return pressed;
    };
    const always = tool.approval !== "always" && choice("always", "Always allow");
    return h("div", { class: "buttons ask", role: "group", "aria-label": `May ${visible(call.name)} be called?` }, choice("no", "Do not allow"), always, choice("yes", "Allow once", true));
  }

  /** Nobody runs these tools but the reader, who may say what they gave. */
  results(calls) {
    const fields = calls.map((call) => h("textarea", { rows: 2, "aria-label": `Result of ${call.name}`, placeholder: `What ${call.name} gives` }));
    const form = h("form", { class: "results", onsubmit: (event) => {
      event.preventDefault();
      this.actions.answerCalls(this.node, calls.map((call, i) => ({ call: call.id, name: call.name, content: fields[i].value })));
    } }, fields, h("button", { type: "submit" }, calls.length > 1 ? "Send results" : "Send result"));
    return form;
  }

  showFoot() {
    const { node, actions } = this;
    const parts = [];
    const branches = children(this.talk, node.parent).filter((other) => other.role === node.role);
    if (branches.length > 1) {
      const at = branches.findIndex((other) => other.id === node.id);
      const go = (to) => () => actions.show(branches[to]);
      const before = button("left", "Branch before", go(at - 1));
      const after = button("right", "Branch after", go(at + 1));
      before.disabled = at === 0;
      after.disabled = at === branches.length - 1;
      parts.push(h("span", { class: "branches" }, before, h("span", { "aria-label": `Branch ${at + 1} of ${branches.length}`, role: "img" }, `${at + 1}/${branches.length}`), after));
    }
    if (!node.busy) {
      const copying = button("copy", "Copy the message", () => copy(node.content, copying));
      parts.push(copying);
      if (node.role === "user") parts.push(button("edit", "Edit the message", () => this.edit()));
      if (node.role === "assistant") parts.push(button("retry", "Answer again", () => actions.retry(node)), button("sliders", "Answer with another model or settings", () => actions.retryWith(node)));
    }
    if (node.stats?.tokens) parts.push(h("span", { class: "stats" }, told(node)));
    const state = JSON.stringify([node.busy, node.stats, branches.map((b) => b.id), node.id]);
    // Buttons that are still right stay, so that a finger or the focus on one is not lost.
    if (state === this.footShown) return;
    this.footShown = state;
    this.foot.replaceChildren(...parts);
  }

  edit() {
    const area = h("textarea", { class: "editing", dir: "auto", "aria-label": "Edit the message", value: this.node.content });
    const done = () => {
      form.replaceWith(this.body);
      this.foot.hidden = false;
    };
    const send = () => {
      done();
      this.actions.edit(this.node, area.value);
    };
    const form = h("form", { class: "edit", onsubmit: (event) => {
      event.preventDefault();
      send();
    } }, area, h("div", { class: "buttons" }, h("button", { type: "button", onclick: done }, "Cancel"), h("button", { type: "submit", class: "main" }, "Send")));
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        done();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      }
    });
    this.body.replaceWith(form);
    this.foot.hidden = true;
    area.style.height = `${Math.min(area.scrollHeight + 4, 400)}px`;
    area.focus();
  }
}

export const size = (text) => weight(new Blob([text]).size);
export const weight = (bytes) => {
  if (bytes < 1000) return `${bytes} B`;
  return bytes < 1e6 ? `${(bytes / 1e3).toFixed(1)} kB` : bytes < 1e9 ? `${(bytes / 1e6).toFixed(1)} MB` : `${(bytes / 1e9).toFixed(1)} GB`;
};
const seconds = (ms) => (ms < 10_000 ? `${(ms / 1000).toFixed(1)} s` : `${Math.round(ms / 1000)} s`);

function told({ stats, by }) {
  const parts = [`${stats.tokens} token${stats.tokens === 1 ? "" : "s"}`];
  if (stats.rate) parts.push(`${stats.rate < 10 ? stats.rate.toFixed(1) : Math.round(stats.rate)} tokens/s`);
  if (stats.first) parts.push(`first after ${seconds(stats.first)}`);
  if (stats.cached) parts.push(`${stats.cached} of ${stats.prompt} prompt tokens cached`);
  if (by?.model) parts.push(by.model);
  if (by?.temperature !== undefined) parts.push(`temperature ${by.temperature}`);
  if (by?.thinking) parts.push(`thinking ${by.thinking}`);
  return parts.join(" · ");
}

/** All messages of the conversation that is shown. */
export class Messages {
  constructor(actions) {
    this.actions = actions;
    this.shown = new Map();
    this.talk = null;
    // A reader who scrolls up is left alone; one who is at the end stays there.
    this.follow = true;
    this.laid = "";
    const view = $("talk");
    view.addEventListener("scroll", () => {
      // Another layout moves the text, too: only in the same layout it was the reader.
      if (this.laid !== layout(view)) return this.keepUp();
      this.follow = atEnd(view);
      $("down").hidden = this.follow;
    }, { passive: true });
    const sizes = new ResizeObserver((entries) => {
      // What the reader unfolds or edits must not run away under the pointer.
      if (entries.some((entry) => entry.target === view)) this.keepUp();
      else this.settle();
    });
    sizes.observe(view);
    sizes.observe($("column"));
    document.fonts.addEventListener("loadingdone", () => this.keepUp());
    $("down").addEventListener("click", () => this.toEnd());
  }

  show(talk, welcome) {
    if (talk !== this.talk) {
      this.shown.clear();
      this.talk = talk;
      this.follow = true;
    }
    const way = path(talk);
    const wanted = new Set(way.map((node) => node.id));
    for (const id of this.shown.keys()) if (!wanted.has(id)) this.shown.delete(id);
    const elements = way.map((node) => {
      const known = this.shown.get(node.id);
      if (known) known.refresh();
      else this.shown.set(node.id, new Message(talk, node, this.actions));
      return this.shown.get(node.id).element;
    });
    // Messages that stay are not moved: one that is being edited keeps the focus.
    arrange($("column"), way.length ? elements : [welcome()]);
    this.keepUp();
  }

  refresh(node) {
    this.shown.get(node.id)?.refresh();
    this.keepUp();
  }

  edit(node) {
    this.shown.get(node.id)?.edit();
  }

  /** Stays at the end, where the reader is. */
  keepUp() {
    if (this.follow) $("talk").scrollTop = $("talk").scrollHeight;
    this.settle();
  }

  /** Remembers the layout. */
  settle() {
    this.laid = layout($("talk"));
    $("down").hidden = this.follow || atEnd($("talk"));
  }

  toEnd() {
    this.follow = true;
    this.keepUp();
  }
}

const layout = (view) => `${view.clientWidth} ${view.clientHeight} ${view.scrollHeight}`;
const atEnd = (view) => view.scrollHeight - view.scrollTop - view.clientHeight < 48;
