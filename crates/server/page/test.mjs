// Tests of what the page computes without a browser: node --test crates/server/page/test.mjs
import assert from "node:assert/strict";
import { test } from "node:test";

import { children, fresh, grow, leaf, path, requestMessages, switchTo } from "./tree.js";
import { parse } from "./markdown.js";
import { scan } from "./highlight.js";
import { plainRoots, tree } from "./math.js";
import { Events } from "./events.js";

const kinds = (text) => parse(text).map((block) => block.type);

test("blocks are told apart", () => {
  assert.deepEqual(kinds("# A\ntext\n\n- a\n- b\n\n1. c\n\n> q\n\n---\n| a | b |\n|--|:-:|\n| 1 | 2 |\n\n$$x$$\n```py\nx\n```"), ["heading", "paragraph", "list", "list", "quote", "rule", "table", "math", "code"]);
  const [list] = parse("1. one\n   - inner\n   - more\n2. two\n\n   still two");
  assert.equal(list.items.length, 2);
  assert.deepEqual(list.items[0].blocks.map((b) => b.type), ["paragraph", "list"]);
  assert.equal(list.items[1].blocks.length, 2);
  const [table] = parse("| a | `x|y` |\n|---|---|\n| 1 | 2 |");
  assert.equal(table.head.length, 2);
  assert.equal(parse("- [x] done\n- [ ] open")[0].items[0].task, true);
  assert.equal(parse("7. seven")[0].start, 7);
});

test("an unfinished fence is code, and what comes behind a finished one is not", () => {
  assert.deepEqual(parse("```js\nlet a"), [{ type: "code", language: "js", text: "let a", whole: false, raw: "```js\nlet a" }]);
  assert.deepEqual(kinds("````md\n```\ninner\n```\n````\nafter"), ["code", "paragraph"]);
});

const flat = (pieces) => pieces.map((p) => (p.inline ? `${p.type}(${flat(p.inline)})` : p.type === "text" ? p.text : `${p.type}:${p.text ?? p.tex ?? ""}`)).join("|");
const line = (text) => flat(parse(text)[0].inline);

test("text within a line", () => {
  assert.equal(line("a **b** *c* `d` ~~e~~"), "a |strong(b)| |em(c)| |code:d| |del(e)");
  assert.equal(line("***both***"), "strong(em(both))");
  assert.equal(line("**a *b* c**"), "strong(a |em(b)| c)");
  assert.equal(line("snake_case_name and 2 * 3 * 4"), "snake_case_name and 2 * 3 * 4");
  assert.equal(line("**open"), "**open");
  assert.equal(line("it costs $5 and $6"), "it costs $5 and $6");
  assert.equal(line("$x^2$ and \\(y\\)"), "math:x^2| and |math:y");
  assert.equal(line("\\*plain\\*"), "*plain*");
  assert.equal(line("see https://a.example/b_(c)."), "see |link(https://a.example/b_(c))|.");
});

test("links lead to the web and nowhere else, and pictures are links", () => {
  assert.equal(parse("[a](https://b.example)")[0].inline[0].href, "https://b.example");
  for (const bad of ["javascript:alert(1)", "data:text/html,x", "vbscript:x", "/admin", "JAVASCRIPT:x"]) assert.equal(parse(`[a](${bad})`)[0].inline[0].href, undefined, bad);
  assert.equal(parse("![a](https://b.example/p.png)")[0].inline[0].type, "link");
});

test("no text is too strange or too deep", () => {
  const pieces = ["**", "_", "`", "$", "[", "](", ")", "> ", "- ", "\n", "| ", "```", "\\", "<", "#", " ", "a", "1. ", "~~", "$$", "\\[", "|-|\n"];
  let seed = 7;
  const random = (n) => (seed = (seed * 1103515245 + 12345) % 2147483648) % n;
  for (let round = 0; round < 3000; round += 1) parse(Array.from({ length: random(40) }, () => pieces[random(pieces.length)]).join(""));
  const start = performance.now();
  for (const deep of ["> ", "- ", "**a ", "[", "$", "`", "*_"]) parse(deep.repeat(3000));
  tree("{".repeat(5000));
  tree("\\frac".repeat(3000));
  assert.ok(performance.now() - start < 5000, `${performance.now() - start} ms`);
});

test("every prefix of a text can be shown, and finished blocks stay as they are", () => {
  const text = "# T\n\nA *b* list:\n\n- one\n- two\n\n```rust\nfn main() {}\n```\n\n| a |\n|---|\n| 1 |\n\nEnd $x$.";
  let before = [];
  for (let n = 1; n <= text.length; n += 1) {
    const now = parse(text.slice(0, n));
    const kept = before.slice(0, -2).every((block, i) => now[i].raw === block.raw);
    assert.ok(kept, text.slice(0, n));
    before = now;
  }
});

test("code is coloured without losing a character", () => {
  const samples = { python: 'def f(x): # c\n  return "a\\"b" + 0x1F', rust: "fn a<'a>(x: &'a str) -> char { 'x' } // c", html: '<a href="x">b</a><!-- c -->', sql: "select * from t -- c", bash: 'echo "$x" # c', nothing: "plain" };
  for (const [language, code] of Object.entries(samples)) assert.equal(scan(code, language).map(([, text]) => text).join(""), code);
  const kind = (code, language, text) => scan(code, language).find(([, t]) => t === text)?.[0];
  assert.equal(kind(samples.python, "py", "def"), "word");
  assert.equal(kind(samples.python, "py", "# c"), "comment");
  assert.equal(kind(samples.python, "py", "0x1F"), "number");
  assert.equal(kind(samples.sql, "sql", "select"), "word");
});

test("formulas become trees", () => {
  const text = (tex) => JSON.stringify(tree(tex));
  assert.equal(text("\\frac{a}{b}"), '["mrow",["mfrac",["mi","a"],["mi","b"]]]');
  assert.equal(text("x_i^2"), '["mrow",["msubsup",["mi","x"],["mi","i"],["mn","2"]]]');
  assert.equal(text("\\sum_{i=1}^n"), '["mrow",["munderover",["mo","∑"],["mrow",["mi","i"],["mo","="],["mn","1"]],["mi","n"]]]');
  assert.equal(text("\\mathbb{R}"), '["mrow",["mi","ℝ"]]');
  assert.equal(text("\\sqrt[3]{x}"), '["mrow",["mroot",["mi","x"],["mn","3"]]]');
  const plain = JSON.stringify(plainRoots(tree("\\frac{\\sqrt{\\pi}}{\\sqrt[3]{x}}")));
  assert.ok(!/msqrt|mroot/.test(plain) && plain.match(/√/g).length === 2 && plain.includes('["mi","π"]') && plain.includes('["mn","3"]'), plain);
  assert.equal(text("3.14"), '["mrow",["mn","3.14"]]');
  assert.match(text("\\begin{pmatrix}a&b\\\\c&d\\end{pmatrix}"), /mtable.*mtr.*mtr/);
  assert.match(text("\\unknown{x}"), /unknown/);
});

test("a conversation branches where a message is edited or answered again", () => {
  const talk = fresh("m");
  const ask = grow(talk, "", { role: "user", content: "one" });
  const first = grow(talk, ask.id, { role: "assistant", content: "a" });
  const second = grow(talk, ask.id, { role: "assistant", content: "b" });
  assert.deepEqual(path(talk).map((n) => n.content), ["one", "b"]);
  switchTo(talk, first.id);
  assert.deepEqual(path(talk).map((n) => n.content), ["one", "a"]);
  assert.equal(children(talk, ask.id).length, 2);
  const edited = grow(talk, "", { role: "user", content: "two", files: [{ name: "f.txt", text: "```" }] });
  assert.equal(leaf(talk).id, edited.id);
  talk.system = "be kind";
  const messages = requestMessages(talk, edited.id);
  assert.deepEqual(messages.map((m) => m.role), ["system", "user"]);
  assert.match(messages[1].content, /f\.txt\n````/);
  assert.deepEqual(requestMessages(talk, second.id).map((m) => m.content), ["be kind", "one", "b"]);
});

test("events are read whatever the pieces they come in", () => {
  const stream = 'data: {"a":1}\n\n: alive\n\ndata: {"b":"é"}\r\n\r\ndata: [DONE]\n\n';
  const bytes = new TextEncoder().encode(stream);
  for (let size = 1; size < 9; size += 1) {
    const events = new Events();
    const got = [];
    for (let i = 0; i < bytes.length; i += size) got.push(...events.push(bytes.slice(i, i + size)));
    assert.deepEqual(got, ['{"a":1}', '{"b":"é"}', "[DONE]"]);
  }
});
