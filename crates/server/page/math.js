// TeX as models write it, made into MathML, which browsers draw themselves. `tree` makes plain data and never fails: what it does not
// know stays as text.

const NAMES = {
  alpha: "α", beta: "β", gamma: "γ", delta: "δ", epsilon: "ϵ", varepsilon: "ε", zeta: "ζ", eta: "η", theta: "θ", vartheta: "ϑ", iota: "ι", kappa: "κ", lambda: "λ", mu: "μ", nu: "ν", xi: "ξ", pi: "π", varpi: "ϖ", rho: "ρ", varrho: "ϱ", sigma: "σ", varsigma: "ς", tau: "τ", upsilon: "υ", phi: "ϕ", varphi: "φ", chi: "χ", psi: "ψ", omega: "ω",
  Gamma: "Γ", Delta: "Δ", Theta: "Θ", Lambda: "Λ", Xi: "Ξ", Pi: "Π", Sigma: "Σ", Upsilon: "Υ", Phi: "Φ", Psi: "Ψ", Omega: "Ω",
  infty: "∞", partial: "∂", nabla: "∇", ell: "ℓ", hbar: "ℏ", Re: "ℜ", Im: "ℑ", aleph: "ℵ", emptyset: "∅", varnothing: "∅", angle: "∠", degree: "°", prime: "′", dots: "…", ldots: "…", cdots: "⋯", vdots: "⋮", ddots: "⋱", top: "⊤", bot: "⊥", square: "□", blacksquare: "■",
};
const OPERATORS = {
  times: "×", cdot: "⋅", div: "÷", pm: "±", mp: "∓", ast: "∗", star: "⋆", circ: "∘", bullet: "∙", oplus: "⊕", otimes: "⊗", odot: "⊙", wedge: "∧", land: "∧", vee: "∨", lor: "∨", neg: "¬", lnot: "¬", cap: "∩", cup: "∪", setminus: "∖",
  le: "≤", leq: "≤", ge: "≥", geq: "≥", ne: "≠", neq: "≠", equiv: "≡", approx: "≈", sim: "∼", simeq: "≃", cong: "≅", propto: "∝", ll: "≪", gg: "≫", in: "∈", notin: "∉", ni: "∋", subset: "⊂", subseteq: "⊆", supset: "⊃", supseteq: "⊇", perp: "⊥", parallel: "∥", mid: "∣", nmid: "∤", forall: "∀", exists: "∃", nexists: "∄",
  to: "→", rightarrow: "→", leftarrow: "←", gets: "←", leftrightarrow: "↔", Rightarrow: "⇒", implies: "⟹", Leftarrow: "⇐", Leftrightarrow: "⇔", iff: "⟺", mapsto: "↦", longrightarrow: "⟶", uparrow: "↑", downarrow: "↓", rightleftharpoons: "⇌", hookrightarrow: "↪", therefore: "∴", because: "∵", colon: ":", models: "⊨", vdash: "⊢",
  langle: "⟨", rangle: "⟩", lfloor: "⌊", rfloor: "⌋", lceil: "⌈", rceil: "⌉", lvert: "|", rvert: "|", lVert: "‖", rVert: "‖", vert: "|", Vert: "‖", "|": "‖", "{": "{", "}": "}", backslash: "\\",
};
const LARGE = { sum: "∑", prod: "∏", coprod: "∐", int: "∫", iint: "∬", iiint: "∭", oint: "∮", bigcup: "⋃", bigcap: "⋂", bigoplus: "⨁", bigotimes: "⨂", bigvee: "⋁", bigwedge: "⋀" };
const FUNCTIONS = new Set("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp det dim ker gcd lcm deg arg hom Pr".split(" "));
const LIMITS = new Set("lim max min sup inf limsup liminf argmax argmin".split(" "));
const ACCENTS = { hat: "^", widehat: "^", bar: "¯", overline: "¯", vec: "→", overrightarrow: "→", dot: "˙", ddot: "¨", tilde: "~", widetilde: "~", overbrace: "⏞" };
const UNDER = { underline: "_", underbrace: "⏟" };
const SPACES = { ",": "0.17em", ":": "0.22em", ">": "0.22em", ";": "0.28em", "!": "-0.17em", " ": "0.25em", quad: "1em", qquad: "2em", enspace: "0.5em", thinspace: "0.17em" };
const STYLES = { mathbf: "bold", boldsymbol: "bold", bm: "bold", mathbb: "double", mathcal: "script", mathscr: "script", mathfrak: "fraktur", mathrm: "normal", mathsf: "normal", mathtt: "mono", mathit: "italic", operatorname: "operator" };
const TEXTS = new Set(["text", "textrm", "textbf", "textit", "mbox", "texttt", "textsf"]);
const ENDS = { matrix: ["", ""], pmatrix: ["(", ")"], bmatrix: ["[", "]"], Bmatrix: ["{", "}"], vmatrix: ["|", "|"], Vmatrix: ["‖", "‖"], cases: ["{", ""], smallmatrix: ["", ""] };
/** Signs that browsers stretch to the height of their row, which only `\\left`, `\\right` and environments mean. */
const FENCES = new Set("()[]{}|‖⟨⟩⌊⌋⌈⌉↑↓");
/** Heights of the signs that are made larger by name. */
const SIZES = { big: "1.2em", Big: "1.8em", bigg: "2.4em", Bigg: "3em" };
const DEEPEST = 40;

const operator = (sign) => (FENCES.has(sign) ? ["mo", { stretchy: "false" }, sign] : ["mo", sign]);

const tokens = (tex) => tex.match(/\\[A-Za-z]+\*?|\\[\s\S]|[{}^_&]|\s+|[\s\S]/gu) ?? [];

class Reader {
  constructor(tex) {
    this.tokens = tokens(tex);
    this.at = 0;
    this.depth = 0;
  }

  get ahead() {
    return this.tokens[this.at];
  }

  skip() {
    while (this.ahead !== undefined && /^\s/.test(this.ahead)) this.at += 1;
  }

  /** Everything up to a token that ends it. */
  row(ends) {
    const out = [];
    this.depth += 1;
    for (;;) {
      this.skip();
      if (this.ahead === undefined || ends.includes(this.ahead)) break;
      if (this.depth > DEEPEST) {
        out.push(["mtext", this.tokens[this.at++]]);
        continue;
      }
      const atom = this.atom();
      if (atom) out.push(this.scripts(atom));
    }
    this.depth -= 1;
    return out.length === 1 ? out[0] : ["mrow", ...out];
  }

  group() {
    this.skip();
    if (this.ahead !== "{") {
      // An argument without braces: `\frac12`, and `\frac\frac…` without end.
      this.depth += 1;
      const atom = this.depth > DEEPEST ? ["mtext", this.tokens[this.at++] ?? ""] : this.atom();
      this.depth -= 1;
      return atom ?? ["mrow"];
    }
    this.at += 1;
    const inner = this.row(["}"]);
    this.at += 1;
    return inner;
  }

  /** The text within braces, as it stands. */
  raw() {
    this.skip();
    if (this.ahead !== "{") return this.tokens[this.at++] ?? "";
    let open = 0;
    let text = "";
    for (; this.at < this.tokens.length; this.at += 1) {
      if (this.ahead === "{" && open++ === 0) continue;
      if (this.ahead === "}" && --open === 0) break;
      text += this.ahead;
    }
    this.at += 1;
    return text;
  }

  scripts(base) {
    let [below, above] = [null, null];
    for (;;) {
      this.skip();
      if (this.ahead === "_" && !below) {
        this.at += 1;
        below = this.group();
      } else if (this.ahead === "^" && !above) {
        this.at += 1;
        above = this.group();
      } else if (this.ahead === "'" && !above) {
        let primes = "";
        while (this.ahead === "'") {
          primes += "′";
          this.at += 1;
        }
        above = ["mo", primes];
      } else if (this.ahead === "\\limits" || this.ahead === "\\nolimits") this.at += 1;
      else break;
    }
    if (!below && !above) return base;
    const limits = base.limits;
    if (below && above) return [limits ? "munderover" : "msubsup", base, below, above];
    return below ? [limits ? "munder" : "msub", base, below] : [limits ? "mover" : "msup", base, above];
  }

  atom() {
    const token = this.tokens[this.at++];
    if (token === undefined) return null;
    if (token === "{") {
      const inner = this.row(["}"]);
      this.at += 1;
      return inner;
    }
    if (token === "}" || token === "&" || token === "^" || token === "_") return ["mtext", token];
    if (token.startsWith("\\") && token.length > 1) return this.command(token.slice(1));
    if (/\d/.test(token)) {
      let number = token;
      while (this.ahead !== undefined && (/\d/.test(this.ahead) || (this.ahead === "." && /\d/.test(this.tokens[this.at + 1] ?? "")))) number += this.tokens[this.at++];
      return ["mn", number];
    }
    if (/\p{L}/u.test(token)) return ["mi", token];
    return operator(token === "-" ? "−" : token === "*" ? "∗" : token);
  }

  command(name) {
    if (NAMES[name]) return ["mi", NAMES[name]];
    if (OPERATORS[name]) return operator(OPERATORS[name]);
    if (LARGE[name]) return Object.assign(["mo", LARGE[name]], { limits: !name.includes("int") });
    if (FUNCTIONS.has(name)) return ["mrow", ["mi", name], ["mo", "\u2061"]];
    if (LIMITS.has(name)) return Object.assign(["mo", name], { limits: true });
    if (SPACES[name]) return ["mspace", { width: SPACES[name] }];
    if (/^[%$#&_]$/.test(name)) return ["mi", name];
    if (name === "\\") return ["mspace", { linebreak: "newline" }];
    if (/^[dtc]?frac$/.test(name)) return ["mfrac", this.group(), this.group()];
    if (/^[dt]?binom$/.test(name)) return ["mrow", ["mo", "("], ["mfrac", { linethickness: "0" }, this.group(), this.group()], ["mo", ")"]];
    if (name === "sqrt") return this.root();
    if (TEXTS.has(name)) return ["mtext", this.raw()];
    if (ACCENTS[name]) return ["mover", { accent: "true" }, this.group(), ["mo", ACCENTS[name]]];
    if (UNDER[name]) return Object.assign(["munder", this.group(), ["mo", UNDER[name]]], { limits: true });
    if (STYLES[name]) return styled(STYLES[name], this.group());
    if (name === "overset" || name === "stackrel") return this.swapped("mover");
    if (name === "underset") return this.swapped("munder");
    if (name === "boxed" || name === "fbox") return ["mrow", { class: "boxed" }, this.group()];
    if (name === "left") return this.fenced();
    if (name === "begin") return this.environment();
    const large = /^(big|Big|bigg|Bigg)[lrm]?$/.exec(name);
    if (large) return this.delimiter({ stretchy: "true", minsize: SIZES[large[1]], maxsize: SIZES[large[1]] });
    if (name === "middle") return this.delimiter();
    if (/^(displaystyle|textstyle|scriptstyle|limits|nolimits|nonumber|notag|bf|rm|it)$/.test(name)) return null;
    if (/^(tag|label|color|phantom|hspace|vspace)\*?$/.test(name)) {
      this.raw();
      return null;
    }
    return ["mtext", `\\${name}`];
  }

  root() {
    this.skip();
    if (this.ahead !== "[") return ["msqrt", this.group()];
    this.at += 1;
    const degree = this.row(["]"]);
    this.at += 1;
    return ["mroot", this.group(), degree];
  }

  swapped(tag) {
    const over = this.group();
    return [tag, this.group(), over];
  }

  delimiter(attributes = { stretchy: "true" }) {
    this.skip();
    const token = this.tokens[this.at++] ?? ".";
    const shown = token.startsWith("\\") ? OPERATORS[token.slice(1)] ?? token.slice(1) : token;
    return ["mo", attributes, shown === "." ? "" : shown];
  }

  fenced() {
    const open = this.delimiter();
    const inner = this.row(["\\right"]);
    this.at += 1;
    return ["mrow", open, inner, this.ahead === undefined ? ["mo", ""] : this.delimiter()];
  }

  environment() {
    const name = this.raw().replace("*", "");
    if (name === "array") this.raw();
    const rows = [[]];
    for (;;) {
      const cell = this.row(["&", "\\\\", "\\end", "\\hline"]);
      const token = this.tokens[this.at++];
      if (token === "\\hline") continue;
      rows.at(-1).push(["mtd", cell]);
      if (token === "\\\\") rows.push([]);
      else if (token !== "&") break;
    }
    this.raw();
    if (rows.at(-1).every((cell) => cell[1].length === 1)) rows.pop();
    const left = name === "cases";
    const aligned = /align|split|gather|eqnarray/.test(name);
    const body = ["mtable", { class: left ? "cases" : aligned ? "aligned" : "matrix", displaystyle: aligned ? "true" : "false" }, ...rows.map((cells) => ["mtr", ...cells])];
    const [open, close] = ENDS[name] ?? ["", ""];
    return open || close ? ["mrow", ["mo", { stretchy: "true" }, open], body, ["mo", { stretchy: "true" }, close]] : body;
  }
}

const DOUBLE = { C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ" };

/** Letters in another style: bold and double-struck by their own characters, which need no style sheet. */
function styled(style, node) {
  if (style === "operator" || style === "normal") return ["mi", { mathvariant: "normal" }, flat(node)];
  const shift = { bold: [0x1d400, 0x1d41a], double: [0x1d538, 0x1d552], script: [0x1d4d0, 0x1d4ea], fraktur: [0x1d56c, 0x1d586], mono: [0x1d670, 0x1d68a] }[style];
  const change = (c) => {
    if (style === "double" && DOUBLE[c]) return DOUBLE[c];
    if (shift && /[A-Z]/.test(c)) return String.fromCodePoint(shift[0] + c.charCodeAt(0) - 65);
    if (shift && /[a-z]/.test(c)) return String.fromCodePoint(shift[1] + c.charCodeAt(0) - 97);
    return c;
  };
  const walk = (n) => (typeof n === "string" ? [...n].map(change).join("") : Array.isArray(n) ? n.map((part, i) => (i === 0 ? part : walk(part))) : n);
  return walk(node);
}

function flat(node) {
  if (typeof node === "string") return node;
  return Array.isArray(node) ? node.slice(1).map(flat).join("") : "";
}

/** A formula as `[element, attributes?, ...children]`. */
export function tree(tex) {
  const reader = new Reader(tex);
  const rows = ["mrow"];
  while (reader.ahead !== undefined) {
    rows.push(reader.row([]));
  }
  return rows;
}

const NS = "http://www.w3.org/1998/Math/MathML";

function build(node) {
  if (typeof node === "string") return document.createTextNode(node);
  const [tag, ...rest] = node;
  const element = document.createElementNS(NS, tag);
  for (const part of rest) {
    if (typeof part === "string" || Array.isArray(part)) element.append(build(part));
    else for (const [name, value] of Object.entries(part)) element.setAttribute(name, value);
  }
  return element;
}

let roots;

/** Whether the browser draws roots: without a font for formulas it leaves out the sign, and says something else. */
function drawsRoots() {
  if (roots === undefined) {
    const math = build(["math", ["msqrt", ["mi", "x"]]]);
    document.body.append(math);
    const [whole, inner] = [math.firstChild, math.firstChild.firstChild].map((part) => part.getBoundingClientRect().width);
    math.remove();
    roots = whole > inner * 1.2;
  }
  return roots;
}

/** The same formula with signs of roots that any font has, and lines above what is under them. */
export function plainRoots(node) {
  if (!Array.isArray(node)) return node;
  const [tag, ...parts] = node;
  const inner = parts.map(plainRoots);
  if (tag !== "msqrt" && tag !== "mroot") return Object.assign([tag, ...inner], { limits: node.limits });
  const sign = ["mo", { form: "prefix", rspace: "0", stretchy: "false" }, "√"];
  const root = ["mrow", sign, ["mrow", { class: "radicand" }, inner[0]]];
  return tag === "msqrt" ? root : ["mrow", ["msup", ["mrow"], inner[1]], ...root.slice(1)];
}

/** A formula as an element. */
export function mathml(tex, display) {
  const formula = tree(tex.trim());
  const math = build(["math", drawsRoots() ? formula : plainRoots(formula)]);
  if (display) math.setAttribute("display", "block");
  math.setAttribute("aria-label", tex.trim());
  return math;
}
