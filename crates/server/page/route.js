// Addresses of conversations: `#/chat/ID`. Everything else is a new chat.

const CHAT = /^#\/chat\/(.+)$/;

/** The address of a conversation of the list; without an id, of a new one. */
export const addressOf = (id) => (id ? `#/chat/${encodeURIComponent(id)}` : "#/");

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
