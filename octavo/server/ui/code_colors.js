// Colours of code, line by line: comments, strings, numbers, keywords and names that are called. No grammar of a language
// is known here, only its words and its marks; a line is read once, from left to right.

const words = (text) => new Set(text.split(" "));
const C_WORDS = "if else for while do switch case default break continue return goto struct enum union typedef const static void int char float double long short unsigned signed bool true false null sizeof class public private protected virtual override final new delete this try catch throw throws namespace using template typename auto import package extends implements interface abstract instanceof super var let function async await yield of in export from as type readonly undefined typeof string number boolean fn mut impl trait pub use mod match loop where crate self Self move ref unsafe dyn func go defer chan map range select nil fallthrough guard val fun object when is internal sealed record foreach out params string decimal base event include define ifdef ifndef endif pragma constexpr nullptr inline extern int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t size_t usize isize u8 u16 u32 u64 i8 i16 i32 i64 f32 f64 str vec echo print";
const HASH_WORDS = "and as assert async await break class continue def del elif else except False finally for from global if import in is lambda None nonlocal not or pass raise return True try while with yield match case self cls then fi do done esac function local export end elsif unless until module require begin rescue nil puts next repeat true false null yes no set unset source alias echo";
const SQL_WORDS = "select from where and or not null insert into values update set delete create table index view drop alter add primary key foreign references join left right inner outer full cross on as group by order having limit offset union all distinct case when then else end in exists between like is asc desc integer int text varchar real date timestamp boolean default unique with returning count sum avg min max";

/** Marks of a family: how a comment of a line begins; what lasts over lines as [begin, end, class]; quotes; keywords. */
const FAMILIES = {
  c: { comment: "//", long: [["/*", "*/", "comment"], ["`", "`", "string"]], quotes: `"'`, words: words(C_WORDS) },
  hash: { comment: "#", long: [['"""', '"""', "string"], ["'''", "'''", "string"]], quotes: `"'`, words: words(HASH_WORDS) },
  sql: { comment: "--", long: [["/*", "*/", "comment"]], quotes: `"'`, words: words(SQL_WORDS), anyCase: true },
  css: { comment: "", long: [["/*", "*/", "comment"]], quotes: `"'`, words: words("important media supports keyframes import from to") },
  json: { comment: "", long: [], quotes: `"`, words: words("true false null") },
  markup: { comment: "", long: [["<!--", "-->", "comment"]], quotes: `"'`, words: new Set(), tags: true },
};
const LANGUAGES = {
  c: "c h cpp c++ cc cxx hpp cuda cu java js javascript jsx mjs ts typescript tsx rust rs go golang swift kotlin kt csharp c# cs php scala dart zig glsl proto",
  hash: "python py python3 bash sh shell zsh console ruby rb yaml yml toml ini r perl pl make makefile dockerfile docker elixir julia nix cmake conf",
  sql: "sql postgresql mysql sqlite plsql",
  css: "css scss less",
  json: "json jsonl json5 jsonc",
  markup: "html xml svg vue xhtml",
};
const FAMILY_OF = new Map(Object.entries(LANGUAGES).flatMap(([family, all]) => all.split(" ").map((name) => [name, FAMILIES[family]])));

const WORD = /[A-Za-z_$][\w$]*/y;
const NUMBER = /0[xXbBoO][\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?/y;
const TAG = /<\/?[A-Za-z][\w:.-]*|\/?>/y;

const at = (pattern, line, place) => ((pattern.lastIndex = place), pattern.exec(line)?.[0]);

/** Whether a language is known here. */
export const hasColors = (language) => FAMILY_OF.has(language.toLowerCase());

/**
 * Reads a line. `open`: what lasts from the line before, or null. Returns { parts: [[class or "", text], ...], open }.
 */
export function colorLine(line, language, open = null) {
  const family = FAMILY_OF.get(language.toLowerCase());
  const parts = [];
  const put = (kind, text) => {
    if (!text) return;
    if (parts.length && parts.at(-1)[0] === kind) parts.at(-1)[1] += text;
    else parts.push([kind, text]);
  };
  if (!family) return { parts: [["", line]], open: null };
  let place = 0;
  let inTag = false;
  while (place < line.length) {
    const begun = open ? open : family.long.find(([begin]) => line.startsWith(begin, place));
    if (begun) {
      const [begin, end, kind] = begun;
      const from = open ? place : place + begin.length;
      const close = line.indexOf(end, from);
      open = close < 0 ? begun : null;
      const next = close < 0 ? line.length : close + end.length;
      put(kind, line.slice(place, next));
      place = next;
      continue;
    }
    const rest = line[place];
    if (family.comment && line.startsWith(family.comment, place) && (family.comment !== "#" || place === 0 || /[\s;]/.test(line[place - 1]))) {
      put("comment", line.slice(place));
      break;
    }
    if (family.quotes.includes(rest) && (!family.tags || inTag)) {
      let end = place + 1;
      while (end < line.length && line[end] !== rest) end += line[end] === "\\" ? 2 : 1;
      const text = line.slice(place, end + 1);
      // A name of an object of JSON is no value.
      put(family === FAMILIES.json && /^\s*:/.test(line.slice(end + 1, end + 40)) ? "name" : "string", text);
      place += text.length;
      continue;
    }
    if (family.tags) {
      const tag = at(TAG, line, place);
      if (tag) {
        inTag = tag[0] === "<";
        put("keyword", tag);
        place += tag.length;
        continue;
      }
    }
    const word = at(WORD, line, place);
    if (word) {
      const isWord = family.words.has(family.anyCase ? word.toLowerCase() : word);
      put(isWord ? "keyword" : line[place + word.length] === "(" || (family.tags && inTag && line[place + word.length] === "=") ? "name" : "", word);
      place += word.length;
      continue;
    }
    const number = !/[\w$]/.test(line[place - 1] ?? "") && at(NUMBER, line, place);
    if (number) {
      put("number", number);
      place += number.length;
      continue;
    }
    put("", rest);
    place += 1;
  }
  return { parts, open };
}
