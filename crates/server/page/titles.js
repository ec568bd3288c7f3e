// Titles that the model gives conversations.

import { requestMessages } from "./tree.js";

const ASKED = "Write a title for this conversation: at most six words, in its language, without quotation marks. Answer with the title alone.";
/** A title is short; a model that writes more is cut. */
const MOST_TOKENS = 32;
const MOST_LETTERS = 60;

/** A title out of what a model wrote; empty where there is none. */
export function cleaned(answer) {
  const line = answer.replace(/<think>[\s\S]*?(<\/think>|$)/g, "").split("\n").map((one) => one.trim()).find(Boolean) ?? "";
  const unmarked = (text) => text.replace(/^["'“”„«»*_`#\s]+|["'“”„«»*_`.\s]+$/g, "");
  const bare = unmarked(unmarked(line).replace(/^(title|titel|titre|título)["*_]*\s*[:：]/i, ""));
  return bare.length > MOST_LETTERS ? `${bare.slice(0, MOST_LETTERS - 1).trimEnd()}…` : bare;
}

/** The request for a title. It begins with the conversation as the model knows it, so its prompt is cached but for the last lines. */
export function titleRequest(talk, last, model) {
  return {
    model,
    messages: [...requestMessages(talk, last.id), { role: "user", content: ASKED }],
    max_tokens: MOST_TOKENS, temperature: 0.2, reasoning_effort: "none", stream: false,
  };
}

/** The title in an answer to the request. */
export const titleIn = (reply) => cleaned(reply.choices?.[0]?.message?.content ?? "");
