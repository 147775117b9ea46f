// Reads Markdown with the page's own module. Input: { "folder": its URL, "texts": [...] }; output: of each text its tree
// ([tag, attributes, ...children] or a text) and the milliseconds of the processor that it took; "trees": false leaves trees out.

import { readFileSync } from "node:fs";

const { folder, texts, trees } = JSON.parse(readFileSync(0, "utf8"));
const { Markdown } = await import(`${folder}/markdown.js`);

/** Children as a list of texts, none beside another, and elements. */
function flat(child, list = []) {
  if (Array.isArray(child)) child.forEach((one) => flat(one, list));
  else if (child !== null && child !== undefined && typeof child !== "boolean") {
    if (typeof child === "object") list.push(tree(child));
    else if (typeof list.at(-1) === "string") list[list.length - 1] += child;
    else list.push(String(child));
  }
  return list;
}

function tree({ type, props: { children, ...attributes } }) {
  return [typeof type === "function" ? type.name : type, attributes, ...flat(children)];
}

const read = (text) => {
  const begin = process.cpuUsage();
  const root = Markdown({ text });
  const { user, system } = process.cpuUsage(begin);
  return { tree: trees === false ? null : tree(root), ms: (user + system) / 1e3 };
};
for (let i = 0; i < 50; i++) Markdown({ text: "*a* **b** `c` [d](https://e) \n- f\n\n> g\n\n|a|\n|-|" }); // compiles it
console.log(JSON.stringify(texts.map(read)));
