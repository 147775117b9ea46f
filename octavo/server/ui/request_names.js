// What requests are called: the ids that their clients and the logs know; the engine's own numbers where none was sent.

import { html, names } from "./dom.js";

/** Longer names are shown by their beginning and their end. */
const LONGEST = 20;

/** `ids`: of a view, by the engine's number; a recording of a simulated or of an earlier engine has none. */
export const nameOf = (ids, group) => ids?.[group] ?? String(group);

export const shortOf = (name) => (name.length > LONGEST ? `${name.slice(0, 13)}…${name.slice(-6)}` : name);

/** A name in short, and whole where the pointer rests on it, or if it is asked for. */
export function RequestName({ ids, group, whole = false }) {
  const name = nameOf(ids, group);
  return html`<span class="id" title=${name.length > LONGEST ? name : undefined}>${whole ? name : shortOf(name)}</span>`;
}

/** The colour of a request, in the map of blocks and beside its name. */
export const hueOf = (group) => (group * 67 + 205) % 360;
export const Swatch = ({ group, hollow }) => html`<span class=${names("swatch", hollow && "hollow")} style=${{ "--of": `hsl(${hueOf(group)} 55% var(--cell-light))` }}></span>`;
