// Markdown as models write it. `parse` makes plain data of a text and never fails; `Live` keeps an element in step with a text
// that grows, and touches only what changed. Nothing becomes HTML but what is made here, element by element.

import { h, copy } from "./dom.js";
import { paint } from "./highlight.js";
import { DEEPEST, inline, useFootnotes } from "./inline.js";
import { mathml } from "./math.js";
import { canPreview, preview } from "./preview.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}>[ ]?/;
const ITEM = /^([ ]*)([-*+]|\d{1,9}[.)])(?:([ \t]+)(.*))?$/;
const DELIMITERS = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const MATH = /^ {0,3}(\$\$|\\\[)/;
const FOOTNOTE = /^ {0,3}\[\^([^\]\s]{1,40})\]:[ \t]*/;

/** The blocks of a text. */
export function parse(text, depth = 0) {
  const lines = text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n");
  const names = lines.map((line) => FOOTNOTE.exec(line)?.[1]).filter(Boolean);
  useFootnotes(new Set(names));
  // A block that names footnotes looks different once they are explained.
  const explained = names.join(" ");
  return blocks(lines, depth).map((block) => (names.length && block.raw.includes("[^") ? { ...block, explained } : block));
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
    const block = fence(lines, i) ?? mathBlock(lines, i) ?? simple(lines, i) ?? footnote(lines, i, depth) ?? table(lines, i) ?? (depth < DEEPEST && (quote(lines, i, depth) ?? list(lines, i, depth))) ?? null;
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

/** What a footnote says: its line, those that follow it directly, and those that are indented. */
function footnote(lines, i, depth) {
  const open = FOOTNOTE.exec(lines[i]);
  if (!open || depth >= DEEPEST) return null;
  const inner = [lines[i].slice(open[0].length)];
  let end = i + 1;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    const belongs = line.trim() ? /^ {2,}/.test(line) || (inner.at(-1).trim() && !FOOTNOTE.test(line) && !begins(lines, end)) : /^ {2,}\S/.test(lines[end + 1] ?? "");
    if (!belongs) break;
    inner.push(line.replace(/^ {1,4}/, ""));
  }
  return { block: { type: "footnote", name: open[1], blocks: blocks(inner, depth + 1) }, next: end };
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
  return FENCE.test(lines[i]) || HEADING.test(lines[i]) || RULE.test(lines[i]) || QUOTE.test(lines[i]) || MATH.test(lines[i]) || FOOTNOTE.test(lines[i]) || counts;
}

function paragraph(lines, i) {
  let end = i + 1;
  while (end < lines.length && lines[end].trim() && !begins(lines, end) && !table(lines, end)) end += 1;
  return { block: { type: "paragraph", inline: inline(lines.slice(i, end).map((line) => line.trimStart()).join("\n")) }, next: end };
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
  ...Object.fromEntries(["sub", "sup", "kbd", "mark", "u", "small"].map((tag) => [tag, (p) => h(tag, {}, p.inline.map(piece2dom))])),
  reference: (p) => h("sup", {}, h("button", { type: "button", class: "reference", "aria-label": `Footnote ${p.name}`, onclick: (event) => jump(event.target, "footnote", p.name) }, p.name)),
};
const piece2dom = (p) => INLINE[p.type](p);

/** Leads from a footnote's sign to what it says, and back. */
function jump(from, to, name) {
  const all = [...from.closest(".prose").querySelectorAll(to === "footnote" ? ".footnote" : "button.reference")];
  const found = all.find((element) => (to === "footnote" ? element.dataset.name : element.textContent) === name);
  found?.scrollIntoView({ block: "nearest" });
  found?.focus();
}

function footnoteBlock(block) {
  const back = h("button", { type: "button", class: "reference", "aria-label": `Back to the text of footnote ${block.name}`, onclick: () => jump(element, "reference", block.name) }, "↩");
  const element = h("div", { class: "footnote", role: "note", "aria-label": `Footnote ${block.name}`, tabIndex: -1 }, h("span", { class: "number" }, `${block.name}.`), h("div", {}, block.blocks.map(block2dom)), back);
  element.dataset.name = block.name;
  return element;
}

const WRAP = "kiln-wrap";

/** What can be done with a block of code: wrap it, look at what it draws, copy it. */
function codeTools(block, code, figure) {
  const wrap = h("button", { type: "button", class: "quiet", icon: "wrap", "aria-label": "Wrap long lines", title: "Wrap long lines", onclick: () => {
    const on = figure.classList.toggle("wrapped");
    wrap.setAttribute("aria-pressed", String(on));
    localStorage.setItem(WRAP, on ? "on" : "");
  } });
  const on = localStorage.getItem(WRAP) === "on";
  figure.classList.toggle("wrapped", on);
  wrap.setAttribute("aria-pressed", String(on));
  const copying = h("button", { type: "button", class: "quiet", icon: "copy", "aria-label": "Copy the code", title: "Copy", onclick: () => copy(block.text, copying) });
  if (!block.whole || !canPreview(block.language, block.text)) return [wrap, copying];
  let frame = null;
  const look = h("button", { type: "button", class: "quiet", icon: "play", "aria-pressed": "false", onclick: () => {
    if (frame) frame.replaceWith(code);
    else code.replaceWith((frame = preview(block.language, block.text)));
    if (!frame.isConnected) frame = null;
    look.setAttribute("aria-pressed", String(Boolean(frame)));
  } }, "Preview");
  return [look, wrap, copying];
}

function codeBlock(block) {
  const name = block.language || "text";
  const code = h("pre", { tabIndex: 0, dir: "ltr", "aria-label": `Code, ${name}`, role: "region" }, h("code", {}, paint(block.text, block.language)));
  const figure = h("figure", { class: "code" });
  figure.append(h("figcaption", {}, h("span", {}, name), h("span", { class: "tools" }, codeTools(block, code, figure))), code);
  return figure;
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
  footnote: footnoteBlock,
};

/** Scripts that are written from the right: Hebrew, Arabic, Syriac, Thaana and N'Ko, and their presentation forms. */
const FROM_THE_RIGHT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/;

function block2dom(block) {
  const element = BLOCKS[block.type](block);
  // Its first letter says which way a block is read; code and formulas have their own.
  if (!["code", "math"].includes(block.type) && FROM_THE_RIGHT.test(/\p{L}/u.exec(element.textContent)?.[0] ?? "")) element.dir = "rtl";
  return element;
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
    const isSame = (old, block) => old?.raw === block.raw && old.type === block.type && old.explained === block.explained;
    while (same < now.length && isSame(this.shown[same], now[same])) same += 1;
    for (const { node } of this.shown.splice(same)) node.remove();
    for (const block of now.slice(same)) {
      const node = block2dom(block);
      this.element.append(node);
      this.shown.push({ raw: block.raw, type: block.type, explained: block.explained, node });
    }
  }
}
