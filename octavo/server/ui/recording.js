// What the engine has sent: the last steps and the views they belong to, to look back at, to save and to open again.

import { events, lost, request } from "./api.js";
import { Lives } from "./lives.js";
import { readStep } from "./records.js";

const FORMAT = "octavo-recording";
const MOST_STEPS = 1000;
/** Runs of blocks, and ids of requests, in all views that are kept; beyond, the oldest views lose their maps. */
const MOST_RUNS = 300_000;

/** One replica's view, with the steps that it has brought. */
class Frame {
  constructor(event, view, steps) {
    this.event = event;
    this.view = view;
    this.steps = steps;
    this.weight = view.blocks.reduce((sum, map) => sum + (map.runs?.length ?? 0) + (map.bins?.length ?? 0), 1 + Object.keys(view.request_ids ?? {}).length + (view.lives?.length ?? 0));
  }
}

export class Recording {
  constructor(bounded = true) {
    this.bounded = bounded;
    this.title = "";
    this.events = [];
    /** By replica: { frames, steps }; each step has the frame that shows the engine after it. */
    this.replicas = new Map();
    this.rows = [];
    this.latencies = [];
    this.weight = 0;
    this.lives = new Lives(bounded);
  }

  push(event) {
    this.rows = event.replicas;
    if (event.latencies?.length) this.latencies = event.latencies;
    for (const view of event.views) {
      const one = this.replicas.get(view.replica) ?? { frames: [], steps: [] };
      this.replicas.set(view.replica, one);
      // An event with all steps repeats those that came before; of the others only the last belongs to its map.
      const known = event.whole ? (one.steps.at(-1)?.at ?? -Infinity) : -Infinity;
      const frame = new Frame(event, view, view.steps.map(readStep).filter((step) => step.at > known));
      frame.steps.forEach((step, i) => (step.frame = event.whole && i < frame.steps.length - 1 ? null : frame));
      one.frames.push(frame);
      one.steps.push(...frame.steps);
      if (this.bounded) this.bound(one, frame);
    }
    this.lives.add(event);
  }

  bound(one, frame) {
    one.steps.splice(0, Math.max(0, one.steps.length - MOST_STEPS));
    this.weight += frame.weight;
    const oldest = one.steps[0]?.at ?? Infinity;
    while (one.frames.length > 1 && (this.weight > MOST_RUNS || one.frames[0].view.at < oldest)) {
      const gone = one.frames.shift();
      this.weight -= gone.weight;
      for (const step of gone.steps) step.frame = null;
    }
  }

  frames(replica) {
    return this.replicas.get(replica)?.frames ?? [];
  }

  steps(replica) {
    return this.replicas.get(replica)?.steps ?? [];
  }

  /** The recording as lines of a file. */
  lines() {
    const all = [...new Set([...this.replicas.values()].flatMap((one) => one.frames.map((frame) => frame.event)))].sort((a, b) => a.time - b.time);
    return [{ format: FORMAT, version: 1, title: this.title }, ...all.map((event) => ({ ...event, whole: false }))].map((line) => JSON.stringify(line));
  }

  /** Reads a file. Throws an Error that says what is wrong with it. */
  static read(text) {
    const lines = text.split("\n").filter((line) => line.trim());
    let header;
    try {
      header = JSON.parse(lines[0]);
    } catch {
      header = null;
    }
    if (header?.format !== FORMAT) throw new Error(`This is no recording of an engine: its first line must name the format ${FORMAT}.`);
    if (header.version !== 1) throw new Error(`The recording has version ${header.version}; this page reads version 1.`);
    const recording = new Recording(false);
    recording.title = String(header.title ?? "");
    lines.slice(1).forEach((line, i) => {
      try {
        recording.push(JSON.parse(line));
      } catch {
        throw new Error(`Line ${i + 2} of the recording is no event of an engine.`);
      }
    });
    if (!recording.replicas.size) throw new Error("The recording has no view of an engine.");
    return recording;
  }
}

/**
 * Follows the server's engine until it is told to stop; calls back with its events, and with whether it is connected.
 * With several models: the engine of `model`, or of the one that was asked last.
 */
export function follow(onEvent, onState, model = "") {
  const address = model ? `/engine/events?model=${encodeURIComponent(model)}` : "/engine/events";
  const abort = new AbortController();
  const quiet = 15_000;
  (async () => {
    let pause = 500;
    while (!abort.signal.aborted) {
      const attempt = new AbortController();
      const stop = () => attempt.abort();
      abort.signal.addEventListener("abort", stop);
      let timer = setTimeout(stop, quiet);
      try {
        const response = await request(address, { signal: attempt.signal });
        onState({ live: true, why: "" });
        for await (const data of events(response)) {
          clearTimeout(timer);
          timer = setTimeout(stop, quiet);
          pause = 500;
          onEvent(JSON.parse(data));
        }
        if (!abort.signal.aborted) onState({ live: false, why: "The stream has ended; connecting again." });
      } catch (error) {
        if (abort.signal.aborted) return;
        if (!error.status) lost();
        onState({ live: false, why: error.status ? error.message : "The server does not answer; trying again." });
      } finally {
        clearTimeout(timer);
        abort.signal.removeEventListener("abort", stop);
      }
      await new Promise((resolve) => setTimeout(resolve, pause));
      pause = Math.min(pause * 1.6, 5000);
    }
  })();
  return () => abort.abort();
}
