// The list of conversations: those of this tab and, as they are saved, of others.

import { download, html, names, useEffect, useMemo, useRef, useState } from "./dom.js";
import { contains, deleteConversation, exported, imported, loadConversations, MOST, newId, onOtherTabs, saveConversations, titleOf } from "./conversations.js";
import { asFarAsItIs } from "./generation.js";
import { filesOf, keepFiles, megabytes, MOST_KEPT } from "./files.js";
import { focusNow, Icon, IconButton, Menu } from "./widgets.js";

/** Milliseconds after a change; while somebody types, saving waits. */
const SAVED_AFTER = 300;

/** The saved conversations with `current`, which is saved once nothing `runs` in it; what is lost when the page is closed is said in `notice`. */
export function useHistory(current, runs) {
  const [list, setList] = useState(loadConversations);
  const [left, setLeft] = useState(0);
  const [dropped, setDropped] = useState([]);
  useEffect(() => onOtherTabs(() => setList(loadConversations())), []);
  const save = useRef();
  save.current = () => {
    const all = current.nodes.length ? [current, ...list.filter((one) => one.id !== current.id)] : list;
    const { kept, left } = saveConversations(all.map(asFarAsItIs));
    setLeft(left);
    // Of those that are not open, the browser's storage has what the list needs.
    keepFiles(kept).then((names) => names.join() !== dropped.join() && setDropped(names));
  };
  useEffect(() => {
    if (runs) return undefined;
    const timer = setTimeout(() => save.current(), SAVED_AFTER);
    return () => clearTimeout(timer);
  }, [list, current, runs]);
  // The browser's database is slow: a page that closes right after an answer would lose the question's files.
  const files = filesOf(current).map((file) => file.id).join();
  useEffect(() => {
    if (files) keepFiles([current, ...list.filter((one) => one.id !== current.id)]);
  }, [files]);
  useEffect(() => {
    const leave = () => save.current();
    addEventListener("pagehide", leave);
    return () => removeEventListener("pagehide", leave);
  }, []);
  /** Puts a conversation into the list, in the place of what the list has of it. */
  const keep = (one) => one.nodes.length && setList((now) => [one, ...now.filter((other) => other.id !== one.id)]);
  const change = (id, act) => setList((now) => now.map((one) => (one.id === id ? act(one) : one)));
  const remove = (id) => {
    deleteConversation(id);
    setList((now) => now.filter((one) => one.id !== id));
  };
  const add = (more) => setList((now) => [...more, ...now]);
  const notice = [
    left > 0 && `Not all conversations stay when this page is closed: the browser keeps ${MOST} at most, and some 5 MB of text. ${left} of the oldest ${left === 1 ? "goes" : "go"}.`,
    dropped.length > 0 && `There is room for ${megabytes(MOST_KEPT)} of files in this browser. Without room, when this page is closed: ${dropped.slice(0, 5).join(", ")}${dropped.length > 5 ? ` and ${dropped.length - 5} more` : ""}. Delete conversations to make room.`,
  ].filter(Boolean);
  return { list, keep, change, remove, add, notice };
}

const DAY = 24 * 3600 * 1000;

/** Conversations in groups by the time of their last change. */
function byTime(list) {
  const today = new Date().setHours(0, 0, 0, 0);
  const groups = [["Today", today], ["Yesterday", today - DAY], ["Last seven days", today - 6 * DAY], ["Earlier", -Infinity]];
  const sorted = [...list].sort((a, b) => b.changed - a.changed);
  return groups.map(([title, from], i) => [title, sorted.filter(({ changed }) => changed >= from && (i === 0 || changed < groups[i - 1][1]))]).filter(([, some]) => some.length);
}

export function History({ list, current, running, onOpen, onNew, onRemove, onRename, onImport, onClose }) {
  const [search, setSearch] = useState("");
  const [problem, setProblem] = useState("");
  const all = useMemo(() => [...(current.nodes.length ? [current] : []), ...list.filter((one) => one.id !== current.id)], [list, current]);
  const word = search.trim().toLowerCase();
  const found = useMemo(() => byTime(word ? all.filter((one) => contains(one, word) || titleOf(one).toLowerCase().includes(word)) : all), [all, word]);
  const save = (some) => download(`octavo-conversations-${new Date().toISOString().slice(0, 10)}.json`, [exported(some)], "application/json");
  const open = async (event) => {
    const [file] = event.target.files;
    event.target.value = "";
    if (!file) return;
    try {
      onImport(imported(await file.text()).map((one) => ({ ...one, id: newId() })));
      setProblem("");
    } catch (error) {
      setProblem(error.message);
    }
  };
  return html`<nav class="history" aria-label="Conversations">
    <div class="history-head">
      <button type="button" class="button new" onClick=${onNew}><${Icon} name="edit" />New</button>
      ${onClose && html`<${IconButton} icon="close" label="Close conversations" side="left" onClick=${onClose} />`}
    </div>
    ${all.length > 0 && html`<div class="search"><${Icon} name="search" /><input type="search" aria-label="Search conversations" placeholder="Search" value=${search} onInput=${(event) => setSearch(event.target.value)} /></div>`}
    <div class="history-list">
      ${!all.length && html`<p class="help">Your conversations appear here.</p>`}
      ${all.length > 0 && !found.length && html`<p class="help">No conversation has “${search.trim()}” in it.</p>`}
      ${found.map(([title, some]) => html`<section key=${title}><h2>${title}</h2><ul>
        ${some.map((one) => html`<${Entry} key=${one.id} one=${one} isCurrent=${one.id === current.id} isRunning=${running.has(one.id)} onOpen=${onOpen} onRename=${onRename} onRemove=${onRemove} onExport=${() => save([one])} />`)}
      </ul></section>`)}
    </div>
    ${problem && html`<p class="note error" role="alert">${problem}</p>`}
    <div class="history-foot">
      <label class="button plain small attach"><${Icon} name="upload" />Import<input type="file" aria-label="Import conversations" accept=".json,application/json" onChange=${open} /></label>
      <button type="button" class="button plain small" disabled=${!all.length} onClick=${() => save(all)}><${Icon} name="download" />Export all</button>
    </div>
  </nav>`;
}

function Entry({ one, isCurrent, isRunning, onOpen, onRename, onRemove, onExport }) {
  const [name, setName] = useState(null);
  const [isAsked, setAsked] = useState(false);
  const field = useRef();
  const title = titleOf(one);
  useEffect(() => void (name !== null && field.current?.select()), [name === null]);
  if (name !== null) {
    const rename = () => {
      if (!field.current || field.current.dataset.left) return; // the field is removed, which leaves it
      onRename(one, name.trim());
      setName(null);
    };
    return html`<li><form class="rename" onSubmit=${(event) => (event.preventDefault(), rename())}><input ref=${field} aria-label="Name of the conversation" value=${name} onInput=${(event) => setName(event.target.value)} onBlur=${rename} onKeyDown=${(event) => event.key === "Escape" && (event.stopPropagation(), (event.target.dataset.left = "yes"), setName(null))} /></form></li>`;
  }
  if (isAsked) {
    return html`<li class="asked-delete"><span class="cut">Delete “${title}”?</span><button type="button" class="button small danger" ref=${focusNow} onClick=${() => onRemove(one)}>Delete</button><${IconButton} icon="close" label="Keep it" small=${true} onClick=${() => setAsked(false)} /></li>`;
  }
  return html`<li class=${names(isCurrent && "chosen")}>
    <button type="button" class="open cut" aria-current=${isCurrent ? "true" : undefined} title=${title} onClick=${() => onOpen(one)}>${title}${isRunning && html`<span class="running-dot"><span class="hidden">, being answered</span></span>`}</button>
    <${Menu} label=${`Actions for ${title}`} actions=${[
      { icon: "edit", label: "Rename", act: () => setName(title) },
      { icon: "download", label: "Export", act: onExport },
      { icon: "delete", label: "Delete", danger: true, act: () => setAsked(true) },
    ]} />
  </li>`;
}
