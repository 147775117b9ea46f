// Lives of requests as rows over time, and one of them told in words: what it waited for, its steps, and what it cost.

import { html, names, useEffect, useRef, useState } from "./dom.js";
import { costsOf, OBSTACLES, phaseAt } from "./lives.js";
import { RequestName, shortOf, Swatch } from "./request_names.js";
import { CopyButton, IconButton } from "./widgets.js";

/** Rows that are shown at once, and how many more each time somebody asks for them. */
const MOST_ROWS = 24;
/** A strip is drawn in a box of this size, however wide it is. */
const WIDE = 1000, HIGH = 24;
/** By kind of phase: where in the box it lies, and its height. */
const SHAPES = { unseen: [11.5, 1], wait: [11, 2], fetch: [9, 6], load: [9, 6], prompt: [3, 18], decode: [6, 12], recompute: [11, 2], swap: [8, 8], lost: [3, 18] };
/** Seconds that are shown at least. */
const SHORTEST = 4;
const RANGES = { "10 s": 10, "30 s": 30, "2 min": 120, All: Infinity };

const REASONS = { stop: "ended", length: "ended at its limit", abort: "aborted", error: "failed", ignored: "refused", "": "ended" };

const count = (n, one, more = `${one}s`) => `${n.toLocaleString()} ${n === 1 ? one : more}`;
export function span(seconds) {
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 100) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}

const title = (life) => life.name || String(life.group);
const waiting = (why) => `waiting ${OBSTACLES[why] ?? ""}`.trim();

/** What a request does at a moment, in a few words. */
function stateOf(life, at) {
  if (at < life.arrival) return "not there yet";
  const phase = phaseAt(life, at);
  if (!phase) return REASONS[life.reason] ?? life.reason;
  if (phase.kind === "prompt") return phase.why === "recompute" || phase.why === "resume" ? "computing again" : "computing its prompt";
  return { unseen: "not watched", wait: waiting(phase.why), fetch: "fetching its prefix", load: waiting(phase.why), decode: "decoding", recompute: "preempted", swap: "swapped out", lost: "its core ended" }[phase.kind];
}

/** One phase in words; `name(group)`: what a request is called. */
function wordsOf(phase, life, name) {
  const other = phase.other === null || phase.other === undefined ? "as no block was left" : `for request ${name(phase.other)}`;
  const chunks = phase.chunks ?? [];
  const tokens = chunks.reduce((sum, chunk) => sum + chunk.amount, 0);
  const found = phase.found ? `${count(phase.found, "token")} found, ` : "";
  switch (phase.kind) {
    case "prompt": {
      const what = { recompute: "Computed again after its preemption", resume: "Computed again at this core" }[phase.why] ?? "Prompt";
      return chunks.length ? `${what}: ${found}${count(tokens, "token")} computed in ${count(chunks.length, "chunk")}` : what;
    }
    case "decode": return phase.why === "swap" ? "Moved back from the host, decodes on" : "Decoded";
    case "recompute": return `Preempted ${other}${phase.amount ? `: ${count(phase.amount, "token")} to compute again` : ""}`;
    case "swap": return `Swapped out ${other}${phase.amount ? `: ${count(phase.amount, "block")} moved to the host` : ""}`;
    case "unseen": return "Came before anybody watched";
    case "lost": return "Its engine core had ended";
    case "fetch": return "Fetched its prefix from the KV stores";
    default: return `Waited ${OBSTACLES[phase.why] ?? (phase.resumed ? "to be resumed" : "")}${phase.resumed ? " at another core" : ""}`.trim();
  }
}

/** What a life has been, in one sentence. */
export function sentenceOf(life) {
  const costs = costsOf(life);
  const parts = [];
  if (costs.waited >= 0.0005) {
    const [why] = Object.entries(costs.waits).sort((a, b) => b[1] - a[1])[0];
    parts.push(`waited ${span(costs.waited)}${OBSTACLES[why] ? ` ${OBSTACLES[why]}` : ""}`);
  }
  if (life.prompt) parts.push(`${count(life.prompt, "prompt token")}${life.found ? `, ${life.found.toLocaleString()} of them found` : ""}`);
  if (life.seqs > 1) parts.push(`${life.seqs} sequences`);
  if (life.output) parts.push(`${count(life.output, "token")} of output`);
  if (life.preemptions) parts.push(`preempted ${life.preemptions === 1 ? "once" : `${life.preemptions} times`}`);
  if (life.resumes) parts.push("resumed on another engine core");
  const words = parts.join("; ") || "has just arrived";
  return `${words[0].toUpperCase()}${words.slice(1)}.`;
}

function Strip({ life, from, to, cursor, name }) {
  const x = (at) => ((Math.min(Math.max(at, from), to) - from) / (to - from)) * WIDE;
  const shapes = [];
  for (const phase of life.phases) {
    const end = phase.to ?? to;
    if (end < from || phase.from > to) continue;
    const [y, height] = SHAPES[phase.kind];
    const left = x(phase.from);
    const width = Math.max(phase.kind === "prompt" ? 3 : 1.5, x(end) - left);
    shapes.push(html`<rect class=${`phase ${phase.kind}`} x=${left} y=${y} width=${width} height=${height}><title>${wordsOf(phase, life, name)}, ${span(end - phase.from)}</title></rect>`);
    for (const chunk of (phase.chunks ?? []).slice(1)) if (chunk.at > from && chunk.at < to) shapes.push(html`<rect class="phase cut-line" x=${x(chunk.at) - 0.7} y="3" width="1.4" height="18" />`);
    if ((phase.kind === "recompute" || phase.kind === "swap") && phase.from >= from) shapes.push(html`<rect class="phase mark-preempted" x=${left - 1.2} y="0" width="2.4" height=${HIGH} />`);
  }
  if (life.end !== null && life.end >= from && life.end <= to) shapes.push(html`<rect class=${names("phase end", ["error", "abort", "ignored"].includes(life.reason) && "failed")} x=${Math.min(WIDE - 2.4, x(life.end))} y="4" width="2.4" height="16" />`);
  return html`<svg class="life-strip" viewBox=${`0 0 ${WIDE} ${HIGH}`} preserveAspectRatio="none" aria-hidden="true">
    ${shapes}
    ${cursor !== null && cursor < to && html`<rect class="later" x=${x(cursor)} y="0" width=${WIDE - x(cursor)} height=${HIGH} />`}
  </svg>`;
}

/** Moments that an axis names, some five of them. */
function ticksOf(from, to) {
  const rough = (to - from) / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
  const digits = step < 1 ? Math.min(3, Math.ceil(-Math.log10(step))) : 0;
  return { step, digits };
}

/**
 * The rows. `lives`: a `Lives`; `at`: the moment that is looked at, or null for now; `focus`, `chosen`: groups, or null;
 * `line`: another moment to mark. Calls back with groups, and with the moment that was clicked.
 */
export function Timeline({ lives, at, isFile, focus, chosen, line, numCores, empty, onFocus, onChoose }) {
  const [range, setRange] = useState(isFile ? "All" : "30 s");
  const [most, setMost] = useState(MOST_ROWS);
  const list = useRef();
  const now = at ?? lives.now;
  const last = lives.now;
  const room = RANGES[range];
  const first = lives.start === Infinity ? now - 1 : lives.start;
  // Of a recording a range lies around the moment that is looked at.
  const to = Math.max(isFile && room !== Infinity ? Math.min(last, now + room / 2) : last, first + 0.01);
  const from = isFile ? Math.min(room === Infinity ? first : to - room, to - 0.01) : Math.min(Math.max(to - room, first), to - SHORTEST);
  const { shown, left } = lives.between(from, to, most, now);
  const byGroup = (group) => shortOf(title(lives.find(group) ?? { group }));
  const { step, digits } = ticksOf(from, to);
  const zero = isFile ? first : to;
  const ticks = [];
  for (let tick = Math.ceil((from - zero) / step) * step; tick <= to - zero + step / 1000; tick += step) ticks.push(tick);
  const place = (moment) => `${(100 * (moment - from)) / (to - from)}%`;
  const move = (event) => {
    const rows = [...list.current.querySelectorAll(".life")];
    const step_ = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const next = step_ ? rows[rows.indexOf(document.activeElement) + step_] : event.key === "Home" ? rows[0] : event.key === "End" ? rows.at(-1) : null;
    if (!next) return;
    event.preventDefault();
    next.focus();
  };
  const entry = shown.some((life) => life.group === chosen) ? chosen : shown[0]?.group;
  return html`
    <div class="card-head"><h2>Lives of requests</h2>
      ${lives.all.length > 0 && html`<div class="segments" role="group" aria-label="Time that is shown">${Object.keys(RANGES).map((name) => html`<button type="button" aria-pressed=${range === name ? "true" : "false"} onClick=${() => setRange(name)}>${name}</button>`)}</div>`}
    </div>
    ${!shown.length ? (lives.all.length ? html`<p class="quiet">No request lived in this time.</p>` : empty) : html`
    <div class="lives-box">
      <div class="life-row axis" aria-hidden="true"><span></span><div class="life-field">${ticks.map((tick) => html`<span style=${{ left: place(zero + tick) }}>${tick.toFixed(digits).replace("-", "−")} s</span>`)}</div><span></span></div>
      <div class="life-row over" aria-hidden="true"><span></span><div class="life-field">
        ${ticks.map((tick) => html`<i style=${{ left: place(zero + tick) }}></i>`)}
        ${at !== null && html`<i class="at" style=${{ left: place(Math.min(Math.max(at, from), to)) }}></i>`}
        ${line !== null && line >= from && line <= to && html`<i class="hover" style=${{ left: place(line) }}></i>`}
      </div><span></span></div>
      <ul class="lives" ref=${list} onKeyDown=${move} onPointerLeave=${() => onFocus(null)}>
        ${shown.map((life) => {
          const state = stateOf(life, now);
          return html`<li key=${`${life.group} ${life.arrival}`}><button type="button" class=${names("life life-row", chosen === life.group && "chosen", focus === life.group && "focus", life.end !== null && life.end <= now && "over-now")}
              aria-pressed=${chosen === life.group ? "true" : "false"} tabindex=${life.group === entry ? 0 : -1}
              onClick=${() => onChoose(chosen === life.group ? null : life.group)} onPointerEnter=${() => onFocus(life.group)} onFocus=${() => onFocus(life.group)} onBlur=${() => onFocus(null)}>
            <span class="life-name cut"><${Swatch} group=${life.group} hollow=${life.end !== null && life.end <= now} /><${RequestName} ids=${{ [life.group]: title(life) }} group=${life.group} />${life.seqs > 1 && html` <span class="quiet">× ${life.seqs}</span>`}</span>
            <${Strip} life=${life} from=${from} to=${to} cursor=${at} name=${byGroup} />
            <span class="life-state cut">${state}${numCores > 1 && html` <span class="quiet">core ${life.replica}</span>`}</span>
            <span class="hidden">${sentenceOf(life)}</span>
          </button></li>`;
        })}
      </ul>
    </div>
    ${left > 0 && html`<button type="button" class="button small" onClick=${() => setMost(most + MOST_ROWS)}>Show ${Math.min(left, MOST_ROWS)} more of ${left.toLocaleString()}</button>`}
    <${LivesLegend} />`}`;
}

function LivesLegend() {
  const key = (kind, words) => {
    const [y, height] = SHAPES[kind];
    return html`<li><svg class="life-key" viewBox="0 0 22 ${HIGH}" aria-hidden="true"><rect class=${`phase ${kind}`} x="0" y=${y} width="22" height=${height} /></svg>${words}</li>`;
  };
  return html`<ul class="legend">${key("wait", "waits")}${key("load", "loads or fetches")}${key("prompt", "prompt, chunk by chunk")}${key("decode", "decodes")}${key("recompute", "preempted, to compute again")}${key("swap", "swapped out")}${key("lost", "its core ended")}</ul>`;
}

/** A life in words. `steps`: those that are kept; `onPick(index)` of one of them. */
export function LifeDetails({ life, lives, steps, onPick, onClose }) {
  const box = useRef();
  // Where it stands under the rows, it comes into sight.
  useEffect(() => {
    if (matchMedia("(max-width: 67.99rem)").matches) box.current.scrollIntoView({ block: "nearest" });
  }, [life]);
  const costs = costsOf(life);
  const byGroup = (group) => shortOf(title(lives.find(group) ?? { group }));
  const hasEvents = life.phases.some((phase) => phase.chunks?.length);
  const prompt = hasEvents ? life.computed : null;
  const facts = [
    ["Computed", prompt === null ? "–" : count(prompt + life.output, "token"), prompt === null ? "not recorded" : `${prompt.toLocaleString()} of prompts, ${life.output.toLocaleString()} of output`],
    ["Found", count(life.found, "token"), life.prompt ? `of ${count(life.prompt, "prompt token")}` : ""],
    ["Block-seconds", !life.mostBlocks ? "–" : life.blockSeconds < 10 ? life.blockSeconds.toFixed(1) : Math.round(life.blockSeconds).toLocaleString(), life.mostBlocks ? `at most ${count(life.mostBlocks, "block")}` : "not recorded"],
    ["Waited", span(costs.waited), Object.entries(costs.waits).filter(([, s]) => s >= 0.0005).sort((a, b) => b[1] - a[1]).map(([why, s]) => `${span(s)} ${OBSTACLES[why] ?? "between two looks at it"}`).join(", ")],
    ["Set back", span(costs.away), life.preemptions || life.resumes ? [life.preemptions && `preempted ${life.preemptions} ×${life.lost ? `, ${count(life.lost, "token")} again` : ""}`, life.resumes && `resumed on another core`].filter(Boolean).join(", ") : "never"],
    ["Ran", span(costs.seconds.prompt + costs.seconds.decode), `${span(costs.seconds.prompt)} of prompts, ${span(costs.seconds.decode)} of decoding`],
  ];
  const stepAt = (moment) => steps.findIndex((step) => step.at >= moment);
  const numbers = (phase) => {
    const begin = stepAt(phase.from), end = steps.findLastIndex((step) => step.at <= (phase.to ?? Infinity) + 1e-6);
    if (begin < 0 || end < begin || (phase.kind !== "prompt" && phase.kind !== "decode")) return "";
    return begin === end ? `step ${steps[begin].step}` : `steps ${steps[begin].step} to ${steps[end].step}`;
  };
  return html`<aside class="life-details" ref=${box} aria-label="Request">
    <div class="card-head"><h3><${Swatch} group=${life.group} /> Request <span class="id whole">${title(life)}</span></h3><span><${CopyButton} text=${title(life)} label="Copy its id" /><${IconButton} icon="close" small label="Close this request" side="left" onClick=${onClose} /></span></div>
    <p>${sentenceOf(life)} <span class="quiet">${life.end === null ? "It goes on." : `${(REASONS[life.reason] ?? life.reason).replace(/^./, (letter) => letter.toUpperCase())} after ${span(life.end - life.arrival)}.`}</span></p>
    <dl class="facts">${facts.map(([name, value, note]) => html`<div><dt>${name}</dt><dd><strong>${value}</strong> <span class="quiet">${note}</span></dd></div>`)}</dl>
    <ol class="phases">${life.phases.map((phase) => {
      const i = stepAt(phase.from);
      const took = (phase.to ?? life.seen) - phase.from;
      const words = html`<span class=${`dot ${phase.kind}`}></span><span class="number quiet">${span(phase.from - life.arrival)}</span><span>${wordsOf(phase, life, byGroup)} <span class="quiet">${span(Math.max(0, took))}${numbers(phase) && `, ${numbers(phase)}`}</span></span>`;
      return html`<li>${i >= 0 ? html`<button type="button" onClick=${() => onPick(i)}>${words}</button>` : html`<div>${words}</div>`}</li>`;
    })}</ol>
  </aside>`;
}
