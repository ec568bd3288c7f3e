// Markdown as models write it. `parse` makes plain data of a text and never fails; `Live` keeps an element in step with a text
// that grows, and touches only what changed. Nothing becomes HTML but what is made here, element by element.

import { h, copy } from "./dom.js";
import { paint } from "./highlight.js";
import { mathml } from "./math.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}>[ ]?/;
const ITEM = /^([ ]*)([-*+]|\d{1,9}[.)])(?:([ \t]+)(.*))?$/;
const DELIMITERS = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const MATH = /^ {0,3}(\$\$|\\\[)/;
/** Deeper nesting than this is shown as text: nobody means it. */
const DEEPEST = 12;

/** The blocks of a text. */
export function parse(text, depth = 0) {
  return blocks(text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n"), depth);
}

function blocks(lines, depth) {
  const out = [];
  let i = 0;
  while (i < lines.length) {
    if (!lines[i].trim()) {
      i += 1;
      continue;
    }
    const from = i;
    const block = fence(lines, i) ?? mathBlock(lines, i) ?? simple(lines, i) ?? table(lines, i) ?? (depth < DEEPEST && (quote(lines, i, depth) ?? list(lines, i, depth))) ?? null;
    const found = block || paragraph(lines, i);
    i = found.next;
    out.push({ ...found.block, raw: lines.slice(from, i).join("\n") });
  }
  return out;
}

function fence(lines, i) {
  const open = FENCE.exec(lines[i]);
  if (!open) return null;
  const close = new RegExp(`^ {0,3}${open[1][0] === "`" ? "`" : "~"}{${open[1].length},}[ \\t]*$`);
  const indent = lines[i].search(/\S/);
  let end = i + 1;
  while (end < lines.length && !close.test(lines[end])) end += 1;
  const body = lines.slice(i + 1, end).map((line) => line.replace(new RegExp(`^ {0,${indent}}`), ""));
  const block = { type: "code", language: open[2].trim().split(/\s/)[0].toLowerCase(), text: body.join("\n"), whole: end < lines.length };
  return { block, next: Math.min(end + 1, lines.length) };
}

function mathBlock(lines, i) {
  const open = MATH.exec(lines[i]);
  if (!open) return null;
  const close = open[1] === "$$" ? "$$" : "\\]";
  const first = lines[i].slice(open[0].length);
  if (first.includes(close)) {
    const at = first.indexOf(close);
    if (first.slice(at + 2).trim()) return null;
    return { block: { type: "math", tex: first.slice(0, at) }, next: i + 1 };
  }
  let end = i + 1;
  while (end < lines.length && !lines[end].includes(close)) end += 1;
  const last = end < lines.length ? lines[end].slice(0, lines[end].indexOf(close)) : "";
  return { block: { type: "math", tex: [first, ...lines.slice(i + 1, end), last].join("\n") }, next: Math.min(end + 1, lines.length) };
}

function simple(lines, i) {
  const heading = HEADING.exec(lines[i]);
  if (heading) return { block: { type: "heading", level: heading[1].length, inline: inline(heading[2] ?? "") }, next: i + 1 };
  return RULE.test(lines[i]) ? { block: { type: "rule" }, next: i + 1 } : null;
}

/** The cells of a line; a bar may be escaped or stand in code. */
function cells(line) {
  const out = [];
  let cell = "";
  let code = false;
  for (const part of line.trim().replace(/^\|/, "").match(/\\.|[\s\S]/gu) ?? []) {
    if (part === "`") code = !code;
    if (part === "|" && !code) {
      out.push(cell.trim());
      cell = "";
    } else cell += part === "\\|" ? "|" : part;
  }
  if (cell.trim()) out.push(cell.trim());
  return out;
}

function table(lines, i) {
  const under = lines[i + 1] ?? "";
  if (!lines[i].includes("|") || !under.includes("-") || !DELIMITERS.test(under)) return null;
  const head = cells(lines[i]);
  const align = cells(under).map((d) => (/^:-*:$/.test(d) ? "center" : d.endsWith(":") ? "right" : "left"));
  if (head.length !== align.length) return null;
  const rows = [];
  let end = i + 2;
  for (; end < lines.length && lines[end].trim() && lines[end].includes("|"); end += 1) {
    const row = cells(lines[end]);
    rows.push(head.map((_, column) => inline(row[column] ?? "")));
  }
  return { block: { type: "table", align, head: head.map((cell) => inline(cell)), rows }, next: end };
}

function quote(lines, i, depth) {
  if (!QUOTE.test(lines[i])) return null;
  const inner = [];
  let end = i;
  for (; end < lines.length && lines[end].trim() && (QUOTE.test(lines[end]) || !begins(lines, end)); end += 1) inner.push(lines[end].replace(QUOTE, ""));
  return { block: { type: "quote", blocks: blocks(inner, depth + 1) }, next: end };
}

function list(lines, i, depth) {
  const first = ITEM.exec(lines[i]);
  if (!first || first[1].length > 3) return null;
  const ordered = /\d/.test(first[2]);
  const kind = (marker) => marker.at(-1);
  const items = [];
  let loose = false;
  let end = i;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || item[1].length > first[1].length + 1 || kind(item[2]) !== kind(first[2]) || RULE.test(lines[end])) break;
    const own = item[1].length + item[2].length + Math.min(item[3]?.length ?? 1, 4);
    const inner = [item[4] ?? ""];
    end += 1;
    for (; end < lines.length; end += 1) {
      const line = lines[end];
      const indent = line.search(/\S/);
      // Models indent what belongs to an item by two or more, whatever the width of its marker.
      if (indent < 0 || indent >= Math.min(own, item[1].length + 2)) inner.push(line.slice(Math.min(own, Math.max(indent, 0))));
      else if (inner.at(-1).trim() && !begins(lines, end) && !ITEM.test(line)) inner.push(line.trimStart());
      else break;
    }
    let blanks = 0;
    while (inner.length > 1 && !inner.at(-1).trim()) {
      inner.pop();
      blanks += 1;
    }
    const more = end < lines.length && ITEM.test(lines[end]);
    loose ||= blanks > 0 && more && kind(ITEM.exec(lines[end])[2]) === kind(first[2]);
    const task = /^\[([ xX])\][ ]+/.exec(inner[0]);
    if (task) inner[0] = inner[0].slice(task[0].length);
    items.push({ blocks: blocks(inner, depth + 1), task: task ? task[1] !== " " : null });
    if (blanks > 0 && !more) {
      end -= blanks;
      break;
    }
  }
  return { block: { type: "list", ordered, start: ordered ? parseInt(first[2], 10) : 1, loose, items }, next: end };
}

/** Whether a line ends a paragraph by beginning something else. */
function begins(lines, i) {
  const item = ITEM.exec(lines[i]);
  const counts = item && item[4] && (!/\d/.test(item[2]) || parseInt(item[2], 10) === 1);
  return FENCE.test(lines[i]) || HEADING.test(lines[i]) || RULE.test(lines[i]) || QUOTE.test(lines[i]) || MATH.test(lines[i]) || counts;
}

function paragraph(lines, i) {
  let end = i + 1;
  while (end < lines.length && lines[end].trim() && !begins(lines, end) && !table(lines, end)) end += 1;
  return { block: { type: "paragraph", inline: inline(lines.slice(i, end).map((line) => line.trimStart()).join("\n")) }, next: end };
}

// --- within a line ----------------------------------------------------------------------------------------------------

const URL_START = /^https?:\/\/[^\s<>"']+/;
const SAFE = /^(https?:|mailto:)/i;

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
    case "[": return link(text, i, depth);
    case "<": return autolink(text, i);
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
  // Pictures would be requests to somewhere else: they are shown as links.
  return SAFE.test(target[1]) ? { piece: { type: "link", href: target[1], inline: label.length ? label : [{ type: "text", text: target[1] }] }, next } : { piece: { type: "span", inline: label }, next };
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

// --- elements ---------------------------------------------------------------------------------------------------------

const INLINE = {
  text: (p) => p.text,
  break: () => h("br"),
  code: (p) => h("code", {}, p.text),
  strong: (p) => h("strong", {}, p.inline.map(piece2dom)),
  em: (p) => h("em", {}, p.inline.map(piece2dom)),
  del: (p) => h("del", {}, p.inline.map(piece2dom)),
  span: (p) => h("span", {}, p.inline.map(piece2dom)),
  link: (p) => h("a", { href: p.href, target: "_blank", rel: "noopener noreferrer" }, p.inline.map(piece2dom)),
  math: (p) => mathml(p.tex, p.display),
};
const piece2dom = (p) => INLINE[p.type](p);

function codeBlock(block) {
  const code = h("code", {}, paint(block.text, block.language));
  const button = h("button", { type: "button", class: "quiet", icon: "copy", "aria-label": "Copy the code", onclick: () => copy(block.text, button) });
  return h("figure", { class: "code" }, h("figcaption", {}, h("span", {}, block.language || "text"), button), h("pre", { tabIndex: 0, "aria-label": `Code, ${block.language || "text"}`, role: "region" }, code));
}

function tableBlock(block) {
  const row = (cells, tag) => h("tr", {}, cells.map((cell, i) => h(tag, { class: block.align[i], scope: tag === "th" ? "col" : null }, cell.map(piece2dom))));
  return h("div", { class: "table", tabIndex: 0, role: "region", "aria-label": "Table" }, h("table", {}, h("thead", {}, row(block.head, "th")), h("tbody", {}, block.rows.map((r) => row(r, "td")))));
}

function listBlock(block) {
  const item = (it) => {
    const body = it.blocks.flatMap((b) => (b.type === "paragraph" && !block.loose ? b.inline.map(piece2dom) : [block2dom(b)]));
    const box = it.task === null ? null : h("input", { type: "checkbox", disabled: true, checked: it.task, "aria-label": it.task ? "done" : "open" });
    return h("li", { class: it.task === null ? null : "task" }, box, body);
  };
  return h(block.ordered ? "ol" : "ul", block.ordered && block.start !== 1 ? { start: block.start } : {}, block.items.map(item));
}

const BLOCKS = {
  paragraph: (b) => h("p", {}, b.inline.map(piece2dom)),
  // The page has a heading of the first and messages have one of the second level.
  heading: (b) => h(`h${Math.min(b.level + 2, 6)}`, { class: `level${b.level}` }, b.inline.map(piece2dom)),
  rule: () => h("hr"),
  quote: (b) => h("blockquote", {}, b.blocks.map(block2dom)),
  math: (b) => h("div", { class: "formula" }, mathml(b.tex, true)),
  code: codeBlock,
  table: tableBlock,
  list: listBlock,
};

function block2dom(block) {
  return BLOCKS[block.type](block);
}

/** An element that shows a text which grows. */
export class Live {
  constructor(element) {
    this.element = element;
    this.shown = [];
  }

  set(text) {
    const now = parse(text);
    let same = 0;
    while (same < now.length && this.shown[same]?.raw === now[same].raw && this.shown[same]?.type === now[same].type) same += 1;
    for (const { node } of this.shown.splice(same)) node.remove();
    for (const block of now.slice(same)) {
      const node = block2dom(block);
      this.element.append(node);
      this.shown.push({ raw: block.raw, type: block.type, node });
    }
  }
}
