// Conversations, which stay in this browser: a list in its storage, bounded by dropping the oldest.

const PLACE = "octavo-conversations";
const MOST = 100;

export const newId = () => `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`;

/** kind: "chat" or "completion". A turn is { role: "user", content, files } or { role: "assistant", answers, chosen }. */
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
const stored = (conversation, withFiles) => ({
  ...conversation,
  turns: conversation.turns.map((turn) =>
    turn.answers ? { ...turn, answers: turn.answers.map(slim) } : withFiles ? turn : { ...turn, files: [] },
  ),
});

export function saveConversations(list) {
  const kept = list.filter((one) => one.turns.length || one.system).sort((a, b) => b.changed - a.changed).slice(0, MOST);
  for (const withFiles of [true, false]) {
    for (let count = kept.length; count > 0; count = withFiles ? 0 : Math.floor(count / 2)) {
      try {
        localStorage.setItem(PLACE, JSON.stringify(kept.slice(0, count).map((one) => stored(one, withFiles))));
        return;
      } catch {
        // the storage is full: without files, then with fewer conversations
      }
    }
  }
  if (!kept.length) localStorage.removeItem(PLACE);
}

export function titleOf(conversation) {
  const first = conversation.turns.find((turn) => turn.role === "user");
  const text = (conversation.title || first?.content || "").trim().replace(/\s+/g, " ");
  return text.length > 48 ? `${text.slice(0, 47)}…` : text || "New conversation";
}
