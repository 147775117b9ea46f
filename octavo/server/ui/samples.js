// The same request as a program: for a shell and for Python.

import { html, useState } from "./dom.js";
import { Code } from "./markdown.js";
import { routeOf } from "./generation.js";

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

export function asCurl(kind, body, origin) {
  const { stream_options, ...rest } = body;
  return [
    `curl -N ${origin}${routeOf(kind)} \\`,
    `  -H 'Content-Type: application/json' -H "Authorization: Bearer $OCTAVO_API_KEY" \\`,
    `  -d ${quoted(JSON.stringify(rest, null, 2))}`,
  ].join("\n");
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

export function asPython(kind, body, origin) {
  const { stream_options, ...rest } = body;
  const entries = Object.entries(rest);
  const lines = entries.filter(([name]) => OWN.has(name)).map(([name, value]) => `    ${name}=${python(value, "    ")},`);
  const others = Object.fromEntries(entries.filter(([name]) => !OWN.has(name)));
  if (Object.keys(others).length) lines.push(`    extra_body=${python(others, "    ")},`);
  const [call, text] = kind === "chat" ? ["chat.completions", "chunk.choices[0].delta.content"] : ["completions", "chunk.choices[0].text"];
  return [
    "import os",
    "",
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${origin}/v1", api_key=os.environ.get("OCTAVO_API_KEY", "none"))`,
    `stream = client.${call}.create(`,
    ...lines,
    ")",
    "for chunk in stream:",
    `    if chunk.choices and ${text}:`,
    `        print(${text}, end="", flush=True)`,
  ].join("\n");
}

export function Samples({ kind, body }) {
  const [language, setLanguage] = useState("curl");
  const text = (language === "curl" ? asCurl : asPython)(kind, body, location.origin);
  return html`<div class="samples">
    <fieldset class="choice"><legend>This request as</legend>
      ${["curl", "Python"].map((name) => html`<label><input type="radio" name="sample" checked=${language === name} onChange=${() => setLanguage(name)} /> ${name}</label>`)}
    </fieldset>
    <${Code} text=${text} language=${language} />
  </div>`;
}
