// Tests of what the page computes without a browser: node --test crates/server/page/test.mjs
import assert from "node:assert/strict";
import { test } from "node:test";

import { Answers, canContinue, MOST_AT_ONCE } from "./answers.js";
import { REFUSED, stateOf, Tools, turns, visible } from "./calls.js";
import { difference, Remote } from "./remote.js";
import { addressOf, idOf, isLoopback } from "./route.js";
import { textOf } from "./pdf.js";
import { cleaned } from "./titles.js";
import { conversationsOf } from "./transfer.js";
import { children, fresh, grow, imported, leaf, markdown, path, prune, rename, requestMessages, retitle, stored, switchTo, tagsIn } from "./tree.js";
import { parse } from "./markdown.js";
import { scan } from "./highlight.js";
import { plainRoots, tree } from "./math.js";
import { Events } from "./events.js";
import { base64, bytesOf, isData, isPicture, read, refusal } from "./pictures.js";

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
  const pieces = ["**", "_", "`", "$", "[", "](", ")", "> ", "- ", "\n", "| ", "```", "\\", "<", "#", " ", "a", "1. ", "~~", "$$", "\\[", "|-|\n", "<sub>", "</sub>", "<br>", "&amp;", "&#x", "[^1]", "\n[^1]: "];
  let seed = 7;
  const random = (n) => (seed = (seed * 1103515245 + 12345) % 2147483648) % n;
  for (let round = 0; round < 3000; round += 1) parse(Array.from({ length: random(40) }, () => pieces[random(pieces.length)]).join(""));
  const start = performance.now();
  for (const deep of ["> ", "- ", "**a ", "[", "$", "`", "*_", "<sub>", "<b><i>", "&", "[^1]", "[^1]: "]) parse(deep.repeat(3000));
  parse(`${"<sub>".repeat(2000)}${"</sub>".repeat(2000)}`);
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
  // A comment is coloured to its last letter, whether the code ends there or the line.
  for (const [code, language, comment] of [["x = 1  # tail", "python", "# tail"], ["x # tail\ny", "python", "# tail"], ["#", "python", "#"], ["//\nx", "js", "//"]]) assert.equal(kind(code, language, comment), "comment", code);
  assert.equal(kind("#include <a.h>", "c", "#include <a.h>"), "call");
});

test("characters by name, a few tags and footnotes", () => {
  const cases = {
    "&amp; &copy; &alpha;&Omega;&sigmaf; &#65;&#x42; &frac12;": "& © αΩς AB ½",
    "&nothing; &#0; &#xD800; &#x110000; AT&T; &": "&nothing; \ufffd \ufffd \ufffd AT&T; &",
    "`&amp;` \\&amp;": "code:&amp;| &amp;",
    "a<br>b<br/>c<BR />\nd": "a|break:|b|break:|c|break:|d",
    "H<sub>2</sub>O and x<sup>*n*</sup>": "H|sub(2)|O and x|sup(em(n))",
    "<b>a</b> <i>b</i> <kbd>c</kbd> <mark>d</mark>": "strong(a)| |em(b)| |kbd(c)| |mark(d)",
    "<sub>open <script>x</script> <b onclick=y>z</b>": "<sub>open <script>x</script> <b onclick=y>z</b>",
    "&#42;not weight&#42; &lt;b&gt;": "*not weight* <b>",
  };
  for (const [text, wanted] of Object.entries(cases)) assert.equal(line(text), wanted, text);
  assert.equal(flat(parse("| a |\n|---|\n| x<br>y |")[0].rows[0][0]), "x|break:|y");
  assert.equal(parse("[a](https://b.example/?c=1&amp;d=2)")[0].inline[0].href, "https://b.example/?c=1&d=2");
  for (const bad of ["java&#115;cript:alert(1)", "&#x6a;avascript:x", "javascript&colon;x"]) assert.equal(parse(`[a](${bad})`)[0].inline[0].href, undefined, bad);
});

test("footnotes lead to what explains them, and other brackets stay", () => {
  const text = "Said[^1], and [^a-z] stays.\n\n[^1]: By *him*.\n    More.\n[^n]: Named.\n\nAfter.";
  const [first, one, named, after] = parse(text);
  assert.deepEqual(first.inline.map((p) => p.name ?? p.text), ["Said", "1", ", and [^a-z] stays."]);
  assert.deepEqual([one.type, one.name, one.blocks[0].inline[1].type], ["footnote", "1", "em"]);
  assert.deepEqual([named.name, after.type], ["n", "paragraph"]);
  // A paragraph that was shown before its footnote came is another one then.
  assert.notDeepEqual(parse("Said[^1].\n\n[^1]: x")[0].explained, parse("Said[^1].")[0].explained);
  assert.equal(parse("Plain.\n\n[^1]: x")[0].explained, undefined);
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
  // Only brackets that enclose something by their name grow with it.
  assert.match(text("f(x)"), /"mo",\{"stretchy":"false"\},"\("/);
  assert.match(text("\\left(x\\right)"), /"mo",\{"stretchy":"true"\},"\("/);
  assert.match(text("\\Big["), /"minsize":"1.8em"/);
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

test("a conversation has an address, and only loopback is this machine", () => {
  assert.equal(addressOf(""), "#/");
  assert.equal(idOf(addressOf("a/b %")), "a/b %");
  for (const none of ["", "#/", "#prompt", "#/chat/", "#/other/x"]) assert.equal(idOf(none), null, none);
  assert.equal(idOf("#/chat/%zz"), "%zz");
  for (const host of ["localhost", "127.0.0.1", "127.1.2.3", "[::1]", "kiln.localhost"]) assert.ok(isLoopback(host), host);
  for (const host of ["10.0.0.2", "kiln.example", "localhost.example", "127.example", "[::2]"]) assert.ok(!isLoopback(host), host);
});

test("a title of the model's is a short line without its signs", () => {
  assert.equal(cleaned('<think>Hm,\nwhat?</think>\n\n**Title:** "Night firing."\nIt fits.'), "Night firing");
  assert.equal(cleaned("# Clay & *fire*"), "Clay & *fire");
  assert.equal(cleaned("<think>never done"), "");
  assert.equal(cleaned("x".repeat(99)).length, 60);
});

test("exports of others become conversations of this page, whatever is wrong in them", () => {
  const [talk] = conversationsOf(JSON.stringify({ id: "o", title: "T", chat: { history: { currentId: "b", messages: { a: { id: "a", role: "user", content: "q", timestamp: 1_700_000_000 }, b: { id: "b", parentId: "a", role: "assistant", content: "x", timestamp: 3 }, c: { id: "c", parentId: "a", role: "assistant", content: "y", timestamp: 4 }, d: { id: "d", parentId: "nobody", role: "user", content: "z" } } } } }));
  assert.deepEqual(path(talk).map((node) => node.content), ["q", "x"]);
  assert.equal(talk.nodes.a.made, 1_700_000_000_000);
  const flat = { conv: { id: "l" }, messages: [{ id: "0", role: "system", content: "S", parent: null }, { id: "1", role: "user", content: "q", parent: "0" }, null, { id: "2", role: "assistant", content: "x", parent: "1", toolCalls: "not JSON" }] };
  assert.equal(conversationsOf(JSON.stringify([flat, { conv: {}, messages: 7 }, 3, null, []]))[0].system, "S");
  assert.equal(conversationsOf(`${JSON.stringify(flat)}\n${JSON.stringify(flat)}\n`).length, 2);
  for (const none of ["[]", "{}", "null", '{"chat": {"messages": [{}]}}', '{"conv": null, "messages": []}', '{"nodes": {"a": null}}']) assert.throws(() => conversationsOf(none), /no conversation/, none);
});

test("titles follow the first message until somebody gives one", () => {
  const talk = fresh("m");
  const first = grow(talk, "", { role: "user", content: "\n  Tell me a long story\nnow" });
  retitle(talk, first);
  assert.equal(talk.title, "Tell me a long story");
  retitle(talk, grow(talk, first.id, { role: "user", content: "More" }));
  assert.equal(talk.title, "Tell me a long story");
  const edited = grow(talk, "", { role: "user", content: "Say hi." });
  retitle(talk, edited);
  assert.equal(talk.title, "Say hi.");
  rename(talk, "  Greetings ");
  retitle(talk, first);
  assert.equal(talk.title, "Greetings");
  assert.equal(imported(JSON.parse(JSON.stringify(talk))).named, true);
  rename(talk, " ");
  assert.deepEqual([talk.title, talk.named], ["Say hi.", false]);
  assert.equal(imported(JSON.parse(JSON.stringify(talk))).named, false);
});

const asked = (content = "q") => {
  const talk = fresh("m");
  return { talk, question: grow(talk, "", { role: "user", content }) };
};

/** Answers whose streams a test writes: `streams` has them in order. */
function rehearsal() {
  const streams = [];
  const saved = [];
  const chat = (body, signal, piece) => new Promise((resolve, reject) => {
    signal.addEventListener("abort", () => reject(Object.assign(new Error(), { name: "AbortError" })));
    let tokens = 0;
    const say = (content) => piece({ choices: [{ index: 0, delta: { content } }], usage: { prompt_tokens: 10, completion_tokens: (tokens += 1) } });
    streams.push({ body, say, end: resolve, fail: reject });
  });
  const nothing = () => {};
  const answers = new Answers({ chat, request: (talk) => ({ model: talk.model }), save: (talk) => saved.push(stored(talk)), begun: nothing, changed: nothing, ended: nothing });
  return { answers, streams, saved };
}

test("conversations are answered at once, and each is stopped by itself", async () => {
  const { answers, streams, saved } = rehearsal();
  const [one, two] = [asked("one"), asked("two")];
  const runs = [answers.start(one.talk, one.question), answers.start(two.talk, two.question)];
  streams[0].say("a");
  streams[1].say("b");
  assert.ok(answers.refusal(one.talk) && !answers.refusal(asked().talk));
  assert.equal(Object.values(saved[0].nodes).at(-1).end, "left");
  answers.stop(one.talk);
  await runs[0];
  assert.equal(answers.of(one.talk), undefined);
  assert.ok(answers.of(two.talk));
  streams[1].say("c");
  streams[1].end();
  await runs[1];
  assert.deepEqual([leaf(one.talk).content, leaf(one.talk).end, leaf(one.talk).stats.tokens], ["a", "stopped", 1]);
  assert.deepEqual([leaf(two.talk).content, leaf(two.talk).end, leaf(two.talk).stats.used], ["bc", undefined, 12]);
  const many = Array.from({ length: MOST_AT_ONCE }, () => asked());
  const all = many.map(({ talk, question }) => answers.start(talk, question));
  assert.match(answers.refusal(asked().talk), /being written already/);
  for (const { talk } of many) answers.stop(talk);
  await Promise.all(all);
});

test("an answer that broke off is continued in its place", async () => {
  const { answers, streams } = rehearsal();
  const { talk, question } = asked();
  const first = answers.start(talk, question);
  streams[0].say("one");
  streams[0].fail(Object.assign(new Error("The connection was lost."), { lost: true }));
  await first;
  const node = leaf(talk);
  assert.deepEqual([node.end, node.note, canContinue(node)], ["lost", "The connection was lost.", true]);
  const rest = answers.resume(talk, node);
  assert.ok(!canContinue(node), "it is being continued");
  assert.deepEqual(streams[1].body.messages.at(-1), { role: "assistant", content: "one" });
  assert.deepEqual([streams[1].body.continue_final_message, streams[1].body.add_generation_prompt], [true, false]);
  streams[1].say(" two");
  streams[1].end();
  await rest;
  assert.deepEqual([leaf(talk), node.content, node.stats.tokens, node.end, node.note], [node, "one two", 2, undefined, undefined]);
  const refused = answers.start(talk, question);
  streams[2].fail(Object.assign(new Error("raw"), { code: "context_length_exceeded", details: { n_prompt_tokens: 9001, n_ctx: 8192 } }));
  await refused;
  assert.match(leaf(talk).note, /has 9,001 tokens .* context of 8,192/);
  prune(talk, leaf(talk));
  assert.equal(leaf(talk), node);
});

test("a stream that ends without its last word was lost", async () => {
  globalThis.localStorage = { getItem: () => "", setItem: () => {} };
  const { chat } = await import("./api.js");
  const bytes = (text) => new TextEncoder().encode(text);
  const replies = (start) => {
    globalThis.fetch = async () => new Response(new ReadableStream({ start }), { status: 200 });
  };
  const pieces = [];
  const ask = () => chat({}, new AbortController().signal, (piece) => pieces.push(piece));
  replies((stream) => {
    stream.enqueue(bytes('data: {"choices":[]}\n\n'));
    stream.close();
  });
  await assert.rejects(ask, { lost: true, message: "The connection was lost." });
  replies((stream) => stream.error(new TypeError("network error")));
  await assert.rejects(ask, { lost: true });
  replies((stream) => {
    stream.enqueue(bytes('data: {"choices":[]}\n\ndata: [DONE]\n\n'));
    stream.close();
  });
  await ask();
  assert.equal(pieces.length, 2);
});

test("pictures stand before the text of their message, and files within it", () => {
  const talk = fresh("m");
  const picture = { name: "a.png", picture: "data:image/png;base64,QUJD" };
  const both = grow(talk, "", { role: "user", content: "what?", files: [picture, { name: "f.txt", text: "x" }] });
  const [message] = requestMessages(talk, both.id);
  assert.deepEqual(message.content[0], { type: "image_url", image_url: { url: picture.picture } });
  assert.deepEqual(message.content[1], { type: "text", text: "f.txt\n```\nx\n```\n\nwhat?" });
  const alone = grow(talk, both.id, { role: "user", content: "", files: [picture] });
  assert.deepEqual(requestMessages(talk, alone.id)[1].content, [{ type: "image_url", image_url: { url: picture.picture } }]);
  assert.ok(markdown(talk).includes("*Picture: a.png*") && !markdown(talk).includes("base64"));
  // What comes back from a file is a picture only if it is one.
  const back = imported(JSON.parse(JSON.stringify(talk)));
  assert.deepEqual(back.nodes[both.id].files[0], picture);
  talk.nodes[both.id].files[0].picture = "https://elsewhere.example/a.png";
  assert.deepEqual(imported(JSON.parse(JSON.stringify(talk))).nodes[both.id].files[0], { name: "a.png", text: "" });
});

test("pictures are told from other files, and why one is not sent", async () => {
  const file = (name, type, bytes = 3) => ({ name, type, size: bytes, arrayBuffer: async () => new Uint8Array([65, 66, 67]).buffer });
  assert.ok(isPicture(file("a.png", "image/png")) && !isPicture(file("a.svg", "image/svg+xml")) && !isPicture(file("a.txt", "text/plain")));
  assert.equal(refusal(file("a.png", "image/png"), true), "");
  assert.ok(refusal(file("a.png", "image/png"), false).includes("reads text only"));
  assert.ok(refusal(file("a.heic", "image/heic"), true).includes("image/heic"));
  assert.ok(refusal(file("a.png", "image/png", 100 << 20), true).includes("larger than 12 MB"));
  const kept = await read(file("a.png", "image/png"));
  assert.deepEqual([kept, bytesOf(kept)], [{ name: "a.png", picture: "data:image/png;base64,QUJD" }, 3]);
  assert.ok(isData(kept.picture));
  for (const other of [undefined, 7, "data:text/html;base64,QUJD", "data:image/svg+xml;base64,QUJD", "data:image/png;base64,<b>", "blob:x"]) assert.ok(!isData(other), String(other));
  const long = new Uint8Array(100_000).map((_, i) => i * 7);
  assert.equal(base64(long), Buffer.from(long).toString("base64"));
});

/** A PDF file of these objects. */
const pdf = (...objects) => new TextEncoder().encode(`%PDF-1.4\n${objects.map((object, i) => `${i + 1} 0 obj\n${object}\nendobj\n`).join("")}`);
const stream = (text) => `<< /Length ${text.length} >>\nstream\n${text}\nendstream`;

test("the text of a PDF file is read as it stands on the page", async () => {
  const page = "<< /Type /Catalog /Pages 2 0 R >>";
  const pages = "<< /Kids [3 0 R] /Resources << /Font << /F 5 0 R >> >> >>";
  const drawn = async (content, font = "<< /Subtype /Type1 /Encoding << /BaseEncoding /WinAnsiEncoding /Differences [65 /fi /eacute /uni20AC] >> >>") => (await textOf(pdf(page, pages, "<< /Type /Page /Contents 4 0 R >>", stream(content), font))).text;
  assert.equal(await drawn("BT /F 10 Tf 50 700 Td (one) Tj 30 0 Td (two) Tj -30 -12 Td [(thr) 20 (ee) -400 (four)] TJ 0 -40 Td (\\(f\\151ve\\)) ' ET"), "one two\nthree four\n\n(five)");
  assert.equal(await drawn("BT /F 10 Tf <414243> Tj ET"), "fié€");
  assert.equal(await drawn("BT /F 10 Tf (a) Tj BI /W 1 ID (b) Tj\u00ff EI (c) Tj ET"), "ac");
  for (const [text, why] of [["BT ET", /no text/], ["[".repeat(1000), /no text/], ["(".repeat(1000), /no text/]]) await assert.rejects(drawn(text), why);
  // Pages that hold themselves, references that lead nowhere, numbers that are none.
  await assert.rejects(textOf(pdf("<< /Type /Catalog /Pages 1 0 R /Kids [1 0 R 9 0 R] >>")), /no text/);
  await assert.rejects(textOf(pdf("1 0 R")), /no text/);
  await assert.rejects(textOf(new TextEncoder().encode("hello")), /no PDF/);
});

test("a damaged PDF file ends in words or in text, and soon", async () => {
  const whole = pdf("<< /Type /Catalog /Pages 2 0 R >>", "<< /Kids [3 0 R] >>", "<< /Type /Page /Contents 4 0 R /Resources << /Font << /F 5 0 R >> >> >>", stream("BT /F 9 Tf [(a) -300 (b)] TJ ET"), "<< /Subtype /Type0 /DescendantFonts [<< /W [1 [2 3] 4 5 6] >>] >>");
  let seed = 3;
  const random = (n) => (seed = (seed * 1103515245 + 12345) % 2147483648) % n;
  const start = performance.now();
  for (let round = 0; round < 400; round += 1) {
    const bytes = whole.slice();
    for (let n = random(6); n >= 0; n -= 1) bytes[9 + random(bytes.length - 9)] = [0, 40, 60, 62, 91, 47, 57, 255][random(8)];
    await textOf(bytes).catch((error) => assert.match(error.message, /^(has no text|is encrypted|is no PDF)/, error.stack));
  }
  assert.ok(performance.now() - start < 5000, `${performance.now() - start} ms`);
});

/** Storage of a browser, as far as the page's modules without a browser need it. */
function storage() {
  const kept = new Map();
  globalThis.localStorage = { getItem: (name) => kept.get(name) ?? null, setItem: (name, value) => kept.set(name, String(value)) };
}

function toolbox(changes = {}) {
  const tools = new Tools();
  const tool = { name: "s__echo", server: "s", tool: "echo", description: "Says it.", parameters: {}, approval: "ask", fingerprint: "f1", ...changes };
  tools.take({ data: [tool, { ...tool, name: "sum", server: "", tool: "sum", approval: "always", fingerprint: "f2" }], problems: [{ server: "gone", why: "x" }], limits: { turns: 2, calls: 2 } });
  return tools;
}

test("what a server says is seen as it is", () => {
  assert.equal(visible("a\u001b[2J\u0007\u007fb"), "a␛[2J␇␡b");
  assert.equal(visible("txt\u202egnp.\u2066x\u2069"), "txt⟨U+202E⟩gnp.⟨U+2066⟩x⟨U+2069⟩");
  assert.equal(visible("two\r\nlines\tand <|im_end|> <b>"), "two\nlines\tand <|im_end|> <b>");
});

test("a call is made when the reader or the server allows it, and a changed tool asks again", () => {
  storage();
  const tools = toolbox();
  assert.deepEqual(tools.servers(), ["s", "", "gone"]);
  assert.deepEqual(tools.fields({ sampling: { off: ["s"] } }).map((tool) => tool.function.name), ["sum"]);
  assert.equal(stateOf({ name: "s__echo" }, tools), "ask");
  assert.equal(stateOf({ name: "sum" }, tools), "make");
  assert.equal(stateOf({ name: "own" }, tools), "write");
  assert.equal(stateOf({ name: "s__echo", said: "yes" }, tools), "make");
  assert.equal(stateOf({ name: "s__echo", result: {} }, tools), "done");
  tools.allow(tools.find("s__echo"));
  assert.equal(stateOf({ name: "s__echo" }, tools), "make");
  assert.equal(tools.forGood().length, 1);
  assert.equal(stateOf({ name: "s__echo" }, toolbox({ fingerprint: "f3" })), "ask");
  tools.forget();
  assert.equal(stateOf({ name: "s__echo" }, tools), "ask");
});

/** A model that says what a test wants it to, and what it was asked. */
function scripted(says, result, tools = toolbox()) {
  const asked = [];
  const made = [];
  const none = () => {};
  const answers = new Answers({
    chat: async (body, _, piece) => {
      asked.push(body);
      const said = body.tool_choice === "none" ? { content: "Done." } : says(asked.length);
      piece({ choices: [{ delta: said, finish_reason: "stop" }] });
    },
    request: () => ({}),
    begun: none,
    changed: none,
    ended: none,
    save: none,
    tools,
    call: async (call, signal) => {
      made.push(call);
      return result(call, signal);
    },
  });
  return { answers, asked, made };
}
const calling = (...names) => ({ tool_calls: names.map((name, index) => ({ index, id: `c${index}`, function: { name, arguments: "{}" } })) });

test("calls of the server's tools are made, and the model goes on with what they gave", async () => {
  storage();
  const talk = fresh("m");
  const { answers, asked, made } = scripted((turn) => (turn === 1 ? calling("sum", "sum") : { content: "It is 42." }), () => ({ text: "42", content: [{ type: "text", text: "42" }], is_error: false, seconds: 0.1 }));
  await answers.start(talk, grow(talk, "", { role: "user", content: "?" }));
  await new Promise((done) => setTimeout(done, 10));
  assert.deepEqual(made.map((call) => [call.name, call.fingerprint]), [["sum", "f2"], ["sum", "f2"]]);
  assert.deepEqual(asked[1].messages.map((message) => message.role), ["user", "assistant", "tool", "tool"]);
  assert.equal(asked[1].messages[3].content, "42");
  assert.equal(leaf(talk).content, "It is 42.");
  assert.deepEqual(path(talk)[2].parts, [{ type: "text", text: "42" }]);
});

test("a call waits for the reader, who may refuse it", async () => {
  storage();
  const talk = fresh("m");
  const { answers, asked, made } = scripted((turn) => (turn === 1 ? calling("s__echo") : { content: "As you wish." }), () => ({ text: "x", content: [] }));
  await answers.start(talk, grow(talk, "", { role: "user", content: "?" }));
  assert.equal(made.length, 0);
  const node = leaf(talk);
  await answers.decide(talk, node, node.calls[0], "no");
  await new Promise((done) => setTimeout(done, 10));
  assert.equal(made.length, 0);
  assert.equal(asked[1].messages.at(-1).content, REFUSED);
  const other = fresh("m");
  const second = scripted((turn) => (turn === 1 ? calling("s__echo") : { content: "Thanks." }), () => { throw Object.assign(new Error("the tool has changed"), { status: 400 }); });
  await second.answers.start(other, grow(other, "", { role: "user", content: "?" }));
  await second.answers.decide(other, leaf(other), leaf(other).calls[0], "yes");
  await new Promise((done) => setTimeout(done, 10));
  assert.match(second.asked[1].messages.at(-1).content, /the tool has changed/, "what fails is told to the model");
});

test("a model that calls without end is stopped", async () => {
  storage();
  const talk = fresh("m");
  const { answers, asked } = scripted(() => calling("sum"), () => ({ text: "1", content: [] }));
  await answers.start(talk, grow(talk, "", { role: "user", content: "?" }));
  await new Promise((done) => setTimeout(done, 20));
  assert.deepEqual(asked.map((body) => body.tool_choice), [undefined, undefined, "none"]);
  assert.equal(leaf(talk).content, "Done.");
  assert.equal(turns(talk, leaf(talk).id), 2);
});

test("results of an import hold nothing that does something, and allow nothing", () => {
  const node = { id: "n", role: "tool", parts: [{ type: "picture", mime: "image/svg+xml", data: "AAAA" }, { type: "picture", mime: "image/png", data: "'><script>" }, { type: "link", url: "javascript:alert(1)", name: "x" }, { type: "html", text: "x" }, { type: "picture", mime: "image/png", data: "AAAA" }, { type: "link", url: "https://a.example/", name: "x" }, null] };
  const calls = [{ id: "c", name: "s__echo", arguments: "{}", said: "yes", result: { text: "x" } }];
  const talk = imported({ nodes: { n: node, a: { id: "a", role: "assistant", calls } } });
  assert.deepEqual(talk.nodes.n.parts.map((part) => part.type), ["picture", "link"]);
  assert.deepEqual(talk.nodes.a.calls, [{ id: "c", name: "s__echo", arguments: "{}" }]);
});

test("the browser's list and the server's become one", () => {
  const own = [{ id: "old", changed: 1 }, { id: "same", changed: 5, folder: "s" }, { id: "mine", changed: 9, folder: "s" }, { id: "gone", changed: 2, folder: "s" }, { id: "other", changed: 2, folder: "of another key" }];
  const there = [{ id: "same", changed: 5 }, { id: "mine", changed: 7 }, { id: "new", changed: 3 }, { id: "old", changed: 4 }];
  const { fetch, send, drop } = difference(own, there, "s");
  assert.deepEqual([fetch.map(({ id }) => id), send, drop], [["new", "old"], ["mine"], ["gone"]]);
});

test("changes are sent when they rest, and what fails is told once", async () => {
  const asked = [];
  const told = [];
  let works = true;
  const ask = async (method, where, body) => {
    asked.push([method, where, body?.title]);
    if (!works) throw new Error("no");
    return method === "GET" ? { kept: true, folder: "s", data: [] } : { kept: true };
  };
  const remote = new Remote({ ask, told: (text) => told.push(text), wait: 5 });
  const rest = () => new Promise((done) => setTimeout(done, 30));
  const talk = { ...fresh("m"), id: "a/b", title: "1" };
  remote.keep(talk);
  await rest();
  assert.deepEqual(asked, [], "nothing is sent to a server that keeps nothing");
  await remote.list();
  let arrived = 0;
  remote.keep(talk, () => (arrived += 1));
  talk.title = "2";
  remote.keep(talk, () => (arrived += 1));
  await rest();
  assert.deepEqual(asked.slice(1), [["PUT", "/conversations/a%2Fb", "2"]]);
  assert.equal(arrived, 1);
  works = false;
  remote.keep(talk);
  await rest();
  remote.keep(talk);
  await rest();
  assert.equal(told.length, 1);
  remote.keep(talk);
  await remote.remove(talk.id);
  await rest();
  assert.equal(asked.at(-1)[0], "DELETE", "what was to be sent of it is not");
});

test("tags are words, each once", () => {
  assert.deepEqual(tagsIn("#Clay glaze, clay  #Fire"), ["clay", "glaze", "fire"]);
  assert.deepEqual(tagsIn(" ,# "), []);
  assert.equal(tagsIn("a b c d e f g h i j").length, 8);
  assert.deepEqual(imported({ nodes: { a: { id: "a", role: "user", content: "x" } }, tags: ["Work", 7, "<b>"] }).tags, ["work", "<b>"]);
});
