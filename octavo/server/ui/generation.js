// One request for answers: its body, and the answers as their parts arrive.

import { request, events, lost } from "./api.js";

export const ALTERNATIVES = 5;

const ROUTES = { chat: "/v1/chat/completions", completion: "/v1/completions" };
export const routeOf = (kind) => ROUTES[kind];

function contentOf({ content, files }) {
  if (!files?.length) return content;
  const parts = files.map((file) =>
    file.type.startsWith("image/")
      ? { type: "image_url", image_url: { url: file.url } }
      : { type: "input_audio", input_audio: { data: file.url.split(",")[1], format: /mp3|mpeg/.test(file.type) ? "mp3" : "wav" } },
  );
  return [...parts, { type: "text", text: content }];
}

function messagesOf(conversation) {
  const messages = conversation.system ? [{ role: "system", content: conversation.system }] : [];
  for (const turn of conversation.turns) {
    if (turn.role === "user") messages.push({ role: "user", content: contentOf(turn) });
    else if (turn.role === "tool") messages.push({ role: "tool", tool_call_id: turn.call, content: turn.content });
    else {
      const answer = turn.answers[turn.chosen ?? 0];
      if (!answer) continue;
      const message = { role: "assistant", content: answer.text };
      if (answer.calls?.length) message.tool_calls = answer.calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
      messages.push(message);
    }
  }
  return messages;
}

/** The body of the request that answers the last turn of a conversation. */
export function bodyOf(conversation, { model, settings, schema, tools, tokens }) {
  const body = { model, ...settings };
  if (conversation.kind === "chat") body.messages = messagesOf(conversation);
  else body.prompt = conversation.turns.findLast((turn) => turn.role === "user")?.content ?? "";
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  if (tools && conversation.kind === "chat") body.tools = tools;
  if (tokens) Object.assign(body, conversation.kind === "chat" ? { logprobs: true, top_logprobs: ALTERNATIVES } : { logprobs: ALTERNATIVES });
  body.stream = true;
  body.stream_options = { include_usage: true };
  return body;
}

const emptyAnswer = () => ({ text: "", thoughts: "", calls: [], tokens: [], running: true, finish: null, error: null, stats: null });

/** Runs a request; calls back with its answers as they grow, and returns them at their end. Never throws. */
export async function generate(kind, body, onChange, signal) {
  const start = performance.now();
  const answers = Array.from({ length: body.use_beam_search ? body.n || body.best_of || 1 : body.n || 1 }, emptyAnswer);
  const times = { first: null, last: null, usage: null };
  const show = frame(() => onChange(answers.map((answer) => ({ ...answer }))));
  let complete = false;
  try {
    const response = await request(routeOf(kind), { method: "POST", body, signal });
    for await (const data of events(response)) {
      if (data === "[DONE]") {
        complete = true; // the response ends by itself, and the connection stays usable
        continue;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) times.usage = chunk.usage;
      for (const choice of chunk.choices ?? []) take(answers, kind, choice, times);
      show();
    }
    if (!complete) {
      lost();
      throw new Error("The connection has ended before the answer did.");
    }
  } catch (error) {
    const stopped = error.name === "AbortError";
    if (!stopped && error instanceof TypeError) lost();
    for (const answer of answers) {
      if (!answer.finish) stopped ? (answer.finish = "stopped") : (answer.error = error instanceof TypeError ? "The connection to the server was lost." : error.message);
    }
  }
  show.cancel();
  const stats = statsOf(start, times);
  return answers.map((answer) => ({ ...answer, running: false, stats }));
}

function take(answers, kind, choice, times) {
  while (answers.length <= choice.index) answers.push(emptyAnswer());
  const answer = answers[choice.index];
  const delta = kind === "chat" ? (choice.delta ?? {}) : { content: choice.text };
  const thoughts = delta.reasoning_content ?? delta.reasoning;
  if (delta.content || thoughts || delta.tool_calls?.length) {
    times.last = performance.now();
    times.first ??= times.last;
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
}

/** Tokens as { text, logprob, top: [[text, logprob], ...] }. */
function tokensOf(kind, logprobs) {
  if (!logprobs) return [];
  if (kind === "chat") {
    return (logprobs.content ?? []).map((one) => ({ text: one.token, logprob: one.logprob, top: (one.top_logprobs ?? []).map((other) => [other.token, other.logprob]) }));
  }
  return (logprobs.tokens ?? []).map((text, i) => ({ text, logprob: logprobs.token_logprobs[i], top: Object.entries(logprobs.top_logprobs?.[i] ?? {}) }));
}

function statsOf(start, { first, last, usage }) {
  if (first === null) return null;
  const count = usage?.completion_tokens ?? null;
  return {
    firstToken: (first - start) / 1e3,
    rate: count > 1 && last > first ? (count - 1) / ((last - first) / 1e3) : null,
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
