// Conversations, kept in this browser. Where it keeps nothing (a private window), they live as long as the page.

const memory = new Map();

function open() {
  return new Promise((resolve, reject) => {
    const asked = indexedDB.open("kiln", 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore("talks", { keyPath: "id" });
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
}

const database = open().catch(() => null);

async function run(mode, work) {
  const db = await database;
  if (!db) return null;
  return new Promise((resolve, reject) => {
    const transaction = db.transaction("talks", mode);
    const asked = work(transaction.objectStore("talks"));
    // A full disk is told at the end of a transaction, not by the request.
    transaction.oncomplete = () => resolve(asked.result);
    transaction.onabort = () => reject(transaction.error);
    // Without this the browser waits for the page's answer to the request, and a page that is reloaded meanwhile loses the change.
    transaction.commit();
  });
}

/** All conversations, the newest first. */
export async function all() {
  const found = (await run("readonly", (talks) => talks.getAll())) ?? [...memory.values()];
  return found.sort((a, b) => b.changed - a.changed);
}

/** One conversation, also one that another window of the browser made. */
export async function find(id) {
  return (await run("readonly", (talks) => talks.get(id))) ?? memory.get(id) ?? null;
}

export async function put(talk) {
  memory.set(talk.id, talk);
  await run("readwrite", (talks) => talks.put(talk));
}

export async function remove(id) {
  memory.delete(id);
  await run("readwrite", (talks) => talks.delete(id));
}
