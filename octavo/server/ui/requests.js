// What is asked of a model: kinds of requests, their routes and bodies.

export const ALTERNATIVES = 5;

/** Kinds of conversations; `task`: what the model must be able to do. */
export const KINDS = {
  chat: { label: "Chat", who: "Assistant", task: "generate", route: "/v1/chat/completions", send: "Send", again: "Regenerate" },
  completion: { label: "Completion", who: "Completion", task: "generate", route: "/v1/completions", send: "Complete", again: "Complete again" },
  transcription: { label: "Transcription", who: "Transcription", task: "transcribe", route: "/v1/audio/transcriptions", send: "Transcribe", again: "Transcribe again", takes: "audio" },
  translation: { label: "Translation into English", who: "Translation", task: "transcribe", route: "/v1/audio/translations", send: "Translate", again: "Translate again", takes: "audio" },
};

export const routeOf = (kind) => KINDS[kind].route;
export const kindsOf = (model) => Object.keys(KINDS).filter((kind) => model?.tasks.includes(KINDS[kind].task));
/** What kinds of files a conversation takes: of "image", "audio" and "text". */
export function takesOf(kind, model) {
  if (KINDS[kind].takes) return [KINDS[kind].takes];
  return kind === "chat" ? [...["image", "audio"].filter((one) => model?.input_modalities.includes(one)), "text"] : [];
}

/** A text file as a part of a question: its name and its content, in a fence that its content does not close. */
function quotedFile({ name, text }) {
  const fence = "`".repeat(Math.max(3, ...[...text.matchAll(/`+/g)].map(([run]) => run.length + 1)));
  return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}\n\n`;
}

function contentOf({ content, files }) {
  const here = (files ?? []).filter((file) => file.url);
  const text = here.filter((file) => file.text !== undefined).map(quotedFile).join("") + content;
  const parts = here.filter((file) => file.text === undefined).map(partOf);
  return parts.length ? [...parts, ...(text ? [{ type: "text", text }] : [])] : text;
}

function partOf({ url, type }) {
  if (!type.startsWith("audio/")) return { type: "image_url", image_url: { url } };
  return { type: "input_audio", input_audio: { data: url.slice(url.indexOf(",") + 1), format: /mp3|mpeg/.test(type) ? "mp3" : /ogg|opus/.test(type) ? "ogg" : /flac/.test(type) ? "flac" : "wav" } };
}

/** Whether an answer has only failed: it is no part of the conversation, and what it was about neither. */
export const hasFailed = (node) => Boolean(node?.role === "assistant" && node.error && !node.text && !node.calls?.length);

function messagesOf(system, path) {
  const messages = system ? [{ role: "system", content: system }] : [];
  path.forEach((node, i) => {
    if (hasFailed(node) || (node.role === "user" && hasFailed(path[i + 1]))) return;
    if (node.role === "user") messages.push({ role: "user", content: contentOf(node) });
    else if (node.role === "tool") messages.push({ role: "tool", tool_call_id: node.call, content: node.content });
    else messages.push(messageOf(node));
  });
  return messages;
}

function messageOf({ text, calls }) {
  const message = { role: "assistant", content: text };
  if (calls?.length) message.tool_calls = calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
  return message;
}

/** Tokens after which an answer ends unless somebody asks for more: a model that repeats itself fills its context. */
const MOST_TOKENS = { chat: 1024, completion: 256 };

/** Settings that the page has of its own, by name, shown where nothing else is typed; none where the model has one. */
export function ownSettings(kind, model) {
  if (KINDS[kind].takes || !model?.max_model_len || model.default_sampling_params?.max_tokens) return {};
  return { max_tokens: Math.min(MOST_TOKENS[kind], Math.floor(model.max_model_len / 2)) };
}

/** The settings of a request: those that were typed, and the page's own; one that was emptied is left to the model. */
export const settingsOf = (typed, values, own) => ({ ...Object.fromEntries(Object.entries(own).filter(([name]) => !(name in typed))), ...values });

/**
 * The body of the request that answers the last message of a branch; of a recording `file` has it.
 * begun: the answer's text so far, which is gone on with; tokens: whether each token's alternatives are asked for.
 */
export function bodyOf({ kind, system }, path, { model, settings, schema, tools, prediction, tokens, begun }) {
  const body = { model, ...settings };
  const asked = path.findLast((node) => node.role === "user");
  if (KINDS[kind].takes) {
    // Other forms than text come whole.
    if (!body.response_format) body.stream = true;
    return { ...body, file: asked?.files[0] };
  }
  if (kind === "chat") body.messages = messagesOf(system, path);
  else body.prompt = asked?.content ?? "";
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  if (tools && kind === "chat") body.tools = tools;
  if (prediction?.trim() && kind === "chat") body.prediction = { type: "content", content: prediction };
  if (tokens) Object.assign(body, kind === "chat" ? { logprobs: true, top_logprobs: ALTERNATIVES } : { logprobs: ALTERNATIVES });
  if (begun) {
    delete body.n;
    delete body.best_of;
    if (kind === "chat") Object.assign(body, { messages: [...body.messages, { role: "assistant", content: begun }], add_generation_prompt: false, continue_final_message: true });
    else body.prompt += begun;
  }
  body.stream = true;
  body.stream_options = { include_usage: true };
  return body;
}

/** Fields of a form, [name, value] each: of a list one for each of its values. */
export const fieldsOf = ({ file, ...body }) => Object.entries(body).flatMap(([name, value]) => (Array.isArray(value) ? value.map((one) => [`${name}[]`, String(one)]) : [[name, String(value)]]));

/** What is sent: JSON, or a form with the recording. */
export function payloadOf(body) {
  if (!body.file) return body;
  const form = new FormData();
  for (const [name, value] of fieldsOf(body)) form.append(name, value);
  form.append("file", body.file.blob, body.file.name);
  return form;
}
