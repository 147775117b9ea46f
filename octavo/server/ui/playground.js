// The playground: conversations and completions with the served model and its adapters.

import { html, names, useEffect, useRef, useState } from "./dom.js";
import { loadConversations, newConversation, saveConversations, titleOf } from "./conversations.js";
import { bodyOf, generate } from "./generation.js";
import { Samples } from "./samples.js";
import { Settings } from "./settings.js";
import { File, Turn } from "./turns.js";

const MOST_FILE_BYTES = 20 << 20;
const readFile = (file) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve({ name: file.name, type: file.type, url: reader.result });
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });

export function Playground({ models }) {
  const [list, setList] = useState(loadConversations);
  const [current, setCurrent] = useState(() => newConversation());
  const [options, setOptions] = useState({ model: "", typed: {}, values: {}, wrong: [], tokens: false, schema: "", tools: "" });
  const [run, setRun] = useState(null);
  const [problem, setProblem] = useState("");
  const latest = useRef(current);
  latest.current = current;
  const model = models.find((one) => one.id === options.model) ?? models[0];

  useEffect(() => {
    if (run) return;
    const others = list.filter((one) => one.id !== current.id);
    saveConversations(current.turns.length ? [current, ...others] : others);
  }, [list, current, run]);

  const change = (conversation) => setCurrent({ ...conversation, changed: Date.now() });
  const keep = () => current.turns.length && setList([current, ...list.filter((one) => one.id !== current.id)]);
  const open = (conversation) => {
    run?.abort();
    keep();
    setCurrent(conversation);
    setProblem("");
  };
  const remove = (id) => {
    setList(list.filter((one) => one.id !== id));
    if (id === current.id) setCurrent(newConversation(current.kind));
  };

  /** The body of the request for a conversation; null, and the reason is shown, if what was typed beside it is wrong. */
  const prepare = (conversation) => {
    try {
      if (options.wrong.length) throw new Error(`These settings are no JSON: ${options.wrong.join(", ")}.`);
      return bodyOf(conversation, { ...options, model: model?.id, settings: options.values, ...parsed(options) });
    } catch (error) {
      setProblem(error.message);
      return null;
    }
  };

  /** Answers the last turn; `before`: answers that stay beside the new ones. Whether it could be sent. */
  const answer = (conversation, before = []) => {
    const body = prepare(conversation);
    if (body) begin(conversation, body, before);
    return Boolean(body);
  };

  const begin = async (conversation, body, before) => {
    setProblem("");
    const abort = new AbortController();
    setRun(abort);
    const show = (answers) => {
      if (latest.current.id !== conversation.id) return;
      const turn = { role: "assistant", answers: [...before, ...answers], chosen: before.length };
      change({ ...conversation, turns: [...conversation.turns, turn] });
    };
    show([{ text: "", running: true }]);
    show(await generate(conversation.kind, body, show, abort.signal));
    setRun((now) => (now === abort ? null : now));
  };

  const send = (content, files) => {
    const turn = { role: "user", content, files };
    return answer({ ...current, turns: current.kind === "completion" ? [turn] : [...current.turns, turn] });
  };
  const cut = (index) => ({ ...current, turns: current.turns.slice(0, index) });
  const edit = (index, content) => {
    const turns = [...cut(index).turns, { ...current.turns[index], content }];
    answer({ ...current, turns });
  };
  const choose = (index, chosen) => change({ ...current, turns: current.turns.map((turn, i) => (i === index ? { ...turn, chosen } : turn)) });
  const useTool = (index, call, content) => {
    const turns = [...cut(index + 1).turns, { role: "tool", call: call.id, name: call.name, content }];
    answer({ ...current, turns });
  };

  const canChat = !model || !model.tasks || model.tasks.includes("generate");
  return html`<div class="playground">
    <${History} list=${list} current=${current} onOpen=${open} onNew=${() => open(newConversation(current.kind))} onRemove=${remove} />
    <div class="talk">
      <${Bar} current=${current} models=${models} model=${model} onKind=${(kind) => open(newConversation(kind))} onModel=${(id) => setOptions({ ...options, model: id })} />
      ${!canChat && html`<p class="error" role="alert">This model does not generate text: it can ${model.tasks.join(", ")}.</p>`}
      ${current.kind === "chat" && html`<details class="system" open=${Boolean(current.system)}><summary>System prompt</summary>
        <textarea aria-label="System prompt" rows="2" value=${current.system} onInput=${(event) => change({ ...current, system: event.target.value })}></textarea></details>`}
      <div class="turns" role="log" aria-label="Conversation">
        ${!current.turns.length && html`<p class="quiet empty">${current.kind === "chat" ? "Ask something. Conversations stay in this browser." : "Begin a text: the model goes on with it."}</p>`}
        ${current.turns.map((turn, i) => html`<${Turn} key=${`${current.id}-${i}`} turn=${turn} index=${i} kind=${current.kind} busy=${Boolean(run)}
          onEdit=${(text) => edit(i, text)} onRegenerate=${() => answer(cut(i), turn.answers)} onChoose=${(chosen) => choose(i, chosen)}
          onTool=${i === current.turns.length - 1 && ((call, text) => useTool(i, call, text))} />`)}
      </div>
      ${problem && html`<p class="error" role="alert">${problem}</p>`}
      <${Composer} kind=${current.kind} model=${model} running=${Boolean(run)} onSend=${send} onStop=${() => run?.abort()} />
    </div>
    <${Panel} current=${current} model=${model} options=${options} setOptions=${setOptions} />
  </div>`;
}

/** The JSON that was typed beside the settings. Throws an Error that names what is none. */
function parsed({ schema, tools }) {
  const read = (text, what) => {
    if (!text.trim()) return undefined;
    try {
      return JSON.parse(text);
    } catch (error) {
      throw new Error(`${what}: ${error.message}`);
    }
  };
  return { schema: read(schema, "The JSON schema"), tools: read(tools, "The tools") };
}

function History({ list, current, onOpen, onNew, onRemove }) {
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

function Bar({ current, models, model, onKind, onModel }) {
  return html`<div class="bar">
    <fieldset class="choice"><legend class="hidden">Kind of prompt</legend>
      ${[["chat", "Chat"], ["completion", "Completion"]].map(([kind, label]) => html`<label><input type="radio" name="kind" checked=${current.kind === kind} onChange=${() => onKind(kind)} /> ${label}</label>`)}
    </fieldset>
    <label class="model">Model <select value=${model?.id ?? ""} onChange=${(event) => onModel(event.target.value)}>
      ${models.map((one) => html`<option value=${one.id}>${one.parent ? `${one.id} (adapter)` : one.id}</option>`)}
    </select></label>
    ${model && html`<span class="quiet">${model.max_model_len.toLocaleString()} tokens</span>`}
  </div>`;
}

function Composer({ kind, model, running, onSend, onStop }) {
  const [text, setText] = useState("");
  const [files, setFiles] = useState([]);
  const [problem, setProblem] = useState("");
  const takes = (model?.input_modalities ?? []).filter((one) => one === "image" || one === "audio");
  const ready = text.trim() || files.length;
  const send = () => {
    if (!ready || running || !onSend(text, files)) return;
    if (kind === "chat") setText("");
    setFiles([]);
  };
  const onKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && kind === "chat") {
      event.preventDefault();
      send();
    }
  };
  const add = async (event) => {
    const chosen = [...event.target.files];
    event.target.value = "";
    setProblem(chosen.some((file) => file.size > MOST_FILE_BYTES) ? "Files of more than 20 MB are left out." : "");
    const read = await Promise.all(chosen.filter((file) => file.size <= MOST_FILE_BYTES).map(readFile));
    setFiles((now) => [...now, ...read]);
  };
  return html`<form class="composer" onSubmit=${(event) => (event.preventDefault(), send())}>
    <label class="hidden" for="question">${kind === "chat" ? "Message" : "Prompt"}</label>
    <textarea id="question" rows=${kind === "chat" ? 3 : 8} value=${text} placeholder=${kind === "chat" ? "Message (Enter sends, Shift+Enter begins a line)" : "Text to complete"} onKeyDown=${onKey} onInput=${(event) => setText(event.target.value)}></textarea>
    ${files.map((file, i) => html`<${File} file=${file} onRemove=${() => setFiles(files.filter((_, j) => j !== i))} />`)}
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    <div class="tools">
      ${takes.length > 0 && kind === "chat" && html`<label class="attach">Add ${takes.join(" or ")} <input type="file" multiple accept=${takes.map((one) => `${one}/*`).join(",")} onChange=${add} /></label>`}
      ${running ? html`<button type="button" class="primary danger" onClick=${onStop}>Stop</button>` : html`<button class="primary" disabled=${!ready}>${kind === "chat" ? "Send" : "Complete"}</button>`}
    </div>
  </form>`;
}

function Panel({ current, model, options, setOptions }) {
  const [open, setOpen] = useState(matchMedia("(min-width: 80rem)").matches);
  const set = (change) => setOptions((now) => ({ ...now, ...change }));
  let body = null;
  try {
    body = bodyOf(current, { ...options, model: model?.id, settings: options.values, ...parsed(options) });
  } catch {
    // what is wrong is said when the request is sent
  }
  return html`<aside class="panel" aria-label="Settings">
    <details open=${open} onToggle=${(event) => setOpen(event.target.open)}><summary>Settings</summary>
      ${open && html`
      <label class="check"><input type="checkbox" checked=${options.tokens} onChange=${(event) => set({ tokens: event.target.checked })} /> Each token's probability and alternatives</label>
      <${Settings} kind=${current.kind} typed=${options.typed} onChange=${(typed, { values, wrong }) => set({ typed, values, wrong })} />
      <details><summary>JSON schema${options.schema.trim() && " (set)"}</summary>
        <p class="help" id="schema-help">The answer is JSON of this schema.</p>
        <textarea aria-label="JSON schema" aria-describedby="schema-help" rows="6" spellcheck="false" value=${options.schema} placeholder='{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}' onInput=${(event) => set({ schema: event.target.value })}></textarea></details>
      ${current.kind === "chat" && html`<details><summary>Tools${options.tools.trim() && " (set)"}</summary>
        <p class="help" id="tools-help">A list of functions, as the API takes them; you give their results.</p>
        <textarea aria-label="Tools" aria-describedby="tools-help" rows="6" spellcheck="false" value=${options.tools} placeholder='[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]' onInput=${(event) => set({ tools: event.target.value })}></textarea></details>`}
      <details><summary>Copy as curl or Python</summary>${body ? html`<${Samples} kind=${current.kind} body=${body} />` : html`<p class="quiet">The schema or the tools are no JSON yet.</p>`}</details>`}
    </details>
  </aside>`;
}
