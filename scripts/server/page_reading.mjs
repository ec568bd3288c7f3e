// Checks of reading: previews in their frame and what they must not do, code that is wrapped, text from the right, paper, and that nothing
// moves while it is read.

import assert from "node:assert/strict";
import { createServer } from "node:http";
import { join } from "node:path";

import { hands } from "./page_hands.mjs";

const DRAWING = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 20 20"><circle id="clay" cx="10" cy="10" r="8" fill="peru"/></svg>';
const DOCUMENT = "<!doctype html>\n<h1 id='h'>Hello</h1>\n<script>document.getElementById('h').textContent = 'Fired at ' + (1000 + 250)</script>";

/** A document that tries to get out, or to get something in. `there` is a server that must hear nothing. */
const escaping = (there) => `<!doctype html><html><head>
<meta http-equiv="refresh" content="4;url=${there}/refresh"><link rel="stylesheet" href="${there}/style"><link rel="prefetch" href="${there}/prefetch">
<link rel="preconnect" href="${there}"><link rel="icon" href="${there}/icon"><style>@import "${there}/import"; body { background: url(${there}/background) }</style></head>
<body><img src="${there}/img"><iframe src="${there}/frame"></iframe><object data="${there}/object"></object><video src="${there}/video"></video>
<form action="${there}/form" method="post" id="f"></form><a href="${there}/ping" ping="${there}/ping" target="_blank" id="a">a</a>
<script>
  const found = [];
  const attempt = (name, work) => { try { const got = work(); if (got && got.catch) got.catch(() => {}); found.push(name); } catch {} };
  attempt("parent", () => parent.document.title);
  attempt("top", () => { top.document.title = "broken"; });
  attempt("storage", () => localStorage.length);
  attempt("database", () => indexedDB.open("kiln").onsuccess);
  attempt("cookie", () => document.cookie);
  fetch("${there}/fetch").then(() => found.push("fetch"), () => {});
  fetch("/v1/models").then(() => found.push("own"), () => {});
  navigator.sendBeacon("${there}/beacon", "x");
  try { new WebSocket("${there.replace("http", "ws")}/socket").onopen = () => found.push("socket"); } catch {}
  try { new EventSource("${there}/events").onopen = () => found.push("source"); } catch {}
  attempt("worker", () => new Worker("${there}/worker"));
  const script = document.createElement("script"); script.src = "${there}/script"; document.body.append(script);
  window.open("${there}/window");
  document.getElementById("f").submit();
  document.getElementById("a").click();
  attempt("top away", () => { top.location = "${there}/top"; });
  try { const c = new RTCPeerConnection({ iceServers: [{ urls: "stun:127.0.0.1:9" }] }); c.createDataChannel("x"); c.createOffer().then((o) => c.setLocalDescription(o)).then(() => found.push("rtc"), () => {}); } catch {}
  setTimeout(() => { document.body.innerHTML = "<p id=done></p>"; document.getElementById("done").textContent = "tried: " + found.join(","); setTimeout(() => (location.href = "${there}/away"), 2000); }, 600);
</script></body></html>`;

export function readingChecks(tools) {
  const { url, accessible, picture, folder } = tools;
  const { reader, ask, told, idle, words, says, bring } = hands(tools);
  const fenced = (language, text) => `\`\`\`${language}\n${text}\n\`\`\`\n\n`;

  return {
    async "documents and drawings are looked at in a frame, code is wrapped"() {
      const page = await reader();
      await told(page, "Draw.", `${fenced("html", DOCUMENT)}${fenced("xml", DRAWING)}${fenced("python", `x = "${"long ".repeat(60)}"`)}`);
      const figures = words(page).locator("figure.code");
      assert.equal(await figures.nth(2).getByRole("button", { name: "Preview" }).count(), 0, "Python is no document");
      await figures.nth(0).getByRole("button", { name: "Preview" }).click();
      await figures.nth(1).getByRole("button", { name: "Preview" }).click();
      await figures.nth(0).frameLocator("iframe").locator("h1", { hasText: "Fired at 1250" }).waitFor();
      await figures.nth(1).frameLocator("iframe").locator("#clay").waitFor();
      await accessible("previews", page);
      await page.evaluate(() => (document.querySelector("#talk").scrollTop = 0));
      await picture("desktop-preview", page);
      await figures.nth(0).getByRole("button", { name: "Preview" }).click();
      assert.equal(await figures.nth(0).locator("iframe").count(), 0);
      assert.match(await figures.nth(0).locator("pre").innerText(), /doctype/);
      const wide = () => figures.nth(2).locator("pre").evaluate((pre) => pre.scrollWidth > pre.clientWidth);
      assert.ok(await wide());
      await figures.nth(2).getByRole("button", { name: "Wrap long lines" }).click();
      assert.ok(!(await wide()));
      await page.reload();
      await says(page, "doctype");
      assert.ok(!(await wide()), "the choice is kept");
      await page.setViewportSize({ width: 320, height: 640 });
      assert.equal(await page.evaluate(() => document.documentElement.scrollWidth), 320);
      await accessible("code on a small phone", page);
      await picture("phone-320-code", page);
      await page.context().close();
    },

    async "a document in its frame gets nothing out, and nothing in"() {
      const heard = [];
      const other = createServer((asked, response) => {
        heard.push(asked.url);
        response.end("x");
      });
      await new Promise((done) => other.listen(0, "127.0.0.1", done));
      const there = `http://127.0.0.1:${other.address().port}`;
      const page = await reader({ guarded: false });
      await told(page, "Get out.", fenced("html", escaping(there)));
      const address = page.url();
      await page.getByRole("button", { name: "Preview" }).click();
      await page.locator("iframe.preview").waitFor();
      const frame = page.frames().find((one) => one.parentFrame());
      await frame.locator("#done").waitFor();
      assert.equal(await frame.locator("#done").innerText(), "tried:", "the document reached what it must not");
      await page.waitForTimeout(5000);
      assert.deepEqual(heard, []);
      assert.equal(page.url(), address);
      assert.match(await page.title(), /Get out/);
      assert.equal(page.context().pages().length, 1);
      other.close();
      other.closeAllConnections();
      await page.context().close();
    },

    async "text from the right is read from the right"() {
      const page = await reader();
      await told(page, "مرحبا، كيف يعمل الفرن؟", "# الفرن\n\nيسخن **الطين** حتى `1250 C`.\n\n- أول\n- ثان\n\n1. one\n\n> قال\n\n| حرارة | وقت |\n|---|---|\n| 900 | 2 |\n\nPlain English stays.\n\n```py\nx = 1\n```\n");
      const ways = await words(page).evaluate((prose) => [...prose.children].map((child) => getComputedStyle(child).direction));
      assert.deepEqual(ways, ["rtl", "rtl", "rtl", "ltr", "rtl", "rtl", "ltr", "ltr"]);
      assert.equal(await words(page).locator("pre").evaluate((pre) => getComputedStyle(pre).direction), "ltr");
      const box = await page.locator("article.user .words").boundingBox();
      assert.ok(box.width > 0);
      await accessible("text from the right", page);
      await picture("desktop-rtl", page);
      await page.context().close();
    },

    async "nothing moves while an answer is written, and the first picture is there at once"() {
      const page = await reader();
      await page.evaluate(() => {
        window.shifts = [];
        new PerformanceObserver((list) => {
          for (const entry of list.getEntries()) if (!entry.hadRecentInput) window.shifts.push([entry.value, ...entry.sources.map((source) => source.node?.className || source.node?.id || source.node?.nodeName)]);
        }).observe({ type: "layout-shift", buffered: false });
      });
      const answer = await ask(page, "A long one.");
      await page.waitForTimeout(600);
      const text = "## A heading\n\nSome words with **weight** and `code`.\n\n- one\n- two\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```py\nx = 1\n```\n\n$$\\frac{a}{b}$$\n\n";
      for (let round = 0; round < 6; round += 1) for (const piece of text.match(/[\s\S]{1,9}/g)) {
        answer.say(piece);
        await new Promise((done) => setTimeout(done, 4));
      }
      await page.waitForTimeout(300);
      answer.end();
      await idle(page);
      await page.waitForTimeout(300);
      const shifts = await page.evaluate(() => window.shifts);
      const sum = shifts.reduce((all, [value]) => all + value, 0);
      console.log(`        layout shift while an answer was written: ${sum.toFixed(4)}`);
      // A tenth is what people notice; what is left here is the line of numbers below an answer that begins.
      assert.ok(sum < 0.05, JSON.stringify(shifts));
      const first = [];
      for (let i = 0; i < 5; i += 1) {
        await page.goto("about:blank");
        await page.goto(`${url}/`);
        await page.locator("#model").waitFor();
        first.push(await page.evaluate(() => new Promise((done) => new PerformanceObserver((list) => done(list.getEntriesByName("first-contentful-paint")[0]?.startTime)).observe({ type: "paint", buffered: true }))));
      }
      console.log(`        first paint after ${first.map((ms) => Math.round(ms)).join(", ")} ms`);
      // The goal is 100 ms; a machine that builds beside this takes its time.
      assert.ok(Math.min(...first) < 1000, `first paint after ${first} ms`);
      await page.context().close();
    },

    async "a long chat leaves the processor time for sixty pictures a second"() {
      const page = await reader();
      const nodes = {};
      for (let i = 0; i < 300; i += 1) nodes[`n${i}`] = { id: `n${i}`, parent: i ? `n${i - 1}` : "", made: i, role: i % 2 ? "assistant" : "user", content: i % 2 ? `## Answer ${i}\n\n${"Some **words** of an answer with `code`. ".repeat(12)}\n\n- one\n- two\n` : `Question ${i}` };
      await bring(page, "long.json", JSON.stringify({ id: "long", title: "Long", nodes }));
      await page.waitForFunction(() => document.querySelectorAll("article").length === 300);
      const session = await page.context().newCDPSession(page);
      await session.send("Performance.enable", { timeDomain: "threadTicks" });
      const spent = async () => Object.fromEntries((await session.send("Performance.getMetrics")).metrics.map(({ name, value }) => [name, value]));
      const answer = await ask(page, "And the last one?");
      await page.evaluate(() => {
        window.drawn = 0;
        const count = () => {
          window.drawn += 1;
          requestAnimationFrame(count);
        };
        requestAnimationFrame(count);
      });
      const before = await spent();
      for (let i = 0; i < 500; i += 1) {
        answer.say(i % 25 ? `word ${i} ` : "\n\nA *new* paragraph: ");
        await new Promise((done) => setTimeout(done, 4));
      }
      await says(page, "word 499");
      const [after, drawn] = [await spent(), await page.evaluate(() => window.drawn)];
      answer.end();
      const each = (1000 * (after.TaskDuration - before.TaskDuration)) / drawn;
      console.log(`        a long chat takes ${each.toFixed(1)} ms of the processor for each of ${drawn} pictures`);
      // A sixtieth of a second, on a machine that has something else to do.
      assert.ok(each < 16.6, `${each} ms for each picture`);
      await page.context().close();
    },

    async "a conversation can be printed, and the page be installed"() {
      const page = await reader();
      await told(page, "Print me.", `A [link](https://example.org/kiln).\n\n${"Words that fill a page. ".repeat(20)}\n\n`.repeat(12));
      await page.emulateMedia({ media: "print" });
      for (const hidden of ["#side", "#composer", ".foot >> nth=0"]) assert.ok(await page.locator(hidden).isHidden(), hidden);
      assert.ok(await page.evaluate(() => document.documentElement.scrollHeight > 2 * innerHeight), "what is below the window is not printed");
      await page.screenshot({ path: join(folder, "print.png"), fullPage: false });
      await page.emulateMedia({ media: "screen" });
      const session = await page.context().newCDPSession(page);
      const { installabilityErrors } = await session.send("Page.getInstallabilityErrors");
      assert.deepEqual(installabilityErrors.filter(({ errorId }) => errorId !== "in-incognito"), []);
      const { errors } = await session.send("Page.getAppManifest");
      assert.deepEqual(errors, []);
      await page.context().close();
    },
  };
}
