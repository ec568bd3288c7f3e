// The conversations of this browser: the heads of all, for the list, and those in use as a whole.

import { difference } from "./remote.js";
import * as store from "./store.js";
import { headOf, stored, tagsIn } from "./tree.js";

/** Conversations in use that are kept in memory; the oldest that nobody needs go first. */
const MOST_IN_USE = 24;
/** A word shorter than this is sought in titles alone. */
const SHORTEST_SOUGHT = 2;

/** Pinned ones first, then the newest. */
const order = (a, b) => Boolean(b.pinned) - Boolean(a.pinned) || b.changed - a.changed;

const holds = (talk, wanted) => Object.values(talk.nodes).some((node) => node.content.toLowerCase().includes(wanted));

export class Library {
  constructor() {
    /** The conversations on the server, where it keeps some. */
    this.remote = null;
    this.heads = new Map();
    /** Conversations in use, by id, the one used last at the end. */
    this.used = new Map();
    this.sorted = null;
  }

  async load() {
    for (const head of await store.heads()) this.heads.set(head.id, head);
    this.sorted = null;
  }

  /** Makes the list that of the server, too. What `isBusy` is left alone. */
  async sync(isBusy) {
    const there = await this.remote.list();
    if (!there) return false;
    const { folder } = this.remote;
    const { fetch, send, drop } = difference([...this.heads.values()], there, folder);
    for (const { id, title, made, changed, pinned, tags: given } of fetch) {
      const tags = tagsIn(Array.isArray(given) ? given.join(" ") : "");
      if (isBusy(id) || typeof id !== "string" || !id) continue;
      this.used.delete(id);
      this.heads.set(id, { id, title: String(title ?? ""), made: Number(made) || 0, changed: Number(changed) || 0, pinned: pinned === true, ...(tags?.length && { tags }), folder, away: true });
    }
    for (const id of drop) {
      if (isBusy(id)) continue;
      this.heads.delete(id);
      this.used.delete(id);
      await store.remove(id);
    }
    this.sorted = null;
    for (const id of send) if (!isBusy(id)) this.send(await this.get(id));
    return true;
  }

  /** Sends a conversation to the server; it is marked when it is there, so that one that is deleted elsewhere goes here, too. */
  send(talk) {
    if (!talk) return;
    const { folder } = this.remote ?? {};
    const arrived = async () => {
      if (talk.folder === folder || !this.has(talk)) return;
      talk.folder = folder;
      this.note(talk);
      await store.put(stored(talk));
    };
    this.remote?.keep(talk, arrived);
  }

  /** A conversation that only the server has, or has newer. */
  async fetch(id) {
    const talk = await this.remote.find(id);
    if (!talk) return null;
    talk.folder = this.remote.folder;
    await store.put(stored(talk));
    this.note(talk);
    return talk;
  }

  /** All conversations, some at a time; those that only the server has come last. */
  async *batches() {
    for await (const talks of store.batches()) yield talks.filter((talk) => !this.heads.get(talk.id)?.away);
    for (const { id } of [...this.heads.values()].filter((head) => head.away)) {
      const talk = await this.get(id);
      if (talk) yield [talk];
    }
  }

  /** All heads in the order of the list. */
  list() {
    return (this.sorted ??= [...this.heads.values()].sort(order));
  }

  /** Whether this very conversation is in the list: after an import another one may have its id. */
  has(talk) {
    return this.heads.has(talk.id) && this.used.get(talk.id) === talk;
  }

  note(talk) {
    this.heads.set(talk.id, headOf(talk));
    this.sorted = null;
  }

  use(talk) {
    this.used.delete(talk.id);
    this.used.set(talk.id, talk);
  }

  /** Forgets what is in memory of conversations that `needed` does not want. */
  trim(needed) {
    for (const [id, talk] of this.used) {
      if (this.used.size <= MOST_IN_USE) return;
      if (!needed(talk)) this.used.delete(id);
    }
  }

  /** A whole conversation; null where there is none. */
  async get(id) {
    const known = this.used.get(id);
    const talk = known ?? (this.heads.get(id)?.away ? await this.fetch(id) : await store.find(id));
    // Another call may have brought it meanwhile: there is one of each.
    const same = this.used.get(id) ?? talk;
    if (!same) return null;
    if (!this.heads.has(id)) this.note(same);
    this.use(same);
    return same;
  }

  /** Takes a new conversation, or one that was deleted, into the list. */
  add(talk) {
    this.note(talk);
    this.use(talk);
  }

  /** Stores a conversation of the list; one that was deleted stays so. */
  async keep(talk) {
    if (!this.has(talk)) return;
    this.note(talk);
    // An answer that grows is sent when it is whole.
    if (!Object.values(talk.nodes).some((node) => node.busy)) this.send(talk);
    await store.put(stored(talk));
  }

  /** Takes in many at once; those with the same ids are replaced. */
  async take(talks) {
    await store.put(...talks);
    for (const talk of talks) {
      this.used.delete(talk.id);
      this.note(talk);
      if (this.remote?.isOn) this.send(await this.get(talk.id));
    }
  }

  async remove(id) {
    this.heads.delete(id);
    this.used.delete(id);
    this.sorted = null;
    await store.remove(id);
    await this.remote?.remove(id);
  }

  /**
   * Seeks a text in titles, then in what was said, and a `#word` in tags; `found` hears of the ids so far, and whether all were looked at. What `signal` ended
   * is not told.
   */
  async search(wanted, signal, found) {
    if (wanted.startsWith("#")) {
      const tag = wanted.slice(1);
      return found(new Set(this.list().filter((head) => head.tags?.some((own) => own.startsWith(tag))).map((head) => head.id)), true);
    }
    const ids = new Set(this.list().filter((head) => head.title.toLowerCase().includes(wanted)).map((head) => head.id));
    const whole = wanted.length < SHORTEST_SOUGHT;
    found(ids, whole);
    if (whole) return;
    for await (const talks of this.batches()) {
      if (signal.aborted) return;
      for (const talk of talks) if (!ids.has(talk.id) && holds(this.used.get(talk.id) ?? talk, wanted)) ids.add(talk.id);
      found(ids, false);
    }
    if (!signal.aborted) found(ids, true);
  }
}
