// The block map: one cell a block, coloured by who has it. What is used comes first; free blocks of a large pool are a count.

import { html, names, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./dom.js";
import { hueOf, nameOf } from "./request_names.js";

export const FREE = 0, CACHED = 1, USED = 2, SHARED = 3, PINNED = 4;
const STATES = ["free", "cached", "used", "shared", "pinned"];
/** Pools up to this size are drawn whole, in the order of their ids, unless somebody chooses. */
const SMALL = 600;
/** Cells that are drawn at most, and in the order of ids the free blocks in a row that still have a cell each. */
const MOST_CELLS = 9000, MOST_FREE = 8;
/** Sides of cells in pixels, and the height that they may take. */
const LARGEST = 22, SMALLEST = 5, TALLEST = 360;

const count = (n, one, more = `${one}s`) => `${n.toLocaleString()} ${n === 1 ? one : more}`;

/** Used blocks with shared ones, as /metrics counts them. */
export const usedOf = (map) => map.counts[USED] + map.counts[SHARED];

/** The blocks that are drawn, a cell each; `isWhole`: with all free ones. In bins a cell is several blocks. */
function cellsOf(map, byRequest, isWhole) {
  if (map.bin_size) return map.bins.map((counts, i) => ({ bin: true, id: map.first + i * map.bin_size, counts, size: counts.reduce((a, b) => a + b, 0) }));
  const cells = [];
  let id = map.first;
  for (const [length, state, references, group, start, direction] of map.runs) {
    if (state === FREE && !isWhole && (byRequest || length > MOST_FREE)) {
      if (!byRequest) cells.push({ id, state, gap: length, group: -1 });
    } else if (state !== CACHED || cells.length < MOST_CELLS) {
      for (let i = 0; i < length; i++) cells.push({ id: id + i, state, references, group, start: start + i * direction * map.block_size });
    }
    id += length;
  }
  if (byRequest) {
    const rank = (cell) => (cell.group >= 0 ? 0 : cell.state === PINNED ? 1 : cell.state === CACHED ? 2 : 3);
    cells.sort((a, b) => rank(a) - rank(b) || (a.group >= 0 ? a.group - b.group || a.start - b.start : 0) || a.id - b.id);
  }
  return cells.slice(0, MOST_CELLS);
}

/** In words, for the tip and for who cannot see the map. */
function describe(cell, map, ids) {
  if (!cell) return "";
  if (cell.gap) return `Blocks ${cell.id} to ${cell.id + cell.gap - 1}: ${cell.gap.toLocaleString()} free`;
  if (cell.bin) return `Blocks ${cell.id} to ${cell.id + cell.size - 1}: ${cell.counts.map((n, state) => n && `${n} ${STATES[state]}`).filter(Boolean).join(", ")}`;
  if (cell.group < 0) return `Block ${cell.id}: ${STATES[cell.state]}`;
  const tokens = `${map.has_states ? "state within " : ""}tokens ${cell.start} to ${cell.start + map.block_size - 1}`;
  return `Block ${cell.id}: request ${nameOf(ids, cell.group)}, ${tokens}${cell.references > 1 ? `, in ${cell.references} block tables` : ""}${cell.state === PINNED ? ", pinned" : ""}`;
}

export function summary(map) {
  const [free, cached, used, shared, pinned] = map.counts;
  const parts = [`${count(used + shared, map.has_states ? "state" : "block")} used${shared ? ` (${shared.toLocaleString()} of them shared)` : ""}`, `${cached.toLocaleString()} cached`, `${free.toLocaleString()} free`];
  if (pinned) parts.push(`${pinned} pinned`);
  const blocks = map.has_states ? `${count(map.num_blocks, "recurrent state")}, at most every ${map.block_size} tokens` : `${count(map.num_blocks, "block")} of ${map.block_size} tokens`;
  return `${blocks}: ${parts.join(", ")}.`;
}

/** Cells in a row, and the side of one in pixels: as large as all of them fit. */
function layout(cells, width) {
  let side = LARGEST;
  const rows = (size) => Math.ceil(cells / Math.max(1, Math.floor(width / size)));
  while (side > SMALLEST && rows(side) * side > TALLEST) side -= 1;
  const columns = Math.max(1, Math.floor(width / side));
  return { side, columns, height: Math.max(1, Math.ceil(cells / columns)) * side };
}

function palette(element) {
  const style = getComputedStyle(element);
  const value = (name) => style.getPropertyValue(name).trim();
  return { free: value("--cell-free"), cached: value("--cell-cached"), pinned: value("--cell-pinned"), light: value("--cell-light"), mark: value("--ink"), used: value("--accent"), shared: value("--cell-shared") };
}

function draw(canvas, cells, { side, columns, height }, flashes, at, focus) {
  const ratio = devicePixelRatio || 1;
  const width = columns * side;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const colors = palette(canvas);
  const gap = side >= 10 ? 2 : side >= 6 ? 1 : 0.5;
  const inner = side - gap;
  const round = side >= 12 ? 3 : side >= 8 ? 2 : 0;
  const fill = (x, y, color) => {
    context.fillStyle = color;
    context.beginPath();
    context.roundRect(x, y, inner, inner, round);
    context.fill();
  };
  const places = new Map();
  const dims = focus !== null && cells.some((cell) => cell.group === focus);
  cells.forEach((cell, i) => {
    const x = (i % columns) * side;
    const y = Math.floor(i / columns) * side;
    places.set(cell.id, i);
    if (cell.bin) {
      let from = 0;
      for (const [state, color] of [[FREE, colors.free], [CACHED, colors.cached], [USED, colors.used], [SHARED, colors.shared], [PINNED, colors.pinned]]) {
        const share = (cell.counts[state] / cell.size) * inner;
        context.fillStyle = color;
        context.fillRect(x, y + inner - from - share, inner, share);
        from += share;
      }
      return;
    }
    context.globalAlpha = dims && cell.group !== focus ? 0.22 : 1;
    if (cell.gap) {
      context.fillStyle = colors.mark;
      for (let dot = 1; dot <= 3; dot++) context.fillRect(x + (inner * dot) / 4 - 0.75, y + inner / 2 - 0.75, 1.5, 1.5);
    } else fill(x, y, cell.group >= 0 ? `hsl(${hueOf(cell.group)} 55% ${colors.light})` : cell.state === CACHED ? colors.cached : cell.state === FREE ? colors.free : colors.pinned);
    if (cell.state === SHARED || cell.references > 1) {
      context.fillStyle = colors.mark;
      if (side >= 14 && cell.references < 100) {
        context.font = `600 ${Math.round(side * 0.55)}px system-ui, sans-serif`;
        context.textAlign = "center";
        context.textBaseline = "middle";
        context.fillText(cell.references, x + inner / 2, y + inner / 2 + 0.5);
      } else context.fillRect(x + inner / 3, y + inner / 3, inner / 3, inner / 3);
    }
    if (cell.state === PINNED) outline(context, x, y, inner, colors.pinned, 1.5);
    context.globalAlpha = 1;
  });
  const mark = (i, color, thick) => i !== undefined && outline(context, (i % columns) * side, Math.floor(i / columns) * side, inner, color, thick);
  for (const [id, color] of flashes) mark(cells[0]?.bin ? Math.floor((id - cells[0].id) / cells[0].size) : places.get(id), color, Math.max(1.5, side / 8));
  if (at !== null && at < cells.length) mark(at, colors.mark, 2);
}

function outline(context, x, y, side, color, width) {
  context.strokeStyle = color;
  context.lineWidth = width;
  context.strokeRect(x + width / 2, y + width / 2, side - width, side - width);
}

export const CHANGE_COLORS = { fork: "#2d7ff9", copy: "#c026d3", evict: "#e5484d", swap_out: "#f59e0b", swap_in: "#16a34a" };

/** The pool as one bar: its parts are as long as they have blocks. */
function PoolBar({ map }) {
  const parts = [["used", map.counts[USED]], ["shared", map.counts[SHARED]], ["pinned", map.counts[PINNED]], ["cached", map.counts[CACHED]], ["free", map.counts[FREE]]].filter(([, n]) => n);
  return html`<div class="pool-bar" aria-hidden="true">${parts.map(([name, n]) => html`<span class=${`part-${name}`} style=${{ flexGrow: n }} title=${`${n.toLocaleString()} ${name}`}></span>`)}</div>`;
}

/** A map with a cell to point at. `changes`: what happened to its blocks just now; `ids`: names of requests; `focus`: the group whose blocks stand out, or null. */
export function BlockMap({ map, changes = [], ids, label, focus = null, onFocus, onChoose }) {
  const box = useRef();
  const canvas = useRef();
  const [width, setWidth] = useState(0);
  const [at, setAt] = useState(null);
  const [order, setOrder] = useState(null);
  const isSmall = map.num_blocks <= SMALL && !map.on_host;
  const byRequest = order === null ? !isSmall : order === "request";
  const cells = useMemo(() => cellsOf(map, byRequest, isSmall), [map, byRequest]);
  const plan = layout(cells.length, width);
  const flashes = map.on_host ? [] : changes.flatMap((change) => change.blocks.map((id) => [id, CHANGE_COLORS[change.kind]])).filter(([, color]) => color);
  useLayoutEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  useEffect(() => {
    const redraw = () => width && cells.length && draw(canvas.current, cells, plan, flashes, at, focus);
    redraw();
    addEventListener("octavo-theme", redraw);
    return () => removeEventListener("octavo-theme", redraw);
  }, [cells, width, at, changes, focus]);
  const show = (i) => {
    if (i === at) return;
    setAt(i);
    const group = cells[i]?.group ?? -1;
    onFocus?.(group >= 0 ? group : null);
  };
  const point = (event) => {
    const place = canvas.current.getBoundingClientRect();
    const column = Math.floor((event.clientX - place.left) / plan.side);
    const i = Math.floor((event.clientY - place.top) / plan.side) * plan.columns + column;
    show(column < plan.columns && i >= 0 && i < cells.length ? i : null);
  };
  const choose = () => cells[at]?.group >= 0 && onChoose?.(cells[at].group);
  const move = (event) => {
    if (event.key === "Enter") return choose();
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: plan.columns, ArrowUp: -plan.columns }[event.key];
    if (!step) return;
    event.preventDefault();
    show(Math.max(0, Math.min(cells.length - 1, (at ?? -1) + step)));
  };
  const undrawn = map.bin_size ? 0 : map.counts[CACHED] - cells.reduce((sum, cell) => sum + (cell.state === CACHED), 0);
  const hint = map.bin_size ? `One cell is ${count(map.bin_size, "block")}.` : undrawn > 0 ? `${count(undrawn, "cached block")} more have no cell.` : "Point at a block, or move with the arrow keys; Enter shows its request.";
  return html`<div class="map" ref=${box}>
    <div class="pool-head"><p class="pool-title"><strong>${label}</strong> <span class="quiet">${summary(map)}</span></p>
      ${!map.bin_size && cells.length > 0 && html`<div class="segments" role="group" aria-label="Order of the blocks">${[["request", "By request"], ["id", "By id"]].map(([name, words]) => html`<button type="button" aria-pressed=${byRequest === (name === "request") ? "true" : "false"} onClick=${() => setOrder(name)}>${words}</button>`)}</div>`}</div>
    <${PoolBar} map=${map} />
    ${cells.length === 0 ? html`<p class="quiet tip">All blocks are free. Each block that a request uses gets a cell here, and keeps one as long as it is cached.</p>` : html`
    <canvas ref=${canvas} class=${names(cells[at]?.group >= 0 && "points")} tabindex="0" role="img" aria-label=${`${label}. ${summary(map)} Arrow keys go from block to block.`} onPointerMove=${point} onPointerDown=${point} onPointerLeave=${() => show(null)} onClick=${choose} onKeyDown=${move} onBlur=${() => show(null)}></canvas>
    <p class="tip" role="status">${describe(cells[at], map, ids) || html`<span class="quiet">${hint}</span>`}</p>`}
  </div>`;
}

export function Legend() {
  const key = (name, text, mark = "") => html`<li><span class=${`key key-${name}`}>${mark}</span>${text}</li>`;
  return html`<ul class="legend">
    ${key("used", "used, a colour for each request")}${key("shared", "shared, in how many block tables", "2")}${key("cached", "cached")}${key("free", "free")}
    ${Object.entries(CHANGE_COLORS).map(([kind]) => key(kind, { fork: "fork", copy: "copy on write", evict: "eviction", swap_out: "swapped out", swap_in: "swapped in" }[kind]))}
  </ul>`;
}
