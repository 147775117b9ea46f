// The engine, live or from a recording: what its blocks hold, who waits, what steps cost, and a way back through them.

import { html, useEffect, useReducer, useRef, useState, download } from "./dom.js";
import { BlockMap, Legend, summary, usedOf } from "./block_map.js";
import { Latencies, Strip } from "./charts.js";
import { Adapters, Changes, Queues, Stores } from "./queues.js";
import { follow, readChange, readTiers, Recording } from "./recording.js";
import { request } from "./api.js";

const MOST_CHANGES = 40;
const MOST_PENDING = 400;
/** Steps a second that a recording plays. */
const PLAYED = 12;

/** Where a live engine is followed, or a recording shown; redraws when either changes. */
function useEngine(mode, model) {
  const [, redraw] = useReducer((n) => n + 1, 0);
  const [state, setState] = useState({ live: false, why: mode === "live" ? "Connecting …" : "" });
  const [file, setFile] = useState(null);
  const live = useRef(new Recording());
  const pending = useRef(null);
  useEffect(() => {
    if (mode !== "live") return undefined;
    live.current = new Recording();
    pending.current = null;
    redraw();
    return follow((event) => {
      if (!pending.current) live.current.push(event);
      else if (pending.current.length < MOST_PENDING) pending.current.push(event);
      redraw();
    }, setState, model);
  }, [mode, model]);
  useEffect(() => {
    if (mode !== "recording") return;
    request("/engine/recording").then((answer) => answer.text()).then((text) => setFile(Recording.read(text))).catch((error) => setState({ live: false, why: error.message }));
  }, [mode]);
  const hold = (held) => {
    if (!held) for (const event of pending.current ?? []) live.current.push(event);
    pending.current = held ? (pending.current ?? []) : null;
    redraw();
  };
  return { recording: file ?? live.current, isFile: Boolean(file), state, setFile, hold, missed: pending.current?.length ?? 0 };
}

export function Engine({ mode, models = [] }) {
  const [model, setModel] = useState("");
  const { recording, isFile, state, setFile, hold, missed } = useEngine(mode, model);
  const [wanted, setReplica] = useState(0);
  const [at, setAt] = useState(null);
  const [playing, setPlaying] = useState(false);
  const [problem, setProblem] = useState("");
  const replica = recording.replicas.has(wanted) ? wanted : ([...recording.replicas.keys()].sort()[0] ?? 0);
  const steps = recording.steps(replica);
  const frames = recording.frames(replica);
  const index = at === null ? null : Math.min(at, steps.length - 1);
  const frame = index === null || index < 0 ? frames.at(-1) : steps[index].frame;
  useEffect(() => {
    if (isFile) setAt(0);
  }, [isFile, recording]);
  useEffect(() => {
    if (!playing) return undefined;
    const timer = setInterval(() => setAt((now) => Math.min((now ?? 0) + 1, steps.length - 1)), 1000 / PLAYED);
    return () => clearInterval(timer);
  }, [playing, recording]);
  const pick = (i) => {
    if (!isFile) hold(true);
    setPlaying(false);
    setAt(Math.max(0, Math.min(i, steps.length - 1)));
  };
  const resume = () => {
    setFile(null);
    setPlaying(false);
    hold(false);
    setAt(null);
  };
  const open = async (event) => {
    const [chosen] = event.target.files;
    event.target.value = "";
    if (!chosen) return;
    try {
      const read = Recording.read(await chosen.text());
      hold(true);
      setProblem("");
      setFile(read);
    } catch (error) {
      setProblem(error.message);
    }
  };
  const save = () => {
    const saved = recording;
    saved.title ||= `${document.title}, ${new Date().toISOString().slice(0, 19).replace("T", " ")}`;
    download(`octavo-${new Date().toISOString().slice(0, 19).replaceAll(":", "")}.jsonl`, [saved.lines().join("\n"), "\n"], "application/jsonl");
  };
  return html`<div class="engine">
    <${Controls} mode=${mode} state=${state} steps=${steps} index=${index} isFile=${isFile} missed=${missed} playing=${playing} hasViews=${frames.length > 0}
      onPick=${pick} onResume=${resume} onPlay=${() => setPlaying(!playing)} onSave=${save} onOpen=${open} title=${recording.title} />
    ${(problem || (!state.live && !isFile && state.why)) && html`<p class="error" role="alert">${problem || state.why}</p>`}
    ${mode === "live" && models.some((one) => one.status) && html`<label class="model">Engine of <select value=${model} onChange=${(event) => (resume(), setModel(event.target.value))}>
      <option value="">the model asked last</option>
      ${models.filter((one) => one.status).map((one) => html`<option value=${one.id}>${one.id}</option>`)}
    </select></label>`}
    <${Replicas} rows=${recording.rows} replica=${replica} onChoose=${setReplica} />
    ${frame ? html`<${View} frame=${frame} frames=${frames} steps=${steps} index=${index} latencies=${recording.latencies} onPick=${pick} />` : steps.length > 0 && html`
      <p class="quiet">The map of this step is no longer kept; later ones are.</p><section class="card"><${Strip} steps=${steps} budget=${0} at=${index} onPick=${pick} /></section>`}
  </div>`;
}

function Controls({ mode, state, steps, index, isFile, missed, playing, hasViews, onPick, onResume, onPlay, onSave, onOpen, title }) {
  const last = steps.length - 1;
  const now = index ?? last;
  const step = steps[now];
  const status = isFile ? `Recording${title ? `: ${title}` : ""}` : index !== null ? `Paused${missed ? `, ${missed} updates waiting` : ""}` : state.live ? "Live" : "Not connected";
  return html`<div class="controls" role="group" aria-label="Time">
    <span class=${`state ${!isFile && index === null && state.live ? "on" : ""}`} role="status">${status}</span>
    ${index === null ? html`<button onClick=${() => onPick(last)} disabled=${last < 0}>Pause</button>` : (mode === "live" || isFile) && html`${isFile && html`<button onClick=${onPlay}>${playing ? "Hold" : "Play"}</button>`}${mode === "live" && html`<button onClick=${onResume}>${isFile ? "Back to live" : "Resume"}</button>`}`}
    <button aria-label="One step back" disabled=${now <= 0} onClick=${() => onPick(now - 1)}>◀</button>
    <input type="range" aria-label="Step" min="0" max=${Math.max(0, last)} value=${Math.max(0, now)} aria-valuetext=${step ? `step ${step.step}` : "none"} disabled=${last < 0} onInput=${(event) => onPick(Number(event.target.value))} />
    <button aria-label="One step forward" disabled=${now >= last} onClick=${() => onPick(now + 1)}>▶</button>
    <span class="step">${step ? `step ${step.step.toLocaleString()}` : "no step yet"}</span>
    <button onClick=${onSave} disabled=${!hasViews}>Save</button>
    <label class="attach">Open <input type="file" accept=".jsonl,application/jsonl" onChange=${onOpen} /></label>
  </div>`;
}

function Replicas({ rows, replica, onChoose }) {
  if (rows.length < 2 && (!rows.length || rows[0].status === "ready")) return null;
  return html`<fieldset class="choice replicas"><legend>Engine cores</legend>${rows.map((row) => html`<label class=${row.status}>
    <input type="radio" name="replica" checked=${row.number === replica} onChange=${() => onChoose(row.number)} /> ${row.number}: ${row.status}, ${row.open_requests} requests${row.restarts > 0 && `, started again ${row.restarts} ×`}
  </label>`)}</fieldset>`;
}

const changesOf = (view) => view.changes.map((change) => ({ ...readChange(change), ids: view.request_ids }));

function View({ frame, frames, steps, index, latencies, onPick }) {
  const { view } = frame;
  const changes = [];
  for (let i = frames.indexOf(frame); i >= 0 && changes.length < MOST_CHANGES; i--) changes.push(...changesOf(frames[i].view).reverse());
  const device = view.blocks.filter((map) => !map.on_host);
  const host = view.blocks.filter((map) => map.on_host && map.num_blocks > 0);
  const kind = (map) => (map.has_states ? ", recurrent states" : map.window ? `, window of ${map.window} tokens` : "");
  const named = (map) => (device.length > 1 ? `Blocks of KV group ${map.group}${kind(map)}` : "Blocks of the KV cache");
  return html`
    <${Tiles} view=${view} steps=${index === null ? steps : steps.slice(0, index + 1)} />
    <section class="card" aria-label="Block map"><h2>Blocks</h2>
      ${device.map((map) => html`<${Pool} key=${map.first} map=${map} changes=${view.changes.map(readChange)} ids=${view.request_ids} label=${named(map)} />`)}
      <${Legend} />
      ${host.map((map) => html`<details class="host" open=${usedOf(map) > 0 || undefined}><summary>Host memory: ${usedOf(map)} blocks of swapped requests of ${map.num_blocks.toLocaleString()}</summary><${Pool} map=${map} ids=${view.request_ids} label="Blocks in host memory" /></details>`)}
    </section>
    <section class="card" aria-label="Steps"><h2>Steps</h2><${Strip} steps=${steps} budget=${view.token_budget} at=${index} onPick=${onPick} /></section>
    <section class="card queues" aria-label="Queues"><h2>Queues</h2><${Queues} view=${view} /></section>
    ${view.adapters?.length > 0 && html`<section class="card adapters" aria-label="Adapters"><h2>Adapters in slots</h2><${Adapters} view=${view} /></section>`}
    ${readTiers(view.state).length > 0 && html`<section class="card" aria-label="KV stores"><h2>KV stores</h2><${Stores} view=${view} /></section>`}
    <section class="card" aria-label="Changes"><h2>What changed</h2><div class="scroll changes-box" tabindex="0" role="region" aria-label="Changes"><${Changes} changes=${changes.slice(0, MOST_CHANGES)} left=${view.num_changes - view.changes.length} /></div></section>
    ${latencies.some((one) => one.counts.some(Boolean)) && html`<section class="card wide" aria-label="Latencies"><h2>Latencies since the start</h2><div class="latencies">${latencies.map((one) => html`<${Latencies} key=${one.name} histogram=${one} />`)}</div></section>`}`;
}

function Pool({ map, changes, ids, label }) {
  return html`<div class="pool"><p class="pool-title"><strong>${label}</strong> ${summary(map)}</p><${BlockMap} map=${map} changes=${changes} ids=${ids} label=${label} /></div>`;
}

const share = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(part === whole ? 0 : 1)} %` : "–");

function Tiles({ view, steps }) {
  const { state } = view;
  const used = state.blocks_used + state.blocks_pinned;
  const all = used + state.blocks_cached + state.blocks_free;
  const tiles = [
    ["Blocks in use", share(used, all), `${used} of ${all}`],
    ["Output", rate(steps), "tokens/s in the last seconds"],
    ["Prefix hits", share(state.prefix_hit_tokens, state.prefix_queried_tokens), `${state.prefix_hit_tokens.toLocaleString()} of ${state.prefix_queried_tokens.toLocaleString()} tokens`],
    ["Preemptions", state.preemptions_by_recompute + state.preemptions_by_swap, `${state.recomputed_tokens.toLocaleString()} tokens again, ${state.swapped_out_blocks.toLocaleString()} blocks moved`],
    ["Evictions", view.evicted_blocks.toLocaleString(), "blocks of the prefix cache"],
  ];
  if (state.speculation) tiles.push(["Drafts accepted", share(state.speculation[2], state.speculation[1]), `${state.speculation[2].toLocaleString()} of ${state.speculation[1].toLocaleString()} tokens`]);
  if (state.adapters) tiles.push(["Adapters in slots", state.adapters[0], `${state.adapters[1]} in memory, ${state.adapters[2]} loading`]);
  return html`<dl class="tiles">${tiles.map(([name, value, note]) => html`<div class="tile"><dt>${name}</dt><dd><strong>${value}</strong><span class="quiet">${note}</span></dd></div>`)}</dl>`;
}

/** Tokens of decodes a second, over the last five seconds of steps. */
function rate(steps) {
  const last = steps.at(-1);
  if (!last) return "–";
  let tokens = 0;
  let begin = last.at - last.seconds;
  for (let i = steps.length - 1; i >= 0 && steps[i].at > last.at - 5; i--) {
    tokens += steps[i].decode;
    begin = steps[i].at - steps[i].seconds - steps[i].between;
  }
  return last.at > begin ? (tokens / (last.at - begin)).toFixed(1) : "–";
}
