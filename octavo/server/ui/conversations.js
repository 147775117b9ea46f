// Conversations, which stay in this browser: each a tree of messages, of which one branch is shown; a list in the browser's
// storage, shared by its tabs, bounded by dropping the oldest.

const PLACE = "octavo-conversations";
export const MOST = 100;

export const newId = () => `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`;

/**
 * kind: one of requests.js. A node is { id, parent, role: "user", content, files }, { ..., role: "tool", call, name, content }
 * or { ..., role: "assistant", batch, ...an answer of generation.js }; nodes with one parent are versions of one message.
 * `chosen` has, by parent ("" at the beginning), the version that is shown; without one it is the last.
 */
export const newConversation = (kind = "chat", system = "") => ({ id: newId(), kind, title: "", system, nodes: [], chosen: {}, changed: Date.now() });

const families = new WeakMap();

/** The nodes by their parent. */
function childrenOf({ nodes }) {
  let found = families.get(nodes);
  if (!found) {
    found = new Map();
    for (const node of nodes) found.set(node.parent, [...(found.get(node.parent) ?? []), node]);
    families.set(nodes, found);
  }
  return found;
}

/** The branch that is shown, from the first message on. */
export function pathOf(conversation) {
  const children = childrenOf(conversation);
  const path = [];
  for (let all = children.get(""); all; all = children.get(path.at(-1).id)) path.push(all.find((one) => one.id === conversation.chosen[one.parent]) ?? all.at(-1));
  return path;
}

/** The messages before one of a branch. */
export const pathBefore = (path, id) => path.slice(0, path.findIndex((one) => one.id === id));

export const versionsOf = (conversation, node) => childrenOf(conversation).get(node.parent) ?? [node];

const touched = (conversation, change) => ({ ...conversation, ...change, changed: Date.now() });

/** Adds messages, each the child of the one before it, after `parent`, and shows them. */
export function withMessages(conversation, parent, messages) {
  const nodes = [...conversation.nodes];
  const chosen = { ...conversation.chosen };
  for (const message of messages) {
    const node = { id: newId(), ...message, parent };
    nodes.push(node);
    chosen[parent] = node.id;
    parent = node.id;
  }
  return touched(conversation, { nodes, chosen });
}

/** Adds answers to one question, and shows the first. */
export function withAnswers(conversation, parent, answers) {
  return touched(conversation, { nodes: [...conversation.nodes, ...answers.map((one) => ({ ...one, parent }))], chosen: { ...conversation.chosen, [parent]: answers[0].id } });
}

/** Changes nodes by their ids. */
export const withChanges = (conversation, changes) => touched(conversation, { nodes: conversation.nodes.map((one) => (changes.has(one.id) ? { ...one, ...changes.get(one.id) } : one)) });

export const withChosen = (conversation, node) => touched(conversation, { chosen: { ...conversation.chosen, [node.parent]: node.id } });

/** Removes a version of a message, with all that came after it. */
export function without(conversation, id) {
  const children = childrenOf(conversation);
  const gone = new Set([id]);
  for (const one of gone) for (const child of children.get(one) ?? []) gone.add(child.id);
  return touched(conversation, { nodes: conversation.nodes.filter((one) => !gone.has(one.id)), chosen: Object.fromEntries(Object.entries(conversation.chosen).filter(([parent, child]) => !gone.has(parent) && !gone.has(child))) });
}

// --- storage

/** A conversation as earlier versions of this page kept it: a list of turns, answers of one question together. */
function fromTurns({ turns, ...rest }) {
  let conversation = { ...newConversation(rest.kind, rest.system), ...rest };
  let parent = "";
  for (const turn of turns) {
    if (turn.answers) {
      const answers = turn.answers.map((answer) => ({ ...answer, id: newId(), role: "assistant" }));
      if (!answers.length) continue;
      conversation = withAnswers(conversation, parent, answers);
      const shown = answers[turn.chosen ?? 0] ?? answers[0];
      conversation = withChosen(conversation, { ...shown, parent });
      parent = shown.id;
    } else {
      const id = newId();
      conversation = withMessages(conversation, parent, [{ ...turn, id }]);
      parent = id;
    }
  }
  return { ...conversation, changed: rest.changed ?? Date.now() };
}

/** What was stored or imported as conversations; other things are left out. */
function read(list) {
  if (!Array.isArray(list)) return [];
  const isNode = (one) => one && typeof one.id === "string" && typeof one.parent === "string" && ["user", "assistant", "tool"].includes(one.role);
  return list.filter((one) => one && typeof one === "object").flatMap((one) => {
    if (Array.isArray(one.turns)) return [fromTurns(one)];
    if (!Array.isArray(one.nodes) || !one.nodes.every(isNode)) return [];
    const nodes = one.nodes.map((node) => ({ ...node, running: undefined, ...(node.role === "assistant" ? { text: String(node.text ?? "") } : { content: String(node.content ?? "") }) }));
    return [{ ...newConversation(), ...one, id: String(one.id ?? newId()), nodes, chosen: { ...one.chosen } }];
  });
}

export function loadConversations() {
  try {
    return read(JSON.parse(localStorage.getItem(PLACE) ?? "[]"));
  } catch {
    return [];
  }
}

/** Contents of files stand elsewhere. */
const nameOnly = ({ id, name, type, size }) => ({ id, name, type, size });
/** Alternatives of tokens take a hundred times the text's room: they last as long as the page. */
const slim = ({ tokens, running, ...node }) => (node.files ? { ...node, files: node.files.map(nameOnly) } : node);
const stored = (conversation) => ({ ...conversation, nodes: conversation.nodes.map(slim) });

/** Saves conversations beside those that other tabs have saved. Those that are kept, the newest first, and how many are not. */
export function saveConversations(list) {
  const newest = new Map(loadConversations().map((one) => [one.id, one]));
  for (const one of list) if (!(newest.get(one.id)?.changed > one.changed)) newest.set(one.id, one);
  const all = [...newest.values()].filter((one) => one.nodes.length).sort((a, b) => b.changed - a.changed);
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
  localStorage.setItem(PLACE, JSON.stringify(loadConversations().filter((one) => one.id !== id).map(stored)));
}

/** Calls back when another tab has saved conversations. */
export function onOtherTabs(call) {
  const listener = (event) => event.key === PLACE && call();
  addEventListener("storage", listener);
  return () => removeEventListener("storage", listener);
}

export function titleOf(conversation) {
  const first = conversation.nodes.find((node) => node.role === "user");
  const text = (conversation.title || first?.content || first?.files?.[0]?.name || "").trim().replace(/\s+/g, " ");
  return text.length > 60 ? `${text.slice(0, 59)}…` : text || "New conversation";
}

/** Whether a word stands in the title or in a message. */
export const contains = (conversation, word) => [conversation.title, ...conversation.nodes.map((node) => node.text ?? node.content)].some((text) => (text ?? "").toLowerCase().includes(word));

// --- files of conversations

const FORMAT = "octavo-conversations";

/** Conversations as the text of a file; contents of attached files are left out. */
export const exported = (list) => JSON.stringify({ format: FORMAT, version: 1, conversations: list.map(stored) }, null, 1);

/** The conversations of such a file, or of a list of messages in OpenAI's form. Throws an Error that says what is wrong with it. */
export function imported(text) {
  let content;
  try {
    content = JSON.parse(text);
  } catch (error) {
    throw new Error(`This file is no JSON: ${error.message}`);
  }
  const messages = Array.isArray(content) ? content : content?.messages;
  if (Array.isArray(messages) && messages.length && messages.every((one) => one && typeof one.role === "string")) return [ofMessages(messages)];
  const found = content?.format === FORMAT ? read(content.conversations) : [];
  if (!found.length) throw new Error("There are no conversations in this file: it must be an export of this page, or a list of messages with role and content.");
  return found.map((one) => ({ ...one, changed: Date.now() }));
}

function ofMessages(messages) {
  const textOf = (content) => (typeof content === "string" ? content : (Array.isArray(content) ? content : []).map((part) => part?.text ?? "").join(""));
  const system = messages.filter((one) => one.role === "system" || one.role === "developer").map((one) => textOf(one.content)).join("\n");
  const turns = messages.flatMap((one) => {
    if (one.role === "assistant") return [{ answers: [{ text: textOf(one.content), thoughts: one.reasoning_content ?? "", finish: "stop", calls: (one.tool_calls ?? []).map((call) => ({ id: call.id, name: call.function?.name ?? "", arguments: call.function?.arguments ?? "" })) }] }];
    if (one.role === "tool") return [{ role: "tool", call: one.tool_call_id, name: one.name ?? "", content: textOf(one.content) }];
    return one.role === "user" ? [{ role: "user", content: textOf(one.content), files: [] }] : [];
  });
  return fromTurns({ kind: "chat", system, turns });
}
