// How an answer is shown: its text, its thoughts, its calls, each token with what it might have been, and its figures.

import { html, names, useState, copyText } from "./dom.js";
import { Markdown, Code } from "./markdown.js";

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

const duration = (seconds) => (seconds < 1 ? `${Math.round(seconds * 1e3)} ms` : `${seconds.toFixed(2)} s`);

function Stats({ stats, finish }) {
  if (!stats) return finish && html`<p class="stats">${finish}</p>`;
  const all = stats.answers > 1 ? ` of all ${stats.answers} answers` : "";
  const parts = [
    stats.rate && `${stats.rate.toFixed(1)} tokens/s${all}`,
    `first token after ${duration(stats.firstToken)}`,
    stats.tokens !== null && `${stats.tokens} tokens${all} in ${duration(stats.seconds)}`,
    stats.prompt !== null && `prompt ${stats.prompt}${stats.cached ? `, ${stats.cached} of them cached` : ""}`,
    stats.drafted !== null && `${stats.drafted} drafted tokens accepted${stats.rejected ? `, ${stats.rejected} not` : ""}`,
    finish && finish !== "stop" && `ended by ${finish}`,
  ];
  return html`<p class="stats">${parts.filter(Boolean).join(" · ")}</p>`;
}

/** Why an answer has ended before its end, and a way to go on. */
function Limit({ answer, onContinue }) {
  const { limit, text, calls, continues } = answer;
  const where = limit ? `its limit of ${limit} tokens (max_tokens in the settings)` : "the server's limit of tokens, or of the model's context";
  return html`<p class="limit" role="status">The answer ended at ${where}. ${onContinue && continues && text && !calls?.length && html`<button class="small" onClick=${onContinue}>Continue</button>`}</p>`;
}

/** An answer's text: JSON as code, other text as Markdown. */
function Text({ text, running }) {
  const json = jsonOf(text, running);
  return json === null ? html`<${Markdown} text=${text} />` : html`<${Code} text=${text} shown=${json} language="json" />`;
}

/** One answer. `onChoose`: where there are several, the one that the conversation goes on with; `onContinue`: goes on with it. */
export function Answer({ answer, label, chosen, onChoose, onContinue, plain }) {
  const [asTokens, setAsTokens] = useState(false);
  const [source, setSource] = useState(false);
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    await copyText(answer.text);
    setCopied(true);
    setTimeout(() => setCopied(false), 1500);
  };
  const tokens = answer.tokens ?? [];
  return html`<article class=${names("answer", chosen && "chosen")} aria-label=${label} aria-busy=${answer.running ? "true" : "false"}>
    ${onChoose && html`<label class="choose"><input type="radio" name=${onChoose.name} checked=${chosen} onChange=${onChoose.call} /> ${label}</label>`}
    ${answer.thoughts && html`<details class="thoughts" open=${answer.running && !answer.text}><summary>Thoughts</summary><${Markdown} text=${answer.thoughts} /></details>`}
    <div class="text" aria-live="polite">
      ${asTokens && tokens.length ? html`<${Tokens} tokens=${tokens} />` : plain || source ? html`<pre class="plain" tabindex="0">${answer.text}</pre>` : html`<${Text} text=${answer.text} running=${answer.running} />`}
      ${answer.running && html`<span class="cursor" aria-hidden="true"></span>`}
    </div>
    ${(answer.calls ?? []).map((call) => html`<div class="call"><p>Calls the tool <code>${call.name}</code></p><${Code} text=${pretty(call.arguments)} language="json" /></div>`)}
    ${answer.error && html`<p class="error" role="alert">${answer.error}</p>`}
    ${!answer.running && answer.finish === "length" && html`<${Limit} answer=${answer} onContinue=${onContinue} />`}
    ${!answer.running && html`<${Stats} stats=${answer.stats} finish=${answer.finish} />`}
    ${!answer.running && html`<div class="tools">
      <button class="small" onClick=${copy}>${copied ? "Copied" : "Copy"}</button>
      ${!plain && html`<button class="small" aria-pressed=${source ? "true" : "false"} onClick=${() => setSource(!source)}>Source</button>`}
      ${tokens.length > 0 && html`<button class="small" aria-pressed=${asTokens ? "true" : "false"} onClick=${() => setAsTokens(!asTokens)}>Tokens</button>`}
    </div>`}
  </article>`;
}

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
