// Formulas in TeX as text that can be read: Greek letters, signs, fractions and roots in one line. What is not known stays as it is.

const SIGNS = {
  alpha: "α", beta: "β", gamma: "γ", delta: "δ", epsilon: "ε", varepsilon: "ε", zeta: "ζ", eta: "η", theta: "θ", iota: "ι", kappa: "κ", lambda: "λ", mu: "μ",
  nu: "ν", xi: "ξ", pi: "π", rho: "ρ", sigma: "σ", tau: "τ", upsilon: "υ", phi: "φ", varphi: "φ", chi: "χ", psi: "ψ", omega: "ω",
  Gamma: "Γ", Delta: "Δ", Theta: "Θ", Lambda: "Λ", Xi: "Ξ", Pi: "Π", Sigma: "Σ", Phi: "Φ", Psi: "Ψ", Omega: "Ω",
  times: "×", cdot: "·", div: "÷", pm: "±", mp: "∓", le: "≤", leq: "≤", ge: "≥", geq: "≥", ne: "≠", neq: "≠", approx: "≈", equiv: "≡", sim: "∼", propto: "∝",
  infty: "∞", sum: "∑", prod: "∏", int: "∫", partial: "∂", nabla: "∇", to: "→", rightarrow: "→", leftarrow: "←", Rightarrow: "⇒", implies: "⇒", iff: "⇔", mapsto: "↦",
  in: "∈", notin: "∉", subset: "⊂", subseteq: "⊆", cup: "∪", cap: "∩", emptyset: "∅", forall: "∀", exists: "∃", neg: "¬", land: "∧", lor: "∨", angle: "∠", circ: "∘", degree: "°",
  ldots: "…", dots: "…", cdots: "⋯", quad: "  ", qquad: "    ", mid: "|", langle: "⟨", rangle: "⟩", hbar: "ℏ", ell: "ℓ", star: "⋆", bullet: "•", perp: "⊥", parallel: "∥",
};
const RAISED = Object.fromEntries([..."0123456789+-=()ni"].map((one, i) => [one, [..."⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ"][i]]));
const LOWERED = Object.fromEntries([..."0123456789+-=()aeijknx"].map((one, i) => [one, [..."₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑᵢⱼₖₙₓ"][i]]));
/** Deepest nesting of braces that is read. */
const MOST_NESTED = 12;

const simple = (text) => /^[\p{L}\p{N}.]*$/u.test(text);
const within = (text) => (simple(text) ? text : `(${text})`);
const moved = (text, table, mark) => ([...text].every((one) => one in table) ? [...text].map((one) => table[one]).join("") : `${mark}${within(text)}`);

/** A formula as text. */
export const readable = (tex) => read(tex.trim(), 0).replace(/[ \t]+/g, " ").trim();

function read(tex, depth) {
  let place = 0;
  let out = "";
  /** What stands in the next braces, or the next sign. */
  const argument = () => {
    while (tex[place] === " ") place += 1;
    if (tex[place] === "{") {
      let open = 0;
      const begin = place + 1;
      for (; place < tex.length; place++) {
        open += tex[place] === "{" ? 1 : tex[place] === "}" ? -1 : 0;
        if (!open) break;
      }
      const inner = tex.slice(begin, place);
      place += 1;
      return depth < MOST_NESTED ? read(inner, depth + 1) : inner;
    }
    const [sign] = /^\\[A-Za-z]+|^[^]?/u.exec(tex.slice(place, place + 40));
    place += sign.length;
    return sign[0] === "\\" ? (SIGNS[sign.slice(1)] ?? sign) : sign;
  };
  while (place < tex.length) {
    const sign = tex[place];
    if (sign === "\\") {
      const [command] = /^\\(?:[A-Za-z]+|[^])?/.exec(tex.slice(place, place + 40));
      place += command.length;
      const name = command.slice(1);
      if (name in SIGNS) out += SIGNS[name];
      else if (["frac", "dfrac", "tfrac"].includes(name)) out += `${within(argument())}/${within(argument())}`;
      else if (name === "sqrt") out += `√${within(argument())}`;
      else if (/^(text|mathrm|mathbf|mathit|mathbb|mathcal|operatorname|boxed|textbf|vec|hat|bar|overline)$/.test(name)) out += argument();
      else if (name === "\\") out += "\n";
      else if (/^(left|right|big|Big|bigg|Bigg|displaystyle|limits|nonumber)$/.test(name)) out += "";
      else if (/^[,;:! ]$/.test(name)) out += name === "!" ? "" : " ";
      else if (/^[{}%$&_#]$/.test(name)) out += name;
      else out += /^(sin|cos|tan|log|ln|exp|lim|max|min|det|gcd|mod|Pr|arg|sup|inf)$/.test(name) ? name : command;
    } else if (sign === "^" || sign === "_") {
      place += 1;
      const text = argument();
      out += text === "∘" ? "°" : moved(text, sign === "^" ? RAISED : LOWERED, sign);
    } else if (sign === "{") {
      out += argument();
    } else {
      out += sign === "}" || sign === "&" ? "" : sign;
      place += 1;
    }
  }
  return out;
}
