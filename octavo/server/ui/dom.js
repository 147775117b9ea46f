// What every module of the page is written with: Preact's elements in htm's notation.

import { h, render, Component, Fragment } from "./vendor/preact.module.js";
import htm from "./vendor/htm.module.js";

export { useState, useEffect, useMemo, useReducer, useRef, useLayoutEffect } from "./vendor/hooks.module.js";
export { render, Fragment };
export const html = htm.bind(h);

/** A component that is drawn again only if one of its properties has changed. */
export const memo = (kind) =>
  class extends Component {
    shouldComponentUpdate(next) {
      return Object.keys(next).length !== Object.keys(this.props).length || Object.keys(next).some((name) => next[name] !== this.props[name]);
    }
    render(props) {
      return h(kind, props);
    }
  };

/** Words of a class list, without those that are false. */
export const names = (...words) => words.filter(Boolean).join(" ");

/** Hands a file to the user. */
export function download(name, parts, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob(parts, { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Puts a text into the clipboard; where the browser allows no page to do so, through a selection. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}
