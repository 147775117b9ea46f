// The same request as a program: for a shell and for Python.

import { html, useState } from "./dom.js";
import { Code } from "./markdown.js";
import { fieldsOf, KINDS, routeOf } from "./requests.js";

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
const KEY = `-H "Authorization: Bearer $OCTAVO_API_KEY"`;
/** What stands for the name of a recording that is not chosen yet. */
const nameOf = (file) => file?.name ?? "recording.wav";

export function asCurl(kind, body, origin) {
  const begin = `curl -N ${origin}${routeOf(kind)}`;
  if (!KINDS[kind].takes) {
    const { stream_options, ...rest } = body;
    // From its input: an image is too long for an argument.
    return `${begin} ${KEY} \\\n  -H 'Content-Type: application/json' --data-binary @- <<'END'\n${JSON.stringify(rest, null, 2)}\nEND`;
  }
  const fields = fieldsOf(body).map(([name, value]) => `--form-string ${quoted(`${name}=${value}`)}`);
  return [`${begin} ${KEY}`, ...fields, `-F ${quoted(`file=@"${nameOf(body.file).replaceAll(/["\\]/g, "\\$&")}"`)}`].join(" \\\n  ");
}

/** A JSON value in Python's notation. */
function python(value, indent = "") {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = `${indent}    `;
  const parts = Array.isArray(value) ? value.map((one) => python(one, inner)) : Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${python(one, inner)}`);
  const [open, close] = Array.isArray(value) ? ["[", "]"] : ["{", "}"];
  if (!parts.length) return open + close;
  return `${open}\n${parts.map((part) => `${inner}${part},\n`).join("")}${indent}${close}`;
}

/** Fields that the OpenAI package has arguments for; others go into its extra_body. */
const OWN = new Set([
  "model", "messages", "prompt", "n", "temperature", "top_p", "max_tokens", "stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias",
  "logprobs", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort", "best_of", "stream",
]);
const OWN_OF_SPEECH = new Set(["model", "prompt", "response_format", "temperature", "language", "timestamp_granularities", "stream"]);

/** By kind: the function of the OpenAI package, and how the text of what it streams is printed. */
const CALLS = {
  chat: ["chat.completions", "chunk.choices and chunk.choices[0].delta.content", "chunk.choices[0].delta.content"],
  completion: ["completions", "chunk.choices and chunk.choices[0].text", "chunk.choices[0].text"],
  transcription: ["audio.transcriptions", 'chunk.type == "transcript.text.delta"', "chunk.delta"],
  translation: ["audio.translations"],
};

export function asPython(kind, body, origin) {
  const [call, condition, text] = CALLS[kind];
  const isSpeech = Boolean(KINDS[kind].takes);
  const { stream_options, file, ...rest } = body;
  if (!condition) delete rest.stream; // the package does not know it there
  const own = isSpeech ? OWN_OF_SPEECH : OWN;
  const entries = Object.entries(rest);
  const lines = entries.filter(([name]) => own.has(name)).map(([name, value]) => `    ${name}=${python(value, "    ")},`);
  const others = Object.fromEntries(entries.filter(([name]) => !own.has(name)));
  if (Object.keys(others).length) lines.push(`    extra_body=${python(others, "    ")},`);
  if (isSpeech) lines.push(`    file=open(${python(nameOf(file))}, "rb"),`);
  const shown = rest.stream ? ["for chunk in answer:", `    if ${condition}:`, `        print(${text}, end="", flush=True)`] : ["print(answer)"];
  return [
    "import os",
    "",
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${origin}/v1", api_key=os.environ.get("OCTAVO_API_KEY", "none"))`,
    `answer = client.${call}.create(`,
    ...lines,
    ")",
    ...shown,
  ].join("\n");
}

/** Files within a text are megabytes, which nobody reads: their beginning. */
const shortened = (text) => text.replace(/(data:[\w/.+-]*;base64,[\w+/]{24})[\w+/=]{40,}/g, (_, begin) => `${begin}…`);

/** The request that `make` gives as a program, or why there is none. */
export function Samples({ kind, make }) {
  try {
    return html`<${Sample} kind=${kind} body=${make()} />`;
  } catch (error) {
    return html`<p class="error">${error.message}</p>`;
  }
}

function Sample({ kind, body }) {
  const [language, setLanguage] = useState("Python");
  const text = (language === "curl" ? asCurl : asPython)(kind, body, location.origin);
  return html`<div class="samples">
    <div class="segments" role="group" aria-label="Language">
      ${["Python", "curl"].map((name) => html`<button type="button" aria-pressed=${language === name ? "true" : "false"} onClick=${() => setLanguage(name)}>${name}</button>`)}
    </div>
    <${Code} text=${text} shown=${shortened(text)} language=${language === "curl" ? "bash" : "python"} />
    ${text.includes(";base64,") && html`<p class="help">Images are copied whole.</p>`}
    ${language === "Python" && html`<p class="help">With OpenAI's package: <code>pip install openai</code>. Any program for OpenAI's API works with this base URL.</p>`}
  </div>`;
}
