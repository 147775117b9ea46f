// The engine, live or from a recording: what it does now, the lives of its requests, its blocks and steps, and a way back through them.

import { html, names, useEffect, useReducer, useRef, useState, download } from "./dom.js";
import { BlockMap, Legend, usedOf } from "./block_map.js";
import { Latencies, Strip } from "./charts.js";
import { ExampleButton, takesExamples, useExamples } from "./examples.js";
import { OBSTACLES, phaseAt } from "./lives.js";
import { Adapters, Changes, Queues, Stores } from "./queues.js";
import { follow, Recording } from "./recording.js";
import { readChange, readGroup, readTiers } from "./records.js";
import { LifeDetails, Timeline } from "./timeline.js";
import { Icon, IconButton } from "./widgets.js";
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
    const { recording = "/engine/recording" } = document.querySelector('meta[name="octavo-mode"]').dataset;
    request(recording).then((answer) => answer.text()).then((text) => setFile(Recording.read(text))).catch((error) => setState({ live: false, why: error.message }));
  }, [mode]);
  const hold = (held) => {
    if (!held) for (const event of pending.current ?? []) live.current.push(event);
    pending.current = held ? (pending.current ?? []) : null;
    redraw();
  };
  return { recording: file ?? live.current, isFile: Boolean(file), state, setFile, hold, missed: pending.current?.length ?? 0 };
}

/** Where a recording is opened: at the step with most requests, and most of them waiting or swapped out. */
function busiest(steps) {
  const load = ({ frame, running, waiting, swapped, used, cached, free }) => (frame ? running + 2 * waiting + 3 * swapped + used / (used + cached + free || 1) : -1);
  return steps.reduce((best, step, i) => (load(step) > load(steps[best]) ? i : best), 0);
}

/** `given`: the model that the page asks. */
export function Engine({ mode, models = [], model: given }) {
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
  const several = models.filter((one) => one.status);
  const asked = model ? models.find((one) => one.id === model) : (several.find((one) => one.status?.value === "loaded") ?? given);
  useEffect(() => {
    if (isFile) setAt(busiest(recording.steps(replica)));
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
  const play = () => {
    if (!playing && index === steps.length - 1) setAt(0);
    setPlaying(!playing);
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
  const sent = useExamples(asked);
  const examples = mode === "live" && !isFile && index === null && takesExamples(asked) ? sent : null;
  return html`<div class="engine">
    <header class="engine-head">
      <${Status} mode=${mode} state=${state} isFile=${isFile} index=${index} missed=${missed} title=${recording.title} />
      <p class="now">${sentence(recording, replica, frame?.view, index === null ? steps : steps.slice(0, index + 1), isFile || index !== null)}</p>
      <${Controls} mode=${mode} steps=${steps} index=${index} isFile=${isFile} playing=${playing} hasViews=${frames.length > 0}
        onPick=${pick} onResume=${resume} onPlay=${play} onSave=${save} onOpen=${open} />
    </header>
    ${(problem || (!state.live && !isFile && state.why)) && html`<p class="note error wide" role="alert">${problem || state.why}</p>`}
    ${mode === "live" && several.length > 0 && html`<label class="model-choice wide">Engine of <select value=${model} onChange=${(event) => (resume(), setModel(event.target.value))}>
      <option value="">the model asked last</option>
      ${several.map((one) => html`<option value=${one.id}>${one.id}</option>`)}
    </select></label>`}
    <${Replicas} rows=${recording.rows} replica=${replica} onChoose=${setReplica} />
    ${frame ? html`<${View} recording=${recording} isFile=${isFile} replica=${replica} frame=${frame} frames=${frames} steps=${steps} index=${index} examples=${examples} onPick=${pick} />` : steps.length > 0 && html`
      <p class="quiet wide">The map of this step is no longer kept; later ones are.</p><section class="card wide"><${Strip} steps=${steps} budget=${0} at=${index} onPick=${pick} /></section>`}
  </div>`;
}

function Status({ mode, state, isFile, index, missed, title }) {
  const words = isFile ? "Recording" : index !== null ? `Paused${missed ? `, ${missed} updates waiting` : ""}` : state.live ? "Live" : mode === "live" ? "Not connected" : "Reading …";
  return html`<p class="engine-status"><span class=${names("state badge", !isFile && index === null && state.live && "on")} role="status">${words}</span>${isFile && title && html` <span class="quiet">${title}</span>`}</p>`;
}

const share = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(part === whole ? 0 : 1)} %` : "–");
const percent = (part, whole) => `${((100 * part) / whole).toFixed(part && part < whole / 20 ? 1 : 0)} %`;
const strong = (value) => html`<strong>${value}</strong>`;

/** What the engine does, in one sentence. `isPast`: it is looked back at. */
function sentence(recording, replica, view, steps, isPast) {
  const row = recording.rows.find((one) => one.number === replica);
  if (!isPast && row && row.status !== "ready") return html`Engine core ${strong(row.number)} is ${row.status}; ${strong(row.open_requests)} ${row.open_requests === 1 ? "request waits" : "requests wait"} for it and will go on.`;
  if (!view) return "Nothing has been seen of the engine yet.";
  const { state } = view;
  const used = state.blocks_used + state.blocks_pinned;
  const all = used + state.blocks_cached + state.blocks_free;
  const parts = [state.num_running ? html`${strong(state.num_running)} running` : "Nothing runs"];
  const why = new Map();
  const waiting = view.groups.map(readGroup).filter((one) => one.status === "waiting");
  for (const { waitsFor } of waiting) why.set(waitsFor ?? "", (why.get(waitsFor ?? "") ?? 0) + 1);
  // Views have the first of a long queue: the others wait for what most of those do.
  const most = [...why].sort((a, b) => b[1] - a[1]);
  most.forEach(([reason, n], i) => parts.push(html`${strong(n + (i ? 0 : state.num_waiting - waiting.length))} waiting ${OBSTACLES[reason] ?? ""}`));
  if (state.num_swapped) parts.push(html`${strong(state.num_swapped)} swapped out`);
  if (state.num_running) parts.push(html`${strong(rate(steps))} tokens/s`);
  if (all) parts.push(html`cache ${strong(percent(used, all))} full`);
  if (state.prefix_queried_tokens) parts.push(html`${strong(percent(state.prefix_hit_tokens, state.prefix_queried_tokens))} of prompt tokens found`);
  return html`${parts.map((part, i) => html`${i > 0 && ", "}${part}`)}.`;
}

function Controls({ mode, steps, index, isFile, playing, hasViews, onPick, onResume, onPlay, onSave, onOpen }) {
  const last = steps.length - 1;
  const now = index ?? last;
  const step = steps[now];
  return html`<div class="controls" role="group" aria-label="Time">
    ${index === null ? html`<button type="button" class="button small" onClick=${() => onPick(last)} disabled=${last < 0}><${Icon} name="pause" />Pause</button>` : html`
      ${isFile && html`<button type="button" class="button small" onClick=${onPlay}><${Icon} name=${playing ? "pause" : "play"} />${playing ? "Hold" : "Play"}</button>`}
      ${mode === "live" && html`<button type="button" class="button small primary" onClick=${onResume}><${Icon} name="play" />${isFile ? "Back to live" : "Resume"}</button>`}`}
    <${IconButton} icon="chevron_left" small label="One step back" disabled=${now <= 0} onClick=${() => onPick(now - 1)} />
    <input type="range" aria-label="Step" min="0" max=${Math.max(0, last)} value=${Math.max(0, now)} aria-valuetext=${step ? `step ${step.step}` : "none"} disabled=${last < 0} onInput=${(event) => onPick(Number(event.target.value))} />
    <${IconButton} icon="chevron_right" small label="One step forward" disabled=${now >= last} onClick=${() => onPick(now + 1)} />
    <span class="step number quiet">${step ? `step ${step.step.toLocaleString()}` : "no step yet"}</span>
    <button type="button" class="button small" onClick=${onSave} disabled=${!hasViews}><${Icon} name="download" />Save</button>
    <label class="attach button small"><${Icon} name="upload" />Open <input type="file" aria-label="Open a recording" accept=".jsonl,application/jsonl" onChange=${onOpen} /></label>
  </div>`;
}

function Replicas({ rows, replica, onChoose }) {
  if (rows.length < 2 && (!rows.length || rows[0].status === "ready")) return null;
  return html`<fieldset class="replicas wide"><legend class="hidden">Engine cores</legend>${rows.map((row) => html`<label class=${names("core", row.status, row.number === replica && "chosen")}>
    <input type="radio" name="replica" checked=${row.number === replica} onChange=${() => onChoose(row.number)} /> <span><strong>Core ${row.number}</strong> ${row.status}, ${row.open_requests} requests${row.restarts > 0 && `, started again ${row.restarts} ×`}</span>
  </label>`)}</fieldset>`;
}

const changesOf = (view) => view.changes.map((change) => ({ ...readChange(change), ids: view.request_ids }));

function View({ recording, isFile, replica, frame, frames, steps, index, examples, onPick }) {
  const { view } = frame;
  const changes = [];
  for (let i = frames.indexOf(frame); i >= 0 && changes.length < MOST_CHANGES; i--) changes.push(...changesOf(frames[i].view).reverse());
  const { latencies } = recording;
  return html`
    <${Picture} recording=${recording} isFile=${isFile} replica=${replica} view=${view} steps=${steps} index=${index} examples=${examples} onPick=${onPick} />
    <${Tiles} view=${view} />
    <section class="card queues" aria-label="Queues"><h2>Queues</h2><${Queues} view=${view} /></section>
    <section class="card" aria-label="Changes"><h2>What changed</h2><div class="scroll changes-box" tabindex="0" role="region" aria-label="Changes"><${Changes} changes=${changes.slice(0, MOST_CHANGES)} left=${view.num_changes - view.changes.length} /></div></section>
    ${view.adapters?.length > 0 && html`<section class="card adapters" aria-label="Adapters"><h2>Adapters in slots</h2><${Adapters} view=${view} /></section>`}
    ${readTiers(view.state).length > 0 && html`<section class="card" aria-label="KV stores"><h2>KV stores</h2><${Stores} view=${view} /></section>`}
    ${latencies.some((one) => one.counts.some(Boolean)) && html`<section class="card wide" aria-label="Latencies"><h2>Latencies since the start</h2><div class="latencies">${latencies.map((one) => html`<${Latencies} key=${one.name} histogram=${one} />`)}</div></section>`}`;
}

/** Lives, blocks and steps: what is pointed at in one of them stands out in all. */
function Picture({ recording, isFile, replica, view, steps, index, examples, onPick }) {
  const [focus, setFocus] = useState(null);
  const [line, setLine] = useState(null);
  const [chosen, setChosen] = useState(null);
  const { lives } = recording;
  const at = index === null ? null : steps[index].at;
  const shownLife = chosen === null ? undefined : lives.find(chosen);
  const stands = focus ?? (shownLife ? chosen : null);
  const life = stands === null ? undefined : lives.find(stands);
  // A step belongs to a request that has computed in it.
  const belongs = life ? (step) => ["prompt", "decode"].includes(phaseAt(life, step.at - step.seconds / 2)?.kind) && life.replica === replica : null;
  const device = view.blocks.filter((map) => !map.on_host);
  const host = view.blocks.filter((map) => map.on_host && map.num_blocks > 0);
  const kind = (map) => (map.has_states ? ", recurrent states" : map.window ? `, window of ${map.window} tokens` : "");
  const named = (map) => (device.length > 1 ? `KV group ${map.group}${kind(map)}` : "KV cache");
  const pointing = { focus: stands, onFocus: setFocus, onChoose: setChosen };
  const empty = html`<div class="empty-state"><p>Each request gets a row here as it arrives: when it waits and for what, the chunks of its prompt, its decoding, and whether it is preempted, swapped out or resumed on another core.</p>${examples && html`<${ExampleButton} examples=${examples} />`}</div>`;
  return html`
    <section class=${names("card wide lives-card", shownLife && "with-details")} aria-label="Lives of requests" onKeyDown=${(event) => event.key === "Escape" && setChosen(null)}>
      <div class="lives-main"><${Timeline} lives=${lives} at=${at} isFile=${isFile} focus=${focus} chosen=${shownLife ? chosen : null} line=${line} numCores=${recording.rows.length} empty=${empty} onFocus=${setFocus} onChoose=${setChosen} />
        ${examples && lives.all.length > 0 && (examples.done !== null || view.state.num_running === 0) && html`<${ExampleButton} examples=${examples} small />`}</div>
      ${shownLife && html`<${LifeDetails} life=${shownLife} lives=${lives} steps=${steps} onPick=${onPick} onClose=${() => setChosen(null)} />`}
    </section>
    <section class="card" aria-label="Block map"><h2>Blocks</h2>
      ${device.map((map) => html`<${BlockMap} key=${`${map.group} ${map.first}`} map=${map} changes=${view.changes.map(readChange)} ids=${view.request_ids} label=${named(map)} ...${pointing} />`)}
      ${host.map((map) => html`<details class="fold host" open=${usedOf(map) > 0 || undefined}><summary>Host memory: ${usedOf(map).toLocaleString()} blocks of swapped requests</summary><${BlockMap} map=${map} ids=${view.request_ids} label="Host memory" ...${pointing} /></details>`)}
      <${Legend} />
    </section>
    <section class="card" aria-label="Steps"><h2>Steps</h2><${Strip} steps=${steps} budget=${view.token_budget} at=${index} onPick=${onPick} belongs=${belongs} onPoint=${(step) => setLine(step ? step.at : null)} /></section>`;
}

function Tiles({ view }) {
  const { state } = view;
  const used = state.blocks_used + state.blocks_pinned;
  const all = used + state.blocks_cached + state.blocks_free;
  const tiles = [
    ["Blocks in use", share(used, all), `${used.toLocaleString()} of ${all.toLocaleString()}, ${state.blocks_cached.toLocaleString()} cached`],
    ["Prefix hits", share(state.prefix_hit_tokens, state.prefix_queried_tokens), `${state.prefix_hit_tokens.toLocaleString()} of ${state.prefix_queried_tokens.toLocaleString()} tokens`],
    ["Preemptions", state.preemptions_by_recompute + state.preemptions_by_swap, `${state.recomputed_tokens.toLocaleString()} tokens again, ${state.swapped_out_blocks.toLocaleString()} blocks moved`],
    ["Evictions", view.evicted_blocks.toLocaleString(), "blocks of the prefix cache"],
  ];
  if (state.speculation) tiles.push(["Drafts accepted", share(state.speculation[2], state.speculation[1]), `${state.speculation[2].toLocaleString()} of ${state.speculation[1].toLocaleString()} tokens`]);
  if (state.adapters) tiles.push(["Adapters in slots", state.adapters[0], `${state.adapters[1]} in memory, ${state.adapters[2]} loading`]);
  return html`<dl class="tiles wide">${tiles.map(([name, value, note]) => html`<div class="tile"><dt>${name}</dt><dd><strong>${value}</strong> <span class="quiet">${note}</span></dd></div>`)}</dl>`;
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
  const value = last.at > begin ? tokens / (last.at - begin) : 0;
  return value < 100 ? value.toFixed(1) : Math.round(value).toLocaleString();
}
