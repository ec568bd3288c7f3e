// Conversations on the server, where it keeps them (`--conversations`): the browser's own stay what is read and written first, and what changed
// goes there a moment later. What comes from there is read as an import is: somebody else may have the same key.

import { imported, stored } from "./tree.js";

/** How long a change waits for others before it is sent, in milliseconds. */
const WAIT = 1200;

export class Remote {
  /** `ask` sends a request (method, path, body) and gives the answer's JSON; `told` hears once of what goes wrong. */
  constructor({ ask, told, wait = WAIT }) {
    Object.assign(this, { ask, told, wait, folder: null, waiting: new Map(), failed: false });
  }

  get isOn() {
    return Boolean(this.folder);
  }

  /** What is there; null where nothing is kept. */
  async list() {
    const { kept, folder, data } = await this.ask("GET", "/conversations");
    this.folder = kept ? folder : null;
    return kept ? data : null;
  }

  async find(id) {
    const talk = imported(await this.ask("GET", this.path(id)));
    return talk && talk.id === id ? talk : null;
  }

  path(id) {
    return `/conversations/${encodeURIComponent(id)}`;
  }

  /** Sends a conversation when it has not changed for a moment; `done` is called when the server has it, `newer` when it has a newer one. */
  keep(talk, done, newer) {
    if (!this.isOn) return;
    clearTimeout(this.waiting.get(talk.id));
    this.waiting.set(talk.id, setTimeout(async () => {
      this.waiting.delete(talk.id);
      try {
        const { kept } = await this.ask("PUT", this.path(talk.id), stored(talk));
        this.failed = false;
        if (kept) done?.();
        else newer?.();
      } catch (error) {
        if (!this.failed) this.told(`The server could not keep the conversation: ${error.message}`);
        this.failed = true;
      }
    }, this.wait));
  }

  async remove(id) {
    if (!this.isOn) return;
    clearTimeout(this.waiting.get(id));
    this.waiting.delete(id);
    try {
      await this.ask("DELETE", this.path(id));
    } catch (error) {
      this.told(`The server still has the conversation: ${error.message}`);
    }
  }
}

/**
 * What is to be done so that the browser's list and the server's are the same. `fetch`: heads whose conversation the server has newer; `send`: ids
 * that the browser has newer; `drop`: ids that were there and are no more, so that somebody deleted them. What was never there stays where it is.
 */
export function difference(own, there, folder) {
  const known = new Map(own.map((head) => [head.id, head]));
  const ids = new Set(there.map(({ id }) => id));
  const isNewer = (head) => !known.has(head.id) || known.get(head.id).changed < head.changed;
  return {
    fetch: there.filter(isNewer),
    send: there.filter((head) => known.get(head.id)?.changed > head.changed && !known.get(head.id).away).map(({ id }) => id),
    drop: own.filter((head) => head.folder === folder && !ids.has(head.id)).map(({ id }) => id),
  };
}
