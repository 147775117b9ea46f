// Where a message is written and files are added: chosen, dropped anywhere on the page, pasted, or spoken.

import { html, names, useEffect, useLayoutEffect, useRef, useState } from "./dom.js";
import { readFile, sortOf } from "./files.js";
import { canRecord, MOST_SECONDS, record } from "./recorder.js";
import { KINDS, takesOf } from "./requests.js";
import { Files } from "./turns.js";
import { Icon, IconButton } from "./widgets.js";

const ACCEPT = { image: "image/*", audio: "audio/*,video/*", text: "text/*,.md,.json,.csv,.py,.js,.ts,.c,.cpp,.h,.rs,.go,.java,.sh,.sql,.yaml,.yml,.toml,.xml,.html,.css,.log,.ini,.tex" };
const SORTS = { image: "pictures", audio: "recordings", text: "text files" };
const HINTS = { chat: "Ask something", completion: "Begin a text; the model goes on with it" };

/** `conversation`: its id, and `isNew`: it has no message; `begun`: { text }, a question that an example puts here; a new object puts it again. */
export function Composer({ conversation, isNew, kind, kinds, model, running, begun, onKind, onSend, onStop }) {
  const [text, setText] = useState("");
  const [files, setFiles] = useState([]);
  const [problem, setProblem] = useState("");
  const field = useRef();
  const takes = takesOf(kind, model);
  const isSpeech = Boolean(KINDS[kind].takes);
  const sent = files.filter((file) => takes.includes(sortOf(file)));
  const ready = isSpeech ? sent.length > 0 : text.trim() || sent.length > 0;
  const focus = () => field.current?.focus({ preventScroll: true });
  useEffect(() => {
    // On a screen that is touched, the keyboard would cover the page; who chooses a kind of request stays there.
    if (isNew && matchMedia("(hover: hover)").matches && document.activeElement?.tagName !== "SELECT") focus();
  }, [isNew, conversation]);
  useLayoutEffect(() => {
    if (!begun) return;
    setText(begun.text);
    focus();
  }, [begun]);
  useLayoutEffect(() => {
    if (!field.current) return;
    field.current.style.height = "auto";
    field.current.style.height = `${field.current.scrollHeight}px`;
  }, [text, kind]);

  const add = async (chosen) => {
    const problems = [];
    const read = [];
    for (const file of chosen) {
      try {
        // What is said to be a recording may have no type.
        read.push(await readFile(checked(file, takes, kind), isSpeech && sortOf(file) !== "audio" ? { type: "audio/unknown" } : {}));
      } catch (error) {
        problems.push(error.message);
      }
    }
    setProblem(problems.join(" "));
    // A recording is asked about alone.
    if (read.length) setFiles((now) => (isSpeech ? read.slice(-1) : [...now, ...read]));
    focus();
  };
  const isOver = useDropped(add);

  const send = () => {
    if (!ready || running || !onSend(isSpeech ? "" : text, sent)) return;
    setProblem("");
    setFiles([]);
    if (kind === "chat") setText("");
  };
  const onKey = (event) => {
    if (event.key === "Escape" && running) onStop();
    else if (event.key === "Enter" && !event.shiftKey && !event.isComposing && kind === "chat") {
      event.preventDefault();
      send();
    }
  };
  const onPaste = (event) => {
    const pasted = [...event.clipboardData.files];
    if (!pasted.length || event.clipboardData.types.includes("text/plain")) return;
    event.preventDefault();
    add(pasted);
  };
  const onChoose = (event) => {
    add([...event.target.files]);
    event.target.value = "";
  };
  return html`<form class=${names("composer", isOver && "dropping")} onPaste=${onPaste} onSubmit=${(event) => (event.preventDefault(), send())}>
    ${problem && html`<p class="note error" role="alert">${problem}</p>`}
    <div class="composer-box">
      <${Files} files=${sent} onRemove=${(file) => setFiles(files.filter((one) => one !== file))} />
      ${isSpeech
        ? !sent.length && html`<p class="speech-hint">Choose a recording, drop one here, paste one${canRecord() ? ", or speak" : ""}.</p>`
        : html`<label class="hidden" for="question">${kind === "chat" ? "Message" : "Prompt"}</label>
          <textarea id="question" ref=${field} rows=${kind === "chat" ? 1 : 4} value=${text} placeholder=${HINTS[kind]} aria-describedby="question-keys" onKeyDown=${onKey} onInput=${(event) => setText(event.target.value)}></textarea>`}
      <div class="composer-row">
        ${takes.length > 0 && html`<label class="icon-button attach tip-up tip-right" data-tip=${`Add ${listed(takes.map((one) => SORTS[one]))}`}><${Icon} name="attach" /><input type="file" aria-label=${`Add ${listed(takes.map((one) => SORTS[one]))}`} multiple=${!isSpeech} accept=${takes.map((one) => ACCEPT[one]).join(",")} onChange=${onChoose} /></label>`}
        ${kinds.length > 1 && html`<span class="kind"><select aria-label="Kind of request" value=${kind} onChange=${(event) => onKind(event.target.value)}>${kinds.map((one) => html`<option value=${one}>${KINDS[one].label}</option>`)}</select></span>`}
        <span class="keys" id="question-keys">${kind === "chat" ? "Enter sends, Shift+Enter begins a line" : ""}</span>
        ${isSpeech && canRecord() && html`<${Record} onFile=${(file) => add([file])} onProblem=${setProblem} />`}
        ${running
          ? html`<button type="button" class="send stop" aria-label="Stop" onClick=${onStop}><${Icon} name="stop" /></button>`
          : html`<button class="send" aria-label=${KINDS[kind].send} disabled=${!ready}><${Icon} name="arrow_up" /></button>`}
      </div>
    </div>
  </form>`;
}

const listed = (words) => (words.length > 1 ? `${words.slice(0, -1).join(", ")} and ${words.at(-1)}` : words[0]);

/** A file, if a conversation takes its kind; what is in it only the server can say. Throws an Error. */
function checked(file, takes, kind) {
  const sort = sortOf(file);
  if (takes.includes(sort) || KINDS[kind].takes) return file;
  if (!takes.length) throw new Error(`${file.name} was left out: a completion begins with text alone.`);
  throw new Error(`${file.name} was left out: this model reads ${kind === "chat" ? listed(takes.map((one) => SORTS[one])) : "recordings"} only.`);
}

/** Takes files that are dropped on the page, which would be left for them otherwise. Whether some are held over it. */
function useDropped(onFiles) {
  const [isOver, setOver] = useState(false);
  const latest = useRef();
  latest.current = onFiles;
  useEffect(() => {
    const over = (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      setOver(true);
    };
    const leave = (event) => !event.relatedTarget && setOver(false);
    const drop = (event) => {
      setOver(false);
      if (!event.dataTransfer.files.length) return;
      event.preventDefault();
      latest.current([...event.dataTransfer.files]);
    };
    addEventListener("dragover", over);
    addEventListener("dragleave", leave);
    addEventListener("drop", drop);
    return () => {
      removeEventListener("dragover", over);
      removeEventListener("dragleave", leave);
      removeEventListener("drop", drop);
    };
  }, []);
  return isOver;
}

/** The microphone's button. */
function Record({ onFile, onProblem }) {
  const [running, setRunning] = useState(null);
  const [seconds, setSeconds] = useState(0);
  const begin = async () => {
    onProblem("");
    setSeconds(0);
    try {
      setRunning(await record());
    } catch (error) {
      onProblem(error.message);
    }
  };
  const end = async () => {
    setRunning(null);
    try {
      onFile(await running.stop());
    } catch (error) {
      onProblem(`What was recorded cannot be read: ${error.message}`);
    }
  };
  useEffect(() => {
    if (!running) return undefined;
    const timer = setInterval(() => setSeconds((now) => now + 1), 1000);
    return () => clearInterval(timer);
  }, [running]);
  const held = useRef();
  held.current = running;
  useEffect(() => () => void held.current?.stop(), []);
  useEffect(() => void (running && seconds >= MOST_SECONDS && end()), [seconds]);
  if (!running) return html`<${IconButton} icon="mic" label="Record" side="up" onClick=${begin} />`;
  return html`<button type="button" class="button small danger" onClick=${end}>Stop recording (${seconds} s)</button>`;
}
