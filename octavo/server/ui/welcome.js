// Before the first message: what the model is and can do, three examples to begin with, and how to call it from a program.

import { html, useEffect, useState } from "./dom.js";
import { request } from "./api.js";
import { KINDS } from "./requests.js";
import { Samples } from "./samples.js";
import { Icon } from "./widgets.js";

/** What the server knows of a model's files: { size, weights, abilities }; null: nothing, or not yet. */
export function useAbout(model) {
  const [about, setAbout] = useState(null);
  const name = model?.parent ?? model?.id;
  useEffect(() => {
    setAbout(null);
    if (!name || !model.tasks.includes("generate")) return undefined;
    let isWanted = true;
    request("/api/show", { method: "POST", body: { model: name } })
      .then((answer) => answer.json())
      .then(({ details, capabilities }) => isWanted && setAbout({ size: details.parameter_size, weights: details.quantization_level, abilities: capabilities }))
      .catch(() => {}); // the examples of a small model are good enough
    return () => (isWanted = false);
  }, [name]);
  return about;
}

/** Parameters in billions: 0.1345 of "134.5M". */
function billions(size) {
  const [, number, unit] = /^([\d.]+)([BMK])$/.exec(size ?? "") ?? [];
  return unit ? Number(number) * { B: 1, M: 1e-3, K: 1e-6 }[unit] : 0;
}

/** What this model can be asked: of small ones what they know well. */
function examplesFor(kind, model, about) {
  if (kind === "completion") return ["Once upon a time, in a village by the sea,", "The three largest cities of France are", "def fibonacci(n):\n    "];
  if (billions(about?.size) < 1.2) return ["What is the capital of France?", "Give the plural of mouse.", "Write one sentence about the sea."];
  const own = [
    ...(model.input_modalities.includes("image") ? [{ text: "What is in this picture?", attach: true }] : []),
    ...(about.abilities.includes("tools") ? [{ text: "What is the weather in Paris? Use the tool.", tool: true }] : []),
  ];
  return [...own, "Explain in three sentences how a bicycle stays upright.", "Compare tea and coffee in a table: caffeine, taste, and when to drink them.", "Write a Python function that finds palindromes in a text, with a test."].slice(0, 3);
}

const READS = { text: "text", image: "pictures", audio: "recordings" };

function factsOf(model, about) {
  const can = new Set(about?.abilities ?? []);
  return [
    about?.size && `${about.size} parameters${about.weights ? `, ${about.weights}` : ""}`,
    model.max_model_len && `${model.max_model_len.toLocaleString()} tokens of context`,
    model.input_modalities.length > 0 && `reads ${model.input_modalities.map((one) => READS[one] ?? one).join(", ")}`,
    can.has("tools") && "calls tools",
    can.has("thinking") && "reasons before it answers",
    can.has("insert") && "fills gaps in code",
    model.parent && `adapter of ${model.parent}`,
    model.loaded === false && "is loaded at the first question",
  ].filter(Boolean);
}

const TITLES = { chat: "What shall we talk about?", completion: "Begin a text", transcription: "What is said becomes text", translation: "What is said becomes English text" };

/** `onExample`: takes { text, attach: a file goes with it, tool: it needs one }; `sample`: gives the request that a program would send. */
export function Welcome({ kind, model, about, onExample, sample }) {
  const [isOpen, setOpen] = useState(false);
  const examples = KINDS[kind].takes ? [] : examplesFor(kind, model, about);
  return html`<div class="welcome">
    <h2>${TITLES[kind]}</h2>
    <p class="model-facts"><strong>${model.id}</strong>${factsOf(model, about).map((fact) => html`<span class="badge">${fact}</span>`)}</p>
    ${examples.length > 0 && html`<ul class="welcome-examples" aria-label="Examples">${examples.map((one) => {
      const example = typeof one === "string" ? { text: one } : one;
      return html`<li><button type="button" class="example" onClick=${() => onExample(example)}><span>${example.text.trim()}</span><${Icon} name=${example.attach ? "attach" : example.tool ? "tool" : "arrow_up"} /></button></li>`;
    })}</ul>`}
    <details class="fold call-it" open=${isOpen} onToggle=${(event) => setOpen(event.target.open)}><summary>Call it from your program</summary>${isOpen && html`<${Samples} kind=${kind} make=${() => sample(examples[0]?.text ?? examples[0])} />`}</details>
    <p class="help center">Conversations stay in this browser.</p>
  </div>`;
}
