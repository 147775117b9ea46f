// Conversations, which stay in this browser: a list in its storage, shared by its tabs, bounded by dropping the oldest.

const PLACE = "octavo-conversations";
export const MOST = 100;

export const newId = () => `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`;

/** kind: one of generation.js. A turn is { role: "user", content, files }, { role: "tool", ... } or { role: "assistant", answers, chosen }. */
export const newConversation = (kind = "chat") => ({ id: newId(), kind, title: "", system: "", turns: [], changed: Date.now() });

export function loadConversations() {
  try {
    const list = JSON.parse(localStorage.getItem(PLACE) ?? "[]");
    return Array.isArray(list) ? list.filter((one) => one && Array.isArray(one.turns)) : [];
  } catch {
    return [];
  }
}

// Alternatives of tokens take a hundred times the text's room: they last as long as the page.
const slim = (answer) => ({ ...answer, tokens: undefined, running: undefined });
/** Contents of files stand elsewhere. */
const nameOnly = ({ id, name, type, size }) => ({ id, name, type, size });
const stored = (conversation) => ({
  ...conversation,
  turns: conversation.turns.map((turn) => (turn.answers ? { ...turn, answers: turn.answers.map(slim) } : turn.files ? { ...turn, files: turn.files.map(nameOnly) } : turn)),
});

/** Saves conversations beside those that other tabs have saved. Those that are kept, the newest first, and how many are not. */
export function saveConversations(list) {
  const newest = new Map(loadConversations().map((one) => [one.id, one]));
  for (const one of list) if (!(newest.get(one.id)?.changed > one.changed)) newest.set(one.id, one);
  const all = [...newest.values()].filter((one) => one.turns.length).sort((a, b) => b.changed - a.changed);
  for (let count = Math.min(MOST, all.length); count > 0; count = Math.floor(0.8 * count)) {
    try {
      const kept = all.slice(0, count);
      localStorage.setItem(PLACE, JSON.stringify(kept.map(stored)));
      return { kept, left: all.length - count };
    } catch {
      // the storage is full: with fewer conversations
    }
  }
  if (!all.length) localStorage.removeItem(PLACE);
  return { kept: [], left: all.length };
}

/** Deletes a conversation, in other tabs too. */
export function deleteConversation(id) {
  localStorage.setItem(PLACE, JSON.stringify(loadConversations().filter((one) => one.id !== id)));
}

/** Calls back when another tab has saved conversations. */
export function onOtherTabs(call) {
  const listener = (event) => event.key === PLACE && call();
  addEventListener("storage", listener);
  return () => removeEventListener("storage", listener);
}

export function titleOf(conversation) {
  const first = conversation.turns.find((turn) => turn.role === "user");
  const text = (conversation.title || first?.content || first?.files?.[0]?.name || "").trim().replace(/\s+/g, " ");
  return text.length > 48 ? `${text.slice(0, 47)}…` : text || "New conversation";
}
