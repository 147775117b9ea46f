// Light or dark: as the system has it, unless somebody chose; canvases are drawn again at the event "octavo-theme".

import { html, useEffect, useState } from "./dom.js";
import { IconButton } from "./widgets.js";

const PLACE = "octavo-theme";
const THEMES = ["auto", "light", "dark"];
const WORDS = { auto: "as the system", light: "light", dark: "dark" };
const ICONS = { auto: "system", light: "sun", dark: "moon" };
const system = matchMedia("(prefers-color-scheme: dark)");

const chosen = () => {
  const theme = localStorage.getItem(PLACE);
  return THEMES.includes(theme) ? theme : "auto";
};

/** Shows the theme that is chosen, or the system's. */
export function applyTheme(theme = chosen()) {
  document.documentElement.dataset.theme = theme === "auto" ? (system.matches ? "dark" : "light") : theme;
  dispatchEvent(new Event("octavo-theme"));
}
system.addEventListener("change", () => applyTheme());

/** Goes from one theme to the next. */
export function ThemeButton() {
  const [theme, setTheme] = useState(chosen);
  useEffect(() => {
    localStorage.setItem(PLACE, theme);
    applyTheme(theme);
  }, [theme]);
  const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  return html`<${IconButton} icon=${ICONS[theme]} label=${`Colours: ${WORDS[theme]}. Change to ${WORDS[next]}`} tip=${`Colours: ${WORDS[theme]}`} side="left" onClick=${() => setTheme(next)} />`;
}
