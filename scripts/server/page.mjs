// Drives the page in Chromium and looks at what becomes of it: node scripts/server/page.mjs URL KEY FOLDER
// FOLDER gets the screenshots. scripts/server/page sets everything up.

import assert from "node:assert/strict";
import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";

import { libraryChecks } from "./page_library.mjs";
import { modelChecks } from "./page_models.mjs";
import { readingChecks } from "./page_reading.mjs";
import { conversationChecks } from "./page_talks.mjs";
import { Stage } from "./page_stage.mjs";

const [upstream, key, folder] = process.argv.slice(2);
// Changes to the page can be tried without building: PAGE=crates/server/page scripts/server/page
const stage = await Stage.open(upstream, process.env.PAGE);
const { url } = stage;
const require = createRequire(join(process.env.NODE_PATH, "x.js"));
const { chromium } = require("playwright-core");
const axe = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");

const RICH = `# A heading

Some *prose* with **weight**, \`code\`, a [link](https://example.org) and a formula $e^{i\\pi} + 1 = 0$.

## A list

1. First
   - within
   - another
2. Second

| Fuel | Heat | Cost |
|:--|--:|:-:|
| Wood | 900 °C | low |
| Gas | 1,300 °C | fair |

$$\\int_0^\\infty e^{-x^2}\\,dx = \\frac{\\sqrt{\\pi}}{2}, \\qquad A = \\begin{pmatrix} a & b \\\\ c & d \\end{pmatrix}$$

\`\`\`python
def primes(n):
    """All primes below n."""
    sieve = [True] * n  # every number, at first
    return [i for i in range(2, n) if sieve[i]]
\`\`\`

> Clay remembers the hand that shaped it.
`;
const HOSTILE = `<img src=x onerror="window.broken=1"><script>window.broken=1</script>\n\n[a](javascript:window.broken=1) ![p](http://elsewhere.example/p.png)\n\n\`\`\`"><img src=x onerror=window.broken=1>\nx\n\`\`\``;

const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM,
  env: { ...process.env, LD_LIBRARY_PATH: process.env.CHROMIUM_LIBRARIES },
  // A name that is not this machine's, for a page that was fetched from elsewhere.
  args: ["--no-sandbox", "--disable-gpu", "--font-render-hinting=none", "--host-resolver-rules=MAP kiln.test 127.0.0.1"],
});
const faults = [];

/** A window of its own, with nothing kept. What goes wrong in it is a fault, where it is `guarded`. */
async function openWindow({ guarded = true, ...options } = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 800 }, permissions: ["clipboard-read", "clipboard-write"], ...options });
  const page = await context.newPage();
  page.setDefaultTimeout(Number(process.env.PATIENCE ?? 30_000));
  // A document that tries everything makes noise; its own check says what became of it.
  if (!guarded) return page;
  page.on("pageerror", (error) => faults.push(`error: ${error.message}`));
  // Plain HTTP from another machine has no use for the opener policy, and browsers say so.
  page.on("console", (message) => message.type() === "error" && !/401|Failed to load resource|Opener-Policy header has been ignored/.test(message.text()) && faults.push(`console: ${message.text()}`));
  page.on("request", (request) => {
    const { protocol, port } = new URL(request.url());
    if (!/^(blob|data):/.test(protocol) && port !== String(stage.port)) faults.push(`a request elsewhere: ${request.url()}`);
  });
  return page;
}
const page = await openWindow({ viewport: { width: 1440, height: 900 } });

async function accessible(view, shown = page) {
  await shown.evaluate(`if (!window.axe) { ${axe} }`).catch(() => {});
  const has = await shown.evaluate("typeof window.axe");
  assert.equal(has, "object", "axe could not be brought in");
  const { violations } = await shown.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
  const told = (found, where) => assert.deepEqual(found.map((v) => `${v.id}: ${v.nodes[0].html} ${v.nodes[0].failureSummary}`), [], where);
  told(violations, view);
  // The other colours must be readable as well.
  const isDark = await shown.evaluate(() => matchMedia("(prefers-color-scheme: dark)").matches);
  const colours = (dark) => shown.emulateMedia({ colorScheme: dark ? "dark" : "light" });
  await colours(!isDark);
  const others = await shown.evaluate(() => window.axe.run(document, { runOnly: ["color-contrast"], resultTypes: ["violations"] }));
  await colours(isDark);
  told(others.violations, `${view}, ${isDark ? "light" : "dark"}`);
}
const picture = (name) => page.screenshot({ path: join(folder, `${name}.png`) });
const settled = () => page.waitForFunction(() => document.querySelector("#stop").hidden && !document.querySelector("[aria-busy=true]"));
const answers = () => page.locator("article.assistant .prose:not(.thought)");
const engine = async () => (await fetch(`${url}/engine`, { headers: { Authorization: `Bearer ${key}` } })).json();

/** Answers the next request of the page, which `work` makes, by hand; gives its body. */
async function replay(chunks, work) {
  const next = stage.next();
  await work();
  const answer = await next;
  for (const delta of chunks) answer.chunk({ choices: [{ index: 0, delta, finish_reason: null }] });
  answer.end();
  await settled();
  return answer.body;
}
const ask = async (text) => {
  await page.fill("#prompt", text);
  await page.press("#prompt", "Enter");
};

/** How long answers of the model may be; the settings stay open or closed as they were. */
async function longest(tokens) {
  const hidden = await page.locator("#settings").isHidden();
  if (hidden) await page.keyboard.press("Control+,");
  await page.fill("#set-max_tokens", tokens);
  await page.press("#set-max_tokens", "Tab");
  if (hidden) await page.keyboard.press("Control+,");
}

const checks = {
  async "a server with a key asks for it once"() {
    await page.goto(url);
    await page.locator("#key-dialog").waitFor();
    await accessible("the key");
    assert.ok(await page.locator("#key-refused").isHidden());
    await page.fill("#key", "wrong");
    await page.keyboard.press("Enter");
    await page.locator("#key-refused", { hasText: "This key was refused." }).waitFor();
    await accessible("a key that was refused");
    await picture("desktop-key");
    await page.fill("#key", key);
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => document.querySelector("#model").value);
  },
  async "the first view explains itself"() {
    const name = await page.inputValue("#model");
    assert.match(await page.locator(".welcome").innerText(), new RegExp(name.replace(/[.*+?^$()|[\]\\]/g, "\\$&")));
    await accessible("the first view");
    await picture("desktop-first");
  },
  async "a model answers as a stream, and says how fast"() {
    await longest("24");
    await ask("Say hello in one short sentence.");
    await page.locator("article.assistant").waitFor();
    await settled();
    assert.ok((await answers().last().innerText()).trim().length > 2);
    assert.match(await page.locator(".stats").last().innerText(), /tokens · .* tokens\/s · first after/);
    assert.match(await page.locator("#conversations .open").first().innerText(), /Say hello/);
    assert.equal(await page.title(), "Say hello in one short sentence. · Kiln");
  },
  async "another answer is a branch, and both can be seen"() {
    const first = await answers().last().innerText();
    await page.getByRole("button", { name: "Answer again" }).last().click();
    await settled();
    const second = await answers().last().innerText();
    assert.equal(await page.locator("article.assistant .branches").innerText(), "2/2");
    await page.getByRole("button", { name: "Branch before" }).click();
    assert.equal(await answers().last().innerText(), first);
    await page.getByRole("button", { name: "Branch after" }).click();
    assert.equal(await answers().last().innerText(), second);
  },
  async "a message can be edited from the keyboard, and branches"() {
    await page.focus("#prompt");
    await page.keyboard.press("ArrowUp");
    const area = page.locator("textarea.editing");
    assert.equal(await area.inputValue(), "Say hello in one short sentence.");
    await area.fill("Say goodbye.");
    await page.keyboard.press("Enter");
    await settled();
    assert.equal(await page.locator("article.user .branches").innerText(), "2/2");
    assert.equal(await page.locator("article.user .words").innerText(), "Say goodbye.");
  },
  async "Escape stops an answer within a moment"() {
    await page.keyboard.press("Control+Shift+O");
    await longest("");
    // A small model may say a word and be done; then it is asked again.
    for (let tries = 0; tries < 5; tries += 1) {
      await ask("Count from one to a thousand, in words, without stopping.");
      await page.waitForFunction(() => {
        const last = [...document.querySelectorAll("article.assistant .prose:not(.thought)")].at(-1);
        return last?.innerText.length > 20 || document.querySelector("#stop").hidden;
      });
      if (await page.locator("#stop").isVisible()) break;
    }
    await picture("desktop-writing");
    await page.keyboard.press("Escape");
    await settled();
    const length = (await answers().last().innerText()).length;
    for (let i = 0; i < 50 && (await engine()).load.writing; i += 1) await new Promise((done) => setTimeout(done, 100));
    assert.equal((await engine()).load.writing, 0);
    assert.equal((await answers().last().innerText()).length, length);
    assert.match(await page.locator(".stats").last().innerText(), /^\d+ tokens? · /);
  },
  async "a model takes up its own words, and those that are there stay"() {
    await longest("5");
    await ask("Count from one to a hundred, in words.");
    await page.locator(".end", { hasText: "cut off" }).waitFor();
    const before = await answers().last().innerText();
    await longest("8");
    await page.getByRole("button", { name: "Continue" }).click();
    await settled();
    await longest("");
    const after = await answers().last().innerText();
    assert.ok(after.length > before.length && after.startsWith(before.trimEnd()), `${before} / ${after}`);
    assert.equal(await page.locator("article.assistant").last().locator(".branches").count(), 0);
  },
  async "Markdown, code, tables and formulas are shown, thoughts are folded"() {
    await page.keyboard.press("Control+Shift+O");
    const pieces = RICH.match(/[\s\S]{1,7}/g).map((content) => ({ content }));
    await replay([{ role: "assistant", content: "" }, { reasoning_content: "Clay first, then fire." }, ...pieces], () => ask("Tell me of kilns."));
    const prose = page.locator("article.assistant .prose:not(.thought)");
    assert.equal(await prose.locator("table tbody tr").count(), 2);
    assert.equal(await prose.locator("math").count(), 2);
    assert.equal(await prose.locator("ol > li").count(), 2);
    assert.ok((await prose.locator(".code-word").count()) >= 4);
    assert.equal(await page.locator(".thinking").getAttribute("open"), null);
    await page.getByRole("button", { name: "Copy the code" }).click();
    assert.match(await page.evaluate(() => navigator.clipboard.readText()), /^def primes\(n\):\n {4}"""/);
    await page.waitForTimeout(1300);
    await accessible("a rich answer");
    await page.evaluate(() => (document.querySelector("#talk").scrollTop = 0));
    await picture("desktop-light");
    await page.emulateMedia({ colorScheme: "dark" });
    // A root without its sign would be another formula.
    const roots = await page.evaluate(() => [...document.querySelectorAll("msqrt, .radicand")].map((root) => (root.matches(".radicand") ? root.previousSibling.textContent === "√" : root.getBoundingClientRect().width > root.firstChild.getBoundingClientRect().width)));
    assert.deepEqual(roots, [true]);
    await accessible("a rich answer in the dark");
    await picture("desktop-dark");
  },
  async "an answer that would be a program stays text"() {
    await replay([{ content: HOSTILE }], () => ask("Now something hostile."));
    assert.equal(await page.evaluate(() => window.broken), undefined);
    assert.equal(await page.locator("article.assistant img, article.assistant script, a[href^='javascript']").count(), 0);
    assert.match(await answers().last().innerText(), /<img src=x onerror/);
  },
  async "tool calls are shown, and what they gave goes back"() {
    await page.keyboard.press("Control+,");
    await page.fill("#set-tools", '[{"type":"function","function":{"name":"heat","parameters":{"type":"object"}}}]');
    await page.fill("#set-system", "You fire kilns.");
    await page.fill("#set-temperature", "0.3");
    await page.press("#set-temperature", "Tab");
    await accessible("the settings");
    const calls = [{ tool_calls: [{ index: 0, id: "call_1", type: "function", function: { name: "heat", arguments: "" } }] }, { tool_calls: [{ index: 0, function: { arguments: '{"to":1300}' } }] }];
    const asked = await replay(calls, () => ask("Heat it."));
    assert.equal(asked.temperature, 0.3);
    assert.equal(asked.tools[0].function.name, "heat");
    assert.deepEqual(asked.messages[0], { role: "system", content: "You fire kilns." });
    assert.match(await page.locator(".call").innerText(), /Calls heat/);
    await accessible("a tool call");
    await picture("desktop-tool");
    const back = await replay([{ content: "It is hot." }], async () => {
      await page.fill(".results textarea", "1300");
      await page.getByRole("button", { name: "Send result" }).click();
    });
    assert.deepEqual(back.messages.at(-1), { role: "tool", tool_call_id: "call_1", content: "1300" });
    assert.equal(back.messages.at(-2).tool_calls[0].function.arguments, '{"to":1300}');
  },
  async "files and long pasted text go along"() {
    await page.setInputFiles("#picker", [{ name: "notes.txt", mimeType: "text/plain", buffer: Buffer.from("the clay is wet") }]);
    await page.locator("#files li").waitFor();
    await page.evaluate(() => {
      const data = new DataTransfer();
      data.setData("text", "x".repeat(5000));
      document.querySelector("#prompt").dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true }));
    });
    assert.equal(await page.locator("#files li").count(), 2);
    await accessible("attached files");
    await page.setInputFiles("#picker", [{ name: "p.png", mimeType: "image/png", buffer: Buffer.from([137, 80, 78, 71, 0, 0, 0, 1]) }]);
    await page.locator("#toast", { hasText: "reads text only" }).waitFor();
    const asked = await replay([{ content: "Read." }], () => ask("What is in them?"));
    assert.match(asked.messages.at(-1).content, /^notes\.txt\n```\nthe clay is wet\n```\n\npasted-2\.txt\n```\nx{5000}\n```\n\nWhat is in them\?$/);
  },
  async "what the server refuses is said, and can be tried again"() {
    await page.route("**/v1/chat/completions", (route) => route.fulfill({ status: 429, contentType: "application/json", body: '{"error":{"message":"the queue is full"}}' }));
    await ask("Are you busy?");
    await page.locator(".note", { hasText: "the queue is full" }).waitFor();
    await page.unroute("**/v1/chat/completions");
    await replay([{ content: "Not any more." }], () => page.getByRole("button", { name: "Answer again" }).last().click());
    assert.equal(await answers().last().innerText(), "Not any more.");
  },
  async "the engine is seen at work"() {
    await page.keyboard.press("Control+.");
    await page.locator("#chart-memory output", { hasText: "%" }).waitFor();
    await page.getByRole("button", { name: "Measure one step" }).click();
    await page.locator("#kernels tr").first().waitFor();
    await page.keyboard.press("Control+Shift+O");
    await ask("Write a long story about a potter.");
    await page.waitForFunction(() => parseFloat(document.querySelector("#chart-written output").innerText) > 0);
    await page.waitForTimeout(4000);
    assert.match(await page.locator("#chart-batch small").innerText(), /1 write, of 2/);
    await page.emulateMedia({ colorScheme: "light" });
    await picture("desktop-engine");
    await accessible("the engine");
    await page.keyboard.press("Escape");
    await settled();
    await page.keyboard.press("Escape");
    assert.ok(await page.locator("#panel").isHidden());
  },
  async "conversations outlast the page, and can be found, saved and brought back"() {
    await page.reload();
    await page.waitForFunction(() => document.querySelectorAll("#conversations .open").length === 4);
    await page.keyboard.press("Control+K");
    await page.keyboard.type("hostile");
    await page.waitForFunction(() => document.querySelectorAll("#conversations .open").length === 1);
    await page.locator("#conversations .open").click();
    await page.locator("#column", { hasText: "Clay remembers" }).waitFor();
    await page.fill("#find", "");
    await page.locator("#title").click();
    await page.evaluate(() => document.activeElement.blur());
    await page.keyboard.press("?");
    await page.locator("#help-dialog").waitFor();
    await page.waitForTimeout(100);
    await accessible("help");
    await picture("desktop-help");
    const [download] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name: "Export everything" }).click()]);
    const file = join(folder, "export.json");
    await download.saveAs(file);
    const kept = JSON.parse(readFileSync(file, "utf8"));
    assert.equal(kept.conversations.length, 4);
    await page.keyboard.press("Escape");
    await page.locator("#conversations li.current a").press("Delete");
    await page.waitForFunction(() => document.querySelectorAll("#conversations .open").length === 3);
    await page.keyboard.press("Control+Shift+O");
    await page.click("#help");
    await page.setInputFiles("#import-file", file);
    await page.waitForFunction(() => document.querySelectorAll("#conversations .open").length === 4);
    writeFileSync(file, '{"nodes": 3}');
    await page.click("#help");
    await page.setInputFiles("#import-file", file);
    await page.locator("#toast", { hasText: "could not be imported" }).waitFor();
    await page.keyboard.press("Escape");
    await page.locator("#toast").waitFor({ state: "hidden" });
  },
  async "a phone has all of it"() {
    await page.setViewportSize({ width: 390, height: 844 });
    await page.waitForTimeout(300);
    await page.click("#side-open");
    await page.waitForTimeout(300);
    await accessible("the list on a phone");
    await picture("phone-list");
    await page.locator("#conversations .open", { hasText: "Tell me of kilns" }).click();
    await page.waitForTimeout(300);
    await page.evaluate(() => (document.querySelector("#talk").scrollTop = 0));
    await accessible("a phone");
    await picture("phone-light");
    await page.emulateMedia({ colorScheme: "dark" });
    await picture("phone-dark");
    const wide = await page.evaluate(() => document.documentElement.scrollWidth);
    assert.ok(wide <= 390, `the page is ${wide} wide`);
    await page.click("#show-settings");
    await accessible("settings on a phone");
    await picture("phone-settings");
    await page.click("#panel-close");
    await page.click("#side-open");
    await page.click("#new");
    await page.waitForTimeout(300);
    await picture("phone-first");
  },
};

const tools = { folder, openWindow, stage, url, key, accessible, picture: (name, shown) => shown.screenshot({ path: join(folder, `${name}.png`) }) };
Object.assign(checks, conversationChecks(tools), libraryChecks(tools), readingChecks(tools), modelChecks(tools));

let failed = 0;
// ONLY=word runs the checks whose name holds it; most of the first ones build on each other.
const wanted = Object.entries(checks).filter(([name]) => name.includes(process.env.ONLY ?? ""));
for (const [name, check] of wanted) {
  const start = Date.now();
  try {
    await check();
    assert.deepEqual(faults.splice(0), []);
    console.log(`ok      ${name} (${Date.now() - start} ms)`);
  } catch (error) {
    failed += 1;
    console.log(`FAILED  ${name}: ${error.message}`);
    await picture(`failed-${failed}`).catch(() => {});
  }
}
await browser.close();
stage.close();
console.log(failed ? `${failed} checks failed` : `all ${wanted.length} checks passed; look at the pictures in ${folder}`);
process.exit(failed ? 1 : 0);
