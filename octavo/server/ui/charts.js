// Charts of steps (canvas, as there are up to a thousand bars) and of latencies (elements of SVG).

import { html, useEffect, useLayoutEffect, useRef, useState } from "./dom.js";

const BAR = 3;

function colorsOf(element) {
  const style = getComputedStyle(element);
  return (name) => style.getPropertyValue(name).trim();
}

/** Bars of two parts each; `budget`: a line across; `of`: for each bar, whether it stands out, or null; `marks`: bars with a mark above. */
function drawBars(canvas, width, height, bars, most, budget, paints, at, of, marks = []) {
  const ratio = devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const scale = (height - 4) / Math.max(1e-9, most);
  bars.forEach((parts, i) => {
    let y = height;
    context.globalAlpha = of && !of[i] ? 0.25 : 1;
    parts.forEach((value, part) => {
      const size = value * scale;
      context.fillStyle = paints[part];
      context.fillRect(i * BAR, y - size, BAR - 0.5, size);
      y -= size;
    });
  });
  context.globalAlpha = 1;
  if (budget) {
    context.fillStyle = paints.line;
    context.fillRect(0, height - budget * scale, width, 1);
  }
  context.fillStyle = paints.mark;
  for (const i of marks) context.fillRect(i * BAR - 1, 0, BAR + 1.5, 7);
  if (at !== null) {
    context.fillStyle = paints.line;
    context.fillRect(at * BAR + BAR / 2 - 0.5, 0, 1, height);
  }
}

/** The last steps. `at`: index of the one that is looked at, or null; `onPick(index)`; `belongs(step)`: which ones stand out, or null; `onPoint(step)`. */
export function Strip({ steps, budget, at, onPick, belongs = null, onPoint }) {
  const box = useRef();
  const tokens = useRef();
  const seconds = useRef();
  const [width, setWidth] = useState(0);
  const [pointed, setPointed] = useState(null);
  const room = Math.max(1, Math.floor(width / BAR));
  const end = at === null ? steps.length : Math.min(steps.length, Math.max(at + Math.ceil(room / 4), room));
  const from = Math.max(0, end - room);
  const shown = steps.slice(from, end);
  const times = shown.map((step) => {
    const inside = step.kernels || step.worker;
    return [inside, Math.max(0, step.seconds + step.between - inside)];
  });
  const sums = shown.map((step) => step.prefill + step.decode);
  const slowest = Math.max(1e-3, ...times.map(([a, b]) => a + b));
  const mostTokens = Math.max(1, ...sums);
  const preempting = [...shown.keys()].filter((i) => shown[i].preemptions > (steps[from + i - 1]?.preemptions ?? shown[i].preemptions));
  const timed = shown.some((step) => step.kernels);
  useLayoutEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  useEffect(() => {
    if (!width || !steps.length) return undefined;
    const redraw = () => {
      const color = colorsOf(tokens.current);
      const mark = at === null ? null : at - from;
      const paint = (a, b) => Object.assign([color(a), color(b)], { line: color("--ink"), mark: color("--life-set-back") });
      const of = belongs && shown.map(belongs);
      drawBars(tokens.current, width, 120, shown.map((step) => [step.decode, step.prefill]), mostTokens, budget <= mostTokens ? budget : 0, paint("--accent", "--second"), mark, of, preempting);
      drawBars(seconds.current, width, 90, times, slowest, 0, paint("--third", "--warn"), mark, of);
    };
    redraw();
    addEventListener("octavo-theme", redraw);
    return () => removeEventListener("octavo-theme", redraw);
  }, [steps, steps.length, steps.at(-1), width, at, belongs]);
  const indexOf = (event) => from + Math.floor((event.clientX - event.target.getBoundingClientRect().left) / BAR);
  const pick = (event) => {
    const i = indexOf(event);
    if (i >= 0 && i < steps.length) onPick(i);
  };
  const point = (event) => {
    const step = steps[indexOf(event)];
    setPointed(step ?? null);
    onPoint?.(step ?? null);
  };
  const leave = () => (setPointed(null), onPoint?.(null));
  const pointing = { onClick: pick, onPointerMove: point, onPointerLeave: leave };
  const last = shown.at(-1);
  const words = last ? `The last of ${shown.length} steps computed ${last.decode} tokens of decodes and ${last.prefill} of prompts in ${(1e3 * last.seconds).toFixed(1)} ms.` : "No step yet.";
  const wide = { width: `${width}px` };
  // The box stays, as its width is watched.
  if (!steps.length) return html`<div class="strip" ref=${box}><p class="quiet">Each step gets a bar here: the tokens that it computes, of prompts and of decodes, and its time.</p></div>`;
  return html`<div class="strip" ref=${box}>
    <p class="chart-title">Tokens of a step <span class="name"><span class="key key-decode"></span>decode</span> <span class="name"><span class="key key-prefill"></span>prompts</span> ${preempting.length > 0 && html`<span class="name"><span class="key key-set-back"></span>preemption</span> `}<span class="quiet">up to ${mostTokens}, budget ${budget}</span></p>
    <canvas ref=${tokens} height="120" style=${{ ...wide, height: "120px" }} role="img" aria-label=${`Tokens of the last steps. ${words}`} ...${pointing}></canvas>
    <p class="chart-title">Time of a step <span class="name"><span class="key key-kernels"></span>${timed ? "in kernels" : "in the worker"}</span> <span class="name"><span class="key key-outside"></span>outside</span> <span class="quiet">up to ${(1e3 * slowest).toFixed(1)} ms</span></p>
    <canvas ref=${seconds} height="90" style=${{ ...wide, height: "90px" }} role="img" aria-label="Times of the last steps" ...${pointing}></canvas>
    <p class="tip">${pointed ? html`Step ${pointed.step.toLocaleString()}: ${pointed.decode} tokens of decodes, ${pointed.prefill} of prompts in ${(1e3 * pointed.seconds).toFixed(1)} ms; ${pointed.running} running, ${pointed.waiting} waiting` : html`<span class="quiet">A click goes to a step.</span>`}</p>
  </div>`;
}

const UNITS = (seconds) => (seconds < 1 ? `${+(seconds * 1e3).toPrecision(3)} ms` : `${+seconds.toPrecision(3)} s`);

/** The value below which a share of the observations lie, as far as buckets tell. */
function quantile({ bounds, counts }, share) {
  const total = counts.reduce((a, b) => a + b, 0);
  let seen = 0;
  for (let i = 0; i < counts.length; i++) {
    seen += counts[i];
    if (total && seen >= share * total) return i < bounds.length ? `≤ ${UNITS(bounds[i])}` : `> ${UNITS(bounds.at(-1))}`;
  }
  return "–";
}

/** A histogram of latencies in buckets. */
export function Latencies({ histogram }) {
  const { name, bounds, counts } = histogram;
  const total = counts.reduce((a, b) => a + b, 0);
  const most = Math.max(1, ...counts);
  const side = 100 / counts.length;
  const words = `${total.toLocaleString()} observed; half ${quantile(histogram, 0.5)}, 99 % ${quantile(histogram, 0.99)}`;
  return html`<figure class="latency">
    <figcaption><strong>${name}</strong> <span class="quiet">${words}</span></figcaption>
    <svg viewBox="0 0 100 40" preserveAspectRatio="none" role="img" aria-label=${`Seconds, ${name}: ${words}`}>
      ${counts.map((n, i) => html`<rect x=${i * side} y=${39 - (38 * n) / most} width=${side * 0.86} height=${(38 * n) / most + 0.6}><title>${i < bounds.length ? `up to ${UNITS(bounds[i])}` : `more than ${UNITS(bounds.at(-1))}`}: ${n}</title></rect>`)}
    </svg>
    <p class="ends"><span>${UNITS(bounds[0])}</span><span>${UNITS(bounds.at(-1))}</span></p>
  </figure>`;
}
