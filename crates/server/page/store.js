// Conversations, kept in this browser: each whole, and beside it the little that the list shows (its head). So a page with thousands of them
// reads one. Where the browser keeps nothing (a private window), they live as long as the page.

import { toast } from "./dom.js";
import { headOf } from "./tree.js";

/** Conversations that are read at once when all are gone through. */
const BATCH = 250;

const memory = new Map();

function upgrade(asked, from) {
  const db = asked.result;
  if (from < 1) db.createObjectStore("talks", { keyPath: "id" });
  const heads = db.createObjectStore("heads", { keyPath: "id" });
  if (from !== 1) return;
  asked.transaction.objectStore("talks").openCursor().onsuccess = ({ target: { result: cursor } }) => {
    if (!cursor) return;
    heads.put(headOf(cursor.value));
    cursor.continue();
  };
}

function open() {
  return new Promise((resolve, reject) => {
    const asked = indexedDB.open("kiln", 2);
    asked.onupgradeneeded = ({ oldVersion }) => upgrade(asked, oldVersion);
    asked.onblocked = () => toast("Close the other windows of Kiln: an older page holds the conversations.");
    asked.onsuccess = () => {
      // A newer page in another window may want another shape.
      asked.result.onversionchange = () => asked.result.close();
      resolve(asked.result);
    };
    asked.onerror = () => reject(asked.error);
  });
}

const database = open().catch(() => null);

/** Does `work` in one transaction; gives what its request found. */
function run(db, mode, names, work) {
  return new Promise((resolve, reject) => {
    const transaction = db.transaction(names, mode);
    const asked = work(...names.map((name) => transaction.objectStore(name)));
    // A full disk is told at the end of a transaction, not by the request.
    transaction.oncomplete = () => resolve(asked?.result);
    transaction.onabort = () => reject(transaction.error);
    // Without this the browser waits for the page's answer to the request, and a page that is reloaded meanwhile loses the change.
    transaction.commit();
  });
}

/** The heads of all conversations. */
export async function heads() {
  const db = await database;
  return db ? run(db, "readonly", ["heads"], (known) => known.getAll()) : [...memory.values()].map(headOf);
}

/** One conversation, also one that another window of the browser made. */
export async function find(id) {
  const db = await database;
  return (db ? await run(db, "readonly", ["talks"], (talks) => talks.get(id)) : memory.get(id)) ?? null;
}

/** All conversations, some at a time. */
export async function* batches() {
  const db = await database;
  if (!db) return yield [...memory.values()];
  for (let range = null; ; ) {
    const found = await run(db, "readonly", ["talks"], (talks) => talks.getAll(range, BATCH));
    if (found.length) yield found;
    if (found.length < BATCH) return;
    range = IDBKeyRange.lowerBound(found.at(-1).id, true);
  }
}

export async function put(...changed) {
  const db = await database;
  if (!db) return changed.forEach((talk) => memory.set(talk.id, talk));
  await run(db, "readwrite", ["talks", "heads"], (talks, known) => {
    for (const talk of changed) {
      talks.put(talk);
      known.put(headOf(talk));
    }
  });
}

export async function remove(id) {
  memory.delete(id);
  const db = await database;
  if (db) await run(db, "readwrite", ["talks", "heads"], (talks, known) => {
    talks.delete(id);
    known.delete(id);
  });
}
