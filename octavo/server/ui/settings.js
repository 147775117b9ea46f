// The settings of a request, made of the server's own description of its routes: names, types and help texts.

import { html, useState, useEffect } from "./dom.js";
import { getJson } from "./api.js";
import { KINDS, routeOf } from "./requests.js";

/** Those that most people look for, in this order; all others stand below. */
const FIRST = ["language", "response_format", "prompt", "hotwords", "temperature", "top_p", "top_k", "min_p", "max_tokens", "n", "seed", "stop", "presence_penalty", "frequency_penalty", "repetition_penalty"];
/** Fields that are no settings, or that the page sets itself. */
const OTHERS = new Set([
  "messages", "prompt", "model", "file", "stream", "stream_options", "tools", "response_format", "logprobs", "top_logprobs", "functions", "function_call",
  "max_completion_tokens", "suffix", "echo", "user", "store", "metadata", "return_token_ids", "return_tokens_as_token_ids", "prompt_logprobs",
  "logprob_token_ids", "structured_outputs", "documents", "chat_template", "prediction",
]);

/** Of these kinds they are settings all the same. */
const OF_SPEECH = new Set(["prompt", "response_format"]);

let description = null;

async function fieldsOf(kind) {
  description ??= getJson("/ui/requests.json");
  try {
    const { components, paths } = await description;
    const [{ schema }] = Object.values(paths[routeOf(kind)].post.requestBody.content);
    return readFields(resolved(schema, components.schemas).properties, components.schemas, Boolean(KINDS[kind].takes));
  } catch (error) {
    description = null;
    throw error;
  }
}

const resolved = (schema, schemas) => (schema.$ref ? schemas[schema.$ref.split("/").at(-1)] : schema);

function readFields(properties, schemas, isSpeech) {
  const fields = [];
  for (const [name, property] of Object.entries(properties)) {
    const isOther = OTHERS.has(name) && !(isSpeech && OF_SPEECH.has(name));
    const field = !isOther && property.description && control(property, schemas);
    if (field) fields.push({ name, help: property.description, ...field });
  }
  const rank = ({ name }) => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length);
  return fields.sort((a, b) => rank(a) - rank(b) || a.name.localeCompare(b.name));
}

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

/** typed: what stands in the controls, by name, and else `own`; onChange gets it and the values, or the name of a wrong one. defaults: the model's own, by name. */
export function Settings({ kind, typed, defaults, own, onChange }) {
  const [fields, setFields] = useState(null);
  const [error, setError] = useState("");
  const load = () => fieldsOf(kind).then((list) => (setFields(list), setError("")), (reason) => setError(reason.message));
  useEffect(() => void load(), [kind]);
  useEffect(() => void (fields && onChange(typed, read(fields, typed))), [fields]);
  if (error) return html`<p class="error" role="alert">${error} <button class="small" onClick=${load}>Try again</button></p>`;
  if (!fields) return html`<p class="quiet">Loading the settings …</p>`;
  const set = (name, value) => {
    const next = { ...typed, [name]: value };
    onChange(next, read(fields, next));
  };
  const wrong = read(fields, typed).wrong;
  const one = (field) => html`<${Setting} key=${field.name} field=${field} typed=${typed[field.name] ?? own[field.name] ?? ""} byDefault=${KINDS[kind].takes ? undefined : defaults[field.name]} isOwn=${field.name in own} wrong=${wrong.includes(field.name)} onInput=${(value) => set(field.name, value)} />`;
  const main = fields.filter((field) => FIRST.includes(field.name));
  const changed = fields.filter((field) => !FIRST.includes(field.name) && typed[field.name]);
  return html`<div class="settings">
    ${main.map(one)}
    <details>
      <summary>All other settings${changed.length > 0 && ` (${changed.length} set)`}</summary>
      ${fields.filter((field) => !FIRST.includes(field.name)).map(one)}
    </details>
    <button class="small" onClick=${() => onChange({}, { values: {}, wrong: [] })}>Reset all settings</button>
  </div>`;
}

function read(fields, typed) {
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

/** A name that may be broken behind its underscores. */
const breakable = (name) => name.split("_").map((part, i) => (i ? html`_<wbr />${part}` : part));

function Setting({ field, typed, byDefault, isOwn, wrong, onInput }) {
  const id = `setting-${field.name}`;
  const common = { id, "aria-describedby": `${id}-help`, "aria-invalid": wrong ? "true" : undefined };
  const input = (event) => onInput(event.target.value);
  const said = byDefault === undefined || byDefault === null ? "default" : `default: ${typeof byDefault === "object" ? JSON.stringify(byDefault) : byDefault}`;
  let element;
  if (field.type === "boolean" || field.type === "choice") {
    const choices = field.type === "boolean" ? ["true", "false", ...field.also] : field.choices;
    element = html`<select ...${common} value=${typed} onChange=${input}><option value="">${said}</option>${choices.map((choice) => html`<option value=${choice}>${choice}</option>`)}</select>`;
  } else if (field.type === "json") {
    element = html`<textarea ...${common} rows="1" spellcheck="false" value=${typed} placeholder=${field.alsoText ? "text, or JSON" : "JSON"} onInput=${input}></textarea>`;
  } else {
    element = html`<input ...${common} type=${field.type === "number" ? "number" : "text"} step=${field.step} value=${typed} placeholder=${said} onInput=${input} />`;
  }
  return html`<div class="setting">
    <label for=${id}>${breakable(field.name)}</label>${element}
    <p class="help" id=${`${id}-help`}>${wrong && html`<strong class="error">This is no JSON. </strong>`}${field.help}${said !== "default" && ` This model's ${said}.`}${isOwn && " This page has a limit of its own; emptied, the answer may fill the model's context."}</p>
  </div>`;
}
