// Files that go with questions: read once, and kept in the browser's database within a bound, those of new conversations first.

import { loadConversations, newId } from "./conversations.js";

/** Bytes of a file that is taken at all: with more the tab would stall before the server could refuse it. */
const MOST_FILE = 100 << 20;
/** Bytes of all files that stay when the page is closed. */
export const MOST_KEPT = 64 << 20;

export const megabytes = (bytes) => `${Math.round(bytes / (1 << 20))} MB`;

/** Bytes of a text file, which goes into the question as text. */
const MOST_TEXT = 1 << 20;

/** "image", "audio" or "text": what a file is read as. */
export const sortOf = ({ type }) => (type.startsWith("image/") ? "image" : type.startsWith("audio/") || type.startsWith("video/") ? "audio" : "text");

/** A file as messages have it: { id, name, type, size, blob, url, text }; `url` has its content, and `text` that of a text. Throws an Error. */
export async function readFile(blob, { id = newId(), name = blob.name || "file", type = blob.type } = {}) {
  if (blob.size > MOST_FILE) throw new Error(`${name} has ${megabytes(blob.size)}; this page takes files of up to ${megabytes(MOST_FILE)}.`);
  const file = { id, name, type, size: blob.size, blob };
  if (sortOf(file) === "text") return { ...file, url: "text", text: await textOf(blob, name) };
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve({ ...file, url: reader.result });
    reader.onerror = () => reject(new Error(`${name} cannot be read: ${reader.error.message}`));
    reader.readAsDataURL(blob);
  });
}

async function textOf(blob, name) {
  if (blob.size > MOST_TEXT) throw new Error(`${name} has ${(blob.size / (1 << 20)).toFixed(1)} MB; a text file may have up to ${megabytes(MOST_TEXT)}.`);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await blob.arrayBuffer());
    if (!text.includes("\0")) return text;
  } catch {
    // its bytes are no text
  }
  throw new Error(`${name} was left out: it is neither text nor a picture nor a recording.`);
}

export const filesOf = (conversation) => conversation.nodes.flatMap((node) => node.files ?? []);

let database = null;

/** Runs a transaction on the files; `act` gets their store and returns a request. Throws where the browser keeps nothing. */
async function transact(mode, act) {
  database ??= settled(
    Object.assign(indexedDB.open("octavo", 1), { onupgradeneeded: (event) => event.target.result.createObjectStore("files") }),
  );
  try {
    const transaction = (await database).transaction("files", mode);
    const answer = settled(act(transaction.objectStore("files")));
    await new Promise((resolve, reject) => Object.assign(transaction, { oncomplete: resolve, onabort: () => reject(transaction.error) }));
    return await answer;
  } catch (error) {
    database = null;
    throw error;
  }
}

function settled(request) {
  const answer = new Promise((resolve, reject) => Object.assign(request, { onsuccess: () => resolve(request.result), onerror: () => reject(request.error) }));
  answer.catch(() => {}); // who waits for it gets the error; who gave up before needs none
  return answer;
}

/** The conversation with its files' contents, as far as they are still there. */
export async function withFiles(conversation) {
  const found = new Map();
  for (const file of filesOf(conversation).filter((one) => !one.url)) {
    try {
      const blob = await transact("readonly", (store) => store.get(file.id));
      if (blob) found.set(file.id, await readFile(blob, file));
    } catch {
      // it is shown as gone
    }
  }
  if (!found.size) return conversation;
  const filled = (node) => (node.files ? { ...node, files: node.files.map((file) => found.get(file.id) ?? file) } : node);
  return { ...conversation, nodes: conversation.nodes.map(filled) };
}

let saving = Promise.resolve();

/** Keeps the files of conversations, the newest first, and drops all others; the names of those for which there is no room. */
export function keepFiles(conversations) {
  const saved = saving.then(() => keep(conversations));
  saving = saved.catch(() => {});
  return saved;
}

async function keep(conversations) {
  const files = conversations.flatMap(filesOf);
  let stored;
  try {
    stored = new Set(await transact("readonly", (store) => store.getAllKeys()));
  } catch {
    return files.map((file) => file.name);
  }
  const kept = new Set();
  const dropped = new Map();
  let room = MOST_KEPT;
  for (const file of files) {
    if (kept.has(file.id)) continue;
    if (!stored.has(file.id) && !file.blob) continue; // it went before
    if (file.size > room || !(stored.has(file.id) || (await put(file)))) {
      dropped.set(file.id, file.name);
      continue;
    }
    room -= file.size;
    kept.add(file.id);
  }
  // What another tab has saved in the meantime stays.
  const named = new Set(loadConversations().flatMap(filesOf).map((file) => file.id));
  for (const id of stored) if (!kept.has(id) && (dropped.has(id) || !named.has(id))) await transact("readwrite", (store) => store.delete(id));
  return [...dropped.values()];
}

/** Whether there was room. */
async function put({ id, blob }) {
  try {
    await transact("readwrite", (store) => store.put(blob, id));
    return true;
  } catch {
    return false;
  }
}
