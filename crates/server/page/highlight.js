// Colours for code: comments, strings, numbers, words of the language, names that are called. One scanner for all languages; a
// language is a row of what it calls a comment, a string and a word. A language without a row is shown as it is.

import { h } from "./dom.js";

const words = (text) => new Set(text.split(" "));

const C = "break case char const continue default do double else enum extern float for goto if inline int long return short signed sizeof static struct switch typedef union unsigned void volatile while bool true false NULL nullptr";
const JS = "async await break case catch class const continue debugger default delete do else export extends false finally for from function get if import in instanceof interface let new null of return set static super switch this throw true try type typeof undefined var void while yield";

const LANGUAGES = {
  python: { line: "#", triple: true, words: words("and as assert async await break case class continue def del elif else except False finally for from global if import in is lambda match None nonlocal not or pass raise return self True try while with yield") },
  javascript: { line: "//", block: ["/*", "*/"], tick: true, words: words(JS) },
  typescript: { line: "//", block: ["/*", "*/"], tick: true, words: words(`${JS} abstract any as boolean declare enum implements keyof namespace never number private protected public readonly string unknown`) },
  rust: { line: "//", block: ["/*", "*/"], lifetimes: true, words: words("as async await break const continue crate dyn else enum extern false fn for if impl in let loop match mod move mut pub ref return self Self static struct super trait true type unsafe use where while bool char f32 f64 i8 i16 i32 i64 isize str u8 u16 u32 u64 usize String Vec Option Result Some None Ok Err") },
  c: { line: "//", block: ["/*", "*/"], hash: true, words: words(C) },
  cpp: { line: "//", block: ["/*", "*/"], hash: true, words: words(`${C} auto class constexpr delete explicit friend mutable namespace new noexcept operator override private protected public template this throw try catch typename using virtual std`) },
  csharp: { line: "//", block: ["/*", "*/"], words: words(`${C} abstract as async await base class decimal event foreach get in interface internal is namespace new null object out override private protected public readonly ref sealed set string this throw try catch finally using var virtual yield`) },
  java: { line: "//", block: ["/*", "*/"], words: words("abstract boolean break byte case catch char class const continue default do double else enum extends final finally float for if implements import instanceof int interface long native new null package private protected public record return short static super switch synchronized this throw throws true false try var void volatile while String") },
  kotlin: { line: "//", block: ["/*", "*/"], words: words("as break by class companion const continue data do else enum false for fun if import in interface internal is lateinit null object open override package private protected public return sealed super suspend this throw true try typealias val var when while") },
  swift: { line: "//", block: ["/*", "*/"], words: words("as async await break case catch class continue default defer do else enum extension false for func guard if import in init inout is let nil private protocol public return self Self static struct super switch throw throws true try var where while") },
  go: { line: "//", block: ["/*", "*/"], tick: true, words: words("break case chan const continue default defer else fallthrough false for func go goto if import interface map nil package range return select struct switch true type var bool byte error float64 int int64 rune string uint") },
  bash: { line: "#", words: words("alias case cd do done echo elif else esac exit export false fi for function if in local read return set shift source sudo test then true unset until while") },
  sql: { line: "--", block: ["/*", "*/"], fold: true, words: words("add all alter and as asc begin between by case commit constraint create cross default delete desc distinct drop else end exists foreign from full group having if in index inner insert into is join key left like limit not null offset on or order outer primary references returning right rollback select set table then union unique update using values view when where with") },
  ruby: { line: "#", words: words("alias and begin break case class def do else elsif end ensure false for if in module next nil not or redo rescue retry return self super then true undef unless until when while yield require attr_accessor") },
  php: { line: "//", block: ["/*", "*/"], words: words("abstract and array as break case catch class const continue declare default do echo else elseif extends false final finally fn for foreach function global if implements include interface namespace new null or private protected public require return static switch this throw trait true try use var while") },
  lua: { line: "--", words: words("and break do else elseif end false for function goto if in local nil not or repeat return then true until while") },
  json: { words: words("true false null") },
  yaml: { line: "#", words: words("true false null yes no on off") },
  toml: { line: "#", words: words("true false") },
  css: { block: ["/*", "*/"], words: words("important inherit initial unset none auto flex grid block inline absolute relative fixed sticky") },
  glsl: { line: "//", block: ["/*", "*/"], hash: true, words: words(`${C} attribute buffer in inout layout mat2 mat3 mat4 out precision readonly shared uniform uvec2 uvec3 uvec4 varying vec2 vec3 vec4 writeonly`) },
  html: { block: ["<!--", "-->"], markup: true, words: words("") },
};

const ALIASES = {
  py: "python", python3: "python", js: "javascript", jsx: "javascript", mjs: "javascript", node: "javascript", ts: "typescript", tsx: "typescript",
  rs: "rust", h: "c", "c++": "cpp", cc: "cpp", hpp: "cpp", cuda: "cpp", cu: "cpp", cs: "csharp", "c#": "csharp", kt: "kotlin", golang: "go", sh: "bash", shell: "bash", zsh: "bash", console: "bash",
  rb: "ruby", yml: "yaml", jsonc: "json", json5: "json", scss: "css", less: "css", xml: "html", svg: "html", htm: "html", comp: "glsl", frag: "glsl", vert: "glsl", hlsl: "glsl", wgsl: "glsl",
};

/** Longer code is shown without colours, so that a page never waits for them. */
const LONGEST = 60_000;

/** Pieces of code as `[kind, text]`; kind is empty for what has no colour. */
export function scan(code, language) {
  const rules = LANGUAGES[ALIASES[language] ?? language];
  if (!rules || code.length > LONGEST) return [["", code]];
  const out = [];
  const add = (kind, text) => {
    if (out.length && out.at(-1)[0] === kind) out.at(-1)[1] += text;
    else out.push([kind, text]);
  };
  let i = 0;
  while (i < code.length) {
    const [kind, length] = next(code, i, rules, out);
    add(kind, code.slice(i, i + length));
    i += length;
  }
  return out;
}

function next(code, i, rules, out) {
  const rest = code.slice(i, i + 400);
  const until = (end, from) => {
    const at = code.indexOf(end, from);
    return (at < 0 ? code.length : at + end.length) - i;
  };
  const line = () => {
    const at = code.indexOf("\n", i);
    return (at < 0 ? code.length : at) - i;
  };
  if (rules.block && rest.startsWith(rules.block[0])) return ["comment", until(rules.block[1], i + rules.block[0].length)];
  if (rules.line && rest.startsWith(rules.line) && (rules.line !== "#" || i === 0 || /\s/.test(code[i - 1]))) return ["comment", line()];
  if (rules.hash && rest[0] === "#" && (i === 0 || code[i - 1] === "\n")) return ["call", line()];
  if (rules.markup) return markup(rest);
  if (rules.triple && /^("""|''')/.test(rest)) return ["string", until(rest.slice(0, 3), i + 3)];
  if (rules.lifetimes && /^'[a-z_]\w*(?!')/.test(rest)) return ["word", /^'\w+/.exec(rest)[0].length];
  if (rest[0] === '"' || rest[0] === "'" || (rules.tick && rest[0] === "`")) return ["string", quoted(code, i)];
  const number = /^(0[xXbBoO][\da-fA-F_]+|\d[\d_]*(\.\d+)?([eE][+-]?\d+)?)\w*/.exec(rest);
  if (number) return ["number", number[0].length];
  const name = /^[A-Za-z_$][\w$]*/.exec(rest);
  if (!name) return ["", 1];
  const word = rules.fold ? name[0].toLowerCase() : name[0];
  // What comes behind a dot is a member, whatever its name.
  if (rules.words.has(word) && !out.at(-1)?.[1].endsWith(".")) return ["word", name[0].length];
  return [/^\s*\(/.test(code.slice(i + name[0].length, i + name[0].length + 8)) ? "call" : "", name[0].length];
}

function quoted(code, i) {
  const quote = code[i];
  for (let at = i + 1; at < code.length; at += 1) {
    if (code[at] === "\\") at += 1;
    else if (code[at] === quote) return at + 1 - i;
    else if (code[at] === "\n" && quote !== "`") return at - i;
  }
  return code.length - i;
}

function markup(rest) {
  const tag = /^<\/?[A-Za-z][\w:-]*|^\/?>/.exec(rest);
  if (tag) return ["word", tag[0].length];
  const attribute = /^[A-Za-z_:@][\w:.-]*(?==["'])/.exec(rest);
  if (attribute) return ["call", attribute[0].length];
  const value = /^=("[^"]*"|'[^']*')/.exec(rest);
  if (value) return ["string", value[0].length];
  return ["", /^[\w]+/.exec(rest)?.[0].length ?? 1];
}

/** Code as nodes. */
export function paint(code, language) {
  return scan(code, language).map(([kind, text]) => (kind ? h("span", { class: `code-${kind}` }, text) : text));
}
