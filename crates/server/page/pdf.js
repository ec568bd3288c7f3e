// The text of a PDF file, page by page. Words are put together from where the letters stand; pictures of text stay pictures.

import { Objects, Reader } from "./pdf_objects.js";

const MOST_PAGES = 3000;
/** Forms within forms. */
const DEEPEST = 6;
/** From this share of the letter's height on, a gap between letters is one between words. */
const GAP = 0.18;
const LINE = 0.45;

const NAMES = {
  space: " ", exclam: "!", quotedbl: '"', numbersign: "#", dollar: "$", percent: "%", ampersand: "&", quotesingle: "'", parenleft: "(", parenright: ")", asterisk: "*", plus: "+",
  comma: ",", hyphen: "-", minus: "−", period: ".", slash: "/", zero: "0", one: "1", two: "2", three: "3", four: "4", five: "5", six: "6", seven: "7", eight: "8", nine: "9", colon: ":",
  semicolon: ";", less: "<", equal: "=", greater: ">", question: "?", at: "@", bracketleft: "[", backslash: "\\", bracketright: "]", underscore: "_", quoteleft: "‘", quoteright: "’",
  quotedblleft: "“", quotedblright: "”", quotedblbase: "„", quotesinglbase: "‚", guillemotleft: "«", guillemotright: "»", endash: "–", emdash: "—", bullet: "•", ellipsis: "…", fi: "fi", fl: "fl",
  ff: "ff", ffi: "ffi", ffl: "ffl", germandbls: "ß", braceleft: "{", braceright: "}", bar: "|", asciitilde: "~", asciicircum: "^", grave: "`", section: "§", degree: "°", copyright: "©", multiply: "×", Euro: "€",
  AE: "Æ", ae: "æ", OE: "Œ", oe: "œ", Oslash: "Ø", oslash: "ø", dotlessi: "ı", mu: "µ", trademark: "™", registered: "®", periodcentered: "·",
};
const MARKS = { acute: "\u0301", grave: "\u0300", dieresis: "\u0308", circumflex: "\u0302", tilde: "\u0303", cedilla: "\u0327", ring: "\u030a", caron: "\u030c" };

/** What a name of a glyph means. */
function letterOf(name) {
  if (Object.hasOwn(NAMES, name)) return NAMES[name];
  const code = /^(?:uni|u)([0-9A-F]{4,6})/.exec(name)?.[1];
  if (code) return parseInt(code, 16) <= 0x10ffff ? String.fromCodePoint(parseInt(code, 16)) : "";
  const [, base, mark] = /^([A-Za-z])(\w*)$/.exec(name.split(".")[0]) ?? [];
  if (!base) return "";
  return mark ? (Object.hasOwn(MARKS, mark) ? (base + MARKS[mark]).normalize("NFC") : "") : base;
}

const wide = (text) => {
  let out = "";
  for (let i = 0; i + 1 < text.length; i += 2) out += String.fromCharCode(text.charCodeAt(i) * 256 + text.charCodeAt(i + 1));
  return out;
};
const codeOf = (text) => [...text].reduce((code, c) => code * 256 + c.charCodeAt(0), 0);

/** The table from codes to letters that a font brings. */
function readTable(source) {
  const letters = new Map();
  let width = 0;
  const reader = new Reader(source);
  const before = [];
  for (let item; (item = reader.next()) !== undefined; ) {
    if (item?.op === "endbfchar") for (let i = 0; i + 1 < before.length; i += 2) if (before[i]?.text && before[i + 1]?.text) letters.set(codeOf(before[i].text), wide(before[i + 1].text));
    if (item?.op === "endbfrange") for (let i = 0; i + 2 < before.length; i += 3) {
      const [low, high] = [codeOf(before[i]?.text ?? ""), codeOf(before[i + 1]?.text ?? "")];
      for (let code = low; code <= Math.min(high, low + 0xffff); code += 1) {
        const to = Array.isArray(before[i + 2]) ? before[i + 2][code - low]?.text : before[i + 2]?.text;
        if (!to) continue;
        const text = wide(to);
        letters.set(code, Array.isArray(before[i + 2]) ? text : text.slice(0, -1) + String.fromCharCode(text.charCodeAt(text.length - 1) + code - low));
      }
    }
    if (item?.op === "endcodespacerange") width = Math.max(width, before[0]?.text?.length ?? 0);
    if (item?.op) before.length = 0;
    else before.push(item);
  }
  return { letters, width };
}

/** A font: what its codes mean, and how wide they are. */
class Font {
  static async of(objects, given) {
    const font = new Font();
    const value = objects.get(given);
    const dictionary = value instanceof Map ? value : new Map();
    const table = objects.object(dictionary.get("/ToUnicode"));
    const { letters, width } = table ? readTable(await objects.data(table)) : { letters: new Map(), width: 0 };
    font.letters = letters;
    const isWide = dictionary.get("/Subtype") === "/Type0";
    font.bytes = isWide ? width || 2 : 1;
    font.widths = new Map();
    if (isWide) font.wide(objects, objects.get([objects.get(dictionary.get("/DescendantFonts"))].flat()[0]));
    else font.narrow(objects, dictionary);
    return font;
  }

  narrow(objects, dictionary) {
    const encoding = objects.get(dictionary.get("/Encoding"));
    const base = encoding instanceof Map ? encoding.get("/BaseEncoding") : encoding;
    const decoder = new TextDecoder(base === "/MacRomanEncoding" ? "macintosh" : "windows-1252");
    for (let code = 32; code < 256; code += 1) if (!this.letters.has(code)) this.letters.set(code, decoder.decode(Uint8Array.of(code)));
    let code = 0;
    for (const item of [objects.get(encoding instanceof Map ? encoding.get("/Differences") : null) ?? []].flat()) {
      if (typeof item === "number") code = item;
      // The table of the font, where there is one, knows better.
      else if (typeof item === "string") {
        const letter = letterOf(item.slice(1));
        if (letter && !dictionary.has("/ToUnicode")) this.letters.set(code, letter);
        code += 1;
      }
    }
    const first = Number(objects.get(dictionary.get("/FirstChar"))) || 0;
    for (const [i, width] of [objects.get(dictionary.get("/Widths")) ?? []].flat().entries()) this.widths.set(first + i, Number(objects.get(width)) || 0);
    this.usual = 500;
  }

  wide(objects, descendant) {
    const dictionary = descendant instanceof Map ? descendant : new Map();
    this.usual = Number(objects.get(dictionary.get("/DW")) ?? 1000);
    const list = [...(objects.get(dictionary.get("/W")) ?? [])].map((item) => objects.get(item));
    for (let i = 0; i < list.length; ) {
      const next = list[i + 1];
      if (Array.isArray(next)) {
        next.forEach((width, at) => this.widths.set(list[i] + at, Number(objects.get(width)) || 0));
        i += 2;
      } else {
        for (let code = list[i]; code <= Math.min(next, list[i] + 0xffff); code += 1) this.widths.set(code, Number(list[i + 2]) || 0);
        i += 3;
      }
    }
  }

  /** The letters of a string, and how far they reach in thousandths of the size. */
  read(text) {
    let [out, width, spaces, count] = ["", 0, 0, 0];
    for (let i = 0; i < text.length; i += this.bytes) {
      const code = codeOf(text.slice(i, i + this.bytes));
      out += this.letters.get(code) ?? "";
      width += this.widths.get(code) ?? this.usual;
      spaces += this.bytes === 1 && code === 32;
      count += 1;
    }
    return { out, width, spaces, count };
  }
}

/** What is written on a page, in the order in which it is drawn. */
class Page {
  constructor(objects, fonts) {
    Object.assign(this, { objects, fonts, out: "", x: null, y: 0 });
  }

  /** Letters at a place; a gap or another line before them is seen. */
  put(text, x, y, size) {
    if (this.x !== null) {
      if (Math.abs(y - this.y) > LINE * size) this.out += Math.abs(y - this.y) > 1.9 * size ? "\n\n" : "\n";
      else if (x - this.x > GAP * size && !/\s$/.test(this.out)) this.out += " ";
    }
    this.out += text;
    this.y = y;
  }

  async draw(source, resources, depth = 0) {
    const { objects } = this;
    const part = (name) => objects.get(objects.get(resources)?.get?.(name));
    const reader = new Reader(source);
    const state = { font: null, size: 1, leading: 0, letter: 0, word: 0, scale: 1, line: [1, 0, 0, 1, 0, 0], at: [1, 0, 0, 1, 0, 0] };
    const moved = (x, y) => {
      const [a, b, c, d, e, f] = state.line;
      state.line = [a, b, c, d, a * x + c * y + e, b * x + d * y + f];
      state.at = [...state.line];
    };
    const forward = (by) => {
      state.at[4] += by * state.at[0];
      state.at[5] += by * state.at[1];
    };
    const say = (text) => {
      if (!state.font) return;
      const { out, width, spaces, count } = state.font.read(text);
      const height = Math.abs(state.size) * (Math.hypot(state.at[2], state.at[3]) || 1);
      if (out) this.put(out, state.at[4], state.at[5], height);
      forward(((width / 1000) * state.size + count * state.letter + spaces * state.word) * state.scale);
      this.x = state.at[4];
    };
    const does = {
      BT: () => (state.line = [1, 0, 0, 1, 0, 0]) && (state.at = [...state.line]),
      Tf: async ([name, size]) => {
        state.size = Number(size) || 1;
        state.font = await this.font(part("/Font")?.get?.(name));
      },
      Td: ([x, y]) => moved(x, y),
      TD: ([x, y]) => {
        state.leading = -y;
        moved(x, y);
      },
      Tm: (six) => {
        state.line = six.slice(-6).map(Number);
        state.at = [...state.line];
      },
      "T*": () => moved(0, -state.leading),
      TL: ([by]) => (state.leading = by),
      Tc: ([by]) => (state.letter = by),
      Tw: ([by]) => (state.word = by),
      Tz: ([by]) => (state.scale = by / 100),
      Tj: ([text]) => say(text?.text ?? ""),
      "'": ([text]) => {
        moved(0, -state.leading);
        say(text?.text ?? "");
      },
      '"': ([word, letter, text]) => {
        Object.assign(state, { word, letter });
        moved(0, -state.leading);
        say(text?.text ?? "");
      },
      TJ: ([list]) => {
        for (const item of Array.isArray(list) ? list : []) {
          if (typeof item === "number") forward((-item / 1000) * state.size * state.scale);
          else say(item?.text ?? "");
        }
      },
      Do: async ([name]) => {
        const form = objects.object(part("/XObject")?.get?.(name));
        if (depth < DEEPEST && form?.value?.get?.("/Subtype") === "/Form") await this.draw(await objects.data(form), form.value.get("/Resources") ?? resources, depth + 1);
      },
      // The data of a picture within the page is skipped.
      ID: () => {
        const end = reader.source.slice(reader.at).search(/\sEI\s/);
        reader.at = end < 0 ? reader.source.length : reader.at + end + 3;
      },
    };
    const before = [];
    for (let item; (item = reader.next()) !== undefined; ) {
      if (item?.op === undefined) {
        if (before.length < 64) before.push(item);
        continue;
      }
      if (Object.hasOwn(does, item.op)) await does[item.op](before);
      before.length = 0;
    }
  }

  async font(given) {
    const key = given?.ref ?? given;
    if (!this.fonts.has(key)) this.fonts.set(key, await Font.of(this.objects, given));
    return this.fonts.get(key);
  }
}

/** The pages of a file, first to last, each with the resources that it has or inherits. */
function pagesOf(objects) {
  const values = [...objects.all.values()].map(({ value }) => value).filter((value) => value instanceof Map);
  const root = values.findLast((value) => value.get("/Type") === "/Catalog");
  const out = [];
  const seen = new Set();
  const walk = (given, inherited) => {
    const node = objects.get(given);
    if (!(node instanceof Map) || seen.has(node) || out.length >= MOST_PAGES) return;
    seen.add(node);
    const resources = node.get("/Resources") ?? inherited;
    const kids = objects.get(node.get("/Kids"));
    if (Array.isArray(kids)) for (const kid of kids) walk(kid, resources);
    else out.push({ node, resources });
  };
  if (root) walk(root.get("/Pages"));
  if (!out.length) for (const node of values.filter((value) => value.get("/Type") === "/Page")) walk(node);
  return out;
}

/** The text of a PDF file. An error says in words why there is none. */
export async function textOf(bytes) {
  const objects = await Objects.of(bytes);
  const pages = pagesOf(objects);
  const fonts = new Map();
  const texts = [];
  for (const { node, resources } of pages) {
    const page = new Page(objects, fonts);
    const given = node.get("/Contents");
    const contents = Array.isArray(objects.get(given)) ? objects.get(given) : [given];
    const parts = [];
    for (const part of contents) parts.push(await objects.data(objects.object(part)));
    await page.draw(parts.join("\n"), resources);
    texts.push(page.out.replace(/[ \t]+\n/g, "\n").replace(/\n{3,}/g, "\n\n").trim());
  }
  if (!texts.some(Boolean)) throw new Error("has no text: its pages are pictures, or its letters have no names");
  return { pages: pages.length, text: texts.map((text, i) => (pages.length > 1 ? `[page ${i + 1}]\n${text}` : text)).join("\n\n") };
}
