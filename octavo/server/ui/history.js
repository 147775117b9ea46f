// The list of conversations: those of this tab and, as they are saved, of others.

import { html, names, useEffect, useState } from "./dom.js";
import { deleteConversation, loadConversations, MOST, onOtherTabs, saveConversations, titleOf } from "./conversations.js";
import { keepFiles, megabytes, MOST_KEPT } from "./files.js";

/** The saved conversations with `current`, which is saved once nothing `runs`; what is lost when the page is closed is said in `notice`. */
export function useHistory(current, runs) {
  const [list, setList] = useState(loadConversations);
  const [left, setLeft] = useState(0);
  const [dropped, setDropped] = useState([]);
  useEffect(() => onOtherTabs(() => setList(loadConversations())), []);
  useEffect(() => {
    if (runs) return;
    const { kept, left } = saveConversations(current.turns.length ? [current, ...list.filter((one) => one.id !== current.id)] : list);
    setLeft(left);
    // Of those that are not open, the browser's storage has what the list needs.
    keepFiles(kept).then((names) => names.join() !== dropped.join() && setDropped(names));
  }, [list, current, runs]);
  const keep = () => current.turns.length && setList([current, ...list.filter((one) => one.id !== current.id)]);
  const remove = (id) => {
    deleteConversation(id);
    setList(list.filter((one) => one.id !== id));
  };
  const notice = [
    left > 0 && `Not all conversations stay when this page is closed: the browser keeps ${MOST} at most, and some 5 MB of text. ${left} of the oldest ${left === 1 ? "goes" : "go"}.`,
    dropped.length > 0 && `There is room for ${megabytes(MOST_KEPT)} of files in this browser. Without room, when this page is closed: ${dropped.slice(0, 5).join(", ")}${dropped.length > 5 ? ` and ${dropped.length - 5} more` : ""}. Delete conversations to make room.`,
  ].filter(Boolean);
  return { list, keep, remove, notice };
}

export function History({ list, current, onOpen, onNew, onRemove }) {
  const [confirming, setConfirming] = useState(null);
  const shown = [...(current.turns.length && !list.some((one) => one.id === current.id) ? [current] : []), ...list];
  return html`<nav class="history" aria-label="Conversations">
    <button class="primary" onClick=${onNew}>New</button>
    <details open=${matchMedia("(min-width: 64rem)").matches}><summary>Conversations (${shown.length})</summary>
      <ul>${shown.map((one) => html`<li key=${one.id} class=${names(one.id === current.id && "chosen")}>
        <button class="plain-button" aria-current=${one.id === current.id ? "true" : undefined} onClick=${() => one.id !== current.id && onOpen(one)}>${titleOf(one.id === current.id ? current : one)}</button>
        ${confirming === one.id
          ? html`<button class="small danger" onClick=${() => (onRemove(one.id), setConfirming(null))}>Delete?</button>`
          : html`<button class="small" aria-label=${`Delete ${titleOf(one)}`} onClick=${() => setConfirming(one.id)}>×</button>`}
      </li>`)}</ul>
    </details>
  </nav>`;
}
