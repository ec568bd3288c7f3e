// Requests to the server that this page came from, and to nobody else.

import { Events } from "./events.js";

let key = localStorage.getItem("kiln-key") ?? "";

export function useKey(given) {
  key = given;
  localStorage.setItem("kiln-key", given);
}

/** An answer that was not the one hoped for. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function request(path, options = {}) {
  const headers = { ...(key && { Authorization: `Bearer ${key}` }), ...(options.body && { "Content-Type": "application/json" }) };
  let reply;
  try {
    reply = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "The server cannot be reached. Is it still running?");
  }
  if (reply.ok) return reply;
  const text = await reply.text();
  let message = text;
  try {
    const { error } = JSON.parse(text);
    message = error?.message ?? error ?? text;
  } catch {
    // An answer of somebody between this page and the server.
  }
  throw new Refused(reply.status, String(message) || `The server answered with status ${reply.status}`);
}

export const get = async (path) => (await request(path)).json();

/** Asks for an answer, and hands its pieces to `piece` as they come. */
export async function chat(body, signal, piece) {
  const reply = await request("/v1/chat/completions", { method: "POST", body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }), signal });
  const reader = reply.body.getReader();
  const events = new Events();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    for (const data of events.push(value)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refused(500, chunk.error.message);
      piece(chunk);
    }
  }
}
