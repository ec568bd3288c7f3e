// Addresses of conversations: `#/chat/ID`. Everything else is a new chat.

const CHAT = /^#\/chat\/(.+)$/;

/** The address of a conversation. One without messages has none of its own. */
export function addressOf(talk) {
  return Object.keys(talk.nodes).length ? `#/chat/${encodeURIComponent(talk.id)}` : "#/";
}

/** The id of the conversation that an address names. */
export function idOf(hash) {
  const named = CHAT.exec(hash)?.[1];
  if (!named) return null;
  try {
    return decodeURIComponent(named);
  } catch {
    return named;
  }
}

/** Whether a host name means the machine that the browser runs on. */
export function isLoopback(host) {
  return /^(localhost|.+\.localhost|127(\.\d{1,3}){3}|\[::1\])$/.test(host);
}
