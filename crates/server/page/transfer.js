// Conversations from files: exports of this page, of Open WebUI and of llama-server. What they hold is brought into the shape of this page's
// own exports, and `imported` looks at every part of it.

import { imported } from "./tree.js";

const isObject = (value) => typeof value === "object" && value !== null;
const text = (value) => (typeof value === "string" ? value : "");
const list = (value) => (Array.isArray(value) ? value : []);

/** Seconds or milliseconds as milliseconds: exports have both. */
const milliseconds = (time) => (Number(time) < 1e11 ? Number(time) * 1000 : Number(time)) || 0;

/** A text whose thoughts stand before it in a tag, as Open WebUI keeps them. */
function withThoughts(content) {
  const found = /^\s*<details type="reasoning"[^>]*>\s*(?:<summary>[^<]*<\/summary>)?([\s\S]*?)<\/details>\s*/.exec(content) ?? /^\s*<think>([\s\S]*?)<\/think>\s*/.exec(content);
  if (!found) return { content, reasoning: "" };
  return { content: content.slice(found[0].length), reasoning: found[1].trim().replace(/^(?:>|&gt;) ?/gm, "") };
}

/** Messages by id, linked to those before them; what is no message of a conversation is left out, and its followers move up. */
function linked(messages, parentOf) {
  const byId = new Map(messages.filter(isObject).map((message) => [text(message.id), message]));
  const known = (message) => ["user", "assistant", "tool"].includes(message?.role);
  const parent = (message) => {
    const seen = new Set();
    let at = byId.get(parentOf(message));
    for (; at && !known(at) && !seen.has(at); at = byId.get(parentOf(at))) seen.add(at);
    return known(at) ? text(at.id) : "";
  };
  return { byId, kept: [...byId.values()].filter(known), parent };
}

/** What is shown where `last` is the last message of the branch that was looked at. */
function shownUpTo(nodes, last) {
  const shown = {};
  const seen = new Set();
  for (let node = nodes[last]; node && !seen.has(node.id); node = nodes[node.parent]) {
    seen.add(node.id);
    shown[node.parent] = node.id;
  }
  return shown;
}

/** A conversation of Open WebUI. */
function openWebUi(entry) {
  const chat = isObject(entry.chat) ? entry.chat : entry;
  const known = chat.history?.messages;
  const all = isObject(known) ? Object.values(known) : list(chat.messages);
  const { kept, parent } = linked(all, (message) => text(message.parentId));
  const nodes = {};
  for (const message of kept) {
    const said = message.role === "assistant" ? withThoughts(text(message.content)) : { content: text(message.content), reasoning: "" };
    const files = list(message.files).map((file) => {
      const name = text(file?.name) || text(file?.file?.filename) || "file";
      return file?.type === "image" ? { name: text(file.name) || "picture", picture: file.url } : { name, text: text(file?.file?.data?.content) || text(file?.content) };
    });
    nodes[message.id] = { id: message.id, parent: parent(message), role: message.role, made: milliseconds(message.timestamp), ...said, files, model: text(message.model) };
  }
  return {
    id: text(entry.id), title: text(entry.title) || text(chat.title), model: text(list(chat.models)[0]), pinned: entry.pinned === true,
    system: text(chat.params?.system) || text(chat.system), made: milliseconds(entry.created_at), changed: milliseconds(entry.updated_at ?? chat.timestamp),
    nodes, shown: shownUpTo(nodes, text(chat.history?.currentId)),
  };
}

/** A conversation of llama-server's page. */
function llamaServer({ conv, messages }) {
  const { byId, kept, parent } = linked(list(messages), (message) => text(message.parent));
  const system = [...byId.values()].find((message) => message.role === "system" && text(message.content).trim());
  const nodes = {};
  for (const message of kept) {
    const files = list(message.extra).filter(isObject).map((file) => ({ name: text(file.name) || "file", ...(file.type === "imageFile" ? { picture: file.base64Url } : { text: text(file.content) }) }));
    let calls = [];
    try {
      calls = list(JSON.parse(text(message.toolCalls) || "[]")).map((call) => ({ id: text(call?.id), name: text(call?.function?.name), arguments: text(call?.function?.arguments) }));
    } catch {
      // Calls that cannot be read are left out; the message stays.
    }
    nodes[message.id] = {
      id: message.id, parent: parent(message), role: message.role, made: milliseconds(message.timestamp), content: text(message.content),
      reasoning: text(message.reasoningContent) || text(message.thinking), files, calls, call: text(message.toolCallId), model: text(message.model),
    };
  }
  return {
    id: text(conv.id), title: text(conv.name), changed: milliseconds(conv.lastModified), pinned: conv.pinned === true, system: text(system?.content),
    nodes, shown: shownUpTo(nodes, text(conv.currNode)),
  };
}

/** A conversation of a kind that is known; null for anything else. */
function convert(value) {
  if (!isObject(value)) return null;
  if (isObject(value.conv)) return llamaServer(value);
  if (isObject(value.nodes)) return value;
  return isObject(value.chat) || isObject(value.history) ? openWebUi(value) : null;
}

/** The value of a file: JSON, or a JSON text in each line. */
function valueOf(source) {
  try {
    return JSON.parse(source);
  } catch (error) {
    const lines = source.split("\n").filter((line) => line.trim());
    if (lines.length < 2) throw error;
    return lines.map((line) => JSON.parse(line));
  }
}

/** The conversations of a file. */
export function conversationsOf(source) {
  const value = valueOf(source);
  const all = Array.isArray(value) ? value : Array.isArray(value?.conversations) ? value.conversations : [value];
  const talks = all.map((one) => imported(convert(one))).filter(Boolean);
  if (!talks.length) throw new Error("there is no conversation in it. Exports of Kiln, Open WebUI and llama-server are read.");
  return talks;
}

/** All conversations as the parts of a file. */
export async function exportParts(batches) {
  const parts = ['{"kiln": 1, "conversations": ['];
  for await (const talks of batches) for (const talk of talks) parts.push(`${parts.length > 1 ? ",\n" : "\n"}${JSON.stringify(talk)}`);
  return [...parts, "\n]}\n"];
}
