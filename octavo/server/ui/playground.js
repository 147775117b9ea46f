// The playground: conversations, completions and recordings with the served model and its adapters.

import { html, useEffect, useRef, useState } from "./dom.js";
import { Composer } from "./composer.js";
import { newConversation } from "./conversations.js";
import { withFiles } from "./files.js";
import { getJson } from "./api.js";
import { generate, joined } from "./generation.js";
import { History, useHistory } from "./history.js";
import { bodyOf, KINDS, kindsOf, ownSettings, settingsOf } from "./requests.js";
import { Samples } from "./samples.js";
import { Settings } from "./settings.js";
import { Turn } from "./turns.js";

const EMPTY = {
  chat: "Ask something. Conversations stay in this browser.",
  completion: "Begin a text: the model goes on with it.",
  transcription: "What is said in a recording becomes text. It stays in this browser.",
  translation: "What is said in a recording becomes English text. It stays in this browser.",
};

export function Playground({ models }) {
  const [current, setCurrent] = useState(() => newConversation());
  const [options, setOptions] = useState({ model: "", typed: {}, values: {}, wrong: [], tokens: false, schema: "", tools: "" });
  const [defaults, setDefaults] = useState({});
  const [run, setRun] = useState(null);
  const [problem, setProblem] = useState("");
  const { list, keep, remove, notice } = useHistory(current, Boolean(run));
  const latest = useRef(current);
  latest.current = current;
  const model = models.find((one) => one.id === options.model) ?? models[0];
  const kinds = kindsOf(model);
  const own = ownSettings(current.kind, model, defaults);
  useEffect(() => {
    // A server that does not say them has them all the same.
    if (model?.loaded === false) setDefaults({}); // asking would load it
    else if (model) getJson(model.status ? `/props?model=${encodeURIComponent(model.id)}` : "/props").then((props) => setDefaults(props.default_generation_settings?.params ?? {}), () => {});
  }, [model]);

  const change = (conversation) => setCurrent({ ...conversation, changed: Date.now() });
  const open = async (conversation) => {
    run?.abort();
    keep();
    setProblem("");
    setCurrent(conversation);
    const filled = await withFiles(conversation);
    if (latest.current === conversation) setCurrent(filled);
  };
  useEffect(() => {
    if (kinds.length && !kinds.includes(current.kind) && !current.turns.length) setCurrent(newConversation(kinds[0]));
  }, [model, current]);

  /** The body of the request for a conversation; null, and the reason is shown, if what was typed beside it is wrong. */
  const prepare = (conversation, begun) => {
    try {
      if (options.wrong.length) throw new Error(`These settings are no JSON: ${options.wrong.join(", ")}.`);
      const body = bodyOf(conversation, { ...options, model: model?.id, settings: settingsOf(options, own), ...parsed(options), begun });
      if ("file" in body && !body.file?.blob) throw new Error("The recording is no longer in this browser: choose it again.");
      return body;
    } catch (error) {
      setProblem(error.message);
      return null;
    }
  };

  /** Answers the last turn; `before`: answers that stay beside the new ones. Whether it could be sent. */
  const answer = (conversation, before = []) => {
    const body = prepare(conversation);
    if (body) begin(conversation, body, (answers) => ({ answers: [...before, ...answers], chosen: before.length }));
    return Boolean(body);
  };

  /** Goes on with the chosen answer of the last turn. */
  const goOn = (index) => {
    const { answers, chosen = 0 } = current.turns[index];
    const body = prepare(cut(index), answers[chosen].text);
    if (body) begin(cut(index), body, ([more]) => ({ answers: answers.map((one, i) => (i === chosen ? joined(one, more) : one)), chosen }));
  };

  /** Runs a request; `arrange`: the last turn of its answers. */
  const begin = async (conversation, body, arrange) => {
    setProblem("");
    const abort = new AbortController();
    setRun(abort);
    const show = (answers) => {
      if (latest.current.id !== conversation.id) return;
      change({ ...conversation, turns: [...conversation.turns, { role: "assistant", ...arrange(answers) }] });
    };
    show([{ text: "", thoughts: "", tokens: [], running: true }]);
    show(await generate(conversation.kind, body, show, abort.signal, "max_tokens" in own && !("max_tokens" in options.typed)));
    setRun((now) => (now === abort ? null : now));
  };

  const send = (content, files) => answer({ ...current, turns: [...(current.kind === "chat" ? current.turns : []), { role: "user", content, files }] });
  const cut = (index) => ({ ...current, turns: current.turns.slice(0, index) });
  const edit = (index, content, files) => answer({ ...current, turns: [...cut(index).turns, { ...current.turns[index], content, files }] });
  const choose = (index, chosen) => change({ ...current, turns: current.turns.map((turn, i) => (i === index ? { ...turn, chosen } : turn)) });
  const useTool = (index, call, content) => {
    const turns = [...cut(index + 1).turns, { role: "tool", call: call.id, name: call.name, content }];
    answer({ ...current, turns });
  };

  const turns = useFollowed(current, Boolean(run));
  const isServed = kinds.includes(current.kind);
  return html`<div class="playground">
    <${History} list=${list} current=${current} onOpen=${open} onNew=${() => open(newConversation(isServed ? current.kind : kinds[0]))} onRemove=${(id) => (remove(id), id === current.id && setCurrent(newConversation(current.kind)))} />
    <div class="talk">
      <${Bar} current=${current} kinds=${kinds} models=${models} model=${model} onKind=${(kind) => open(newConversation(kind))} onModel=${(id) => setOptions({ ...options, model: id })} />
      ${notice.map((text) => html`<p class="notice" role="status">${text}</p>`)}
      ${!isServed && html`<p class="error" role="alert">This model ${current.kind in KINDS && kinds.length ? `makes no ${KINDS[current.kind].label.toLowerCase()}` : "does not generate text"}: it can ${model.tasks.join(", ")}.</p>`}
      ${current.kind === "chat" && isServed && html`<details class="system" open=${Boolean(current.system)}><summary>System prompt</summary>
        <textarea aria-label="System prompt" rows="2" value=${current.system} onInput=${(event) => change({ ...current, system: event.target.value })}></textarea></details>`}
      <div class="turns" ref=${turns} role="log" aria-label="Conversation">
        ${!current.turns.length && isServed && html`<p class="quiet empty">${EMPTY[current.kind]}</p>`}
        ${current.turns.map((turn, i) => html`<${Turn} key=${`${current.id}-${i}`} turn=${turn} index=${i} kind=${current.kind} busy=${Boolean(run) || !isServed}
          onEdit=${(text, files) => edit(i, text, files)} onRegenerate=${() => answer(cut(i), turn.answers)} onChoose=${(chosen) => choose(i, chosen)}
          isLast=${i === current.turns.length - 1} onContinue=${i === current.turns.length - 1 && (() => goOn(i))} onTool=${i === current.turns.length - 1 && ((call, text) => useTool(i, call, text))} />`)}
      </div>
      ${problem && html`<p class="error" role="alert">${problem}</p>`}
      ${isServed && html`<${Composer} key=${KINDS[current.kind].takes ?? "text"} kind=${current.kind} model=${model} running=${Boolean(run)} onSend=${send} onStop=${() => run?.abort()} />`}
    </div>
    ${isServed && html`<${Panel} current=${current} model=${model} options=${options} setOptions=${setOptions} defaults=${defaults} own=${own} />`}
  </div>`;
}

/** Keeps the end of what is written in view while it is, unless somebody scrolls up to read. */
function useFollowed(current, runs) {
  const turns = useRef();
  const follows = useRef(false);
  useEffect(() => {
    if (runs) follows.current = true;
    let last = scrollY;
    const onScroll = () => {
      if (scrollY < last - 2) follows.current = false;
      last = scrollY;
    };
    addEventListener("scroll", onScroll);
    return () => removeEventListener("scroll", onScroll);
  }, [runs]);
  useEffect(() => {
    if (follows.current) turns.current.lastElementChild?.scrollIntoView({ block: "end" });
    if (!runs) follows.current = false;
  }, [current, runs]);
  return turns;
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

function Bar({ current, kinds, models, model, onKind, onModel }) {
  return html`<div class="bar">
    <fieldset class="choice"><legend class="hidden">Kind of request</legend>
      ${kinds.map((kind) => html`<label><input type="radio" name="kind" checked=${current.kind === kind} onChange=${() => onKind(kind)} /> ${KINDS[kind].label}</label>`)}
    </fieldset>
    <label class="model">Model <select value=${model?.id ?? ""} onChange=${(event) => onModel(event.target.value)}>
      ${models.map((one) => html`<option value=${one.id}>${one.parent ? `${one.id} (adapter)` : one.loaded === false ? `${one.id} (not loaded)` : one.id}</option>`)}
    </select></label>
    ${model?.max_model_len && html`<span class="quiet">${model.max_model_len.toLocaleString()} tokens</span>`}
  </div>`;
}

function Panel({ current, model, options, setOptions, defaults, own }) {
  const [open, setOpen] = useState(matchMedia("(min-width: 80rem)").matches);
  const set = (change) => setOptions((now) => ({ ...now, ...change }));
  const writes = !KINDS[current.kind].takes;
  return html`<aside class="panel" aria-label="Settings">
    <details open=${open} onToggle=${(event) => setOpen(event.target.open)}><summary>Settings</summary>
      ${open && html`
      ${writes && html`<label class="check"><input type="checkbox" checked=${options.tokens} onChange=${(event) => set({ tokens: event.target.checked })} /> Each token's probability and alternatives</label>`}
      <${Settings} kind=${current.kind} typed=${options.typed} defaults=${defaults} own=${own} onChange=${(typed, { values, wrong }) => set({ typed, values, wrong })} />
      ${writes && html`<details><summary>JSON schema${options.schema.trim() && " (set)"}</summary>
        <p class="help" id="schema-help">The answer is JSON of this schema.</p>
        <textarea aria-label="JSON schema" aria-describedby="schema-help" rows="6" spellcheck="false" value=${options.schema} placeholder='{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}' onInput=${(event) => set({ schema: event.target.value })}></textarea></details>`}
      ${current.kind === "chat" && html`<details><summary>Tools${options.tools.trim() && " (set)"}</summary>
        <p class="help" id="tools-help">A list of functions, as the API takes them; you give their results.</p>
        <textarea aria-label="Tools" aria-describedby="tools-help" rows="6" spellcheck="false" value=${options.tools} placeholder='[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]' onInput=${(event) => set({ tools: event.target.value })}></textarea></details>`}
      <${Sample} current=${current} model=${model} options=${options} own=${own} />`}
    </details>
  </aside>`;
}

/** The request of the last answer, or the one that would be sent, as a program. */
function Sample({ current, model, options, own }) {
  const [open, setOpen] = useState(false);
  return html`<details onToggle=${(event) => setOpen(event.target.open)}><summary>Copy as curl or Python</summary>${open && sample()}</details>`;

  function sample() {
    const asked = current.turns.findLastIndex((turn) => !turn.answers);
    try {
      const body = bodyOf({ ...current, turns: current.turns.slice(0, asked + 1) }, { ...options, model: model?.id, settings: settingsOf(options, own), ...parsed(options) });
      return html`<${Samples} kind=${current.kind} body=${body} />`;
    } catch (error) {
      return html`<p class="error">${error.message}</p>`;
    }
  }
}
