// The block map: one cell a block, coloured by what it holds and by who has it; of very many blocks, one cell a bin.

import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./dom.js";
import { nameOf } from "./request_names.js";

export const FREE = 0, CACHED = 1, USED = 2, SHARED = 3, PINNED = 4;
const STATES = ["free", "cached", "used", "shared", "pinned"];
const count = (n, one, more = `${one}s`) => `${n.toLocaleString()} ${n === 1 ? one : more}`;

/** The blocks of a map, one object a block, or a bin. */
function cellsOf(map) {
  if (map.bin_size) return map.bins.map((counts, i) => ({ bin: true, id: map.first + i * map.bin_size, counts, size: counts.reduce((a, b) => a + b, 0) }));
  const cells = [];
  for (const [length, state, references, group, start, direction] of map.runs) {
    for (let i = 0; i < length; i++) cells.push({ id: map.first + cells.length, state, references, group, start: start + i * direction * map.block_size });
  }
  return cells;
}

/** Of host memory, most of which is free, what stands behind the last used block is left out. */
function shownOf(map) {
  const cells = cellsOf(map);
  if (!map.on_host || map.bin_size) return cells;
  const last = cells.findLastIndex((cell) => cell.state !== FREE);
  return cells.slice(0, last + 1);
}

/** In words, for the tip and for who cannot see the map. */
function describe(cell, map, ids) {
  if (!cell) return "";
  if (cell.bin) return `Blocks ${cell.id} to ${cell.id + cell.size - 1}: ${cell.counts.map((n, state) => n && `${n} ${STATES[state]}`).filter(Boolean).join(", ")}`;
  if (cell.group < 0) return `Block ${cell.id}: ${STATES[cell.state]}`;
  const tokens = `${map.has_states ? "state within " : ""}tokens ${cell.start} to ${cell.start + map.block_size - 1}`;
  return `Block ${cell.id}: request ${nameOf(ids, cell.group)}, ${tokens}${cell.references > 1 ? `, in ${cell.references} block tables` : ""}${cell.state === PINNED ? ", pinned" : ""}`;
}

/** Used blocks with shared ones, as /metrics counts them. */
export const usedOf = (map) => map.counts[USED] + map.counts[SHARED];

export function summary(map) {
  const [free, cached, used, shared, pinned] = map.counts;
  const parts = [`${count(used + shared, map.has_states ? "state" : "block")} used${shared ? ` (${shared} of them shared)` : ""}`, `${cached} cached`, `${free} free`];
  if (pinned) parts.push(`${pinned} pinned`);
  const blocks = map.has_states ? `${count(map.num_blocks, "recurrent state")}, at most every ${map.block_size} tokens` : `${count(map.num_blocks, "block")} of ${map.block_size} tokens`;
  return `${blocks}: ${parts.join(", ")}.`;
}

/** Cells in a row, and the side of one in pixels. */
function layout(cells, width, most = 340) {
  let side = Math.min(16, Math.max(2, Math.floor(Math.sqrt((width * most) / Math.max(1, cells)))));
  let columns = Math.max(1, Math.floor(width / side));
  while (side > 2 && Math.ceil(cells / columns) * side > most) {
    side -= 1;
    columns = Math.max(1, Math.floor(width / side));
  }
  return { side, columns, height: Math.ceil(cells / columns) * side };
}

const hue = (group) => (group * 67 + 205) % 360;

function palette(element) {
  const style = getComputedStyle(element);
  const value = (name) => style.getPropertyValue(name).trim();
  return { free: value("--cell-free"), cached: value("--cell-cached"), pinned: value("--cell-pinned"), light: value("--cell-light"), mark: value("--ink"), used: value("--accent"), shared: value("--cell-shared") };
}

function draw(canvas, cells, { side, columns, height }, flashes, at) {
  const ratio = devicePixelRatio || 1;
  const width = columns * side;
  canvas.width = width * ratio;
  canvas.height = Math.max(1, height) * ratio;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const colors = palette(canvas);
  const gap = side >= 6 ? 1 : side >= 4 ? 0.5 : 0;
  const inner = side - gap;
  cells.forEach((cell, i) => {
    const x = (i % columns) * side;
    const y = Math.floor(i / columns) * side;
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
    context.fillStyle = cell.group >= 0 ? `hsl(${hue(cell.group)} 55% ${colors.light})` : cell.state === CACHED ? colors.cached : cell.state === FREE ? colors.free : colors.pinned;
    context.fillRect(x, y, inner, inner);
    if (cell.state === SHARED || cell.references > 1) {
      context.fillStyle = colors.mark;
      if (side >= 14 && cell.references < 100) {
        context.font = `${side - 6}px system-ui, sans-serif`;
        context.textAlign = "center";
        context.fillText(cell.references, x + inner / 2, y + inner - 3.5);
      } else context.fillRect(x + inner / 3, y + inner / 3, inner / 3, inner / 3);
    }
    if (cell.state === PINNED) outline(context, x, y, inner, colors.pinned, 1.5);
  });
  for (const [id, color] of flashes) {
    const i = cells.length && cells[0].bin ? Math.floor((id - cells[0].id) / cells[0].size) : id - (cells[0]?.id ?? 0);
    if (i >= 0 && i < cells.length) outline(context, (i % columns) * side, Math.floor(i / columns) * side, inner, color, Math.max(1, side / 6));
  }
  if (at !== null && at < cells.length) outline(context, (at % columns) * side, Math.floor(at / columns) * side, inner, colors.mark, 2);
}

function outline(context, x, y, side, color, width) {
  context.strokeStyle = color;
  context.lineWidth = width;
  context.strokeRect(x + width / 2, y + width / 2, side - width, side - width);
}

export const CHANGE_COLORS = { fork: "#2d7ff9", copy: "#c026d3", evict: "#e5484d", swap_out: "#f59e0b", swap_in: "#16a34a" };

/** A map with a cell to point at. `changes`: what happened to its blocks just now; `ids`: names of requests. */
export function BlockMap({ map, changes = [], ids, label }) {
  const box = useRef();
  const canvas = useRef();
  const [width, setWidth] = useState(0);
  const [at, setAt] = useState(null);
  const cells = useMemo(() => shownOf(map), [map]);
  const plan = layout(cells.length, width);
  const flashes = map.on_host ? [] : changes.flatMap((change) => change.blocks.map((id) => [id, CHANGE_COLORS[change.kind]])).filter(([, color]) => color);
  useLayoutEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  useEffect(() => {
    const redraw = () => width && draw(canvas.current, cells, plan, flashes, at);
    redraw();
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", redraw);
    addEventListener("octavo-theme", redraw);
    return () => {
      dark.removeEventListener("change", redraw);
      removeEventListener("octavo-theme", redraw);
    };
  }, [cells, width, at, changes]);
  const point = (event) => {
    const place = canvas.current.getBoundingClientRect();
    const column = Math.floor((event.clientX - place.left) / plan.side);
    const i = Math.floor((event.clientY - place.top) / plan.side) * plan.columns + column;
    setAt(column < plan.columns && i >= 0 && i < cells.length ? i : null);
  };
  const move = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: plan.columns, ArrowUp: -plan.columns }[event.key];
    if (!step) return;
    event.preventDefault();
    setAt(Math.max(0, Math.min(cells.length - 1, (at ?? -1) + step)));
  };
  return html`<div class="map" ref=${box}>
    <canvas ref=${canvas} tabindex="0" role="img" aria-label=${`${label}. ${summary(map)} Arrow keys go from block to block.`} onPointerMove=${point} onPointerDown=${point} onPointerLeave=${() => setAt(null)} onKeyDown=${move} onBlur=${() => setAt(null)}></canvas>
    <p class="tip" role="status">${describe(cells[at], map, ids) || html`<span class="quiet">${map.bin_size ? `One cell is ${count(map.bin_size, "block")}.` : "Point at a block, or move with the arrow keys."}</span>`}</p>
  </div>`;
}

export function Legend() {
  const key = (name, text, mark = "") => html`<li><span class=${`key key-${name}`}>${mark}</span>${text}</li>`;
  return html`<ul class="legend">
    ${key("free", "free")}${key("cached", "cached")}${key("used", "used, a colour for each request")}${key("shared", "shared: in how many block tables, or a dot", "2")}
    ${Object.entries(CHANGE_COLORS).map(([kind]) => key(kind, { fork: "fork", copy: "copy on write", evict: "eviction", swap_out: "swapped out", swap_in: "swapped in" }[kind]))}
  </ul>`;
}
