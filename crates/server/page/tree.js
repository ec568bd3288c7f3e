// A conversation is a tree: who edits a message or asks for another answer adds a branch, and nothing is lost. `shown` says for each
// message which of those behind it is looked at.

import { isData, isResultPicture } from "./pictures.js";

/**
 * How an answer ended, where it is not complete:
 * `stopped` by the reader, `length` at its limit, `lost` with the connection, `left` with the page, `failed` at the server.
 */
const ENDS = ["stopped", "length", "lost", "left", "failed"];

/** What is known in numbers of how an answer was written. */
const STATS = ["tokens", "prompt", "cached", "used", "first", "rate", "thought"];

const id = () => [...crypto.getRandomValues(new Uint8Array(9))].map((b) => b.toString(36).padStart(2, "0")).join("");

/** A conversation without messages. */
export function fresh(model) {
  const now = Date.now();
  return { id: id(), title: "", made: now, changed: now, model, system: "", sampling: {}, nodes: {}, shown: {} };
}

/** Tags of a conversation, and letters of one, at most. */
const MOST_TAGS = 8;
const LONGEST_TAG = 30;

/** The tags in a text: its words, each once, with or without the sign that they are sought by. */
export function tagsIn(text) {
  const words = text.split(/[\s,#]+/).map((word) => word.toLowerCase().slice(0, LONGEST_TAG)).filter(Boolean);
  return [...new Set(words)].slice(0, MOST_TAGS);
}

/** What the list shows of a conversation. */
export function headOf({ id, title, made, changed, pinned, folder, tags }) {
  return { id, title, made, changed, pinned: Boolean(pinned), ...(folder && { folder }), ...(tags?.length && { tags }) };
}

/** What follows a message; the first messages follow "". */
export function children(talk, parent) {
  return Object.values(talk.nodes).filter((node) => node.parent === parent).sort((a, b) => a.made - b.made);
}

/** A new message behind another one, and the way to it is shown. */
export function grow(talk, parent, fields) {
  const siblings = children(talk, parent);
  // Two messages of one millisecond keep their order.
  const made = Math.max(Date.now(), (siblings.at(-1)?.made ?? 0) + 1);
  const node = { id: id(), parent, made, content: "", ...fields };
  talk.nodes[node.id] = node;
  switchTo(talk, node.id);
  talk.changed = Date.now();
  return node;
}

/** Shows the branch with this message. */
export function switchTo(talk, nodeId) {
  for (let node = talk.nodes[nodeId]; node; node = talk.nodes[node.parent]) talk.shown[node.parent] = node.id;
}

/** The messages that are shown, first to last. */
export function path(talk) {
  const out = [];
  for (let parent = ""; ; ) {
    const node = talk.nodes[talk.shown[parent]] ?? children(talk, parent).at(-1);
    if (!node) return out;
    out.push(node);
    parent = node.id;
  }
}

/** The last message that is shown. */
export function leaf(talk) {
  return path(talk).at(-1);
}

/** A title made of a text: its first line that says something. */
export function titleOf(text) {
  const line = text.split("\n").find((l) => l.trim())?.trim() ?? "";
  return line.length > 60 ? `${line.slice(0, 57).trimEnd()}…` : line;
}

const titleFrom = (node) => titleOf(node?.content || node?.files?.[0]?.name || "");

/** Lets the title follow the first message, when that is another one now and no reader gave a title. */
export function retitle(talk, changed) {
  if (!talk.named && !changed.parent) talk.title = titleFrom(changed);
}

/** Gives a conversation a name; an empty one lets the title follow the first message again. */
export function rename(talk, name) {
  talk.named = Boolean(name.trim());
  talk.title = talk.named ? name.trim().slice(0, 200) : titleFrom(path(talk)[0]);
}

/** A conversation as it is stored. An answer that is being written ends with the page; who comes back sees that it did. */
export function stored(talk) {
  const still = (calls) => calls?.map(({ running, ...call }) => call);
  const nodes = Object.entries(talk.nodes).map(([id, { busy, ...node }]) => [id, { ...node, ...(node.calls && { calls: still(node.calls) }), ...(busy && { end: "left" }) }]);
  return { ...talk, nodes: Object.fromEntries(nodes) };
}

/** Takes out a message that nothing follows. */
export function prune(talk, node) {
  if (children(talk, node.id).length) return;
  delete talk.nodes[node.id];
  if (talk.shown[node.parent] === node.id) delete talk.shown[node.parent];
}

/** A text with its files, as the model gets it. Pictures go beside it. */
export function withFiles(node) {
  const files = (node.files ?? []).filter((file) => !file.picture).map(({ name, text }) => {
    // The fence is longer than any in the file.
    const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
    const fence = "`".repeat(longest + 1);
    return `${name}\n${fence}\n${text}\n${fence}`;
  });
  return [...files, node.content].filter(Boolean).join("\n\n");
}

/** What the reader said, as the API takes it: pictures stand before the text. */
function contentOf(node) {
  const text = withFiles(node);
  const shown = (node.files ?? []).filter((file) => file.picture).map((file) => ({ type: "image_url", image_url: { url: file.picture } }));
  if (!shown.length) return text;
  return text ? [...shown, { type: "text", text }] : shown;
}

/** The messages up to one of them, as the API takes them. */
export function requestMessages(talk, upTo) {
  const out = [];
  for (let node = talk.nodes[upTo]; node; node = talk.nodes[node.parent]) {
    if (node.role === "assistant") {
      const calls = (node.calls ?? []).map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
      const message = { role: "assistant", content: node.content };
      if (node.reasoning) message.reasoning_content = node.reasoning;
      if (calls.length) message.tool_calls = calls;
      out.unshift(message);
    } else if (node.role === "tool") out.unshift({ role: "tool", tool_call_id: node.call, content: node.content });
    else out.unshift({ role: "user", content: contentOf(node) });
  }
  if (talk.system.trim()) out.unshift({ role: "system", content: talk.system });
  return out;
}

/** A conversation as Markdown, as it is shown. */
export function markdown(talk) {
  const parts = [`# ${talk.title || "Chat"}`];
  if (talk.system.trim()) parts.push(`**System**\n\n${talk.system}`);
  for (const node of path(talk)) {
    const who = { user: "You", assistant: "Model", tool: "Tool result" }[node.role];
    const calls = (node.calls ?? []).map((call) => `\`${call.name}(${call.arguments})\``);
    const shown = (node.files ?? []).filter((file) => file.picture).map((file) => `*Picture: ${file.name}*`);
    parts.push([`**${who}**`, ...shown, withFiles(node), ...calls].filter(Boolean).join("\n\n"));
  }
  return `${parts.join("\n\n")}\n`;
}

const text = (value) => (typeof value === "string" ? value : "");
const list = (value) => (Array.isArray(value) ? value : undefined);
const isObject = (value) => typeof value === "object" && value !== null;

/** The entries of `value` under these names that are numbers. */
const numbers = (value, names) => Object.fromEntries(names.map((name) => [name, value?.[name]]).filter(([, number]) => Number.isFinite(number)));

/** A piece of a tool's result: what is not known is dropped, and nothing is an address that does something. */
function partOf(part) {
  if (part?.type === "text") return { type: "text", text: text(part.text) };
  if (part?.type === "picture" && isResultPicture(part)) return { type: "picture", mime: part.mime, data: part.data };
  if (part?.type === "link" && /^https?:\/\/[^\s]+$/.test(text(part.url))) return { type: "link", url: part.url, name: text(part.name) };
  return null;
}

/** With which model and settings an answer was written, where the reader chose. */
function choiceOf(by) {
  const choice = { ...numbers(by, ["temperature"]), ...(text(by?.model) && { model: by.model }), ...(text(by?.thinking) && { thinking: by.thinking }) };
  return Object.keys(choice).length ? choice : undefined;
}

/** A message of an import, as far as it is known what it holds. */
function importedNode(node) {
  if (!isObject(node) || !text(node.id) || node.id === "__proto__" || !["user", "assistant", "tool"].includes(node.role)) return null;
  const files = list(node.files)?.filter((f) => text(f?.name)).map((f) => (isData(f.picture) ? { name: f.name, picture: f.picture } : { name: f.name, text: text(f.text) }));
  // What was allowed on another page is not allowed here.
  const calls = list(node.calls)?.filter((c) => text(c?.name)).map((c) => ({ id: text(c.id), name: c.name, arguments: text(c.arguments), ...(c.made === true && { made: true }) }));
  const parts = list(node.parts)?.map(partOf).filter(Boolean);
  const stats = isObject(node.stats) ? numbers(node.stats, STATS) : undefined;
  return {
    id: node.id, parent: text(node.parent), role: node.role, made: Number(node.made) || 0, content: text(node.content), reasoning: text(node.reasoning), call: text(node.call),
    name: text(node.name), note: text(node.note), end: ENDS.includes(node.end) ? node.end : undefined, files, calls, parts, stats, by: choiceOf(node.by),
    failed: node.failed === true || undefined, cut: text(node.cut) || undefined, seconds: Number.isFinite(node.seconds) ? node.seconds : undefined,
  };
}

/** Whether something that was imported is a conversation; what is not known in it is dropped. */
export function imported(value) {
  if (!isObject(value) || !isObject(value.nodes)) return null;
  const talk = fresh(String(value.model ?? ""));
  Object.assign(talk, { title: text(value.title), system: text(value.system), made: Number(value.made) || talk.made, changed: Number(value.changed) || talk.changed, pinned: value.pinned === true });
  const tags = tagsIn(list(value.tags)?.map(text).join(" ") ?? "");
  if (tags.length) talk.tags = tags;
  if (text(value.id)) talk.id = value.id;
  if (isObject(value.sampling)) talk.sampling = value.sampling;
  for (const node of Object.values(value.nodes).map(importedNode)) if (node) talk.nodes[node.id] = node;
  for (const node of Object.values(talk.nodes)) {
    // A message whose way to the first one is broken, or goes round, would never be seen or never end.
    const seen = new Set();
    let at = node;
    while (at && at.parent && !seen.has(at.id)) {
      seen.add(at.id);
      at = Object.hasOwn(talk.nodes, at.parent) ? talk.nodes[at.parent] : null;
    }
    if (!at || at.parent) delete talk.nodes[node.id];
  }
  if (!Object.keys(talk.nodes).length) return null;
  for (const [parent, child] of Object.entries(isObject(value.shown) ? value.shown : {})) if (Object.hasOwn(talk.nodes, child) && talk.nodes[child].parent === parent) talk.shown[parent] = child;
  // A title that is not the first message's was given by somebody.
  talk.named = value.named === true || (talk.title !== "" && talk.title !== titleFrom(path(talk)[0]));
  return talk;
}
