// Text within a line: emphasis, code, links, formulas, footnotes, and the few tags of HTML that Markdown has no signs for. A tag with
// attributes, and every other tag, stays text.

import { decoded, entity } from "./entities.js";

/** Deeper nesting than this is shown as text: no reader means it. */
export const DEEPEST = 12;

const URL_START = /^https?:\/\/[^\s<>"']+/;
const SAFE = /^(https?:|mailto:)/i;

/** Tags that may stand in a line, and what they become. */
const TAGS = { sub: "sub", sup: "sup", kbd: "kbd", mark: "mark", u: "u", ins: "u", b: "strong", strong: "strong", i: "em", em: "em", s: "del", del: "del", strike: "del", small: "small" };

/** Names of the footnotes that the text explains. Brackets with another name are brackets. */
let footnotes = new Set();

export function useFootnotes(names) {
  footnotes = names;
}

/** The pieces of a line of text. */
export function inline(text, depth = 0) {
  const out = [];
  let plain = "";
  const push = (piece) => {
    if (plain) out.push({ type: "text", text: plain });
    plain = "";
    out.push(piece);
  };
  let i = 0;
  while (i < text.length) {
    const found = depth < DEEPEST ? piece(text, i, depth) : null;
    if (found?.text !== undefined) plain += found.text;
    else if (found) push(found.piece);
    else plain += text[i];
    i = found ? found.next : i + 1;
  }
  if (plain) out.push({ type: "text", text: plain });
  return out;
}

function piece(text, i, depth) {
  switch (text[i]) {
    case "\\": return escaped(text, i);
    case "`": return codeSpan(text, i);
    case "$": return dollars(text, i);
    case "\n": return { piece: { type: "break" }, next: i + 1 };
    case " ": return /^ {2,}\n/.test(text.slice(i, i + 40)) ? { text: "", next: text.indexOf("\n", i) } : null;
    case "*": case "_": case "~": return emphasis(text, i, depth);
    case "!": return text[i + 1] === "[" ? link(text, i + 1, depth) : null;
    case "[": return reference(text, i) ?? link(text, i, depth);
    case "<": return autolink(text, i) ?? tag(text, i, depth);
    case "&": return named(text, i);
    case "h": return i === 0 || /[^\w]/.test(text[i - 1]) ? bare(text, i) : null;
    default: return null;
  }
}

function escaped(text, i) {
  const next = text[i + 1];
  if (next === "(" || next === "[") {
    const end = text.indexOf(next === "(" ? "\\)" : "\\]", i + 2);
    if (end > 0) return { piece: { type: "math", tex: text.slice(i + 2, end), display: next === "[" }, next: end + 2 };
  }
  if (next === "\n") return { text: "", next: i + 1 };
  return next && /[!-/:-@[-`{-~]/.test(next) ? { text: next, next: i + 2 } : null;
}

function codeSpan(text, i) {
  const ticks = /^`+/.exec(text.slice(i))[0];
  for (let at = i + ticks.length; (at = text.indexOf(ticks, at)) >= 0; ) {
    const run = /^`+/.exec(text.slice(at))[0].length;
    if (run === ticks.length) {
      const body = text.slice(i + ticks.length, at).replace(/\n/g, " ");
      return { piece: { type: "code", text: /^ .*[^ ].* $/.test(body) ? body.slice(1, -1) : body }, next: at + run };
    }
    at += run;
  }
  return { text: ticks, next: i + ticks.length };
}

function dollars(text, i) {
  const double = text[i + 1] === "$";
  const start = i + (double ? 2 : 1);
  if (!double && !/\S/.test(text[start] ?? " ")) return null;
  const end = text.indexOf(double ? "$$" : "$", start);
  if (end <= start) return null;
  const tex = text.slice(start, end);
  // `$5 and $6` are prices: no formula ends behind a space or before a digit.
  if (!double && (/\s$/.test(tex) || /\d/.test(text[end + 1] ?? "") || tex.includes("\n\n"))) return null;
  return { piece: { type: "math", tex, display: double }, next: end + (double ? 2 : 1) };
}

function emphasis(text, i, depth) {
  const mark = text[i];
  const run = /^(\*+|_+|~+)/.exec(text.slice(i))[0].length;
  const width = mark === "~" ? 2 : run >= 2 ? 2 : 1;
  const word = (c) => c !== undefined && /[\p{L}\p{N}]/u.test(c);
  const opens = run >= width && /\S/.test(text[i + width] ?? " ") && !(mark === "_" && word(text[i - 1]));
  if (opens && !(mark === "~" && run !== 2)) {
    for (let at = i + width; at < text.length; at += 1) {
      if (text[at] === "\\") at += 1;
      else if (text[at] === "`") at = codeSpan(text, at).next - 1;
      else if (text.startsWith(mark.repeat(width), at) && /\S/.test(text[at - 1])) {
        const closing = /^(\*+|_+|~+)/.exec(text.slice(at))[0].length;
        // A pair within a single one, or the other way round, belongs to the inner text.
        if (width === 1 && closing === 2) at += 1;
        else if (at > i + width && !(mark === "_" && word(text[at + closing]))) {
          const end = width === 2 && closing > 2 && run <= closing ? at + closing - width : at;
          const type = mark === "~" ? "del" : width === 2 ? "strong" : "em";
          return { piece: { type, inline: inline(text.slice(i + width, end), depth + 1) }, next: end + width };
        }
      }
    }
  }
  return { text: mark.repeat(run), next: i + run };
}

function named(text, i) {
  const found = entity(text.slice(i, i + 14));
  return found && { text: found.text, next: i + found.length };
}

function tag(text, i, depth) {
  const open = /^<([A-Za-z]{1,6})[ \t]*(\/?)>/.exec(text.slice(i, i + 20));
  if (!open) return null;
  const name = open[1].toLowerCase();
  const start = i + open[0].length;
  // A line that ends behind the tag is broken once.
  if (name === "br") return { piece: { type: "break" }, next: text[start] === "\n" ? start + 1 : start };
  if (!Object.hasOwn(TAGS, name) || open[2]) return null;
  const close = new RegExp(`</${name}[ \\t]*>`, "gi");
  close.lastIndex = start;
  const end = close.exec(text);
  return end && { piece: { type: TAGS[name], inline: inline(text.slice(start, end.index), depth + 1) }, next: close.lastIndex };
}

function reference(text, i) {
  const found = /^\[\^([^\]\s]{1,40})\]/.exec(text.slice(i, i + 44));
  return found && footnotes.has(found[1]) ? { piece: { type: "reference", name: found[1] }, next: i + found[0].length } : null;
}

function link(text, i, depth) {
  let open = 0;
  let end = i;
  for (; end < text.length; end += 1) {
    if (text[end] === "\\") end += 1;
    else if (text[end] === "[") open += 1;
    else if (text[end] === "]" && --open === 0) break;
  }
  const target = /^\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+["'(][^"')]*["')])?\s*\)/.exec(text.slice(end + 1));
  if (end >= text.length || !target) return null;
  const label = inline(text.slice(i + 1, end), depth + 1);
  const next = end + 1 + target[0].length;
  const href = decoded(target[1]);
  // Pictures would be requests to somewhere else: they are shown as links.
  return SAFE.test(href) ? { piece: { type: "link", href, inline: label.length ? label : [{ type: "text", text: href }] }, next } : { piece: { type: "span", inline: label }, next };
}

function autolink(text, i) {
  const found = /^<((?:https?:\/\/|mailto:)[^\s<>]+)>/.exec(text.slice(i));
  return found && { piece: { type: "link", href: found[1], inline: [{ type: "text", text: found[1] }] }, next: i + found[0].length };
}

function bare(text, i) {
  const found = URL_START.exec(text.slice(i));
  if (!found) return null;
  let href = found[0].replace(/[.,;:!?*_~]+$/, "");
  while (href.endsWith(")") && (href.match(/\)/g) ?? []).length > (href.match(/\(/g) ?? []).length) href = href.slice(0, -1);
  return { piece: { type: "link", href, inline: [{ type: "text", text: href }] }, next: i + href.length };
}
