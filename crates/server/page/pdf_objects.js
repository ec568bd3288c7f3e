// The objects of a PDF file, read without trust: every depth, size and count has an end. Names are texts that begin with `/`, strings are
// `{ text }` with a letter for each byte, references are `{ ref }`, dictionaries are maps.

/** All that may come out of the compressed parts of one file. */
const MOST_INFLATED = 96 << 20;
const DEEPEST = 48;

const SPACE = " \t\r\n\f\0";
const ENDS = `${SPACE}()<>[]{}/%`;

/** Reads objects and operators from a text that has a letter for each byte. */
export class Reader {
  constructor(source, at = 0) {
    Object.assign(this, { source, at });
  }

  skip() {
    const { source } = this;
    for (; this.at < source.length; this.at += 1) {
      if (source[this.at] === "%") while (this.at < source.length && source[this.at] !== "\n" && source[this.at] !== "\r") this.at += 1;
      else if (!SPACE.includes(source[this.at])) return;
    }
  }

  word() {
    const from = this.at;
    while (this.at < this.source.length && !ENDS.includes(this.source[this.at])) this.at += 1;
    return this.source.slice(from, this.at);
  }

  /** The next object; `undefined` at the end, `{ op }` for a word that is none. */
  next(depth = 0) {
    this.skip();
    const { source } = this;
    const first = source[this.at];
    if (first === undefined || depth > DEEPEST) return undefined;
    if (first === "/") {
      this.at += 1;
      return `/${this.word().replace(/#([0-9a-fA-F]{2})/g, (_, code) => String.fromCharCode(parseInt(code, 16)))}`;
    }
    if (first === "(") return this.string();
    if (first === "[") return this.list(depth);
    if (first === "<") return source[this.at + 1] === "<" ? this.dictionary(depth) : this.hex();
    if (ENDS.includes(first)) {
      this.at += first === ">" && source[this.at + 1] === ">" ? 2 : 1;
      return { op: first };
    }
    const word = this.word();
    if (!/^[+-]?(\d+\.?\d*|\.\d+)$/.test(word)) return { true: true, false: false, null: null }[word] ?? { op: word };
    const reference = /^\d+$/.test(word) && /^\s+\d+\s+R(?![A-Za-z])/.exec(source.slice(this.at, this.at + 24));
    if (!reference) return Number(word);
    this.at += reference[0].length;
    return { ref: Number(word) };
  }

  string() {
    let text = "";
    let open = 1;
    for (this.at += 1; this.at < this.source.length; this.at += 1) {
      const c = this.source[this.at];
      if (c === "\\") {
        this.at += 1;
        const octal = /^[0-7]{1,3}/.exec(this.source.slice(this.at, this.at + 3))?.[0];
        const next = this.source[this.at];
        if (octal) {
          text += String.fromCharCode(parseInt(octal, 8) & 255);
          this.at += octal.length - 1;
        } else if (next === "\r" && this.source[this.at + 1] === "\n") this.at += 1;
        else if (next !== "\n" && next !== "\r") text += { n: "\n", r: "\r", t: "\t", b: "\b", f: "\f" }[next] ?? next ?? "";
        continue;
      }
      if (c === "(") open += 1;
      if (c === ")" && --open === 0) break;
      text += c;
    }
    this.at += 1;
    return { text };
  }

  hex() {
    const end = this.source.indexOf(">", this.at);
    const digits = this.source.slice(this.at + 1, end < 0 ? undefined : end).replace(/[^0-9a-fA-F]/g, "");
    this.at = end < 0 ? this.source.length : end + 1;
    return { text: (digits.match(/..?/g) ?? []).map((pair) => String.fromCharCode(parseInt(pair.padEnd(2, "0"), 16))).join("") };
  }

  list(depth) {
    const out = [];
    this.at += 1;
    for (let item; (item = this.next(depth + 1)) !== undefined && item?.op !== "]"; ) out.push(item);
    return out;
  }

  dictionary(depth) {
    const out = new Map();
    this.at += 2;
    for (let name; (name = this.next(depth + 1)) !== undefined && name?.op !== ">"; ) {
      if (typeof name !== "string") continue;
      const value = this.next(depth + 1);
      if (value?.op === ">") break;
      out.set(name, value);
    }
    return out;
  }
}

export const latin = (bytes) => {
  const parts = [];
  for (let at = 0; at < bytes.length; at += 0x8000) parts.push(String.fromCharCode(...bytes.subarray(at, at + 0x8000)));
  return parts.join("");
};
const bytesOf = (text) => Uint8Array.from(text, (c) => c.charCodeAt(0));

function ascii85(text) {
  let out = "";
  for (const group of text.replace(/\s|~>[\s\S]*$/g, "").replace(/z/g, "!!!!!").match(/.{1,5}/g) ?? []) {
    let value = 0;
    for (const c of group.padEnd(5, "u")) value = value * 85 + c.charCodeAt(0) - 33;
    const four = [24, 16, 8, 0].map((shift) => String.fromCharCode(Math.floor(value / 2 ** shift) & 255)).join("");
    out += four.slice(0, group.length - 1);
  }
  return out;
}

/** The objects of a file. */
export class Objects {
  constructor(bytes) {
    this.source = latin(bytes);
    this.all = new Map();
    this.inflated = 0;
  }

  static async of(bytes) {
    const objects = new Objects(bytes);
    if (!/^[\s\S]{0,1024}%PDF-/.test(objects.source.slice(0, 1100))) throw new Error("is no PDF file");
    const packed = objects.scan();
    for (const holder of packed) await objects.unpack(holder);
    return objects;
  }

  /** Finds the objects of the file; later ones replace earlier ones. Gives those that hold others. */
  scan() {
    const packed = [];
    const start = /(\d{1,9})\s+\d{1,5}\s+obj\b|\btrailer\b/g;
    for (let found; (found = start.exec(this.source)); ) {
      const reader = new Reader(this.source, start.lastIndex);
      const value = reader.next();
      if (value instanceof Map && value.has("/Encrypt")) throw new Error("is encrypted");
      if (!found[1]) continue;
      const object = { value, data: null };
      reader.skip();
      if (value instanceof Map && this.source.startsWith("stream", reader.at)) {
        const from = reader.at + 6 + (this.source[reader.at + 6] === "\r" ? 1 : 0) + 1;
        const told = value.get("/Length");
        const fits = typeof told === "number" && /^\s*endstream/.test(this.source.slice(from + told, from + told + 14));
        const end = fits ? from + told : this.source.indexOf("endstream", from);
        object.data = this.source.slice(from, end < 0 ? undefined : end);
        if (end < 0) start.lastIndex = this.source.length;
        else start.lastIndex = end;
      } else start.lastIndex = Math.max(start.lastIndex, reader.at);
      this.all.set(Number(found[1]), object);
      if (value instanceof Map && value.get("/Type") === "/ObjStm") packed.push(object);
    }
    return packed;
  }

  /** Takes the objects out of one that holds them. Those that stand in the file by themselves are newer. */
  async unpack(holder) {
    const text = await this.data(holder);
    const first = Number(this.get(holder.value.get("/First"))) || 0;
    const heads = (text.slice(0, first).match(/\d+/g) ?? []).map(Number);
    for (let i = 0; i + 1 < heads.length; i += 2) {
      const known = this.all.get(heads[i]);
      if (!known || known.packed) this.all.set(heads[i], { value: new Reader(text, first + heads[i + 1]).next(), data: null, packed: true });
    }
  }

  /** The value that is meant: a reference is followed. */
  get(value) {
    for (let steps = 0; value?.ref !== undefined && steps < DEEPEST; steps += 1) value = this.all.get(value.ref)?.value;
    return value;
  }

  /** The object behind a reference, with its data. */
  object(value) {
    return value?.ref !== undefined ? this.all.get(value.ref) : undefined;
  }

  /** What an object's data means, with its filters undone; empty where one of them is not known. */
  async data(object) {
    if (!object || object.data === null) return "";
    const filters = [this.get(object.value.get("/Filter")) ?? []].flat().map((filter) => this.get(filter));
    const parameters = this.get([this.get(object.value.get("/DecodeParms"))].flat()[0]);
    let text = object.data;
    for (const filter of filters) {
      if (filter === "/FlateDecode" || filter === "/Fl") text = await this.inflate(text);
      else if (filter === "/ASCII85Decode" || filter === "/A85") text = ascii85(text);
      else if (filter === "/ASCIIHexDecode" || filter === "/AHx") text = new Reader(`<${text}`).hex().text;
      else return "";
    }
    // Differences between rows are used for tables of places and for pictures, and for no text.
    return parameters instanceof Map && Number(parameters.get("/Predictor") ?? 1) > 1 ? "" : text;
  }

  async inflate(text) {
    const reader = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("deflate")).getReader();
    const parts = [];
    try {
      for (let piece; !(piece = await reader.read()).done; ) {
        this.inflated += piece.value.length;
        if (this.inflated > MOST_INFLATED) throw new RangeError("unpacks to more than 96 MB");
        parts.push(latin(piece.value));
      }
    } catch (error) {
      if (error instanceof RangeError) throw error;
      // What came before the damage is text all the same; many files have a few bytes too many.
    }
    return parts.join("");
  }
}
