// The settings of requests, made of the server's own description of its routes: each with the value that applies and whose it is.

import { html, names, useEffect, useState } from "./dom.js";
import { getJson } from "./api.js";
import { KINDS, routeOf } from "./requests.js";
import { focusNow, Icon, IconButton } from "./widgets.js";

/** Names of settings for people; `range`: a slider from, to and by. Others have their field's name. */
const TITLES = {
  temperature: ["Temperature", "Low: the likeliest words. High: more varied ones. 0: always the same answer.", [0, 2, 0.05]],
  top_p: ["Top-p", "Draws from the likeliest words that together have this probability. 1: from all.", [0, 1, 0.01]],
  max_tokens: ["Longest answer", "In tokens; a token is about three quarters of an English word."],
  seed: ["Seed", "With a number, the same question gets the same answer every time."],
  top_k: ["Top-k", "Draws from this many of the likeliest words. 0: from all."],
  min_p: ["Min-p", "Leaves out words less likely than this share of the likeliest. 0: none.", [0, 1, 0.01]],
  n: ["Answers at once", "This many answers to each question, side by side."],
  best_of: ["Best of", "Writes this many answers and keeps the likeliest."],
  stop: ["Stop texts", "The answer ends before one of them; one a line."],
  min_tokens: ["Shortest answer", "In tokens: before, the model cannot end."],
  ignore_eos: ["Ignore the end", "Goes on where the model would end."],
  repetition_penalty: ["Repetition penalty", "Above 1: words of the conversation become less likely. 1: off.", [0.5, 2, 0.05]],
  presence_penalty: ["Presence penalty", "Above 0: words that the answer has used become less likely, once.", [-2, 2, 0.1]],
  frequency_penalty: ["Frequency penalty", "Above 0: words become less likely each time they are used.", [-2, 2, 0.1]],
  logit_bias: ["Logit bias", 'Makes tokens more or less likely, by their ids: {"13": -5}.'],
  bad_words: ["Forbidden words", "A list: they are never written."],
  allowed_token_ids: ["Allowed tokens"], stop_token_ids: ["Stop tokens"], include_stop_str_in_output: ["Keep the stop text"], skip_special_tokens: ["Hide special tokens"],
  use_beam_search: ["Beam search", "Looks for the likeliest whole answer."], length_penalty: ["Length penalty", "Of beam search: above 0 favours long answers."], early_stopping: ["Early stopping"],
  tool_choice: ["Use of tools", "auto: the model decides; required: it calls one."], parallel_tool_calls: ["Several calls at once"], parse_tool_calls: ["Read calls"],
  enable_thinking: ["Reasoning", "On or off, for models that can do both."], reasoning_effort: ["Effort of reasoning", "For models that know it; none: off."], thinking_token_budget: ["Longest reasoning", "In tokens; -1: no limit."],
  include_reasoning: ["Show reasoning"], separate_reasoning: ["Reasoning apart"], priority: ["Priority", "Lower runs first, if the server's policy has priorities."], ttft_target: ["First word within", "Seconds; of the deadline policy."], tpot_target: ["Time for each token", "Seconds; of the deadline policy."],
  language: ["Language", "Of the recording: a code or a name. Empty: found out."], response_format: ["Form", "Plain text comes while it is written; others come whole."], prompt: ["Text before", "Sets the style, and how names are written."], hotwords: ["Words to expect"],
  truncate_prompt_tokens: ["Cut long prompts", "Keeps this many tokens; -1: as many as fit."], truncation_side: ["Cut at the"],
};
const FIRST = { chat: ["temperature", "top_p", "max_tokens", "seed"], speech: ["language", "response_format", "prompt", "hotwords", "temperature", "seed"] };
const GROUPS = {
  Sampling: ["top_k", "min_p", "n", "best_of", "logit_bias", "bad_words", "allowed_token_ids", "use_beam_search", "length_penalty", "early_stopping"],
  Penalties: ["repetition_penalty", "presence_penalty", "frequency_penalty"],
  "Form of the answer": ["stop", "min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens"],
  Tools: ["tool_choice", "parallel_tool_calls", "parse_tool_calls"],
  Reasoning: ["enable_thinking", "reasoning_effort", "thinking_token_budget", "include_reasoning", "separate_reasoning"],
  Drafts: [],
  Adapters: [],
  Priority: ["priority", "ttft_target", "tpot_target", "user", "cache_salt"],
};
/** Fields that are no settings, that the page sets itself, or that give the program what this page does not show. */
const OTHERS = new Set([
  "messages", "prompt", "model", "file", "stream", "stream_options", "tools", "response_format", "logprobs", "top_logprobs", "functions", "function_call",
  "max_completion_tokens", "suffix", "echo", "store", "metadata", "return_token_ids", "return_tokens_as_token_ids", "prompt_logprobs", "logprob_token_ids",
  "structured_outputs", "documents", "chat_template", "prediction", "thinking", "reasoning", "repeat_last_n", "continue_final_message", "add_generation_prompt", "reasoning_format",
  "guided_whitespace_pattern", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options",
]);
/** Of these kinds they are settings all the same. */
const OF_SPEECH = new Set(["prompt", "response_format"]);
/** What fields of texts take that have few values. */
const CHOICES = { tool_choice: ["auto", "required", "none"], reasoning_effort: ["none", "low", "medium", "high"] };
/** How descriptions of fields begin that are other names of other fields, or do nothing. */
const ALIAS = /^(Another name|Other names|The same as|Former name|Accepted, without effect|As [a-z_]+[.(])/;

let description = null;

/** The settings of a kind of requests, as the server describes them. */
async function fieldsOf(kind) {
  description ??= getJson("/ui/requests.json");
  try {
    const { components, paths } = await description;
    const [{ schema }] = Object.values(paths[routeOf(kind)].post.requestBody.content);
    const isSpeech = Boolean(KINDS[kind].takes);
    return Object.entries(resolved(schema, components.schemas).properties).flatMap(([name, property]) => {
      const isOther = (OTHERS.has(name) && !(isSpeech && OF_SPEECH.has(name))) || !property.description || ALIAS.test(property.description);
      const field = !isOther && (CHOICES[name] ? { type: "choice", choices: CHOICES[name] } : control(property, components.schemas));
      return field ? [{ name, help: property.description, byDefault: property["x-default"], ...field }] : [];
    });
  } catch (error) {
    description = null;
    throw error;
  }
}

const resolved = (schema, schemas) => (schema.$ref ? schemas[schema.$ref.split("/").at(-1)] : schema);

/** How a field is given: { type: "number" | "boolean" | "choice" | "text" | "json" }; null if its schema allows anything. */
function control(property, schemas) {
  const kinds = (property.anyOf ?? [property]).map((one) => resolved(one, schemas)).filter((one) => one && one.type !== "null");
  const types = new Set(kinds.map((one) => one.type ?? (one.enum ? "string" : undefined)));
  const choices = kinds.flatMap((one) => one.enum ?? (one.const !== undefined ? [one.const] : []));
  if (!kinds.length || types.has(undefined)) return null;
  if (choices.length && types.has("boolean")) return { type: "boolean", also: choices };
  if (choices.length) return { type: "choice", choices };
  if (types.has("array") || types.has("object")) return { type: "json", alsoText: types.has("string") };
  if (types.has("number") || types.has("integer")) return { type: "number", step: types.has("number") ? "any" : 1 };
  if (types.has("boolean")) return { type: "boolean", also: [] };
  return types.has("string") ? { type: "text" } : null;
}

/** The value of a setting from what was typed; undefined: left out. Throws a SyntaxError. */
export function valueOf(field, typed) {
  if (typed === "" || typed === undefined) return undefined;
  if (field.type === "number") return Number(typed);
  if (field.type === "boolean") return field.also.includes(typed) ? typed : typed === "true";
  if (field.type === "json") {
    if (field.alsoText && !/^\s*[[{"]/.test(typed)) return typed.includes("\n") ? typed.split("\n").filter(Boolean) : typed;
    return JSON.parse(typed);
  }
  return typed;
}

/** What was typed as values, and the names of settings that are no JSON. */
export function readTyped(fields, typed) {
  const values = {};
  const wrong = [];
  for (const field of fields) {
    try {
      const value = valueOf(field, typed[field.name]);
      if (value !== undefined && !Number.isNaN(value)) values[field.name] = value;
    } catch {
      wrong.push(field.name);
    }
  }
  return { values, wrong };
}

/** The fields of a kind: { fields, error, load }; fields are null until they are there. */
export function useFields(kind, isReady) {
  const [state, setState] = useState({ kind: null, fields: null, error: "" });
  const load = () => fieldsOf(kind).then((fields) => setState({ kind, fields, error: "" }), (reason) => setState({ kind, fields: null, error: reason.message }));
  useEffect(() => void (isReady && kind && load()), [kind, isReady]);
  return { fields: state.kind === kind ? state.fields : null, error: state.error, load };
}

// --- what is kept in this browser

const PLACE = "octavo-settings";
const PRESETS = "octavo-presets";
export const NO_OPTIONS = { typed: {}, tokens: false, schema: "", tools: "", prediction: "" };

const kept = (place, otherwise) => {
  try {
    return { ...otherwise, ...JSON.parse(localStorage.getItem(place) ?? "{}") };
  } catch {
    return otherwise;
  }
};
const keep = (place, value) => {
  try {
    localStorage.setItem(place, JSON.stringify(value));
  } catch {
    // there is no room: it lasts as long as the page
  }
};

/** What is set, also when the page is opened again. */
export function useOptions() {
  const [options, setOptions] = useState(() => kept(PLACE, NO_OPTIONS));
  useEffect(() => keep(PLACE, options), [options]);
  return [options, (change) => setOptions((now) => ({ ...now, ...change }))];
}

// --- the drawer's content

const OWN_PRESETS = {
  "The model's own": {},
  "Exact": { temperature: "0", seed: "1" },
  "Balanced": { temperature: "0.7", top_p: "0.95" },
  "Inventive": { temperature: "1.1", min_p: "0.05" },
};

/** The value of a setting where nothing is typed: [value, whose]; null: there is none. */
function applying({ name, byDefault }, model, own, isSpeech) {
  if (name in own) return [own[name], "this page's"];
  if (!isSpeech) {
    // Of a model that is not loaded they are not known yet.
    if (!model?.default_sampling_params) return null;
    const value = model.default_sampling_params[name];
    if (value !== undefined) return [value, model.own_sampling_params?.includes(name) ? "the model's" : "the server's"];
  }
  return byDefault === undefined ? null : [byDefault, "the server's"];
}

const shown = (value) => (Number.isInteger(value) ? value.toLocaleString("en") : typeof value === "object" ? JSON.stringify(value) : typeof value === "boolean" ? (value ? "yes" : "no") : String(value));

/** `own`: settings that the page has of its own; `system`: the conversation's system prompt. */
export function Settings({ kind, fields, error, onLoad, options, setOptions, own, model, models, system, onSystem, onModel, children }) {
  if (error) return html`<p class="note error" role="alert">${error} <button type="button" class="button small" onClick=${onLoad}>Try again</button></p>`;
  if (!fields) return html`<p class="quiet">Loading the settings …</p>`;
  const { typed } = options;
  const isSpeech = Boolean(KINDS[kind].takes);
  const { wrong } = readTyped(fields, typed);
  const byName = new Map(fields.map((field) => [field.name, field]));
  const set = (name, value) => {
    const next = { ...typed, [name]: value };
    // The page's own limit is emptied by an empty field, others are left to the model.
    if (value === undefined || (value === "" && !(name in own))) delete next[name];
    setOptions({ typed: next });
  };
  const one = (name) => byName.has(name) && html`<${Setting} key=${name} field=${byName.get(name)} typed=${typed[name]} applies=${applying(byName.get(name), model, own, isSpeech)} isOwn=${name in own} wrong=${wrong.includes(name)} onInput=${(value) => set(name, value)} />`;
  const first = FIRST[isSpeech ? "speech" : "chat"];
  const placed = new Set([...first, ...Object.values(GROUPS).flat()]);
  const groups = isSpeech ? { More: fields.map((field) => field.name).filter((name) => !first.includes(name)) } : { ...GROUPS, More: fields.map((field) => field.name).filter((name) => !placed.has(name)).sort() };
  const adapters = (models ?? []).filter((other) => other.parent && other.parent === (model?.parent ?? model?.id));
  const extra = {
    "Form of the answer": [!isSpeech && html`<${Schema} options=${options} setOptions=${setOptions} />`, options.schema.trim()],
    Tools: [kind === "chat" && html`<${Tools} options=${options} setOptions=${setOptions} />`, options.tools.trim()],
    Drafts: [kind === "chat" && html`<${Prediction} options=${options} setOptions=${setOptions} />`, options.prediction.trim()],
    Adapters: [!isSpeech && adapters.length > 0 && html`<${Adapter} model=${model} adapters=${adapters} onModel=${onModel} />`, model?.parent],
    Sampling: [!isSpeech && html`<label class="check tokens-check"><input type="checkbox" checked=${options.tokens} onChange=${(event) => setOptions({ tokens: event.target.checked })} /> Each token's probability and alternatives</label>`, options.tokens],
  };
  return html`<div class="settings">
    <${Presets} typed=${typed} onChange=${(next) => setOptions({ typed: next })} />
    ${first.map(one)}
    ${kind === "chat" && html`<div class="field"><label for="system">System prompt</label><textarea id="system" rows="3" value=${system} placeholder="Who the model is, and how it answers; of this conversation and of new ones" onInput=${(event) => onSystem(event.target.value)}></textarea></div>`}
    ${Object.entries(groups).map(([title, members]) => {
      const [more, isSet] = extra[title] ?? [];
      const there = members.filter((name) => byName.has(name));
      const changed = there.filter((name) => typed[name] !== undefined).length + (isSet ? 1 : 0);
      return (there.length > 0 || more) && html`<${Group} key=${title} title=${title} changed=${changed}>${more}${there.map(one)}</${Group}>`;
    })}
    ${children}
    <button type="button" class="button reset-all" disabled=${!Object.keys(typed).length} onClick=${() => setOptions({ typed: {} })}><${Icon} name="refresh" />Reset all settings</button>
  </div>`;
}

/** A group that opens; what is in it is made when it does. */
function Group({ title, changed, children }) {
  const [open, setOpen] = useState(false);
  return html`<details class="fold group" open=${open} onToggle=${(event) => setOpen(event.target.open)}><summary>${title}${changed > 0 && html`<span class="badge">${changed} set</span>`}</summary>${open && html`<div class="group-body">${children}</div>`}</details>`;
}

/** A name that may be broken behind its underscores. */
const breakable = (name) => name.split("_").map((part, i) => (i ? html`_<wbr />${part}` : part));

function Setting({ field, typed, applies, isOwn, wrong, onInput }) {
  const id = `setting-${field.name}`;
  const [title, hint, range] = TITLES[field.name] ?? [];
  const value = typed ?? (isOwn ? String(applies[0]) : "");
  const common = { id, "aria-describedby": `${id}-help ${id}-whose`, "aria-invalid": wrong ? "true" : undefined };
  const input = (event) => onInput(event.target.value);
  const placeholder = applies && !isOwn ? shown(applies[0]) : "";
  let element;
  if (field.type === "boolean" || field.type === "choice") {
    const choices = field.type === "boolean" ? [["true", "yes"], ["false", "no"], ...field.also.map((one) => [one, one])] : field.choices.map((one) => [one, one]);
    element = html`<select ...${common} value=${value} onChange=${input}><option value="">${placeholder || "–"}</option>${choices.map(([choice, word]) => html`<option value=${choice}>${word}</option>`)}</select>`;
  } else if (field.type === "json" || field.name === "prompt") {
    element = html`<textarea ...${common} rows=${field.name === "stop" ? 2 : 1} spellcheck="false" value=${value} placeholder=${field.type === "json" && !field.alsoText ? "JSON" : ""} onInput=${input}></textarea>`;
  } else {
    element = html`<input ...${common} type=${field.type === "number" ? "number" : "text"} step=${field.step} value=${value} placeholder=${placeholder} onInput=${input} />`;
  }
  const isSet = typed !== undefined;
  const whose = isSet ? (typed === "" ? "no limit, yours" : `${typed.length > 24 ? "set" : typed}, yours`) : applies ? `${shown(applies[0])}, ${applies[1]}` : "not set";
  const isLong = element.type === "textarea";
  return html`<div class=${names("setting", isLong && "long", isSet && "set")}>
    <label for=${id}>${title ?? breakable(field.name)}</label>
    ${isSet && html`<${IconButton} icon="refresh" label=${`Reset ${title ?? field.name}`} tip="Reset" side="left" small=${true} onClick=${() => onInput(undefined)} />`}
    ${element}
    ${range && html`<input type="range" class="slider" min=${range[0]} max=${range[1]} step=${range[2]} aria-label=${`${title}, as a slider`} value=${value !== "" ? value : (applies?.[0] ?? range[0])} onInput=${input} />`}
    <p class="help" id=${`${id}-help`} title=${title ? `${field.name}: ${field.help}` : undefined}>${wrong && html`<strong class="error">This is no JSON. </strong>`}${hint ?? field.help}</p>
    <p class="whose" id=${`${id}-whose`}>${whose}</p>
  </div>`;
}

function Presets({ typed, onChange }) {
  const [own, setOwn] = useState(() => kept(PRESETS, {}));
  const [name, setName] = useState(null);
  useEffect(() => keep(PRESETS, own), [own]);
  const all = { ...OWN_PRESETS, ...own };
  const same = (one) => JSON.stringify(Object.entries(one).sort()) === JSON.stringify(Object.entries(typed).sort());
  const current = Object.keys(all).find((one) => same(all[one])) ?? "";
  const save = (event) => {
    event.preventDefault();
    if (name.trim()) setOwn({ ...own, [name.trim()]: typed });
    setName(null);
  };
  const remove = () => setOwn(Object.fromEntries(Object.entries(own).filter(([one]) => one !== current)));
  if (name !== null) {
    return html`<form class="presets" onSubmit=${save}><input aria-label="Name of the preset" placeholder="Name of the preset" ref=${focusNow} value=${name} onInput=${(event) => setName(event.target.value)} onKeyDown=${(event) => event.key === "Escape" && (event.stopPropagation(), setName(null))} />
      <button class="button small primary" disabled=${!name.trim()}>Save</button><button type="button" class="button small" onClick=${() => setName(null)}>Cancel</button></form>`;
  }
  return html`<div class="presets">
    <select aria-label="Preset" value=${current} onChange=${(event) => event.target.value && onChange({ ...all[event.target.value] })}>
      ${!current && html`<option value="">Own settings</option>`}
      <optgroup label="Presets">${Object.keys(OWN_PRESETS).map((one) => html`<option value=${one}>${one}</option>`)}</optgroup>
      ${Object.keys(own).length > 0 && html`<optgroup label="Yours">${Object.keys(own).map((one) => html`<option value=${one}>${one}</option>`)}</optgroup>`}
    </select>
    ${current in own ? html`<${IconButton} icon="delete" label=${`Delete the preset ${current}`} side="left" onClick=${remove} />` : html`<button type="button" class="button small" disabled=${Boolean(current)} onClick=${() => setName("")}>Save as preset</button>`}
  </div>`;
}

function Schema({ options, setOptions }) {
  return html`<div class="field"><label for="schema">JSON schema</label><p class="help" id="schema-help">The answer is JSON of this schema.</p>
    <textarea id="schema" aria-describedby="schema-help" rows="5" spellcheck="false" value=${options.schema} placeholder='{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}' onInput=${(event) => setOptions({ schema: event.target.value })}></textarea></div>`;
}

/** A tool to try with. */
export const EXAMPLE_TOOL = JSON.stringify([{ type: "function", function: { name: "weather", description: "The weather of a city now.", parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false } } }], null, 2);

function Tools({ options, setOptions }) {
  return html`<div class="field"><label for="tools">Tools</label><p class="help" id="tools-help">A list of functions as OpenAI's API takes them. When the model calls one, you write its result.</p>
    <textarea id="tools" aria-describedby="tools-help" rows="6" spellcheck="false" value=${options.tools} placeholder='[{"type": "function", "function": {…}}]' onInput=${(event) => setOptions({ tools: event.target.value })}></textarea>
    ${!options.tools.trim() && html`<button type="button" class="button small fit" onClick=${() => setOptions({ tools: EXAMPLE_TOOL })}>Put an example here</button>`}</div>`;
}

function Prediction({ options, setOptions }) {
  return html`<div class="field"><label for="prediction">Expected answer</label><p class="help" id="prediction-help">Text that the answer will mostly repeat, such as a file to be changed: what matches is drafted and comes faster. The answer stays the same.</p>
    <textarea id="prediction" aria-describedby="prediction-help" rows="4" value=${options.prediction} onInput=${(event) => setOptions({ prediction: event.target.value })}></textarea></div>`;
}

function Adapter({ model, adapters, onModel }) {
  const base = model.parent ?? model.id;
  return html`<div class="field"><label for="adapter">Adapter</label><select id="adapter" value=${model.id} onChange=${(event) => onModel(event.target.value)}><option value=${base}>none</option>${adapters.map((one) => html`<option value=${one.id}>${one.id}</option>`)}</select></div>`;
}
