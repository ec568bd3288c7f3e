// Requests to the server that this page came from, and to no other.

import { Events } from "./events.js";

let key = localStorage.getItem("kiln-key") ?? "";

export const hasKey = () => Boolean(key);

export function useKey(given) {
  key = given;
  localStorage.setItem("kiln-key", given);
}

/** An answer that was not the one hoped for. */
export class Refused extends Error {
  constructor(status, message, details = {}) {
    super(message);
    Object.assign(this, { status, details, code: details.code });
  }
}

/** A connection that ended before the answer did. */
export class Lost extends Error {
  constructor() {
    super("The connection was lost.");
    this.lost = true;
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
  let [message, details] = [text, {}];
  try {
    const { error } = JSON.parse(text);
    message = error?.message ?? error ?? text;
    details = typeof error === "object" && error ? error : {};
  } catch {
    // An answer of somebody between this page and the server.
  }
  throw new Refused(reply.status, String(message) || `The server answered with status ${reply.status}`, details);
}

export const get = async (path) => (await request(path)).json();

/** Sends a value, and gives the answer's. */
export const post = async (path, body, signal) => (await request(path, { method: "POST", body: JSON.stringify(body), signal })).json();

/** Sends any request, and gives the answer's value. */
export const json = async (method, path, body) => (await request(path, { method, ...(body && { body: JSON.stringify(body) }) })).json();

/** Asks for an answer, and hands its pieces to `piece` as they come. */
export async function chat(body, signal, piece) {
  const whole = { ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  const reply = await request("/v1/chat/completions", { method: "POST", body: JSON.stringify(whole), signal });
  const reader = reply.body.getReader();
  const events = new Events();
  for (;;) {
    let read;
    try {
      read = await reader.read();
    } catch (error) {
      throw error.name === "AbortError" ? error : new Lost();
    }
    // A stream without its last word was cut.
    if (read.done) throw new Lost();
    for (const data of events.push(read.value)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refused(500, chunk.error.message, chunk.error);
      piece(chunk);
    }
  }
}
