// The queues of the scheduler, and what has happened to groups and blocks, in words.

import { html, useState } from "./dom.js";
import { OBSTACLES } from "./lives.js";
import { readGroup, readTiers } from "./records.js";
import { nameOf, RequestName, shortOf } from "./request_names.js";

const TITLES = { running: "Running", waiting: "Waiting", swapped: "Swapped out" };

function preempted(group, name) {
  const parts = [];
  if (group.recomputes) parts.push(`${group.recomputes} × recompute (${group.recomputed} tokens again)`);
  if (group.swaps) parts.push(`${group.swaps} × swap (${group.swapped} blocks moved)`);
  if (parts.length) parts.push(group.preemptedFor === null ? "no block was left" : html`for request ${name(group.preemptedFor)}`);
  return parts.map((part, i) => html`${i > 0 && ", "}${part}`);
}

/** What it waits for, and how it was preempted. */
function notes(group, name) {
  const waits = group.isFetching ? "fetching its prefix" : OBSTACLES[group.waitsFor] ? `waits ${OBSTACLES[group.waitsFor]}` : "";
  const parts = preempted(group, name);
  return html`${waits}${waits && parts.length > 0 && "; "}${parts}`;
}

const seconds = (value) => (value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString());

export function Queues({ view }) {
  const groups = view.groups.map(readGroup);
  const totals = { running: view.state.num_running, waiting: view.state.num_waiting, swapped: view.state.num_swapped };
  const ids = view.request_ids;
  const [whole, setWhole] = useState(false);
  const name = (group) => html`<${RequestName} ids=${ids} group=${group} whole=${whole} />`;
  const shortens = groups.some((group) => shortOf(nameOf(ids, group.id)) !== nameOf(ids, group.id));
  return html`${shortens && html`<button class="small" aria-pressed=${whole ? "true" : "false"} onClick=${() => setWhole(!whole)}>Whole ids</button>`}
  ${Object.entries(TITLES).map(([status, title]) => {
    const rows = groups.filter((group) => group.status === status);
    return html`<section class="queue" aria-label=${title}>
      <h3>${title} <span class="number">${totals[status]}</span></h3>
      ${rows.length > 0 && html`<div class="scroll" tabindex="0" role="region" aria-label=${`${title}: requests`}><table>
        <thead><tr><th scope="col">Request</th><th scope="col">Prompt</th><th scope="col">Output</th><th scope="col">Computed</th><th scope="col">Age (s)</th><th scope="col">Notes</th></tr></thead>
        <tbody>${rows.slice(0, 40).map((group) => html`<tr key=${group.id}>
          <th scope="row">${name(group.id)}${group.seqs > 1 && html` <span class="quiet">× ${group.seqs}</span>`}</th>
          <td>${group.prompt}${group.cached > 0 && html` <span class="quiet">(${group.cached} cached)</span>`}</td><td>${group.output}</td><td>${group.computed}</td><td>${seconds(group.age)}</td><td>${notes(group, name)}</td></tr>`)}
        </tbody></table></div>`}
      ${totals[status] > Math.min(40, rows.length) && html`<p class="quiet">and ${totals[status] - Math.min(40, rows.length)} more</p>`}
    </section>`;
  })}`;
}

/** The adapters in slots, those that run most first. */
export function Adapters({ view }) {
  const left = (view.state.adapters?.[0] ?? 0) - view.adapters.length;
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Adapters: slots"><table>
      <thead><tr><th scope="col">Adapter</th><th scope="col">Running</th><th scope="col">Slot</th></tr></thead>
      <tbody>${view.adapters.map(([slot, key, running, names]) => html`<tr key=${slot}><th scope="row">${names.join(" = ") || html`<span class="quiet">unloaded, ${key.slice(0, 12)}</span>`}</th><td>${running}</td><td>${slot}</td></tr>`)}</tbody>
    </table></div>
    ${left > 0 && html`<p class="quiet">and ${left} more</p>`}`;
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
function bytes(number) {
  const power = Math.min(UNITS.length - 1, Math.floor(Math.log2(Math.max(1, number)) / 10));
  return `${(number / 1024 ** power).toFixed(power > 1 ? 1 : 0)} ${UNITS[power]}`;
}

/** The tiers of the KV stores: what they hold, what was found in them, how fast they are, and what is wrong. */
export function Stores({ view }) {
  return html`<div class="scroll" tabindex="0" role="region" aria-label="KV stores: tiers"><table>
    <thead><tr><th scope="col">Tier</th><th scope="col">Held</th><th scope="col">Found</th><th scope="col">Read</th><th scope="col">Written</th><th scope="col">Lost</th></tr></thead>
    <tbody>${readTiers(view.state).map((tier) => html`<tr key=${tier.tier}><th scope="row">${tier.tier}</th>
      <td>${bytes(tier.heldBytes)}${tier.maxBytes > 0 && html` <span class="quiet">of ${bytes(tier.maxBytes)}</span>`}</td>
      <td>${tier.found.toLocaleString()} <span class="quiet">of ${tier.asked.toLocaleString()} blocks</span></td>
      <td>${bytes(tier.bytesRead)}${tier.readSeconds > 0 && html` <span class="quiet">${bytes(tier.bytesRead / tier.readSeconds)}/s</span>`}</td>
      <td>${tier.written.toLocaleString()} blocks</td>
      <td>${[["dropped", tier.dropped], ["evicted", tier.evicted], ["damaged", tier.damaged]].filter(([, count]) => count).map(([name, count]) => `${count.toLocaleString()} ${name}`).join(", ") || "–"}</td></tr>
      ${tier.trouble && html`<tr><td colspan="6" class="error">Does not work: ${tier.trouble}</td></tr>`}`)}</tbody>
  </table></div>`;
}

const blocks = (list) => (list.length ? `block${list.length > 1 ? "s" : ""} ${list.slice(0, 6).join(", ")}${list.length > 6 ? ` and ${list.length - 6} more` : ""}` : "");
const STORES = { disk: "disk", shared: "shared store" };
const REASONS = { room: ", as others need room", ended: ", as nobody asks to keep it any more", held: ", though it was to be kept: all else is in use" };
const WORDS = {
  fork: ({ group, blocks: list }, name) => html`Request ${name(group)} forked: it shares ${blocks(list)}`,
  copy: ({ blocks: [source, target] }) => `Copy on write: block ${source} to ${target}`,
  evict: ({ blocks: list, cost, why: reason }) => (STORES[reason] ? `Evicted from the ${STORES[reason]}: ${cost} blocks, to keep its bound` : `Evicted from the prefix cache${REASONS[reason] ?? ""}: ${blocks(list)}`),
  swap_out: ({ blocks: list }) => `Swapped out: ${blocks(list)}`,
  swap_in: ({ blocks: list, why: reason }) => `${reason === "store" ? "Fetched from the KV stores" : "Swapped in"}: ${blocks(list)}`,
  recompute: ({ group, cost, preemptedFor }, name) => html`Request ${name(group)} was preempted ${why(preemptedFor, name)}: ${cost} tokens so far to compute again`,
  swap: ({ group, cost, preemptedFor }, name) => html`Request ${name(group)} was preempted ${why(preemptedFor, name)}: ${cost} blocks so far moved to the host`,
};
const why = (other, name) => (other === null || other === undefined ? "as no block was left" : html`for request ${name(other)}`);

/** The last changes, newest first; each with the `ids` of its view. */
export function Changes({ changes, left }) {
  if (!changes.length) return html`<p class="quiet">Nothing was forked, copied, evicted, moved or preempted since the engine is watched.</p>`;
  return html`<ol class="changes" reversed>${changes.map((change) => html`<li class=${`change-${change.kind}`}><span class="quiet">step ${change.step}</span> ${WORDS[change.kind]?.(change, (group) => html`<${RequestName} ids=${change.ids} group=${group} />`) ?? change.kind}</li>`)}</ol>
    ${left > 0 && html`<p class="quiet">${left} earlier ones are not listed.</p>`}`;
}
