// Where a message is written and files are added: chosen, dropped anywhere on the page, pasted, or spoken.

import { html, useEffect, useRef, useState } from "./dom.js";
import { readFile } from "./files.js";
import { canRecord, MOST_SECONDS, record } from "./recorder.js";
import { KINDS, takesOf } from "./requests.js";
import { File } from "./turns.js";

export function Composer({ kind, model, running, onSend, onStop }) {
  const [text, setText] = useState("");
  const [files, setFiles] = useState([]);
  const [problem, setProblem] = useState("");
  const takes = takesOf(kind, model);
  const isSpeech = takes === "audio";
  const sent = takes ? files : [];
  const ready = isSpeech ? sent.length > 0 : text.trim() || sent.length > 0;

  const add = async (chosen) => {
    const problems = [];
    const read = [];
    for (const file of chosen) {
      try {
        read.push(await readFile(checked(file, takes, kind)));
      } catch (error) {
        problems.push(error.message);
      }
    }
    setProblem(problems.join(" "));
    // A recording is asked about alone.
    if (read.length) setFiles((now) => (isSpeech ? read.slice(-1) : [...now, ...read]));
  };
  useDropped(add);

  const send = () => {
    if (!ready || running || !onSend(isSpeech ? "" : text, sent)) return;
    setProblem("");
    setFiles([]);
    if (kind === "chat") setText("");
  };
  const onKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && kind === "chat") {
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
  return html`<form class="composer" onPaste=${onPaste} onSubmit=${(event) => (event.preventDefault(), send())}>
    ${isSpeech
      ? !sent.length && html`<p class="quiet">Choose a recording, drop one here, paste one${canRecord() ? ", or speak" : ""}.</p>`
      : html`<label class="hidden" for="question">${kind === "chat" ? "Message" : "Prompt"}</label>
        <textarea id="question" rows=${kind === "chat" ? 3 : 8} value=${text} placeholder=${kind === "chat" ? "Message (Enter sends, Shift+Enter begins a line)" : "Text to complete"} onKeyDown=${onKey} onInput=${(event) => setText(event.target.value)}></textarea>`}
    ${sent.length > 0 && html`<div class="files">${sent.map((file) => html`<${File} key=${file.id} file=${file} onRemove=${() => setFiles(files.filter((one) => one !== file))} />`)}</div>`}
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    <div class="tools">
      ${takes && html`<label class="attach">Add ${takes} <input type="file" multiple=${!isSpeech} accept=${isSpeech ? "audio/*,video/*" : "image/*"} onChange=${onChoose} /></label>`}
      ${isSpeech && canRecord() && html`<${Record} onFile=${(file) => add([file])} onProblem=${setProblem} />`}
      ${running ? html`<button type="button" class="primary danger" onClick=${onStop}>Stop</button>` : html`<button class="primary" disabled=${!ready}>${KINDS[kind].send}</button>`}
    </div>
  </form>`;
}

/** A file, if a conversation takes its kind; what is in it only the server can say. Throws an Error. */
function checked(file, takes, kind) {
  if (!takes) throw new Error(kind === "chat" ? `${file.name} was left out: this model reads text alone.` : `${file.name} was left out: a completion begins with text alone.`);
  if (takes === "image" && !file.type.startsWith("image/")) throw new Error(`${file.name} was left out: it is no image.`);
  return file;
}

/** Files that are dropped on the page, which would be left for them otherwise. */
function useDropped(onFiles) {
  const latest = useRef();
  latest.current = onFiles;
  useEffect(() => {
    const over = (event) => event.dataTransfer.types.includes("Files") && event.preventDefault();
    const drop = (event) => {
      if (!event.dataTransfer.files.length) return;
      event.preventDefault();
      latest.current([...event.dataTransfer.files]);
    };
    addEventListener("dragover", over);
    addEventListener("drop", drop);
    return () => {
      removeEventListener("dragover", over);
      removeEventListener("drop", drop);
    };
  }, []);
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
  if (!running) return html`<button type="button" onClick=${begin}>Record</button>`;
  return html`<button type="button" class="danger" onClick=${end}>Stop recording (${seconds} s)</button>`;
}
