// Example requests: a few seconds of work for an engine that has nothing to show yet. Bounded, and sent only when somebody asks.

import { html, useEffect, useRef, useState } from "./dom.js";
import { request } from "./api.js";
import { Icon } from "./widgets.js";

const NUMBER = 20;
/** Tokens of an answer, and characters of the long prompts; less where the model's context is small. */
const TOKENS = 56, LETTERS = 1400;
/** Requests that begin alike find each other's prefixes. */
const BEGINNINGS = [
  "You are a guide who knows a small town by a river, its bridges, its market and the people who live there. Answer in a few plain sentences. ",
  "You are a teacher who explains how machines work to children of ten years, with examples from a kitchen. ",
];
const QUESTIONS = ["What is worth seeing in the morning?", "Who should I ask about the old mill?", "How does a clock keep time?", "Where does the bread come from?", "Why does the water never stop?"];

/** The body of example `i` of a model: most are short, some are long, and some have two answers of one prompt. */
function bodyOf(i, model) {
  const room = model.max_model_len ?? 2048;
  const begin = BEGINNINGS[i % 2].repeat(i % 5 === 4 ? 8 : 1);
  const prompt = (begin.slice(0, Math.min(LETTERS, Math.floor(room / 3))) + QUESTIONS[i % QUESTIONS.length]).slice(0, Math.floor(room / 2));
  if (!model.tasks.includes("generate")) return ["/v1/embeddings", { model: model.id, input: prompt }];
  const max_tokens = Math.max(1, Math.min(Math.floor(TOKENS / 2) + ((i * 11) % Math.floor(TOKENS / 2)), Math.floor(room / 4)));
  return ["/v1/completions", { model: model.id, prompt, max_tokens, ignore_eos: true, seed: i, temperature: 0.8, ...(i % 7 === 3 && { n: 2 }) }];
}

export const takesExamples = (model) => Boolean(model?.tasks?.some((task) => task === "generate" || task === "embed"));

/** The examples of a model that are being sent: { model, done (null: none are), problem, send(), stop() }; they end with the view. */
export function useExamples(model) {
  const [done, setDone] = useState(null);
  const [problem, setProblem] = useState("");
  const abort = useRef(null);
  useEffect(() => () => abort.current?.abort(), []);
  const send = async () => {
    const { signal } = (abort.current = new AbortController());
    setProblem("");
    setDone(0);
    let ended = 0;
    await Promise.all(Array.from({ length: NUMBER }, async (_, i) => {
      const [path, body] = bodyOf(i, model);
      // One after the other, so that some find what others have computed.
      await new Promise((resolve) => setTimeout(resolve, i * 60));
      if (signal.aborted) return;
      try {
        await (await request(path, { method: "POST", body, signal })).text();
      } catch (error) {
        if (error.name !== "AbortError") setProblem(error.message);
      }
      setDone((ended += 1));
    }));
    setDone(null);
  };
  return { model, done, problem, send, stop: () => abort.current?.abort() };
}

/** A button that sends them, and stops them. */
export function ExampleButton({ examples, small = false }) {
  const { done, problem, send, stop } = examples;
  const runs = done !== null;
  return html`<div class="examples">
    <button type="button" class=${small ? "button small" : "button primary"} onClick=${runs ? stop : send}><${Icon} name=${runs ? "stop" : "spark"} />${runs ? `Stop the examples (${done} of ${NUMBER} done)` : `Send ${NUMBER} example requests`}</button>
    ${problem && html`<p class="error small-text" role="alert">${problem}</p>`}
  </div>`;
}
