// One request for answers: they grow as their parts arrive. Only the elements that show them are drawn again meanwhile.

import { useLayoutEffect, useReducer } from "./dom.js";
import { request, events, lost } from "./api.js";
import { payloadOf, routeOf } from "./requests.js";

export const emptyAnswer = () => ({ text: "", thoughts: "", calls: [], tokens: [], running: true, finish: null, error: null, stats: null });

/** Answers that grow now, by the id of their node, and who shows them. */
const growing = new Map();
const watchers = new Map();

/** Shows how far an answer is; null: its node has it again. */
export function setGrowing(id, answer) {
  if (answer) growing.set(id, answer);
  else growing.delete(id);
  watchers.get(id)?.forEach((redraw) => redraw());
}

/** An answer as it is now. */
export function useGrowing(node) {
  const [, redraw] = useReducer((n) => n + 1, 0);
  const shown = growing.get(node.id);
  useLayoutEffect(() => {
    const all = watchers.get(node.id) ?? new Set();
    watchers.set(node.id, all.add(redraw));
    if (growing.get(node.id) !== shown) redraw(); // it has grown since
    return () => {
      all.delete(redraw);
      if (!all.size) watchers.delete(node.id);
    };
  }, [node.id]);
  return shown ?? node;
}

/** A conversation with its growing answers as far as they are: what remains of it if the page is closed now. */
export const asFarAsItIs = (conversation) => ({ ...conversation, nodes: conversation.nodes.map((node) => (growing.has(node.id) ? { ...node, ...growing.get(node.id), running: false, finish: "stopped", continues: true } : node)) });

/** An answer with what was generated after it. */
export const joined = (begun, more) => ({ ...more, text: begun.text + more.text, thoughts: begun.thoughts + more.thoughts, tokens: [...(begun.tokens ?? []), ...more.tokens] });

/** Runs a request; calls back with its answers as they grow, and returns them at their end. Never throws. `anyLimit`: its max_tokens is the page's own, and left out where the context has no room for it. */
export async function generate(kind, body, onChange, signal, anyLimit = false) {
  const start = performance.now();
  const answers = Array.from({ length: body.use_beam_search ? body.n || body.best_of || 1 : body.n || 1 }, emptyAnswer);
  const ask = (body) => request(routeOf(kind), { method: "POST", body: payloadOf(body), signal });
  let limit = body.max_tokens ?? null;
  const times = { usage: null, each: answers.map(() => ({ first: null, last: null })) };
  const show = frame(() => onChange(answers.map((answer) => ({ ...answer }))));
  try {
    const response = await ask(body).catch((error) => {
      if (!anyLimit || error.code !== "context_length_exceeded") throw error;
      limit = null;
      const { max_tokens, ...rest } = body;
      return ask(rest);
    });
    if (body.stream) await readStream(response, kind, answers, times, show);
    else Object.assign(answers[0], { text: await readText(response), finish: "stop" });
  } catch (error) {
    const stopped = error.name === "AbortError";
    if (!stopped && error instanceof TypeError) lost();
    for (const answer of answers) {
      if (!answer.finish) stopped ? (answer.finish = "stopped") : (answer.error = error instanceof TypeError ? "The connection to the server was lost." : error.message);
    }
  }
  show.cancel();
  // A form of the whole answer does not fit what comes after a part of it.
  const continues = !body.response_format;
  return answers.map((answer, i) => ({ ...answer, running: false, stats: statsOf(start, times, i), limit, continues }));
}

/** Takes the parts of a stream. Throws an Error, also where it ends before the answers do. */
async function readStream(response, kind, answers, times, show) {
  let complete = false;
  for await (const data of events(response)) {
    if (data === "[DONE]") {
      complete = true; // the response ends by itself, and the connection stays usable
      continue;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) times.usage = chunk.usage;
    if (chunk.type) complete = takeTranscript(answers[0], chunk, times);
    for (const choice of chunk.choices ?? []) take(answers, kind, choice, times);
    show();
  }
  if (complete) return;
  lost();
  throw new Error("The connection has ended before the answer did.");
}

async function readText(response) {
  const text = await response.text();
  return response.headers.get("content-type").startsWith("application/json") ? JSON.stringify(JSON.parse(text), null, 2) : text;
}

/** Something of an answer has come. */
function arrived(times, index) {
  const one = (times.each[index] ??= { first: null, last: null });
  one.last = performance.now();
  one.first ??= one.last;
}

/** An event of a transcription; whether it is the last. */
function takeTranscript(answer, { type, delta, text }, times) {
  arrived(times, 0);
  const isLast = type === "transcript.text.done";
  answer.text = isLast ? text : answer.text + delta;
  if (isLast) answer.finish = "stop";
  return isLast;
}

function take(answers, kind, choice, times) {
  while (answers.length <= choice.index) answers.push(emptyAnswer());
  const answer = answers[choice.index];
  const delta = kind === "chat" ? (choice.delta ?? {}) : { content: choice.text };
  const thoughts = delta.reasoning_content ?? delta.reasoning;
  if (delta.content || thoughts || delta.tool_calls?.length) arrived(times, choice.index);
  if (thoughts) {
    const { first, last } = times.each[choice.index];
    answer.thoughtSeconds = (last - first) / 1e3;
  }
  answer.text += delta.content ?? "";
  answer.thoughts += thoughts ?? "";
  for (const part of delta.tool_calls ?? []) {
    const call = (answer.calls[part.index ?? 0] ??= { id: "", name: "", arguments: "" });
    call.id ||= part.id ?? "";
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
  answer.tokens.push(...tokensOf(kind, choice.logprobs));
  answer.finish = choice.finish_reason ?? answer.finish;
  if (typeof choice.stop_reason === "string") answer.stopText = choice.stop_reason;
}

/** Tokens as { text, logprob, top: [[text, logprob], ...] }. */
function tokensOf(kind, logprobs) {
  if (!logprobs) return [];
  if (kind === "chat") {
    return (logprobs.content ?? []).map((one) => ({ text: one.token, logprob: one.logprob, top: (one.top_logprobs ?? []).map((other) => [other.token, other.logprob]) }));
  }
  return (logprobs.tokens ?? []).map((text, i) => ({ text, logprob: logprobs.token_logprobs[i], top: Object.entries(logprobs.top_logprobs?.[i] ?? {}) }));
}

/** The figures of an answer; what the server counts is of all answers of a request (`answers`) together. */
function statsOf(start, { each, usage }, index) {
  const { first } = each[index] ?? { first: null };
  if (first === null) return null;
  const came = each.filter((one) => one.first !== null);
  const [begin, end] = [Math.min(...came.map((one) => one.first)), Math.max(...came.map((one) => one.last))];
  const count = usage?.completion_tokens ?? usage?.output_tokens ?? null;
  const isSpeech = Boolean(usage?.output_tokens); // whose text comes in pieces of half a minute
  return {
    answers: each.length,
    firstToken: (first - start) / 1e3,
    seconds: (end - start) / 1e3,
    rate: !isSpeech && count > each.length && end > begin ? (count - each.length) / ((end - begin) / 1e3) : null,
    tokens: count,
    prompt: usage?.prompt_tokens ?? null,
    cached: usage?.prompt_tokens_details?.cached_tokens ?? null,
    drafted: usage?.completion_tokens_details?.accepted_prediction_tokens ?? null,
    rejected: usage?.completion_tokens_details?.rejected_prediction_tokens ?? null,
  };
}

/** Calls a function once a frame at most. */
function frame(call) {
  let wanted = 0;
  const schedule = () => {
    wanted ||= requestAnimationFrame(() => {
      wanted = 0;
      call();
    });
  };
  schedule.cancel = () => cancelAnimationFrame(wanted);
  return schedule;
}
