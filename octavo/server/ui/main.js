// The page: its two views, the key that the server may ask for, and whether the server answers.

import { html, render, useEffect, useRef, useState } from "./dom.js";
import { getJson, onServerState, setKey } from "./api.js";
import { Playground } from "./playground.js";
import { Engine } from "./engine.js";

const mode = document.querySelector('meta[name="octavo-mode"]').content;
const VIEWS = { playground: "Playground", engine: "Engine" };
const THEMES = ["auto", "light", "dark"];

function App() {
  const [view, setView] = useState(readView);
  const [server, setServer] = useState({ connection: "unknown", needsKey: false });
  const [models, setModels] = useState([]);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    const change = () => setView(readView());
    addEventListener("hashchange", change);
    return () => removeEventListener("hashchange", change);
  }, []);
  useEffect(() => onServerState(setServer), []);
  useEffect(() => {
    if (mode === "recording" || server.needsKey || models.length) return;
    getJson("/v1/models").then(({ data }) => (setModels(data), setProblem(""), (document.title = `${data[0].id} · Octavo`)), (error) => setProblem(error.message));
  }, [server]);
  const lost = server.connection === "lost";
  return html`
    <header class="top">
      <h1><a href="/">Octavo</a></h1>
      ${mode === "live" && html`<nav aria-label="Views">${Object.entries(VIEWS).map(([name, title]) => html`<a href=${`#${name}`} aria-current=${view === name ? "page" : undefined}>${title}</a>`)}</nav>`}
      ${models.length > 0 && html`<span class="served">${models[0].status ? `${models.length} models` : models[0].id}</span>`}
      <${Theme} />
    </header>
    ${lost && html`<p class="banner" role="alert">The server does not answer. This page tries again until it does.</p>`}
    <main>
      ${server.needsKey ? html`<${AskKey} why=${server.why} />` : problem && !models.length && mode === "live" && !lost ? html`<p class="error pad" role="alert">${problem}</p>` : null}
      ${!server.needsKey && (view === "engine" || mode === "recording" ? html`<${Engine} mode=${mode} models=${models} />` : html`<${Playground} models=${models} />`)}
    </main>`;
}

function readView() {
  const name = location.hash.slice(1);
  return name in VIEWS ? name : "playground";
}

function AskKey({ why }) {
  const [key, setValue] = useState("");
  const field = useRef();
  useEffect(() => field.current.focus(), []);
  return html`<form class="ask-key card" onSubmit=${(event) => (event.preventDefault(), setKey(key.trim()))}>
    <h2>This server asks for an API key</h2>
    ${why && html`<p class="error" role="alert">${why}</p>`}
    <label for="key">API key</label>
    <input id="key" ref=${field} type="password" autocomplete="off" value=${key} onInput=${(event) => setValue(event.target.value)} />
    <p class="help">It stays in this tab and is forgotten when the tab is closed.</p>
    <button class="primary" disabled=${!key.trim()}>Use this key</button>
  </form>`;
}

function Theme() {
  const [theme, setTheme] = useState(() => localStorage.getItem("octavo-theme") ?? "auto");
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
    localStorage.setItem("octavo-theme", theme);
    dispatchEvent(new Event("octavo-theme"));
  }, [theme]);
  return html`<label class="theme"><span class="hidden">Colours</span><select value=${theme} onChange=${(event) => setTheme(event.target.value)}>${THEMES.map((name) => html`<option>${name}</option>`)}</select></label>`;
}

document.documentElement.dataset.theme = localStorage.getItem("octavo-theme") ?? "auto";
const app = document.getElementById("app");
app.replaceChildren();
render(html`<${App} />`, app);
