// What an answer has: its reasoning, its text, its calls of tools, each token with what it might have been, and how it ended.

import { html, memo, names, useState } from "./dom.js";
import { useGrowing } from "./generation.js";
import { Code, GrowingMarkdown, Markdown } from "./markdown.js";
import { Icon } from "./widgets.js";

const percent = (logprob) => {
  const share = 100 * Math.exp(logprob);
  return share >= 99.95 ? "100 %" : share >= 0.1 ? `${share.toFixed(1)} %` : "< 0.1 %";
};
/** A token as it can be read where spaces and line ends matter. */
const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/^ | $/g, "·") || "∅";
const band = (logprob) => (logprob > Math.log(0.9) ? "p4" : logprob > Math.log(0.6) ? "p3" : logprob > Math.log(0.3) ? "p2" : logprob > Math.log(0.1) ? "p1" : "p0");

/** The likely tokens beside the chosen one, which is among them if it is likely; others may have its text. */
function othersOf({ text, logprob, top }) {
  const same = top.filter((one) => one[0] === text);
  const chosen = same.find((one) => one[1] === logprob) ?? same[0];
  return top.filter((one) => one !== chosen);
}

/** Tokens in their probability's colour; the one under the pointer, or chosen with the arrow keys, is explained. */
function Tokens({ tokens }) {
  const [at, setAt] = useState(null);
  const shown = at === null ? null : tokens[at];
  const move = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (!step) return;
    event.preventDefault();
    setAt(Math.max(0, Math.min(tokens.length - 1, (at ?? -1) + step)));
  };
  const over = (event) => {
    const index = event.target.dataset?.index;
    if (index !== undefined) setAt(Number(index));
  };
  return html`<div class="tokens-box">
    <div class="tokens" tabindex="0" role="group" aria-label="Tokens: left and right arrows go from one to the next" onKeyDown=${move} onMouseOver=${over} onClick=${over}>
      ${tokens.map((token, i) => html`<span data-index=${i} class=${names("token", band(token.logprob), i === at && "chosen")}>${token.text}</span>`)}
    </div>
    <div class="alternatives" role="status">
      ${shown
        ? html`<strong><code>${visible(shown.text)}</code> ${percent(shown.logprob)}</strong> ${othersOf(shown).map(([text, logprob]) => html`<span class="alternative"><code>${visible(text)}</code> ${percent(logprob)}</span> `)}`
        : html`<span class="quiet">Point at a token, or move with the arrow keys: its probability and what else was likely.</span>`}
    </div>
  </div>`;
}

export const duration = (seconds) => (seconds < 1 ? `${Math.round(seconds * 1e3)} ms` : seconds < 60 ? `${seconds.toFixed(seconds < 10 ? 2 : 1)} s` : `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`);

/** The figures of an answer in one line. */
export function Stats({ stats }) {
  if (!stats) return null;
  const all = stats.answers > 1 ? ` of all ${stats.answers} answers` : "";
  const parts = [
    stats.rate && `${stats.rate.toFixed(1)} tokens/s${all}`,
    `first token after ${duration(stats.firstToken)}`,
    stats.tokens !== null && `${stats.tokens.toLocaleString()} tokens${all} in ${duration(stats.seconds)}`,
    stats.prompt !== null && `prompt ${stats.prompt.toLocaleString()}${stats.cached ? `, ${stats.cached.toLocaleString()} of them cached` : ""}`,
    stats.drafted !== null && `${stats.drafted} drafted tokens accepted${stats.rejected ? `, ${stats.rejected} not` : ""}`,
  ];
  return html`<p class="stats">${parts.filter(Boolean).join(" · ")}</p>`;
}

/** In words, why an answer ended before its end; empty: it ended by itself. */
function endingOf({ finish, limit, stopText }) {
  if (finish === "length") return `The answer ended at ${limit ? `its limit of ${limit.toLocaleString()} tokens (“Longest answer” in the settings)` : "the server's limit of tokens, or of the model's context"}.`;
  if (finish === "stopped") return "You stopped this answer.";
  if (finish === "stop" && stopText) return `The answer ended at the stop text “${stopText}”.`;
  if (finish === "tool_calls" || finish === "stop" || !finish) return "";
  return `The server ended this answer: ${finish.replaceAll("_", " ")}.`;
}

/** Why an answer ended, and a way to go on. */
function Ending({ answer, onContinue }) {
  const words = endingOf(answer);
  const goesOn = onContinue && ["length", "stopped"].includes(answer.finish) && answer.continues && answer.text && !answer.calls?.length;
  return words && html`<p class="ending" role="status">${words} ${goesOn && html`<button type="button" class="button small" onClick=${onContinue}>Continue</button>`}</p>`;
}

/** An answer's text: JSON as code, other text as Markdown. */
const Text = memo(function Text({ text, running }) {
  const json = jsonOf(text, running);
  if (json !== null) return html`<${Code} text=${text} shown=${json} language="json" />`;
  return running ? html`<${GrowingMarkdown} text=${text} />` : html`<${Markdown} text=${text} />`;
});

/** The reasoning before an answer, folded. */
function Thoughts({ answer }) {
  const [open, setOpen] = useState(false);
  const { thoughts, thoughtSeconds, running, text, calls } = answer;
  const runs = running && !text && !calls?.length;
  const time = thoughtSeconds === undefined ? "" : thoughtSeconds < 1 ? "a moment" : duration(thoughtSeconds);
  return html`<details class=${names("fold thoughts", runs && "runs")} open=${open} onToggle=${(event) => setOpen(event.target.open)}>
    <summary>${runs ? `Thinking${time && ` for ${time}`} …` : time ? `Thought for ${time}` : "Thoughts"}</summary>
    ${open && (running ? html`<${GrowingMarkdown} text=${thoughts} />` : html`<${Markdown} text=${thoughts} />`)}
  </details>`;
}

/**
 * An answer as it is now. `view`: "text", "source" or "tokens"; `plain`: its text is no Markdown; `results`: by id of its
 * calls what the tools gave; `onResults`: takes what they give; `onContinue`: goes on with it.
 */
export function AnswerBody({ node, label, view = "text", plain, results, onResults, onContinue }) {
  const answer = useGrowing(node);
  const { text, thoughts, running, error } = answer;
  const calls = answer.calls ?? [];
  const tokens = answer.tokens ?? [];
  return html`<article class="answer" aria-label=${label} aria-busy=${running ? "true" : "false"}>
    ${thoughts && html`<${Thoughts} answer=${answer} />`}
    <div class="text">
      ${view === "tokens" && tokens.length ? html`<${Tokens} tokens=${tokens} />` : plain || view === "source" ? html`<pre class="plain" tabindex="0">${text}</pre>` : text && html`<${Text} text=${text} running=${running} />`}
      ${running && html`<span class="cursor" aria-hidden="true"></span>`}
    </div>
    ${calls.map((call) => html`<${Call} key=${call.id} call=${call} running=${running} result=${results?.get(call.id)} />`)}
    ${calls.length > 0 && !running && onResults && html`<${ResultsForm} calls=${calls} onSend=${onResults} />`}
    ${error && html`<p class="note error" role="alert">${error}</p>`}
    ${!running && html`<${Ending} answer=${answer} onContinue=${onContinue} />`}
  </article>`;
}

// --- calls of tools

/** A call as a card: the tool, what it gets and what it gave. */
function Call({ call, running, result }) {
  return html`<section class="call card" aria-label=${`Call of the tool ${call.name}`}>
    <p class="call-head"><${Icon} name="tool" /><strong>${call.name || "…"}</strong><span class="badge">${running ? "being written" : result === undefined ? "waits for its result" : "answered"}</span></p>
    <${Arguments} text=${call.arguments} />
    ${result !== undefined && html`<p class="call-label">Result</p><pre class="call-result" tabindex="0">${pretty(result)}</pre>`}
  </section>`;
}

/** Arguments as names with values where they are simple, else as JSON. */
function Arguments({ text }) {
  let values = null;
  try {
    values = JSON.parse(text || "{}");
  } catch {
    // it grows, or the model wrote it wrongly
  }
  const entries = values && typeof values === "object" && !Array.isArray(values) ? Object.entries(values) : null;
  if (!entries || entries.length > 8 || entries.some(([, value]) => typeof value === "object" && value !== null)) return html`<${Code} text=${text} shown=${pretty(text)} language="json" />`;
  return entries.length ? html`<dl class="arguments">${entries.map(([name, value]) => html`<dt>${name}</dt><dd>${String(value)}</dd>`)}</dl>` : html`<p class="quiet small-text">Without arguments.</p>`;
}

/** Takes the results of all calls of an answer. */
function ResultsForm({ calls, onSend }) {
  const [texts, setTexts] = useState({});
  const ready = calls.every((call) => texts[call.id]?.trim());
  const submit = (event) => {
    event.preventDefault();
    if (ready) onSend(calls.map((call) => ({ role: "tool", call: call.id, name: call.name, content: texts[call.id] })));
  };
  return html`<form class="results" onSubmit=${submit}>
    ${calls.map((call) => {
      const id = `result-${call.id}`;
      return html`<div class="field" key=${call.id}><label for=${id}>Result of <code>${call.name}</code></label>
        <textarea id=${id} rows="2" placeholder="What the tool would give; the model goes on with it" value=${texts[call.id] ?? ""} onInput=${(event) => setTexts({ ...texts, [call.id]: event.target.value })}></textarea></div>`;
    })}
    <button class="button small primary" disabled=${!ready}>${calls.length > 1 ? "Send the results" : "Send the result"}</button>
  </form>`;
}

// --- JSON

/** JSON as it is shown; text that is none as it stands. */
function pretty(text) {
  return isJson(text) ? indented(text) : text;
}

/** How an answer is shown that is an object or a list of JSON, or the beginning of one; null: it is other text. */
function jsonOf(text, running) {
  if (!/^\s*[[{]/.test(text)) return null;
  if (isJson(text)) return indented(text);
  // It grows, or was cut: an object begins like nothing else, and a list might be a link.
  return /^\s*(\{\s*"|\[\s*[[{"])/.test(text) && (running || /^\s*\[?\s*\{\s*"/.test(text)) ? text : null;
}

function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

/** JSON with a value a line. Its text is kept as it was written: a number that is read and written again may be another. */
function indented(text) {
  let out = "";
  let depth = 0;
  const line = () => `\n${"  ".repeat(depth)}`;
  const tokens = text.match(/"(?:[^"\\]|\\.)*"|[{}[\],:]|[^\s"{}[\],:]+/g) ?? [];
  tokens.forEach((token, i) => {
    const closes = token === "}" || token === "]";
    const opened = "{[".includes(tokens[i - 1] ?? " ");
    if (closes) depth -= 1;
    if (closes ? !opened : opened) out += line();
    out += token;
    if (token === ",") out += line();
    else if (token === ":") out += " ";
    if (token === "{" || token === "[") depth += 1;
  });
  return out;
}
