// The turns of a conversation: what was asked, which can be changed, and the answers, side by side if there are several.

import { html, useState } from "./dom.js";
import { Answer } from "./answers.js";

export function Turn({ turn, index, kind, busy, onEdit, onRegenerate, onChoose, onTool }) {
  if (turn.role === "user") return html`<${Question} turn=${turn} busy=${busy} onEdit=${onEdit} plain=${kind === "completion"} />`;
  if (turn.role === "tool") return html`<section class="turn user" aria-label="Result of a tool"><p class="who">Result of ${turn.name}</p><pre class="plain" tabindex="0">${turn.content}</pre></section>`;
  const several = turn.answers.length > 1;
  const running = turn.answers.some((answer) => answer.running);
  const calls = turn.answers[turn.chosen ?? 0]?.calls ?? [];
  return html`<section class="turn assistant" aria-label="Answer">
    <p class="who">${kind === "chat" ? "Assistant" : "Completion"}</p>
    <div class=${several ? "branches" : ""}>
      ${turn.answers.map((answer, i) => html`<${Answer} key=${i} answer=${answer} label=${several ? `Answer ${i + 1} of ${turn.answers.length}` : "Answer"} chosen=${several && i === (turn.chosen ?? 0)} plain=${kind === "completion"} onChoose=${several && { name: `branch-${index}`, call: () => onChoose(i) }} />`)}
    </div>
    ${!running && html`<div class="tools"><button class="small" disabled=${busy} onClick=${onRegenerate}>${kind === "chat" ? "Regenerate" : "Complete again"}</button></div>`}
    ${!running && onTool && calls.map((call) => html`<${ToolResult} key=${call.id} call=${call} onSend=${onTool} />`)}
  </section>`;
}

function Question({ turn, busy, onEdit, plain }) {
  const [text, setText] = useState(null);
  const editing = text !== null;
  const send = () => {
    onEdit(text);
    setText(null);
  };
  return html`<section class="turn user" aria-label="Question">
    <p class="who">${plain ? "Prompt" : "You"}</p>
    ${(turn.files ?? []).map((file) => html`<${File} file=${file} />`)}
    ${editing
      ? html`<textarea aria-label="Changed question" rows=${Math.min(12, text.split("\n").length + 1)} value=${text} onInput=${(event) => setText(event.target.value)}></textarea>
          <div class="tools"><button class="small primary" disabled=${!text.trim() || busy} onClick=${send}>Send</button><button class="small" onClick=${() => setText(null)}>Cancel</button></div>`
      : html`<pre class="plain asked" tabindex="0">${turn.content}</pre><div class="tools"><button class="small" disabled=${busy} onClick=${() => setText(turn.content)}>Edit</button></div>`}
  </section>`;
}

/** A picture or a recording that goes with a question. */
export function File({ file, onRemove }) {
  const shown = file.type.startsWith("image/") ? html`<img src=${file.url} alt=${file.name} />` : html`<audio src=${file.url} controls aria-label=${file.name}></audio>`;
  return html`<figure class="file">${shown}<figcaption>${file.name} ${onRemove && html`<button class="small" onClick=${onRemove} aria-label=${`Remove ${file.name}`}>Remove</button>`}</figcaption></figure>`;
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
