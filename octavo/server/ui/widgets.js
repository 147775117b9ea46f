// Elements that both views are made of: icons, buttons with an icon, drawers, menus, and copying with a sign that it worked.

import { html, names, copyText, useEffect, useLayoutEffect, useRef, useState } from "./dom.js";

/** Icons as paths of lines in a square of 24. */
const ICONS = {
  add: "M12 5v14M5 12h14",
  arrow_down: "M12 5v14M6 13l6 6 6-6",
  arrow_up: "M12 19V5M6 11l6-6 6 6",
  attach: "M20 11.5l-8 8a5 5 0 0 1-7-7l8.3-8.3a3.3 3.3 0 0 1 4.7 4.7l-8.2 8.2a1.7 1.7 0 0 1-2.4-2.4l7.6-7.5",
  check: "M5 12.5l4.5 4.5L19 7.5",
  chevron_down: "M6 9l6 6 6-6",
  chevron_left: "M15 6l-6 6 6 6",
  chevron_right: "M9 6l6 6-6 6",
  close: "M6 6l12 12M18 6L6 18",
  code: "M8.5 7L3.5 12l5 5M15.5 7l5 5-5 5",
  columns: "M4 5h7v14H4zM13 5h7v14h-7z",
  copy: "M9 9h10.5v10.5H9zM15 5.5V4.5H4.5V15h1",
  delete: "M4 7h16M9.5 7V4.5h5V7M6.5 7l.8 12.5h9.4L17.5 7M10.3 11v5M13.7 11v5",
  download: "M12 4v11M7 11l5 5 5-5M5 20h14",
  edit: "M4.5 19.5l1-4L15.8 5.2a1.9 1.9 0 0 1 2.7 0l.3.3a1.9 1.9 0 0 1 0 2.7L8.5 18.5z",
  file: "M6 3.5h8l4.5 4.5v12.5H6zM13.5 3.5V8.5h5",
  forward: "M6 5l8 7-8 7zM18 5v14",
  menu: "M4 7h16M4 12h16M4 17h16",
  mic: "M12 3.5a3 3 0 0 1 3 3v5a3 3 0 0 1-6 0v-5a3 3 0 0 1 3-3zM5.5 11.5a6.5 6.5 0 0 0 13 0M12 18v3",
  moon: "M19.5 14.5A8 8 0 0 1 9.5 4.5a8 8 0 1 0 10 10z",
  more: "M5.5 12h.01M12 12h.01M18.5 12h.01",
  pause: "M8 5v14M16 5v14",
  play: "M7 5l12 7-12 7z",
  record: "M12 12h.01M12 4a8 8 0 1 0 0 16 8 8 0 0 0 0-16z",
  refresh: "M19.5 12a7.5 7.5 0 1 1-2.3-5.4M19.5 4v4.5H15",
  search: "M11 4.5a6.5 6.5 0 1 0 0 13 6.5 6.5 0 0 0 0-13zM16 16l4.5 4.5",
  settings: "M4 7h9M17 7h3M4 17h3M11 17h9M15 4.8v4.4M9 14.8v4.4",
  source: "M5 6h14M5 10h10M5 14h14M5 18h7",
  spark: "M12 3.5l1.9 6.6 6.6 1.9-6.6 1.9L12 20.5l-1.9-6.6L3.5 12l6.6-1.9z",
  stop: "M7 7h10v10H7z",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2.5v2M12 19.5v2M2.5 12h2M19.5 12h2M5.3 5.3l1.4 1.4M17.3 17.3l1.4 1.4M18.7 5.3l-1.4 1.4M6.7 17.3l-1.4 1.4",
  system: "M4 5h16v11H4zM9 20h6M12 16v4",
  tokens: "M4 6h5v5H4zM11.5 6H20v5h-8.5zM4 14h8.5v5H4zM15 14h5v5h-5z",
  tool: "M14.5 6.5a4 4 0 0 1 5-1.9l-2.8 2.8 1.9 1.9 2.8-2.8a4 4 0 0 1-5.5 4.9L9 18.3a1.9 1.9 0 0 1-2.7-2.7l6.9-6.9a4 4 0 0 1 1.3-2.2z",
  upload: "M12 16V5M7 9l5-5 5 5M5 20h14",
};

export const Icon = ({ name }) => html`<svg class="icon" viewBox="0 0 24 24" aria-hidden="true"><path d=${ICONS[name]} /></svg>`;

/** A button that shows an icon; `label` is its name for everybody. */
export function IconButton({ icon, label, small, tip = label, side, class: more, ...rest }) {
  return html`<button type="button" class=${names("icon-button", small && "small", side && `tip-${side}`, more)} aria-label=${label} data-tip=${tip} ...${rest}><${Icon} name=${icon} /></button>`;
}

/** A button that copies a text, and shows for a moment that it did. */
export function CopyButton({ text, label = "Copy", small = true }) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    await copyText(typeof text === "function" ? text() : text);
    setCopied(true);
    setTimeout(() => setCopied(false), 1500);
  };
  return html`<${IconButton} icon=${copied ? "check" : "copy"} label=${copied ? "Copied" : label} small=${small} onClick=${copy} />`;
}

/** As the `ref` of an element: it gets the keyboard when it appears. */
export const focusNow = (element) => element?.focus();

/** A button that deletes at its second press. */
export function DeleteButton({ label, onDelete, disabled }) {
  const [isAsked, setAsked] = useState(false);
  if (!isAsked) return html`<${IconButton} icon="delete" label=${label} small=${true} disabled=${disabled} onClick=${() => setAsked(true)} />`;
  const forget = () => setAsked(false);
  return html`<button type="button" class="button small danger" ref=${focusNow} onClick=${() => (forget(), onDelete())} onBlur=${forget} onKeyDown=${(event) => event.key === "Escape" && forget()}>Delete?</button>`;
}

/** Whether a media query holds now. */
export function useMedia(query) {
  const [holds, setHolds] = useState(() => matchMedia(query).matches);
  useEffect(() => {
    const list = matchMedia(query);
    const change = () => setHolds(list.matches);
    change();
    list.addEventListener("change", change);
    return () => list.removeEventListener("change", change);
  }, [query]);
  return holds;
}

const FOCUSABLE = "a[href], button:not(:disabled), input:not(:disabled), select, textarea, summary, [tabindex='0']";

/** Keeps the keyboard in an element while it is there, and gives it back; Escape closes. */
export function useDialog(onClose, isOpen = true) {
  const box = useRef();
  const close = useRef();
  close.current = onClose;
  useLayoutEffect(() => {
    if (!isOpen) return undefined;
    const before = document.activeElement;
    const own = () => [...box.current.querySelectorAll(FOCUSABLE)].filter((one) => one.offsetParent);
    if (!box.current.contains(before)) box.current.focus();
    const onKey = (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close.current();
      } else if (event.key === "Tab") {
        const all = own();
        const last = event.shiftKey ? all[0] : all.at(-1);
        if (document.activeElement !== last && document.activeElement !== box.current) return;
        event.preventDefault();
        (event.shiftKey ? all.at(-1) : all[0])?.focus();
      }
    };
    const element = box.current;
    element.addEventListener("keydown", onKey);
    return () => {
      element.removeEventListener("keydown", onKey);
      if (!document.activeElement || document.activeElement === document.body || element.contains(document.activeElement)) before?.focus?.();
    };
  }, [isOpen]);
  return box;
}

/** A dialog at the right edge of the page. */
export function Drawer({ title, label = title, onClose, children, actions }) {
  const box = useDialog(onClose);
  return html`<div class="backdrop" onClick=${onClose}></div>
    <aside class="drawer" ref=${box} tabindex="-1" role="dialog" aria-modal="true" aria-label=${label}>
      <div class="drawer-head"><h2>${title}</h2>${actions}<${IconButton} icon="close" label=${`Close ${title.toLowerCase()}`} side="left" onClick=${onClose} /></div>
      <div class="drawer-body">${children}</div>
    </aside>`;
}

/** A button that opens a list of actions: { icon, label, act, danger }. */
export function Menu({ label, icon = "more", small = true, actions, class: more }) {
  const [isOpen, setOpen] = useState(false);
  const box = useRef();
  useLayoutEffect(() => {
    if (!isOpen) return undefined;
    const items = () => [...box.current.querySelectorAll("[role=menuitem]")];
    items()[0]?.focus();
    const outside = (event) => !box.current.contains(event.target) && setOpen(false);
    const onKey = (event) => {
      const all = items();
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape" || event.key === "Tab") {
        setOpen(false);
        box.current.querySelector("button").focus();
        if (event.key === "Escape") event.stopPropagation();
      } else if (step) {
        event.preventDefault();
        all[(all.indexOf(document.activeElement) + step + all.length) % all.length].focus();
      }
    };
    const element = box.current;
    addEventListener("pointerdown", outside);
    element.addEventListener("keydown", onKey);
    return () => {
      removeEventListener("pointerdown", outside);
      element.removeEventListener("keydown", onKey);
    };
  }, [isOpen]);
  const choose = (act) => {
    setOpen(false);
    box.current.querySelector("button").focus();
    act();
  };
  return html`<div class=${names("menu-box", more)} ref=${box}>
    <${IconButton} icon=${icon} label=${label} small=${small} tip=${isOpen ? null : "Actions"} side="left" aria-haspopup="menu" aria-expanded=${isOpen ? "true" : "false"} onClick=${() => setOpen(!isOpen)} />
    ${isOpen && html`<div class="menu" role="menu" aria-label=${label}>${actions.filter(Boolean).map((one) => html`<button type="button" role="menuitem" class=${names(one.danger && "danger")} onClick=${() => choose(one.act)}><${Icon} name=${one.icon} />${one.label}</button>`)}</div>`}
  </div>`;
}
