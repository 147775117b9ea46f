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
        ? html`<strong><code>${visible(shown.text)}</code> ${percent(shown.logprob)}</strong> ${shown.top.map(([text, logprob]) => html`<span class=${names("alternative", text === shown.text && "chosen")}><code>${visible(text)}</code> ${percent(logprob)}</span> `)}`
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

/** One answer. `onChoose`: where there are several, the one that the conversation goes on with. */
export function Answer({ answer, label, chosen, onChoose, plain }) {
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
      ${asTokens && tokens.length ? html`<${Tokens} tokens=${tokens} />` : plain || source ? html`<pre class="plain" tabindex="0">${answer.text}</pre>` : html`<${Markdown} text=${answer.text} />`}
      ${answer.running && html`<span class="cursor" aria-hidden="true"></span>`}
    </div>
    ${(answer.calls ?? []).map((call) => html`<div class="call"><p>Calls the tool <code>${call.name}</code></p><${Code} text=${pretty(call.arguments)} language="json" /></div>`)}
    ${answer.error && html`<p class="error" role="alert">${answer.error}</p>`}
    ${!answer.running && html`<${Stats} stats=${answer.stats} finish=${answer.finish} />`}
    ${!answer.running && html`<div class="tools">
      <button class="small" onClick=${copy}>${copied ? "Copied" : "Copy"}</button>
      ${!plain && html`<button class="small" aria-pressed=${source ? "true" : "false"} onClick=${() => setSource(!source)}>Source</button>`}
      ${tokens.length > 0 && html`<button class="small" aria-pressed=${asTokens ? "true" : "false"} onClick=${() => setAsTokens(!asTokens)}>Tokens</button>`}
    </div>`}
  </article>`;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
