// Lives of requests: phases in time, made of an engine's events and, where these are missing, of its queues.

import { readGroup, readLife } from "./records.js";

/** Lives that are kept: ended ones go first. A life keeps its last phases, and of a prompt its last chunks. */
const MOST = 400;
const MOST_IN_FILES = 4000;
const MOST_PHASES = 200;
const MOST_CHUNKS = 100;
/** Rows of each queue in a view: of longer queues a request that is missing has not ended. */
const MOST_ROWS = 128;
/** Seconds by which the arrival of one request may differ between two views. */
const SAME = 0.05;

/** What a request waits for, as a view says it, in words. */
export const OBSTACLES = {
  blocks: "for blocks",
  sequences: "for a place among the running",
  prompts: "for other prompts",
  step: "for its turn",
  store: "for its prefix from the KV stores",
  lora: "for its adapter",
  prompt_adapter: "for its adapter",
  grammar: "for its grammar",
  image: "for its images",
  encoder_input: "for its input",
};
const kindOfWait = (why) => (why === "store" ? "fetch" : ["blocks", "sequences", "prompts", "step", ""].includes(why ?? "") ? "wait" : "load");

const isRunning = (phase) => phase.kind === "prompt" || phase.kind === "decode";

class Life {
  constructor(group, replica, arrival) {
    this.group = group;
    this.name = "";
    this.replica = replica;
    this.arrival = arrival;
    this.end = null;
    this.reason = "";
    /** { kind, from, to (null: goes on), why, amount, other, chunks: [{ step, at, amount, left }] }, in time. */
    this.phases = [{ kind: "wait", from: arrival, to: null }];
    this.seqs = 1;
    this.prompt = 0;
    this.output = 0;
    this.found = 0;
    this.computed = 0;
    this.blocks = 0;
    this.mostBlocks = 0;
    this.blockSeconds = 0;
    this.preemptions = 0;
    this.lost = 0;
    this.resumes = 0;
    /** When it was last seen; until when its blocks are counted; and the step that its prompt awaits to be computed. */
    this.seen = arrival;
    this.counted = arrival;
    this.awaits = null;
  }

  get phase() {
    return this.phases.at(-1);
  }

  /** Counts the blocks that it has held since they were last counted; `blocks`: those of now. */
  hold(at, blocks = this.blocks) {
    if (isRunning(this.phase)) this.blockSeconds += ((this.blocks + blocks) / 2) * Math.max(0, at - this.counted);
    this.counted = Math.max(at, this.counted);
    this.blocks = blocks;
    this.mostBlocks = Math.max(this.mostBlocks, blocks);
  }

  enter(kind, at, more = {}) {
    const last = this.phase;
    at = Math.max(at, last.from);
    this.hold(at);
    last.to = at;
    // One that took no time was only a guess.
    if (at === last.from && !last.chunks && this.phases.length > 1) this.phases.pop();
    this.phases.push({ kind, from: at, to: null, ...more });
    if (this.phases.length > MOST_PHASES) this.phases.splice(1, 1);
    this.awaits = null;
    if (!isRunning(this.phase)) this.blocks = 0;
  }

  finish(at, reason) {
    this.hold(at);
    this.phase.to = Math.max(at, this.phase.from);
    this.end = this.phase.to;
    this.reason = reason;
    this.awaits = null;
    this.blocks = 0;
  }

  revive() {
    this.end = null;
    this.reason = "";
    this.phase.to = null;
  }
}

export class Lives {
  constructor(bounded = true) {
    this.most = bounded ? MOST : MOST_IN_FILES;
    /** In the order in which they were first seen. */
    this.all = [];
    this.current = new Map();
    this.now = 0;
    this.start = Infinity;
    /** From the times of events to the engine's clock. */
    this.offset = null;
  }

  find(group) {
    return this.current.get(group);
  }

  life(group, view, arrival) {
    let life = this.current.get(group);
    // Another server behind the same address counts from the start again.
    if (life && life.end !== null && Math.abs(life.arrival - arrival) > SAME) life = undefined;
    if (!life) {
      arrival = Math.min(arrival, view.at);
      life = new Life(group, view.replica, arrival);
      this.all.push(life);
      this.current.set(group, life);
      this.start = Math.min(this.start, arrival);
    } else if (life.end !== null) life.revive();
    if (life.replica !== view.replica) this.moved(life, view.replica, view.at);
    if (!life.name && view.request_ids?.[group]) life.name = view.request_ids[group];
    return life;
  }

  moved(life, replica, at) {
    if (life.phase.kind !== "lost") life.enter("lost", life.seen);
    life.replica = replica;
    life.resumes += 1;
    life.enter("wait", at, { resumed: true });
  }

  add(event) {
    for (const view of event.views) this.addView(view);
    if (event.views.length) this.offset = this.now - event.time;
    else if (this.offset !== null) this.now = Math.max(this.now, event.time + this.offset);
    for (const row of event.replicas) {
      if (row.status === "ready" || event.views.some((view) => view.replica === row.number)) continue;
      for (const life of this.all) if (life.end === null && life.replica === row.number && life.phase.kind !== "lost") life.enter("lost", life.seen);
    }
    this.bound();
  }

  addView(view) {
    this.now = Math.max(this.now, view.at);
    const ends = new Map(view.steps.map((step) => [step[0], step[1]]));
    for (const values of view.lives ?? []) this.addEvent(readLife(values), view, ends);
    const rows = view.groups.map(readGroup);
    for (const row of rows) this.addRow(row, view, ends);
    this.endMissing(rows, view);
  }

  /** A prompt is computed when its step is done; from then on tokens are decoded. */
  settle(life, ends, at = undefined) {
    if (life.awaits === null) return;
    const done = ends.get(life.awaits) ?? at;
    if (done !== undefined) life.enter("decode", done);
  }

  addEvent(event, view, ends) {
    const { kind, at } = event;
    const known = this.current.get(event.group);
    const life = this.life(event.group, view, kind === "admit" ? event.arrival : (known?.arrival ?? at));
    this.settle(life, ends, kind === "prompt" ? undefined : at);
    if (kind === "admit") {
      if (event.why === "") life.found = event.amount;
      if (life.phase.kind === "lost" || (event.why === "resume" && !life.resumes)) life.resumes += 1;
      life.enter(event.why === "swap" ? "decode" : "prompt", at, { why: event.why, found: event.amount, chunks: event.why === "swap" ? undefined : [] });
    } else if (kind === "prompt") {
      if (life.phase.kind !== "prompt") life.enter("prompt", at, { chunks: [] });
      const { chunks } = life.phase;
      chunks.push({ step: event.step, at, amount: event.amount, left: event.left });
      if (chunks.length > MOST_CHUNKS) chunks.shift();
      life.computed += event.amount;
      if (event.left === 0) life.awaits = event.step;
    } else if (kind === "end") {
      life.output = Math.max(life.output, event.amount);
      life.finish(at, event.why);
    } else {
      life.preemptions += 1;
      if (kind === "recompute") life.lost += event.amount;
      life.enter(kind, at, { amount: event.amount, other: event.preemptedFor });
    }
    life.seen = Math.max(life.seen, at);
  }

  addRow(row, view, ends) {
    const life = this.life(row.id, view, view.at - row.age);
    const { at } = view;
    const isComputed = row.computed > 0 && row.computed >= row.prompt + row.output - row.seqs;
    this.settle(life, ends, row.output > life.output && isComputed ? at : undefined);
    life.seqs = row.seqs;
    life.prompt = row.prompt;
    life.output = Math.max(life.output, row.output);
    life.found = Math.max(life.found, row.cached);
    life.hold(at, row.status === "running" ? (row.blocks ?? 0) : 0);
    const { phase } = life;
    if (row.status === "running" && life.phases.length === 1 && phase.why === undefined) phase.kind = "unseen";
    const wasLost = phase.kind === "lost";
    if (wasLost) life.resumes += 1;
    if (row.status === "running") {
      if (!isRunning(phase)) life.enter(isComputed ? "decode" : "prompt", at, isComputed ? {} : { chunks: [], why: wasLost || phase.resumed ? "resume" : "" });
      else if (phase.kind === "prompt" && life.awaits === null && isComputed && !(phase.chunks.at(-1)?.left > 1)) life.enter("decode", at);
    } else if (row.status === "swapped") {
      if (phase.kind !== "swap") life.enter("swap", at, { other: row.preemptedFor });
      else phase.why = row.waitsFor;
    } else if (wasLost) life.enter(kindOfWait(row.waitsFor), at, { why: row.waitsFor, resumed: true });
    else if (isRunning(phase) || phase.kind === "swap") {
      // Preempted, and nothing said so.
      life.enter("recompute", at, { other: row.preemptedFor, why: row.waitsFor });
    } else if (phase.kind === "recompute") phase.why = row.waitsFor;
    else {
      const kind = kindOfWait(row.waitsFor);
      if (phase.why === undefined || phase.why === "") Object.assign(phase, { kind, why: row.waitsFor });
      else if (phase.why !== row.waitsFor) life.enter(kind, at, { why: row.waitsFor });
    }
    if (row.isResumed && !life.resumes) life.resumes = 1;
    life.seen = at;
  }

  endMissing(rows, view) {
    const { state } = view;
    if (rows.length < state.num_running + state.num_waiting + state.num_swapped || rows.length >= 3 * MOST_ROWS) return;
    const open = new Set(rows.map((row) => row.id));
    for (const life of this.all) if (life.end === null && life.replica === view.replica && !open.has(life.group) && life.phase.kind !== "lost" && life.seen <= view.at) life.finish(view.at, "");
  }

  bound() {
    let extra = this.all.length - this.most;
    if (extra <= 0) return;
    this.all = this.all.filter((life) => {
      if (extra <= 0 || life.end === null) return true;
      extra -= 1;
      if (this.current.get(life.group) === life) this.current.delete(life.group);
      return false;
    });
  }

  /** Those that lived between two moments, in the order of their arrival; of more than `most` the nearest to the moment `at`. */
  between(from, to, most, at) {
    const shown = this.all.filter((life) => life.arrival <= to && (life.end ?? Infinity) >= from);
    const left = Math.max(0, shown.length - most);
    const far = (life) => (at < life.arrival ? life.arrival - at : Math.max(0, at - (life.end ?? Infinity)));
    const nearest = left ? [...shown].sort((a, b) => far(a) - far(b) || a.arrival - b.arrival).slice(0, most) : shown;
    return { shown: nearest.sort((a, b) => a.arrival - b.arrival), left };
  }
}

/** The phase of a life at a moment, or undefined before it arrived and after it ended. */
export const phaseAt = (life, at) => life.phases.findLast((phase) => phase.from <= at && (phase.to === null || at < phase.to || (at === phase.to && life.end === null)));

/** What a life has cost up to a moment: seconds by kind of phase and by what it waited for, and tokens. */
export function costsOf(life, at = Infinity) {
  const seconds = { unseen: 0, wait: 0, fetch: 0, load: 0, prompt: 0, decode: 0, recompute: 0, swap: 0, lost: 0 };
  const waits = {};
  let chunks = 0;
  for (const phase of life.phases) {
    if (phase.from > at) break;
    const spent = Math.max(0, Math.min(phase.to ?? life.seen, at) - phase.from);
    seconds[phase.kind] += spent;
    if (phase.kind === "wait" || phase.kind === "fetch" || phase.kind === "load") waits[phase.why ?? ""] = (waits[phase.why ?? ""] ?? 0) + spent;
    chunks += (phase.chunks ?? []).filter((chunk) => chunk.at <= at).length;
  }
  const waited = seconds.wait + seconds.fetch + seconds.load;
  return { seconds, waits, chunks, waited, away: seconds.recompute + seconds.swap + seconds.lost };
}
