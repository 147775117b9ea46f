// Messages of a conversation: questions, which can be changed, and answers with what can be done with them; several versions
// of a message are leafed through, and several answers to one request stand side by side.

import { download, html, memo, names, useEffect, useMemo, useState } from "./dom.js";
import { AnswerBody, Stats } from "./answers.js";
import { sortOf } from "./files.js";
import { hasFailed, KINDS } from "./requests.js";
import { CopyButton, DeleteButton, Icon, IconButton } from "./widgets.js";

/** A message; `actions`: what can be done with it, an object that stays the same. */
export const Turn = memo(function Turn({ node, versions, results, kind, busy, isLast, actions }) {
  if (node.role === "user") return html`<${Question} node=${node} versions=${versions} kind=${kind} busy=${busy} actions=${actions} />`;
  if (node.role === "tool") return html`<section class="turn tool" aria-label="Result of a tool"><p class="call-label">Result of ${node.name || "a tool"}</p><pre class="call-result" tabindex="0">${node.content}</pre></section>`;
  return html`<${Answers} node=${node} versions=${versions} results=${results} kind=${kind} busy=${busy} isLast=${isLast} actions=${actions} />`;
});

/** "2 / 3", with a way to the other versions. */
function Versions({ node, versions, busy, onChoose }) {
  if (versions.length < 2) return null;
  const at = versions.findIndex((one) => one.id === node.id);
  return html`<div class="versions" role="group" aria-label="Versions">
    <${IconButton} icon="chevron_left" label="Version before" small=${true} disabled=${busy || at === 0} onClick=${() => onChoose(versions[at - 1])} />
    <span class="number">${at + 1} / ${versions.length}</span>
    <${IconButton} icon="chevron_right" label="Version after" small=${true} disabled=${busy || at === versions.length - 1} onClick=${() => onChoose(versions[at + 1])} />
  </div>`;
}

function Answers({ node, versions, results, kind, busy, isLast, actions }) {
  const together = useMemo(() => (node.batch ? versions.filter((one) => one.batch === node.batch) : [node]), [node, versions]);
  const [isWide, setWide] = useState(null);
  const [view, setView] = useState("text");
  const several = together.length > 1;
  const wide = several && (isWide ?? isLast);
  const running = wide ? together.some((one) => one.running) : node.running;
  const tokens = node.tokens?.length > 0;
  const toggle = (name) => setView(view === name ? "text" : name);
  const body = (one, label) => html`<${AnswerBody} key=${one.id} node=${one} label=${label} view=${view} plain=${kind !== "chat"} results=${results}
    onResults=${isLast && !busy && one.id === node.id ? (messages) => actions.useTools(node, messages) : undefined} onContinue=${isLast && !busy && one.id === node.id ? () => actions.goOn(node) : undefined} />`;
  return html`<section class="turn assistant" aria-label=${KINDS[kind].who}>
    ${wide
      ? html`<div class="columns">${together.map((one, i) => html`<div key=${one.id} class=${names("column", one.id === node.id && "chosen")}>
          <label class="choose"><input type="radio" name=${`batch-${node.batch}`} checked=${one.id === node.id} disabled=${busy} onChange=${() => actions.choose(one)} /> Answer ${i + 1} of ${together.length}</label>
          ${body(one, `Answer ${i + 1} of ${together.length}`)}
        </div>`)}</div>`
      : body(node, "Answer")}
    ${!running && html`<div class="actions">
      <${CopyButton} text=${node.text} />
      <${IconButton} icon="refresh" label=${KINDS[kind].again} small=${true} disabled=${busy} onClick=${() => actions.regenerate(node)} />
      ${kind === "chat" && html`<${IconButton} icon="source" label="Text as it was written" small=${true} aria-pressed=${view === "source" ? "true" : "false"} onClick=${() => toggle("source")} />`}
      ${tokens && html`<${IconButton} icon="tokens" label="Tokens" small=${true} aria-pressed=${view === "tokens" ? "true" : "false"} onClick=${() => toggle("tokens")} />`}
      ${several && html`<${IconButton} icon="columns" label="Side by side" small=${true} aria-pressed=${wide ? "true" : "false"} onClick=${() => setWide(!wide)} />`}
      <${DeleteButton} label="Delete this answer" disabled=${busy} onDelete=${() => actions.remove(node)} />
      <${Versions} node=${node} versions=${versions} busy=${busy} onChoose=${actions.choose} />
      <${Stats} stats=${node.stats} />
    </div>`}
    ${!running && !isLast && hasFailed(node) && html`<p class="quiet small-text">This question is left out of what the model gets from here on.</p>`}
  </section>`;
}

function Question({ node, versions, kind, busy, actions }) {
  const [text, setText] = useState(null);
  const [files, setFiles] = useState([]);
  const editing = text !== null;
  const begin = () => (setText(node.content), setFiles(node.files ?? []));
  const send = () => {
    if (actions.edit(node, text, files)) setText(null);
  };
  const onKey = (event) => {
    if (event.key === "Escape") setText(null);
    else if (event.key === "Enter" && !event.shiftKey && !event.isComposing && kind === "chat") {
      event.preventDefault();
      if (!busy && (text.trim() || files.length)) send();
    }
  };
  const who = kind === "chat" ? "You" : kind === "completion" ? "Prompt" : "Recording";
  return html`<section class=${names("turn user", editing && "editing")} aria-label=${kind === "chat" ? "Question" : who}>
    <${Files} files=${editing ? files : node.files} onRemove=${editing && ((file) => setFiles(files.filter((one) => one !== file)))} />
    ${editing
      ? html`<div class="edit"><textarea aria-label="Changed question" ref=${focusOnce} rows=${Math.min(14, text.split("\n").length + 1)} value=${text} onKeyDown=${onKey} onInput=${(event) => setText(event.target.value)}></textarea>
          <div class="edit-row"><span class="help">The conversation goes on from here in a new branch; this one stays.</span><button type="button" class="button small" onClick=${() => setText(null)}>Cancel</button><button type="button" class="button small primary" disabled=${(!text.trim() && !files.length) || busy} onClick=${send}>Send</button></div></div>`
      : html`${node.content && html`<pre class="plain asked" tabindex="0">${node.content}</pre>`}
          <div class="actions">
            ${node.content && html`<${CopyButton} text=${node.content} />`}
            ${!KINDS[kind].takes && html`<${IconButton} icon="edit" label="Edit" small=${true} disabled=${busy} onClick=${begin} />`}
            <${DeleteButton} label="Delete this question" disabled=${busy} onDelete=${() => actions.remove(node)} />
            <${Versions} node=${node} versions=${versions} busy=${busy} onChoose=${actions.choose} />
          </div>`}
  </section>`;
}

/** Focuses a field when it appears, its end first. */
const focusOnce = (field) => {
  if (!field || field.dataset.focused) return;
  field.dataset.focused = "true";
  field.focus();
  field.setSelectionRange(field.value.length, field.value.length);
};

export const Files = ({ files, onRemove }) => files?.length > 0 && html`<div class="files">${files.map((file) => html`<${File} key=${file.id} file=${file} onRemove=${onRemove && (() => onRemove(file))} />`)}</div>`;

/** A picture, a recording or a text that goes with a question. */
function File({ file, onRemove }) {
  const { name, type, blob, text } = file;
  const [broken, setBroken] = useState(false);
  const sort = sortOf(file);
  const url = useMemo(() => blob && sort !== "text" && URL.createObjectURL(blob), [blob]);
  useEffect(() => () => url && URL.revokeObjectURL(url), [url]);
  let shown = html`<p class="gone">No longer in this browser${sort === "audio" ? "" : ": the model does not get it again"}.</p>`;
  if (text !== undefined) shown = html`<p class="text-file"><${Icon} name="file" /><span class="quiet">${text.length.toLocaleString()} characters</span></p>`;
  else if (url && broken) shown = html`<p class="gone">This browser cannot ${sort === "image" ? "show" : "play"} it.</p>`;
  else if (url && sort === "image") shown = html`<img src=${url} alt=${name} onError=${() => setBroken(true)} />`;
  else if (url) shown = html`<audio src=${url} controls aria-label=${name} onError=${() => setBroken(true)}></audio>`;
  return html`<figure class=${`file ${sort}`}>${shown}<figcaption><span class="cut" title=${name}>${name}</span>
    ${blob && sort === "audio" && html`<${IconButton} icon="download" label=${`Save ${name}`} tip="Save" small=${true} onClick=${() => download(name, [blob], type)} />`}
    ${onRemove && html`<${IconButton} icon="close" label=${`Remove ${name}`} tip="Remove" small=${true} onClick=${onRemove} />`}</figcaption></figure>`;
}
