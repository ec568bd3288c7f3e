// Answers as they are written: one at a time in each conversation, any conversations at once.

import { REFUSED, resultNode, stateOf, turns } from "./calls.js";
import { grow, requestMessages } from "./tree.js";

/** Browsers open six connections to a server without TLS; the page keeps one for everything else. */
export const MOST_AT_ONCE = 5;
/** How often a conversation is stored while its answer grows, in milliseconds. */
const SAVE_EVERY = 2000;

/** Adds a chunk of the stream to a message. */
export function take(node, chunk, run) {
  const { usage } = chunk;
  // The prompt's length is known before the first token and told with each one, so that a stopped answer has its numbers, too.
  if (usage?.prompt_tokens) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    run.tokens = usage.completion_tokens;
    node.stats = { ...node.stats, tokens: run.before + run.tokens, prompt: usage.prompt_tokens, cached, used: usage.prompt_tokens + usage.completion_tokens };
  }
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const { delta } = choice;
  // Which of the two names it has is a flag of the server.
  const thought = delta.reasoning_content ?? delta.reasoning ?? "";
  if (delta.content || thought || delta.tool_calls) run.first ||= performance.now();
  if (delta.content && !run.words) {
    run.words = performance.now();
    if (node.reasoning && !node.stats?.thought) node.stats = { ...node.stats, thought: Math.round(run.words - run.first) };
  }
  node.content += delta.content ?? "";
  node.reasoning += thought;
  for (const call of delta.tool_calls ?? []) {
    const known = (node.calls[call.index] ??= { id: call.id, name: "", arguments: "" });
    known.name += call.function?.name ?? "";
    known.arguments += call.function?.arguments ?? "";
  }
  if (choice.finish_reason === "length") node.end = "length";
}

const isEmpty = (node) => !node.content && !node.reasoning && !node.calls.length;

/** Whether the model can take up an answer where it broke off. */
export function canContinue(node) {
  return Boolean(node.end && node.content && !node.calls?.length && !node.busy);
}

/** What a reader chose for one answer, as fields of a request. */
function chosen({ model, temperature, thinking } = {}) {
  return { ...(model && { model }), ...(temperature !== undefined && { temperature }), ...(thinking && { reasoning_effort: thinking }) };
}

/** What is said of an error. */
function explain(error) {
  if (error.code !== "context_length_exceeded") return error.message;
  const number = (n) => (typeof n === "number" ? n.toLocaleString("en") : "?");
  return `This conversation has ${number(error.details?.n_prompt_tokens)} tokens and no longer fits into the model's context of ${number(error.details?.n_ctx)}. Edit an earlier message or start a new chat.`;
}

export class Answers {
  /**
   * `chat` asks the server; `request` gives the fields of a request beside its messages; `changed` hears of every piece, `begun` and
   * `ended` of the beginning and the end, `save` that a conversation is to be stored. `tools` are the server's, and `call` makes a call of one.
   */
  constructor({ chat, request, begun, changed, ended, save, tools, call }) {
    Object.assign(this, { chat, request, begun, changed, ended, save, tools, call });
    this.running = new Map();
  }

  /** The answer that is being written in a conversation. */
  of(talk) {
    return this.running.get(talk.id);
  }

  stop(talk) {
    this.of(talk)?.stop.abort();
  }

  /** Why a conversation cannot be answered now, or nothing. */
  refusal(talk) {
    if (this.of(talk)) return "The model is still answering here. Esc stops it.";
    if (this.running.size >= MOST_AT_ONCE) return `${MOST_AT_ONCE} answers are being written already. Wait for one, or stop it.`;
    return "";
  }

  /** Lets the model answer a message, with another model or other settings where `by` says so. */
  start(talk, to, by) {
    const node = grow(talk, to.id, { role: "assistant", reasoning: "", calls: [], ...(by && { by }) });
    const most = this.tools?.limits?.turns;
    // A model that calls without end must answer at last.
    const last = most && turns(talk, to.id) >= most ? { tool_choice: "none" } : {};
    return this.run(talk, node, { messages: requestMessages(talk, to.id), ...last });
  }

  /** Makes the calls of an answer that may be made, and lets the model go on when all have a result. Those that wait for the reader keep it waiting. */
  async goOn(talk, node) {
    const { calls, by } = node;
    if (!calls?.length || node.end || !calls.some((call) => this.tools?.find(call.name))) return;
    const make = calls.filter((call) => stateOf(call, this.tools) === "make");
    if (make.length && !calls.some((call) => stateOf(call, this.tools) === "ask")) {
      const run = { node, stop: new AbortController() };
      this.running.set(talk.id, run);
      this.begun(talk, node);
      for (const call of make) {
        const most = this.tools.limits?.calls;
        if (most && calls.indexOf(call) >= most) call.result = { text: `Error:\nonly ${most} calls of one answer are made`, is_error: true };
        else await this.make(talk, node, call, run);
        if (run.stop.signal.aborted) break;
      }
      this.running.delete(talk.id);
      this.save(talk);
      this.ended(talk, node, run.error, { calls: true });
      if (run.stop.signal.aborted || run.error) return;
    }
    if (!calls.every((call) => call.result)) return;
    let last = node;
    for (const call of calls) {
      last = grow(talk, last.id, resultNode(call));
      delete call.result;
      call.made = true;
    }
    this.save(talk);
    this.start(talk, last, by);
  }

  async make(talk, node, call, run) {
    const tool = this.tools.find(call.name);
    call.running = true;
    this.changed(talk, node);
    try {
      call.result = await this.call({ name: call.name, arguments: call.arguments, fingerprint: tool.fingerprint }, run.stop.signal);
    } catch (error) {
      // A call that was stopped may be made again; one that cannot be made is a result as any other.
      if (error.name === "AbortError") delete call.said;
      else if (error.status === 401) run.error = error;
      else call.result = { text: `Error:\n${error.message}`, is_error: true };
    }
    delete call.running;
    this.changed(talk, node);
  }

  /** Takes what the reader says to a call: yes, always, or no. */
  decide(talk, node, call, said) {
    if (said === "always") this.tools.allow(this.tools.find(call.name));
    if (said === "no") call.result = { text: REFUSED, is_error: true };
    else call.said = "yes";
    this.save(talk);
    this.changed(talk, node);
    return this.goOn(talk, node);
  }

  /** Lets the model go on with an answer that broke off. */
  resume(talk, node) {
    node.calls ??= [];
    node.reasoning ??= "";
    return this.run(talk, node, { messages: requestMessages(talk, node.id), continue_final_message: true, add_generation_prompt: false });
  }

  async run(talk, node, fields) {
    const run = { node, stop: new AbortController(), start: performance.now(), first: 0, words: 0, tokens: 0, before: node.stats?.tokens ?? 0 };
    this.running.set(talk.id, run);
    node.busy = true;
    delete node.end;
    delete node.note;
    talk.changed = Date.now();
    this.save(talk);
    this.begun(talk, node);
    const saving = setInterval(() => this.save(talk), SAVE_EVERY);
    try {
      await this.chat({ ...this.request(talk), ...chosen(node.by), ...fields }, run.stop.signal, (chunk) => {
        take(node, chunk, run);
        this.changed(talk, node);
      });
    } catch (error) {
      if (error.name === "AbortError") node.end = "stopped";
      else {
        node.end = error.lost ? "lost" : "failed";
        node.note = explain(error);
        run.error = error;
      }
    }
    clearInterval(saving);
    this.finish(node, run);
    this.running.delete(talk.id);
    this.save(talk);
    this.ended(talk, node, run.error);
    return this.goOn(talk, node);
  }

  finish(node, run) {
    const ended = performance.now();
    node.stats ??= {};
    if (run.first && !run.before) node.stats.first = Math.round(run.first - run.start);
    if (run.tokens > 1 && run.first && ended - run.first > 20) node.stats.rate = (run.tokens - 1) / ((ended - run.first) / 1000);
    if (isEmpty(node) && !node.end) node.note = "The model said nothing.";
    node.busy = false;
  }
}
