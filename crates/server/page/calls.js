// Calls of the server's tools: offered to the model, allowed by the reader, made by the server, and handed back to the model. What servers say
// (names, descriptions, results) is data: it is shown as text, and what would change the text around it is made visible.

const ALWAYS = "kiln-tools-allowed";

/** Characters that do something to a text instead of being seen: those of terminals, and those that turn the direction of writing. */
// eslint-disable-next-line no-control-regex
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g;

/** A text of a server, as it is: nothing in it is hidden. */
export function visible(text) {
  return text.replace(/\r\n/g, "\n").replace(HIDDEN, (c) => {
    const code = c.charCodeAt(0);
    return code < 0x20 ? String.fromCharCode(0x2400 + code) : code === 0x7f ? "␡" : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

/** What the reader allowed for good: the fingerprints of tools as they were then. */
const allowed = () => {
  try {
    const list = JSON.parse(localStorage.getItem(ALWAYS) ?? "[]");
    return Array.isArray(list) ? list : [];
  } catch {
    return [];
  }
};
const keep = (list) => localStorage.setItem(ALWAYS, JSON.stringify(list.slice(-500)));

export class Tools {
  constructor() {
    this.list = [];
    this.problems = [];
    this.limits = null;
  }

  /** Takes what the server lists. */
  take({ data, problems, limits }) {
    Object.assign(this, { list: data ?? [], problems: problems ?? [], limits });
  }

  find(name) {
    return this.list.find((tool) => tool.name === name);
  }

  /** The servers that have tools, or should have some. */
  servers() {
    return [...new Set([...this.list, ...this.problems].map(({ server }) => server))];
  }

  /** The tools of a conversation, as the API takes them. */
  fields(talk) {
    const off = talk.sampling.off ?? [];
    return this.list.filter((tool) => !off.includes(tool.server)).map(({ name, description, parameters }) => ({ type: "function", function: { name, description, parameters } }));
  }

  /** Whether a tool is called without asking. */
  isAllowed(tool) {
    return tool.approval === "always" || allowed().includes(tool.fingerprint);
  }

  allow(tool) {
    keep([...allowed().filter((one) => one !== tool.fingerprint), tool.fingerprint]);
  }

  /** Forgets what was allowed for good. */
  forget(tools = this.list) {
    keep(allowed().filter((one) => !tools.some((tool) => tool.fingerprint === one)));
  }

  /** Those that the reader allowed for good. */
  forGood() {
    return this.list.filter((tool) => tool.approval !== "always" && this.isAllowed(tool));
  }
}

/** Answers with calls between a message of the reader and the one with this id. */
export function turns(talk, id) {
  let count = 0;
  for (let node = talk.nodes[id]; node && node.role !== "user"; node = talk.nodes[node.parent]) if (node.calls?.length) count += 1;
  return count;
}

/** What the model is told of a call that the reader does not allow. */
export const REFUSED = "Error:\nthe user does not allow this call";

/**
 * What is to be done about a call. `ask`: somebody must say whether it may be made; `make`: it may; `write`: the tool is the reader's own, who says
 * what it gave; `done`: it has a result.
 */
export function stateOf(call, tools) {
  if (call.result) return "done";
  const tool = tools.find(call.name);
  if (!tool) return "write";
  return call.said === "yes" || tools.isAllowed(tool) ? "make" : "ask";
}

/** A result as a message of the conversation. */
export function resultNode(call) {
  const { text, content, is_error: failed, cut, seconds } = call.result;
  return { role: "tool", call: call.id, name: call.name, content: text, parts: content ?? [], ...(failed && { failed }), ...(cut && { cut }), ...(Number.isFinite(seconds) && { seconds }) };
}
