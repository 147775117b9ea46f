// Markdown as elements. A model's text never becomes markup of the page: every piece of it is the text of an element,
// links go to http, https and mailto only, and pictures are shown as links, so that no answer makes the browser fetch.

import { html, useMemo, useRef } from "./dom.js";
import { colorLine, hasColors } from "./code_colors.js";
import { readable } from "./formulas.js";
import { CopyButton } from "./widgets.js";

// Every scan goes forwards only: the cost is linear in the text, whatever a model writes.

const SAFE = /^(https?:\/\/|mailto:)/i;
/** Deepest nesting that is looked for; below it, text stays as it was written. */
const MOST_NESTED = 6;
/** What stands in the brackets of a link, from the first character behind the "(". */
const TARGET = /([^()\s]+(?:\([^()\s]*\))?)(?:\s+"[^"\n]*")?\)/y;
const BARE = /https?:\/\/[^\s<>()`]+/y;

const isSpace = (character) => character === undefined || /\s/.test(character);

/** Inline Markdown as a list of texts and elements. */
export function inline(text, depth = 0) {
  if (depth >= MOST_NESTED) return text ? [text] : [];
  const spans = new Spans(text, depth);
  const out = [];
  let given = 0;
  for (let at = 0; at < text.length; ) {
    const { end, element } = spans.at(at);
    if (element !== undefined) {
      if (at > given) out.push(text.slice(given, at));
      out.push(element);
      given = end;
    }
    at = end;
  }
  if (given < text.length) out.push(text.slice(given));
  return out;
}

/** The elements of a text, asked for from its beginning to its end. */
class Spans {
  constructor(text, depth) {
    this.text = text;
    this.depth = depth;
    /** By what was looked for: the first place of it from where it was looked for last; Infinity: there is none. */
    this.places = {};
    /** Places of the runs of backticks by length, the next one last. */
    this.ticks = null;
    /** Targets of links by the place of the "]" before them. */
    this.targets = new Map();
  }

  /** What begins at a place: its end, and its element; without one, the text up to there is plain. */
  at(place) {
    const { text } = this;
    switch (text[place]) {
      case "`": return this.code(place);
      case "!": return (text[place + 1] === "[" && this.link(place, place + 1)) || { end: place + 1 };
      case "[": return this.link(place, place) || { end: place + 1 };
      case "*": return this.pair(place, "**", "strong") || this.emphasis(place) || { end: place + 1 };
      case "_": return this.pair(place, "__", "strong") || this.emphasis(place) || { end: place + 1 };
      case "~": return this.pair(place, "~~", "s") || { end: place + 1 };
      case "h": return this.bare(place) || { end: place + 1 };
      case "$": return this.formula(place, "$", "$") || { end: place + 1 };
      case "\\": return this.formula(place, "\\(", "\\)") || { end: place + 1 };
      default: return { end: place + 1 };
    }
  }

  /** The first place from `from` on, which never decreases for the same `name`, that `search` finds. */
  next(name, from, search) {
    if (!(this.places[name] >= from)) {
      const found = search(from);
      this.places[name] = found < 0 ? Infinity : found;
    }
    return this.places[name];
  }

  code(place) {
    const { text } = this;
    if (!this.ticks) {
      this.ticks = new Map();
      for (const { 0: run, index } of [...text.matchAll(/`+/g)].reverse()) {
        if (!this.ticks.has(run.length)) this.ticks.set(run.length, []);
        this.ticks.get(run.length).push(index);
      }
    }
    let begin = place;
    while (text[begin] === "`") begin += 1;
    const ends = this.ticks.get(begin - place);
    while (ends?.length && ends.at(-1) < begin) ends.pop();
    if (!ends?.length) return { end: begin };
    const end = ends.at(-1);
    const padded = end - begin > 2 && text[begin] === " " && text[end - 1] === " ";
    return { end: end + begin - place, element: html`<code>${padded ? text.slice(begin + 1, end - 1) : text.slice(begin, end)}</code>` };
  }

  link(place, open) {
    const { text, targets } = this;
    const close = this.next("]", open + 1, (from) => text.indexOf("]", from));
    const line = this.next("line", open + 1, (from) => text.indexOf("\n", from));
    if (close > line || text[close + 1] !== "(") return null;
    if (!targets.has(close)) {
      TARGET.lastIndex = close + 2;
      const found = TARGET.exec(text);
      targets.set(close, found && { address: found[1], end: TARGET.lastIndex });
    }
    const target = targets.get(close);
    if (!target) return null;
    const { address, end } = target;
    if (!SAFE.test(address)) return { end, element: text.slice(place, end) };
    return { end, element: link(address, inline(text.slice(open + 1, close) || address, this.depth + 1)) };
  }

  /** What stands between two equal marks of two characters, with no space within them. */
  pair(place, mark, name) {
    const { text } = this;
    if (text[place + 1] !== mark[1] || isSpace(text[place + 2])) return null;
    const close = this.next(mark, place + 3, (from) => {
      let found = text.indexOf(mark, from);
      while (found >= 0 && isSpace(text[found - 1])) found = text.indexOf(mark, found + 1);
      return found;
    });
    if (close === Infinity) return null;
    return { end: close + 2, element: html`<${name}>${inline(text.slice(place + 2, close), this.depth + 1)}</${name}>` };
  }

  emphasis(place) {
    const { text } = this;
    const mark = text[place];
    if (/[\w*]/.test(text[place - 1] ?? "") || isSpace(text[place + 1])) return null;
    const close = this.next("emphasis", place + 1, (from) => {
      const marks = /[*_\n]/g;
      marks.lastIndex = from;
      return marks.exec(text)?.index ?? -1;
    });
    if (text[close] !== mark || close === place + 1 || isSpace(text[close - 1]) || /[\w*]/.test(text[close + 1] ?? "")) return null;
    return { end: close + 1, element: html`<em>${inline(text.slice(place + 1, close), this.depth + 1)}</em>` };
  }

  /** A formula in one line; a "$" before a space or behind one is an amount. */
  formula(place, open, close) {
    const { text } = this;
    const begin = place + open.length;
    if (!text.startsWith(open, place) || (open === "$" && (isSpace(text[begin]) || text[begin] === "$" || /[\w$]/.test(text[place - 1] ?? "")))) return null;
    const end = this.next(close, begin + 1, (from) => text.indexOf(close, from));
    if (open === "$" && (isSpace(text[end - 1]) || /[\d$]/.test(text[end + 1] ?? ""))) return null;
    const line = this.next("line", begin, (from) => text.indexOf("\n", from));
    if (end > line || end === Infinity) return null;
    return { end: end + close.length, element: html`<code class="formula">${readable(text.slice(begin, end))}</code>` };
  }

  bare(place) {
    BARE.lastIndex = place;
    const found = BARE.exec(this.text);
    if (!found) return null;
    let length = found[0].length;
    while (".,;:!?'\"".includes(found[0][length - 1])) length -= 1;
    const address = found[0].slice(0, length);
    return /\/\/./.test(address) ? { end: place + length, element: link(address, address) } : null;
  }
}

const link = (address, content) =>
  html`<a href=${address} target="_blank" rel="noopener noreferrer nofollow">${content}</a>`;

const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/s;
const QUOTE = /^ {0,3}> ?/;

/** The mark that opens a block of code, and its language; null: the line opens none. */
function fenceOf(line) {
  const mark = /^ {0,3}(`{3,}|~{3,})/.exec(line);
  const rest = mark && line.slice(mark[0].length);
  if (!mark || rest.includes("`")) return null;
  return { mark: mark[1], language: /^[\w+#.-]*/.exec(rest.trimStart())[0] };
}

/** Whether a line closes a block of code: its mark's character alone, at least as often. */
function closes(line, mark) {
  const found = line.trim();
  return found.length >= mark.length && found.startsWith(mark) && count(found, mark[0]) === found.length;
}

const count = (text, character) => text.split(character).length - 1;

/** The level of a heading, and its text without the marks; null: the line is none. */
function headingOf(line) {
  const marks = /^ {0,3}(#{1,6})\s/.exec(line);
  if (!marks) return null;
  const text = line.slice(marks[0].length).trim();
  let end = text.length;
  while (text[end - 1] === "#") end -= 1;
  return { level: marks[1].length, title: end === 0 || isSpace(text[end - 1]) ? text.slice(0, end).trimEnd() : text };
}

function isRule(line) {
  const mark = /^ {0,3}([-*_])/.exec(line)?.[1];
  const marks = mark && line.trimEnd().replaceAll(" ", "");
  return Boolean(marks) && marks.length >= 3 && count(marks, mark) === marks.length;
}

/** Whether a line stands between the head and the rows of a table. */
function isSeparator(line) {
  return line.includes("-") && cellsOf(line).every((cell) => /^:?-+:?$/.test(cell));
}

/** The cells of a table's line. */
const cellsOf = (line) => line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|").map((cell) => cell.trim());

/** Whether a line ends the paragraph before it. */
const beginsBlock = (line) => /^ {0,3}(#{1,6}\s|>|`{3,}|~{3,}|\$\$|\\\[)/.test(line) || isRule(line) || ITEM.test(line);

const FORMULA = /^ {0,3}(?:\$\$|\\\[)/;

const linesOf = (text) => (text.includes("\r") ? text.replace(/\r\n?/g, "\n") : text).split("\n");

/** A text as block elements. */
export function Markdown({ text }) {
  return html`<div class="markdown">${blocks(linesOf(text))}</div>`;
}

/** A text that grows: what was read of it stays as it is, but for its last two blocks, which may still become others. */
export function GrowingMarkdown({ text }) {
  const read = useRef({ head: "", done: [] });
  const { current } = read;
  if (!text.startsWith(current.head)) Object.assign(current, { head: "", done: [] });
  const lines = text.slice(current.head.length).split("\n");
  const found = [];
  for (let at = 0; at < lines.length; ) {
    const { element, next } = block(lines, at, 0);
    if (element) found.push({ element, at });
    at = next;
  }
  const live = found.splice(-2);
  if (found.length) {
    current.done = [...current.done, ...found.map((one) => one.element)];
    current.head += `${lines.slice(0, live[0].at).join("\n")}\n`;
  }
  return html`<div class="markdown">${[...current.done, ...live.map((one) => one.element)]}</div>`;
}

function blocks(lines, depth = 0) {
  const out = [];
  for (let at = 0; at < lines.length; ) {
    const { element, next } = block(lines, at, depth);
    if (element) out.push(element);
    at = next;
  }
  return out;
}

/** The block that begins at a line, if one does, and the line after it. */
function block(lines, at, depth) {
  const line = lines[at];
  if (!line.trim()) return { next: at + 1 };
  const fence = fenceOf(line);
  if (fence) {
    const stop = until(lines, at + 1, (other) => closes(other, fence.mark));
    return { element: html`<${Code} language=${fence.language} text=${lines.slice(at + 1, stop).join("\n")} />`, next: stop + 1 };
  }
  const heading = headingOf(line);
  if (heading) {
    // Headings of an answer are no headings of the page: they stand below those of its own.
    const { level, title } = heading;
    return { element: html`<p class=${`md-h md-h${Math.min(level, 4)}`} role="heading" aria-level=${Math.min(level + 3, 6)}>${inline(title)}</p>`, next: at + 1 };
  }
  if (isRule(line)) return { element: html`<hr />`, next: at + 1 };
  const formula = FORMULA.test(line) && formulaOf(lines, at);
  if (formula) return formula;
  if (QUOTE.test(line)) {
    const stop = until(lines, at, (other) => !QUOTE.test(other));
    const inner = lines.slice(at, stop).map((other) => other.replace(QUOTE, ""));
    return { element: html`<blockquote>${depth < MOST_NESTED ? blocks(inner, depth + 1) : inner.join("\n")}</blockquote>`, next: stop };
  }
  if (ITEM.test(line)) {
    const stop = until(lines, at + 1, (other, i) => !ITEM.test(other) && !/^\s{2,}\S/.test(other) && (other.trim() !== "" || !/^\s{2,}\S|^\s*([-*+]|\d{1,9}[.)])\s/.test(lines[i + 1] ?? "")));
    return { element: list(lines.slice(at, stop), depth), next: stop };
  }
  if (line.includes("|") && isSeparator(lines[at + 1] ?? "")) {
    const stop = until(lines, at + 2, (other) => !other.includes("|"));
    return { element: table(lines.slice(at, stop)), next: stop };
  }
  const stop = until(lines, at + 1, (other) => !other.trim() || beginsBlock(other));
  return { element: html`<p>${lines.slice(at, stop).flatMap((part, i) => [...(i ? [html`<br />`] : []), ...inline(part.trim())])}</p>`, next: stop };
}

/** Lines of a formula that a text never closes. */
const MOST_FORMULA_LINES = 40;

/** A formula of lines of its own; null: it is not closed before the next empty line. */
function formulaOf(lines, at) {
  const [open, close] = lines[at].trimStart().startsWith("$$") ? ["$$", "$$"] : ["\\[", "\\]"];
  const first = lines[at].trimStart().slice(2);
  const inFirst = first.indexOf(close);
  if (inFirst >= 0) return first.slice(inFirst + 2).trim() ? null : { element: formula(first.slice(0, inFirst)), next: at + 1 };
  const last = Math.min(lines.length, at + MOST_FORMULA_LINES);
  for (let i = at + 1; i < last && lines[i].trim(); i++) {
    const end = lines[i].indexOf(close);
    if (end >= 0) return lines[i].slice(end + 2).trim() ? null : { element: formula([first, ...lines.slice(at + 1, i), lines[i].slice(0, end)].join("\n")), next: i + 1 };
  }
  return null;
}

const formula = (tex) => html`<pre class="formula" tabindex="0">${readable(tex)}</pre>`;

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
    else items.at(-1).push(line.slice(Math.min(line.length - line.trimStart().length, indent.length + 4)));
  }
  const content = items.map(([first, ...more]) => {
    const nested = more.some((line) => line.trim());
    return html`<li>${inline(first)}${nested && (depth < MOST_NESTED ? blocks(more, depth + 1) : html`<pre class="plain">${more.join("\n")}</pre>`)}</li>`;
  });
  return /\d/.test(mark) ? html`<ol start=${parseInt(mark, 10)}>${content}</ol>` : html`<ul>${content}</ul>`;
}

function table([head, , ...rows]) {
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Table of the answer"><table>
    <thead><tr>${cellsOf(head).map((cell) => html`<th>${inline(cell)}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr>${cellsOf(row).map((cell) => html`<td>${inline(cell)}</td>`)}</tr>`)}</tbody>
  </table></div>`;
}

/** A block of code with a button that copies it; `shown`: where not all of it is shown, what is. */
export function Code({ text, shown = text, language }) {
  const colored = useColored(shown, language);
  return html`<div class="code">
    <div class="code-head"><span>${language || "text"}</span><${CopyButton} text=${text} label="Copy code" /></div>
    <pre tabindex="0"><code>${colored}</code></pre>
  </div>`;
}

/** Lines of code that get colours; longer code is shown without. */
const MOST_COLORED = 4000;

/** Code with its colours; of code that grows only the new lines are read. */
function useColored(text, language) {
  const read = useRef({ language: null, lines: [] });
  return useMemo(() => {
    const lines = text.split("\n");
    if (!hasColors(language ?? "") || lines.length > MOST_COLORED) return text;
    const old = read.current.language === language ? read.current.lines : [];
    let open = null;
    const colored = lines.map((line, i) => {
      const known = old[i];
      const one = known && known.line === line && known.before === open && known.isLast === (i === lines.length - 1) ? known : { line, before: open, isLast: i === lines.length - 1, ...coloredLine(line, language, open, i < lines.length - 1) };
      ({ open } = one);
      return one;
    });
    read.current = { language, lines: colored };
    return colored.map((one) => one.element);
  }, [text, language]);
}

/** A line as elements, and what lasts from it to the next. */
function coloredLine(line, language, before, hasNext) {
  const { parts, open } = colorLine(line, language, before);
  return { open, element: html`<span>${parts.map(([kind, part]) => (kind ? html`<span class=${`c-${kind}`}>${part}</span>` : part))}${hasNext ? "\n" : ""}</span>` };
}
