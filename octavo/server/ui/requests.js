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
export const kindsOf = (model) => Object.keys(KINDS).filter((kind) => !model || model.tasks.includes(KINDS[kind].task));
/** What files a conversation of a kind takes: "image", "audio" or nothing. */
export const takesOf = (kind, model) => KINDS[kind].takes ?? (kind === "chat" && model?.input_modalities.includes("image") ? "image" : "");

function contentOf({ content, files }) {
  const images = (files ?? []).filter((file) => file.url).map((file) => ({ type: "image_url", image_url: { url: file.url } }));
  return images.length ? [...images, ...(content ? [{ type: "text", text: content }] : [])] : content;
}

export const chosenOf = (turn) => turn.answers?.[turn.chosen ?? 0];
/** Whether a turn has only failed: it is no part of the conversation, and what it was about neither. */
export const hasFailed = (turn) => Boolean(chosenOf(turn)?.error && !chosenOf(turn).text && !chosenOf(turn).calls?.length);

function messagesOf({ system, turns }) {
  const messages = system ? [{ role: "system", content: system }] : [];
  turns.forEach((turn, i) => {
    if (hasFailed(turn) || (turn.role === "user" && turns[i + 1] && hasFailed(turns[i + 1]))) return;
    if (turn.role === "user") messages.push({ role: "user", content: contentOf(turn) });
    else if (turn.role === "tool") messages.push({ role: "tool", tool_call_id: turn.call, content: turn.content });
    else if (chosenOf(turn)) messages.push(messageOf(chosenOf(turn)));
  });
  return messages;
}

function messageOf({ text, calls }) {
  const message = { role: "assistant", content: text };
  if (calls?.length) message.tool_calls = calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
  return message;
}

/** Tokens after which a chat's answer ends unless somebody asks for more: a model that repeats itself fills its context. */
const MOST_TOKENS = 1024;

/** Settings that the page has of its own, by name, shown where nothing else is typed; `defaults`: those of the model. */
export function ownSettings(kind, model, defaults) {
  if (kind !== "chat" || !model || defaults.max_tokens) return {};
  return { max_tokens: Math.min(MOST_TOKENS, Math.floor(model.max_model_len / 2)) };
}

/** The settings of a request: those that were typed, and the page's own; one that was emptied is left to the model. */
export const settingsOf = ({ typed, values }, own) => ({ ...Object.fromEntries(Object.entries(own).filter(([name]) => !(name in typed))), ...values });

/** The body of the request that answers the last turn of a conversation; of a recording `file` has it. `begun`: the answer's text so far, which is gone on with. */
export function bodyOf(conversation, { model, settings, schema, tools, tokens, begun }) {
  const { kind } = conversation;
  const body = { model, ...settings };
  const asked = conversation.turns.findLast((turn) => turn.role === "user");
  if (KINDS[kind].takes) {
    // Other forms than text come whole.
    if (!body.response_format) body.stream = true;
    return { ...body, file: asked?.files[0] };
  }
  if (kind === "chat") body.messages = messagesOf(conversation);
  else body.prompt = asked?.content ?? "";
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  if (tools && kind === "chat") body.tools = tools;
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
