// Markdown as elements. A model's text never becomes markup of the page: every piece of it is the text of an element,
// links go to http, https and mailto only, and pictures are shown as links, so that no answer makes the browser fetch.

import { html, copyText, useState } from "./dom.js";

const SAFE = /^(https?:\/\/|mailto:)/i;
const INLINE =
  /(`+)([\s\S]+?)\1(?!`)|!?\[([^\]\n]*)\]\(([^()\s]+(?:\([^()\s]*\))?)(?:\s+"[^"\n]*")?\)|(\*\*|__)(?=\S)([\s\S]*?\S)\5|(?<![\w*])([*_])(?=\S)([^*_\n]*?\S)\7(?![\w*])|~~(?=\S)([\s\S]*?\S)~~|(https?:\/\/[^\s<>()`]*[^\s<>()`.,;:!?'"])/;

/** Inline Markdown as a list of texts and elements. */
export function inline(text, depth = 0) {
  const out = [];
  let rest = text;
  while (rest) {
    const found = depth < 6 ? INLINE.exec(rest) : null;
    if (!found) {
      out.push(rest);
      break;
    }
    if (found.index) out.push(rest.slice(0, found.index));
    out.push(element(found, depth));
    rest = rest.slice(found.index + found[0].length);
  }
  return out;
}

function element(found, depth) {
  const [whole, ticks, code, label, address, strong, strongText, , emText, struck, bare] = found;
  if (ticks) return html`<code>${code.replace(/^ (.*) $/, "$1")}</code>`;
  if (address !== undefined) return SAFE.test(address) ? link(address, inline(label || address, depth + 1)) : whole;
  if (strong) return html`<strong>${inline(strongText, depth + 1)}</strong>`;
  if (emText !== undefined) return html`<em>${inline(emText, depth + 1)}</em>`;
  if (struck !== undefined) return html`<s>${inline(struck, depth + 1)}</s>`;
  return link(bare, bare);
}

const link = (address, content) =>
  html`<a href=${address} target="_blank" rel="noopener noreferrer nofollow">${content}</a>`;

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const BLOCK_START = /^( {0,3}(#{1,6}\s|>|`{3,}|~{3,}|([-*_])( *\3){2,}\s*$)|\s*([-*+]|\d{1,9}[.)])\s+)/;

/** A text as block elements. */
export function Markdown({ text }) {
  return html`<div class="markdown">${blocks(text.replace(/\r\n?/g, "\n").split("\n"))}</div>`;
}

function blocks(lines, depth = 0) {
  const out = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    if (!line.trim()) {
      at += 1;
    } else if (fence) {
      const end = lines.findIndex((other, i) => i > at && other.trim().startsWith(fence[1]) && !other.trim().slice(fence[1].length).trim());
      const stop = end < 0 ? lines.length : end;
      out.push(html`<${Code} language=${fence[2]} text=${lines.slice(at + 1, stop).join("\n")} />`);
      at = stop + 1;
    } else if (/^ {0,3}#{1,6}\s/.test(line)) {
      const [, marks, title] = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/.exec(line) ?? [, "#", line];
      // Headings of an answer are no headings of the page: they stand below those of its own.
      out.push(html`<p class=${`md-h md-h${Math.min(marks.length, 4)}`} role="heading" aria-level=${Math.min(marks.length + 3, 6)}>${inline(title)}</p>`);
      at += 1;
    } else if (/^ {0,3}([-*_])( *\1){2,}\s*$/.test(line)) {
      out.push(html`<hr />`);
      at += 1;
    } else if (/^ {0,3}>/.test(line)) {
      const stop = until(lines, at, (other) => !/^ {0,3}>/.test(other));
      const inner = lines.slice(at, stop).map((other) => other.replace(/^ {0,3}> ?/, ""));
      out.push(html`<blockquote>${depth < 6 ? blocks(inner, depth + 1) : inner.join("\n")}</blockquote>`);
      at = stop;
    } else if (ITEM.test(line)) {
      const stop = until(lines, at, (other, i) => i > at && !ITEM.test(other) && !/^\s{2,}\S/.test(other) && (other.trim() !== "" || !/^\s{2,}\S|^\s*([-*+]|\d{1,9}[.)])\s/.test(lines[i + 1] ?? "")));
      out.push(list(lines.slice(at, stop), depth));
      at = stop;
    } else if (line.includes("|") && /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/.test(lines[at + 1] ?? "") && lines[at + 1].includes("-")) {
      const stop = until(lines, at + 2, (other) => !other.includes("|"));
      out.push(table(lines.slice(at, stop)));
      at = stop;
    } else {
      const stop = until(lines, at + 1, (other) => !other.trim() || BLOCK_START.test(other));
      out.push(html`<p>${lines.slice(at, stop).flatMap((part, i) => [...(i ? [html`<br />`] : []), ...inline(part.trim())])}</p>`);
      at = stop;
    }
  }
  return out;
}

function until(lines, from, ends) {
  let at = from;
  while (at < lines.length && !ends(lines[at], at)) at += 1;
  return at;
}

function list(lines, depth) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent.length + 1) items.push([item[3]]);
    else items.at(-1).push(line.replace(new RegExp(`^\\s{0,${indent.length + 4}}`), ""));
  }
  const content = items.map(([first, ...more]) => {
    const nested = depth < 6 && more.some((line) => line.trim());
    return html`<li>${inline(first)}${nested && blocks(more, depth + 1)}</li>`;
  });
  return /\d/.test(mark) ? html`<ol start=${parseInt(mark, 10)}>${content}</ol>` : html`<ul>${content}</ul>`;
}

function table([head, , ...rows]) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|");
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Table of the answer"><table>
    <thead><tr>${cells(head).map((cell) => html`<th>${inline(cell.trim())}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr>${cells(row).map((cell) => html`<td>${inline(cell.trim())}</td>`)}</tr>`)}</tbody>
  </table></div>`;
}

/** A block of code with a button that copies it; `shown`: where not all of it is shown, what is. */
export function Code({ text, shown = text, language }) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    await copyText(text);
    setCopied(true);
    setTimeout(() => setCopied(false), 1500);
  };
  return html`<div class="code">
    <div class="code-head"><span>${language || "text"}</span><button class="small" onClick=${copy}>${copied ? "Copied" : "Copy"}</button></div>
    <pre tabindex="0"><code>${shown}</code></pre>
  </div>`;
}
