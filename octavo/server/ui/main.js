// The page: its two views, the key that the server may ask for, and whether the server answers.

import { html, render, useEffect, useRef, useState } from "./dom.js";
import { getJson, onServerState, setKey } from "./api.js";
import { Engine } from "./engine.js";
import { Playground } from "./playground.js";
import { applyTheme, ThemeButton } from "./theme.js";
import { IconButton, useMedia } from "./widgets.js";

const mode = document.querySelector('meta[name="octavo-mode"]').content;
const VIEWS = { chat: "Chat", engine: "Engine" };
const MODEL = "octavo-model";

function App() {
  const [view, setView] = useState(readView);
  const [server, setServer] = useState({ connection: "unknown", needsKey: false });
  const [models, setModels] = useState([]);
  const [chosen, setChosen] = useState(() => localStorage.getItem(MODEL) ?? "");
  const [problem, setProblem] = useState("");
  const [panels, setAllPanels] = useState({ history: false, historyDocked: true, settings: false });
  const setPanels = (change) => setAllPanels((now) => ({ ...now, ...change }));
  const isDocked = useMedia("(min-width: 60rem)");
  useEffect(() => {
    const change = () => setView(readView());
    addEventListener("hashchange", change);
    return () => removeEventListener("hashchange", change);
  }, []);
  useEffect(() => onServerState(setServer), []);
  useEffect(() => {
    if (mode === "recording" || server.needsKey || models.length) return;
    getJson("/v1/models").then(({ data }) => (setModels(data), setProblem("")), (error) => setProblem(error.message));
  }, [server]);
  const model = models.find((one) => one.id === chosen) ?? models[0];
  useEffect(() => {
    if (model) document.title = `${model.id} · Octavo`;
  }, [model?.id]);
  const choose = (id) => {
    setChosen(id);
    localStorage.setItem(MODEL, id);
    // Another model may have been loaded since.
    getJson("/v1/models").then(({ data }) => setModels(data), () => {});
  };
  const lost = server.connection === "lost";
  const isEngine = view === "engine" || mode === "recording";
  const isChat = !isEngine && !server.needsKey;
  const toggleHistory = () => setPanels(isDocked ? { historyDocked: !panels.historyDocked } : { history: true });
  return html`
    <header class="top">
      ${isChat && html`<${IconButton} icon="menu" label="Conversations" side="right" aria-expanded=${(isDocked ? panels.historyDocked : panels.history) ? "true" : "false"} onClick=${toggleHistory} />`}
      <h1><a class="brand" href="/" aria-label="Octavo"><img class="logo" src="/ui/icon.svg" alt="" width="22" height="22" /><span>Octavo</span></a></h1>
      ${mode === "live" && html`<nav class="segments" aria-label="Views">${Object.entries(VIEWS).map(([name, title]) => html`<a href=${`#${name}`} aria-current=${view === name ? "page" : undefined}>${title}</a>`)}</nav>`}
      <span class="spring"></span>
      ${isChat && model && html`<${Model} models=${models} model=${model} onModel=${choose} />`}
      <${ThemeButton} />
      ${isChat && html`<${IconButton} icon="settings" label="Settings" side="left" aria-expanded=${panels.settings ? "true" : "false"} onClick=${() => setPanels({ settings: !panels.settings })} />`}
    </header>
    ${lost && html`<p class="banner" role="alert">The server does not answer. This page tries again until it does.</p>`}
    <main>
      ${server.needsKey ? html`<${AskKey} why=${server.why} />` : problem && !models.length && mode === "live" && !lost ? html`<p class="note error pad" role="alert">${problem}</p>` : null}
      ${!server.needsKey && mode === "live" && html`<div class="view" hidden=${isEngine}><${Playground} models=${models} model=${model} onModel=${choose} panels=${isEngine ? { ...panels, history: false, settings: false } : panels} setPanels=${setPanels} /></div>`}
      ${!server.needsKey && isEngine && html`<${Engine} mode=${mode} models=${models} model=${model} />`}
    </main>`;
}

function readView() {
  const name = location.hash.slice(1);
  return name in VIEWS ? name : "chat";
}

const MANY = (model) => (model.parent ? `${model.id} (adapter)` : model.loaded === false ? `${model.id} (not loaded)` : model.id);

/** The model that is asked; one alone is only named. */
function Model({ models, model, onModel }) {
  if (models.length < 2) return html`<span class="model cut" title=${model.id}>${model.id}</span>`;
  return html`<span class="model choose-model"><select aria-label="Model" value=${model.id} onChange=${(event) => onModel(event.target.value)}>${models.map((one) => html`<option value=${one.id}>${MANY(one)}</option>`)}</select></span>`;
}

function AskKey({ why }) {
  const [key, setValue] = useState("");
  const field = useRef();
  useEffect(() => field.current.focus(), []);
  return html`<form class="ask-key card" onSubmit=${(event) => (event.preventDefault(), setKey(key.trim()))}>
    <h2>This server asks for an API key</h2>
    ${why && html`<p class="note error" role="alert">${why}</p>`}
    <div class="field"><label for="key">API key</label>
    <input id="key" ref=${field} type="password" autocomplete="off" value=${key} onInput=${(event) => setValue(event.target.value)} /></div>
    <p class="help">It stays in this tab and is forgotten when the tab is closed.</p>
    <button class="button primary" disabled=${!key.trim()}>Use this key</button>
  </form>`;
}

applyTheme();
const app = document.getElementById("app");
app.replaceChildren();
render(html`<${App} />`, app);
