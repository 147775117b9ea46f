// The server: requests with the key of this tab, streams of server-sent events, and whether it answers at all.

const KEY = "octavo-key";
const listeners = new Set();
let state = { connection: "unknown", needsKey: false, why: "" };
let watching = null;

export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** Calls back with { connection: "ok" | "lost" | "unknown", needsKey } now and whenever it changes. */
export function onServerState(listener) {
  listeners.add(listener);
  listener(state);
  return () => listeners.delete(listener);
}

function setState(change) {
  const next = { ...state, ...change };
  if (Object.keys(next).every((name) => next[name] === state[name])) return;
  state = next;
  for (const listener of [...listeners]) listener(state);
}

/** The key stays in this tab and goes with it. */
export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
  setState({ needsKey: false, why: "" });
}

function headers(more) {
  const key = sessionStorage.getItem(KEY);
  return { ...more, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

/** A response with a status below 400; `body`: a form, or what is sent as JSON. Throws ApiError, or an AbortError of the signal. */
export async function request(path, { method = "GET", body, signal } = {}) {
  const isJson = body && !(body instanceof FormData);
  const options = { method, signal, headers: headers(isJson ? { "Content-Type": "application/json" } : {}), cache: "no-store" };
  if (body) options.body = isJson ? JSON.stringify(body) : body;
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    lost();
    throw new ApiError("The server does not answer.", 0, "unreachable");
  }
  setState({ connection: "ok" });
  if (response.ok) return response;
  let message = `The server answered ${response.status}.`;
  let code = "";
  try {
    const { error } = await response.json();
    message = error.message ?? message;
    code = error.code ?? "";
  } catch {
    // no JSON: the status says enough
  }
  if (response.status === 401) setState({ needsKey: true, why: sessionStorage.getItem(KEY) ? message : "" });
  throw new ApiError(message, response.status, code);
}

export const getJson = async (path, options) => (await request(path, options)).json();

/** The data of each server-sent event of a response, until it ends. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split(/\r?\n\r?\n/);
      rest = parts.pop();
      for (const part of parts) {
        const lines = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The server has gone, perhaps in the middle of a stream: asks for it until it is back. */
export function lost() {
  setState({ connection: "lost" });
  if (watching) return;
  watching = setInterval(async () => {
    try {
      const response = await fetch("/health", { cache: "no-store" });
      if (response.status === 503 && (await response.json()).error?.code === "loading") return;
    } catch {
      return;
    }
    clearInterval(watching);
    watching = null;
    setState({ connection: "ok" });
  }, 1500);
}
