// What a message costs before it is sent: the server counts, a moment after the reader stops typing.

import * as api from "./api.js";
import { $ } from "./dom.js";
import * as models from "./models.js";
import { page } from "./state.js";
import { path, withFiles } from "./tree.js";

/** How long the reader has stopped, in milliseconds. */
const PAUSE = 350;

let timer;
let counting = new AbortController();

/** Counts the tokens of a text as a message; null where the model is not loaded: counting is no reason to load it. */
async function count(content, signal) {
  const id = models.modelOf(page.talk);
  const model = page.models.find((known) => known.id === id);
  if (!model || !models.isLoaded(model)) return null;
  return (await api.post("/v1/chat/completions/input_tokens", { model: id, messages: [{ role: "user", content }] }, signal)).input_tokens;
}

function show(tokens, pictures) {
  $("cost").hidden = tokens === null;
  if (tokens === null) return;
  const context = models.contextOf(page.talk);
  const used = path(page.talk).findLast((node) => node.stats?.used)?.stats.used ?? 0;
  const left = context - used;
  const number = (n) => n.toLocaleString("en");
  const tooMany = context > 0 && tokens > left;
  $("cost").classList.toggle("nearly", tooMany);
  $("cost").textContent = `This message: ${number(tokens)} tokens${pictures ? " and its pictures" : ""}${tooMany ? `, more than the ${number(Math.max(0, left))} that are left` : ""}`;
}

/** Counts what is in the message box, once the reader pauses. `files` get their own numbers, and `counted` hears of them. */
export function weigh(text, files, counted) {
  clearTimeout(timer);
  counting.abort();
  if (!text && !files.length) return show(null);
  counting = new AbortController();
  const { signal } = counting;
  timer = setTimeout(async () => {
    try {
      for (const file of files) {
        if (file.picture || file.tokens !== undefined) continue;
        const tokens = await count(withFiles({ files: [file], content: "" }), signal);
        if (tokens === null) return show(null);
        file.tokens = tokens;
        counted();
      }
      const tokens = await count(withFiles({ files, content: text }), signal);
      if (!signal.aborted) show(tokens, files.some((file) => file.picture));
    } catch {
      // A server that cannot count is no reason to disturb the writer.
      if (!signal.aborted) show(null);
    }
  }, PAUSE);
}
