// The playground: conversations, completions and recordings with the served models and their adapters.

import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./dom.js";
import { Composer } from "./composer.js";
import { newConversation, newId, pathBefore, pathOf, versionsOf, withAnswers, withChanges, withChosen, withMessages, without } from "./conversations.js";
import { withFiles } from "./files.js";
import { emptyAnswer, generate, joined, setGrowing } from "./generation.js";
import { History, useHistory } from "./history.js";
import { bodyOf, KINDS, kindsOf, ownSettings, settingsOf } from "./requests.js";
import { Samples } from "./samples.js";
import { EXAMPLE_TOOL, readTyped, Settings, useFields, useOptions } from "./settings.js";
import { Turn } from "./turns.js";
import { useAbout, Welcome } from "./welcome.js";
import { Drawer, Icon, useDialog, useMedia } from "./widgets.js";

/** `panels`: which of { history, settings } are open, and `setPanels` changes some of them. */
export function Playground({ models, model, onModel, panels, setPanels }) {
  const [current, setCurrent] = useState(() => newConversation());
  const [options, setOptions] = useOptions();
  const [runs, setRuns] = useState(new Map());
  const [problem, setProblem] = useState("");
  const [begun, setBegun] = useState(null);
  const running = runs.has(current.id);
  const history = useHistory(current, running);
  const latest = useRef(current);
  latest.current = current;
  const kinds = kindsOf(model);
  const isServed = kinds.includes(current.kind);
  const own = ownSettings(current.kind, model);
  const { fields, error, load } = useFields(current.kind, Boolean(model));
  const about = useAbout(model);
  const path = useMemo(() => pathOf(current), [current.nodes, current.chosen]);

  /** Changes a conversation, which may no longer be the one that is shown. */
  const update = (id, act) => {
    if (latest.current.id !== id) return history.change(id, act);
    latest.current = act(latest.current);
    setCurrent(latest.current);
  };
  const open = async (conversation) => {
    history.keep(latest.current);
    setProblem("");
    setPanels({ history: false });
    latest.current = conversation;
    setCurrent(conversation);
    const filled = await withFiles(conversation);
    const files = new Map(filled.nodes.filter((node) => node.files).map((node) => [node.id, { files: node.files }]));
    // What was answered meanwhile stays.
    if (filled !== conversation && latest.current.id === conversation.id) update(conversation.id, (now) => ({ ...withChanges(now, files), changed: now.changed }));
  };
  const begin = (kind = current.kind) => open(newConversation(kind, current.system));
  useEffect(() => {
    if (kinds.length && !kinds.includes(current.kind) && !current.nodes.length) setCurrent(newConversation(kinds[0], current.system));
  }, [model, current]);

  /** The body of the request that answers the end of a branch; null, and the reason is shown, if what was typed beside it is wrong. */
  const prepare = (conversation, branch, more = {}) => {
    try {
      const body = request(conversation, branch, more);
      if ("file" in body && !body.file?.blob) throw new Error("The recording is no longer in this browser: choose it again.");
      return body;
    } catch (reason) {
      setProblem(reason.message);
      return null;
    }
  };
  const request = (conversation, branch, more = {}) => {
    const { typed, tokens, prediction } = options;
    if (!fields && Object.keys(typed).length) throw new Error("The settings are still being loaded: try again in a moment.");
    const { values, wrong } = readTyped(fields ?? [], typed);
    if (wrong.length) throw new Error(`These settings are no JSON: ${wrong.join(", ")}.`);
    return bodyOf(conversation, branch, { model: model?.id, settings: settingsOf(typed, values, own), tokens, prediction, ...parsed(options), ...more });
  };

  /** Runs a request whose answers have these ids; `before`: an answer that is gone on with. */
  const run = async ({ id, kind }, ids, body, before = null) => {
    setProblem("");
    const abort = new AbortController();
    setRuns((now) => new Map(now).set(id, abort));
    const whole = (answer) => (before ? joined(before, answer) : answer);
    const show = (answers) => ids.forEach((one, i) => answers[i] && setGrowing(one, whole(answers[i])));
    show(ids.map(emptyAnswer));
    const answers = await generate(kind, body, show, abort.signal, "max_tokens" in own && !("max_tokens" in options.typed));
    update(id, (now) => withChanges(now, new Map(ids.map((one, i) => [one, whole(answers[i])]))));
    for (const one of ids) setGrowing(one, null);
    setRuns((now) => new Map([...now].filter(([other]) => other !== id)));
    if (model.loaded === false) onModel(model.id); // it is loaded now
  };

  /** Answers a message. Whether it could be sent. */
  const answer = (conversation, parent) => {
    const branch = pathOf(conversation);
    const body = prepare(conversation, branch.slice(0, branch.findIndex((one) => one.id === parent) + 1));
    if (!body) return false;
    const batch = newId();
    const count = KINDS[conversation.kind].takes ? 1 : Number(body.n) || (body.use_beam_search && Number(body.best_of)) || 1;
    const answers = Array.from({ length: Math.min(count, 64) }, () => ({ id: newId(), role: "assistant", batch, ...emptyAnswer() }));
    const next = withAnswers(conversation, parent, answers);
    latest.current = next;
    setCurrent(next);
    void run(next, answers.map((one) => one.id), body);
    return true;
  };
  const say = (parent, messages) => {
    const next = withMessages(latest.current, parent, messages);
    return answer(next, pathOf(next).at(-1).id);
  };

  // A completion has one prompt: another one is another version of it.
  const send = (content, files) => say(current.kind === "chat" ? (path.at(-1)?.id ?? "") : "", [{ role: "user", content, files }]);
  const actions = useRef({}).current;
  Object.assign(actions, {
    edit: (node, content, files) => say(node.parent, [{ role: "user", content, files }]),
    regenerate: (node) => answer(latest.current, node.parent),
    useTools: (node, results) => say(node.id, results),
    choose: (node) => update(current.id, (now) => withChosen(now, node)),
    remove: (node) => update(current.id, (now) => without(now, node.id)),
    goOn: (node) => {
      const body = prepare(latest.current, pathBefore(path, node.id), { begun: node.text });
      if (body) void run(latest.current, [node.id], body, node);
    },
  });
  const remove = (conversation) => {
    runs.get(conversation.id)?.abort();
    history.remove(conversation.id);
    if (conversation.id !== latest.current.id) return;
    latest.current = newConversation(current.kind, current.system);
    setCurrent(latest.current);
  };
  const rename = (conversation, title) => (conversation.id === current.id ? update(current.id, (now) => ({ ...now, title })) : history.change(conversation.id, (now) => ({ ...now, title })));
  const takeExample = ({ text, attach, tool }) => {
    setBegun({ text });
    if (tool && !options.tools.trim()) setOptions({ tools: EXAMPLE_TOOL });
    if (attach) document.querySelector(".composer input[type=file]")?.click();
  };

  const isDocked = useMedia("(min-width: 60rem)");
  const settingsDocked = useMedia("(min-width: 78rem)");
  const list = html`<${History} list=${history.list} current=${current} running=${runs} onOpen=${(one) => one.id !== current.id && open(one)} onNew=${() => begin(isServed ? current.kind : kinds[0])} onRemove=${remove} onRename=${rename} onImport=${history.add} onClose=${isDocked ? undefined : () => setPanels({ history: false })} />`;
  const settings = isServed && html`<${Settings} kind=${current.kind} fields=${fields} error=${error} onLoad=${load} options=${options} setOptions=${setOptions} own=${own} model=${model} models=${models} onModel=${onModel}
    system=${current.system} onSystem=${(system) => update(current.id, (now) => ({ ...now, system, changed: Date.now() }))}><${Sample} kind=${current.kind} make=${() => request(current, path.slice(0, path.findLastIndex((node) => node.role !== "assistant") + 1))} /></${Settings}>`;
  return html`<div class="playground">
    ${isDocked ? panels.historyDocked && html`<div class="side">${list}</div>` : panels.history && html`<${SideDrawer} onClose=${() => setPanels({ history: false })}>${list}</${SideDrawer}>`}
    <div class="talk">
      <${Conversation} conversation=${current} path=${path} busy=${running || !isServed} running=${running} actions=${actions}>
        ${!current.nodes.length && isServed && html`<${Welcome} kind=${current.kind} model=${model} about=${about} onExample=${takeExample} sample=${(text) => request(current, text ? [{ role: "user", content: text, files: [] }] : [])} />`}
        ${current.kind === "chat" && current.system.trim() && current.nodes.length > 0 && html`<button type="button" class="system-line cut" title=${current.system} onClick=${() => setPanels({ settings: true })}>System prompt: ${current.system}</button>`}
        ${model && !isServed && current.nodes.length === 0 && !kinds.length && html`<p class="note" role="status">This model does not generate text: it can ${model.tasks.join(", ")}. Call it from your program, or watch it under Engine.</p>`}
      </${Conversation}>
      <div class="foot">
        ${history.notice.map((text) => html`<p class="note" role="status">${text}</p>`)}
        ${model && !isServed && current.nodes.length > 0 && html`<p class="note error" role="alert">This model ${kinds.length ? `makes no ${KINDS[current.kind].label.toLowerCase()}` : "does not generate text"}: it can ${model.tasks.join(", ")}.</p>`}
        ${problem && html`<p class="note error" role="alert">${problem}</p>`}
        ${isServed && html`<${Composer} key=${KINDS[current.kind].takes ?? "text"} conversation=${current.id} isNew=${!current.nodes.length} kind=${current.kind} kinds=${kinds} model=${model} running=${running} begun=${begun} onKind=${begin} onSend=${send} onStop=${() => runs.get(current.id)?.abort()} />`}
      </div>
    </div>
    ${panels.settings && settings && (settingsDocked
      ? html`<aside class="panel" aria-label="Settings"><div class="drawer-head"><h2>Settings</h2><button type="button" class="icon-button" aria-label="Close settings" onClick=${() => setPanels({ settings: false })}><${Icon} name="close" /></button></div><div class="drawer-body">${settings}</div></aside>`
      : html`<${Drawer} title="Settings" onClose=${() => setPanels({ settings: false })}>${settings}</${Drawer}>`)}
  </div>`;
}

function SideDrawer({ onClose, children }) {
  const box = useDialog(onClose);
  return html`<div class="backdrop" onClick=${onClose}></div><div class="side covers" ref=${box} tabindex="-1" role="dialog" aria-modal="true" aria-label="Conversations">${children}</div>`;
}

/** Messages that are drawn at first, and how many more at a time; of long conversations the others wait above. */
const SHOWN = 60;

/** The messages of a branch. The end of what is written stays in view, unless somebody scrolls up to read. */
function Conversation({ conversation, path, busy, running, actions, children }) {
  const [shown, setShown] = useState(SHOWN);
  const { box, content, isAtEnd, goToEnd } = useFollowed(conversation.id, running);
  useEffect(() => setShown(SHOWN), [conversation.id]);
  const turns = useMemo(() => turnsOf(conversation, path), [path]);
  const hidden = Math.max(0, turns.length - shown);
  const more = () => setShown((now) => now + SHOWN);
  return html`<div class="turns-box">
    <div class="turns-scroll" ref=${box} onScroll=${(event) => hidden > 0 && event.target.scrollTop < 300 && more()}>
      <div class="turns" ref=${content} role="log" aria-label="Conversation">
        ${children}
        ${hidden > 0 && html`<button type="button" class="button small earlier" onClick=${more}>${hidden} earlier ${hidden === 1 ? "message" : "messages"}</button>`}
        ${turns.slice(hidden).map(({ node, results, versions }, i, all) => html`<${Turn} key=${node.id} node=${node} versions=${versions} results=${results} kind=${conversation.kind} busy=${busy} isLast=${i === all.length - 1} actions=${actions} />`)}
      </div>
    </div>
    ${!isAtEnd && turns.length > 0 && html`<button type="button" class="to-end" onClick=${goToEnd}><${Icon} name="arrow_down" />To the end</button>`}
  </div>`;
}

/** The messages that are drawn for themselves: results of tools stand in the answer that has called them. */
function turnsOf(conversation, path) {
  const turns = [];
  for (const node of path) {
    const caller = node.role === "tool" && turns.at(-1);
    if (caller && caller.node.calls?.some((call) => call.id === node.call)) (caller.results ??= new Map()).set(node.call, node.content);
    else turns.push({ node, versions: versionsOf(conversation, node), results: undefined });
  }
  return turns;
}

/** Pixels from the end that count as the end. */
const NEAR = 48;

function useFollowed(id, runs) {
  const box = useRef();
  const content = useRef();
  const follows = useRef(true);
  const [isAtEnd, setAtEnd] = useState(true);
  const goToEnd = () => {
    follows.current = true;
    box.current.scrollTop = box.current.scrollHeight;
    setAtEnd(true);
  };
  useLayoutEffect(goToEnd, [id]);
  useEffect(() => void (runs && goToEnd()), [runs]);
  useEffect(() => {
    const element = box.current;
    let last = element.scrollTop;
    const isEnd = () => element.scrollHeight - element.scrollTop - element.clientHeight < NEAR;
    const onScroll = () => {
      if (isEnd()) follows.current = true;
      else if (element.scrollTop < last - 2) follows.current = false;
      last = element.scrollTop;
      setAtEnd(follows.current || isEnd());
    };
    const observer = new ResizeObserver(() => {
      if (follows.current) element.scrollTop = element.scrollHeight;
      else setAtEnd(isEnd());
    });
    element.addEventListener("scroll", onScroll, { passive: true });
    observer.observe(content.current);
    observer.observe(element);
    return () => {
      element.removeEventListener("scroll", onScroll);
      observer.disconnect();
    };
  }, []);
  return { box, content, isAtEnd, goToEnd };
}

/** The JSON that was typed beside the settings. Throws an Error that names what is none. */
function parsed({ schema, tools }) {
  const read = (text, what) => {
    if (!text.trim()) return undefined;
    try {
      return JSON.parse(text);
    } catch (error) {
      throw new Error(`${what}: ${error.message}`);
    }
  };
  return { schema: read(schema, "The JSON schema"), tools: read(tools, "The tools") };
}

/** The request of the last answer, or the one that would be sent, as a program. */
function Sample({ kind, make }) {
  const [open, setOpen] = useState(false);
  return html`<details class="fold group" open=${open} onToggle=${(event) => setOpen(event.target.open)}><summary>This request as code</summary>${open && html`<div class="group-body"><${Samples} kind=${kind} make=${make} /></div>`}</details>`;
}
