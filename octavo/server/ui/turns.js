// The turns of a conversation: what was asked, which can be changed, and the answers, side by side if there are several.

import { download, html, useEffect, useMemo, useState } from "./dom.js";
import { Answer } from "./answers.js";
import { hasFailed, KINDS } from "./requests.js";

export function Turn({ turn, index, kind, busy, onEdit, onRegenerate, onChoose, onContinue, onTool, isLast }) {
  if (turn.role === "user") return html`<${Question} turn=${turn} busy=${busy} onEdit=${onEdit} kind=${kind} />`;
  if (turn.role === "tool") return html`<section class="turn user" aria-label="Result of a tool"><p class="who">Result of ${turn.name}</p><pre class="plain" tabindex="0">${turn.content}</pre></section>`;
  const several = turn.answers.length > 1;
  const running = turn.answers.some((answer) => answer.running);
  const calls = turn.answers[turn.chosen ?? 0]?.calls ?? [];
  return html`<section class="turn assistant" aria-label="Answer">
    <p class="who">${KINDS[kind].who}</p>
    <div class=${several ? "branches" : ""}>
      ${turn.answers.map((answer, i) => html`<${Answer} key=${i} answer=${answer} label=${several ? `Answer ${i + 1} of ${turn.answers.length}` : "Answer"} chosen=${several && i === (turn.chosen ?? 0)} plain=${kind !== "chat"} onChoose=${several && { name: `branch-${index}`, call: () => onChoose(i) }} onContinue=${!busy && i === (turn.chosen ?? 0) && onContinue} />`)}
    </div>
    ${!running && html`<div class="tools"><button class="small" disabled=${busy} onClick=${onRegenerate}>${KINDS[kind].again}</button></div>`}
    ${!running && !isLast && hasFailed(turn) && html`<p class="quiet">This question is left out of what the model gets from here on.</p>`}
    ${!running && onTool && calls.map((call) => html`<${ToolResult} key=${call.id} call=${call} onSend=${onTool} />`)}
  </section>`;
}

function Question({ turn, kind, busy, onEdit }) {
  const [text, setText] = useState(null);
  const [files, setFiles] = useState([]);
  const editing = text !== null;
  const begin = () => (setText(turn.content), setFiles(turn.files ?? []));
  const send = () => {
    if (onEdit(text, files)) setText(null);
  };
  return html`<section class="turn user" aria-label="Question">
    <p class="who">${kind === "chat" ? "You" : kind === "completion" ? "Prompt" : "Recording"}</p>
    <div class="files">${(editing ? files : (turn.files ?? [])).map((file) => html`<${File} key=${file.id} file=${file} onRemove=${editing && (() => setFiles(files.filter((one) => one !== file)))} />`)}</div>
    ${editing
      ? html`<textarea aria-label="Changed question" rows=${Math.min(12, text.split("\n").length + 1)} value=${text} onInput=${(event) => setText(event.target.value)}></textarea>
          <div class="tools"><button class="small primary" disabled=${(!text.trim() && !files.length) || busy} onClick=${send}>Send</button><button class="small" onClick=${() => setText(null)}>Cancel</button></div>`
      : html`${turn.content && html`<pre class="plain asked" tabindex="0">${turn.content}</pre>`}
          ${!KINDS[kind].takes && html`<div class="tools"><button class="small" disabled=${busy} onClick=${begin}>Edit</button></div>`}`}
  </section>`;
}

/** A picture or a recording that goes with a question. */
export function File({ file, onRemove }) {
  const { name, type, blob } = file;
  const [broken, setBroken] = useState(false);
  const url = useMemo(() => blob && URL.createObjectURL(blob), [blob]);
  useEffect(() => () => url && URL.revokeObjectURL(url), [url]);
  let shown = html`<p class="gone">No longer in this browser${type.startsWith("image/") ? ": the model does not get it again" : ""}.</p>`;
  if (url && broken) shown = html`<p class="gone">This browser cannot ${type.startsWith("image/") ? "show" : "play"} it.</p>`;
  else if (url && type.startsWith("image/")) shown = html`<img src=${url} alt=${name} onError=${() => setBroken(true)} />`;
  else if (url) shown = html`<audio src=${url} controls aria-label=${name} onError=${() => setBroken(true)}></audio>`;
  return html`<figure class="file">${shown}<figcaption>${name} ${onRemove && html`<button type="button" class="small" onClick=${onRemove} aria-label=${`Remove ${name}`}>Remove</button>`}
    ${blob && type.startsWith("audio/") && html`<button type="button" class="small" onClick=${() => download(name, [blob], type)} aria-label=${`Save ${name}`}>Save</button>`}</figcaption></figure>`;
}

function ToolResult({ call, onSend }) {
  const [text, setText] = useState("");
  const id = `tool-${call.id}`;
  return html`<form class="tool-result" onSubmit=${(event) => (event.preventDefault(), onSend(call, text))}>
    <label for=${id}>Result of <code>${call.name}</code>, for the model to go on with</label>
    <textarea id=${id} rows="2" value=${text} onInput=${(event) => setText(event.target.value)}></textarea>
    <button class="small" disabled=${!text.trim()}>Send the result</button>
  </form>`;
}
