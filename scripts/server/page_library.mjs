// Checks of the list of conversations: thousands of them, pins, titles by the model, undo, other models' answers, and what comes from
// elsewhere.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";

import { hands } from "./page_hands.mjs";

const MANY = 10_000;
const HOSTILE = '<img src=x onerror="window.broken=1"><script>window.broken=1</script>';

/** An export of Open WebUI, with a branch, thoughts, a file and a payload. */
const OPEN_WEBUI = [{
  id: "ow-1", title: `Kilns ${HOSTILE}`, pinned: true, created_at: 1_700_000_000, updated_at: 1_700_000_100,
  chat: {
    models: ["llama3"], params: { system: "You fire clay." },
    history: {
      currentId: "c",
      messages: {
        a: { id: "a", parentId: null, childrenIds: ["b", "c"], role: "user", content: "How hot?", timestamp: 1_700_000_000, files: [{ type: "file", name: "clay.txt", file: { data: { content: "stoneware" } } }] },
        b: { id: "b", parentId: "a", role: "assistant", content: "Hot.", timestamp: 1_700_000_002 },
        c: { id: "c", parentId: "a", role: "assistant", content: '<details type="reasoning" done="true" duration="2">\n<summary>Thought for 2 seconds</summary>\n&gt; Stoneware, so\n</details>\n1,250 °C', timestamp: 1_700_000_001 },
      },
    },
  },
}];
/** An export of llama-server's page. */
const LLAMA_SERVER = {
  conv: { id: "ls-1", name: "Glazes", lastModified: 1_750_000_000_000, currNode: "3" },
  messages: [
    { id: "0", convId: "ls-1", type: "root", role: "system", content: "", parent: null, timestamp: 1, children: ["1"] },
    { id: "1", convId: "ls-1", type: "text", role: "system", content: "Be brief.", parent: "0", timestamp: 2, children: ["2"] },
    { id: "2", convId: "ls-1", type: "text", role: "user", content: `What is ash glaze? ${HOSTILE}`, parent: "1", timestamp: 3, children: ["3"], extra: [{ type: "textFile", name: "notes.md", content: "# Ash" }, { type: "imageFile", name: "x.png", base64Url: "javascript:window.broken=1" }] },
    { id: "3", convId: "ls-1", type: "text", role: "assistant", content: "Wood ash that melts.", thinking: "Ash melts.", parent: "2", timestamp: 4, children: [] },
  ],
};

/** The conversations as the page stored them, by IndexedDB itself. */
const storedIn = (page, id) => page.evaluate((id) => new Promise((done) => {
  const asked = indexedDB.open("kiln");
  asked.onsuccess = () => {
    const found = asked.result.transaction("talks").objectStore("talks").get(id);
    found.onsuccess = () => {
      asked.result.close();
      done(found.result ?? null);
    };
  };
}), id);

export function libraryChecks(tools) {
  const { openWindow, stage, url, key, accessible, picture } = tools;
  const { reader, ask, told, idle, words, row, menu, says, bring } = hands(tools);

  return {
    async "ten thousand conversations cost nothing: to come, to scroll, to seek, to ask"() {
      const page = await reader();
      const now = Date.now();
      const conversations = Array.from({ length: MANY }, (_, i) => ({ id: `c${i}`, title: `Chat ${i}`, changed: now - (i + 1) * 60_000, nodes: { [`n${i}`]: { id: `n${i}`, parent: "", role: "user", content: `Question ${i} ${i === 7777 ? "porcelain" : "clay"} ${"and more ".repeat(40)}` } } }));
      await bring(page, "many.json", JSON.stringify({ conversations }));
      await page.locator("#toast", { hasText: `Imported ${MANY} conversations.` }).waitFor();
      await page.goto(`${url}/`);
      await page.locator("#conversations .open").first().waitFor();
      const took = await page.evaluate(() => performance.measure("list", "kiln-begin", "kiln-list").duration);
      console.log(`        ${MANY} conversations are listed ${Math.round(took)} ms after the page's program began`);
      assert.ok(took < 4000, `the list was there after ${took} ms`);
      const count = () => page.locator("#conversations .open").count();
      assert.ok((await count()) < 60, `${await count()} rows are elements`);
      const middle = await page.evaluate(async () => {
        const list = document.querySelector("#conversations");
        const times = [];
        for (let i = 0; i < 60; i += 1) {
          const start = performance.now();
          list.scrollTop += 6000;
          await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
          times.push(performance.now() - start);
        }
        return times.sort((a, b) => a - b)[30];
      });
      console.log(`        a picture of the list while it is scrolled takes ${middle.toFixed(1)} ms`);
      assert.ok(middle < 200, `a picture took ${middle} ms while scrolling`);
      const labels = await page.locator("#conversations .label").allInnerTexts();
      assert.ok(labels.length && !labels.includes("Chat 0"), "the list did not move");
      assert.ok((await count()) < 60, `${await count()} rows are elements after scrolling`);
      await page.evaluate(() => (document.querySelector("#conversations").scrollTop = 1e9));
      await row(page, `Chat ${MANY - 1}`).waitFor();
      const start = Date.now();
      await page.fill("#find", "porcelain");
      await row(page, "Chat 7777").waitFor();
      assert.ok(Date.now() - start < 15_000, `found after ${Date.now() - start} ms`);
      await page.locator("#conversations .none").waitFor({ state: "detached" });
      assert.equal(await count(), 1);
      await picture("desktop-many-found", page);
      await row(page, "Chat 7777").locator("a").click();
      await page.fill("#find", "");
      await page.waitForFunction(() => document.querySelectorAll("#conversations .open").length > 10);
      await page.evaluate(() => {
        window.touched = 0;
        new MutationObserver((changes) => {
          for (const change of changes) window.touched += Math.max(1, change.addedNodes.length + change.removedNodes.length);
        }).observe(document.querySelector("#conversations"), { childList: true, subtree: true, attributes: true });
      });
      await told(page, "And another?");
      const touched = await page.evaluate(() => window.touched);
      assert.ok(touched > 0 && touched < 60, `${touched} changes to the list`);
      assert.match(await page.locator("#conversations .open").first().innerText(), /Chat 7777/);
      await accessible("many conversations", page);
      await page.context().close();
    },

    async "conversations are pinned, deleted and brought back, by menu and by keys"() {
      const page = await reader();
      for (const name of ["One", "Two", "Three"]) {
        await page.click("#new");
        await told(page, name);
      }
      const titles = () => page.locator("#conversations .label").allInnerTexts();
      assert.deepEqual(await titles(), ["Three", "Two", "One"]);
      await row(page, "One").hover();
      await row(page, "One").locator(".more").click();
      await accessible("the menu of a conversation", page);
      await picture("desktop-menu", page);
      await page.keyboard.press("Escape");
      assert.match(await page.evaluate(() => document.activeElement.className), /more/);
      await page.keyboard.press("Enter");
      await page.keyboard.press("Enter");
      await page.waitForFunction(() => document.querySelector("#conversations .group").innerText === "Pinned");
      assert.deepEqual(await titles(), ["One", "Three", "Two"]);
      await row(page, "Three").locator("a").focus();
      await page.keyboard.press("ArrowUp");
      await page.keyboard.press("Delete");
      await page.waitForFunction(() => document.querySelectorAll("#conversations .open").length === 2);
      assert.match(await page.evaluate(() => document.activeElement.innerText), /^Three/, "the focus goes to the next one");
      await accessible("a conversation that was deleted", page);
      await page.getByRole("button", { name: "Undo" }).click();
      await page.waitForFunction(() => document.querySelectorAll("#conversations .open").length === 3);
      await page.reload();
      await page.waitForFunction(() => document.querySelectorAll("#conversations .open").length === 3);
      assert.deepEqual(await titles(), ["One", "Three", "Two"]);
      await menu(page, "One", "Unpin");
      await page.waitForFunction(() => document.querySelector("#conversations .label").innerText === "Three");
      await row(page, "Three").locator("a").click();
      await says(page, "Said.");
      await page.keyboard.press("Alt+ArrowDown");
      await page.waitForFunction(() => document.querySelector("#title").innerText === "Two");
      await page.keyboard.press("Control+b");
      assert.ok(await page.locator("#side").isHidden());
      await picture("desktop-side-hidden", page);
      await page.keyboard.press("Control+b");
      assert.ok(await page.locator("#side").isVisible());
      await page.context().close();
    },

    async "the model writes a title, when it is asked and when it always shall"() {
      const page = await reader();
      await told(page, "Tell me of clay that is fired at night.");
      let asked;
      await page.route("**/v1/chat/completions", async (route) => {
        asked = route.request().postDataJSON();
        if (asked.stream) return route.fallback();
        await route.fulfill({ json: { choices: [{ message: { content: `<think>hm</think>\n**Title: "Night ${asked.messages.length > 3 ? "again" : "firing"} ${"x".repeat(80)}"**` } }] } });
      });
      await menu(page, "Tell me", "Title by the model");
      await page.waitForFunction(() => /^Night firing x+…$/.test(document.querySelector("#title").innerText));
      assert.deepEqual(asked.messages.map((message) => message.role), ["user", "assistant", "user"]);
      assert.equal(asked.max_tokens, 32);
      await page.click("#show-settings");
      await page.check("#set-titles");
      await accessible("titles by the model", page);
      await page.click("#new");
      await told(page, "Another one.");
      await page.waitForFunction(() => /^Night firing/.test(document.querySelector("#title").innerText));
      // A title that somebody gave stays.
      const id = page.url().split("/").at(-1);
      await told(page, "And on.");
      assert.equal((await storedIn(page, id)).named, true);
      await page.context().close();
    },

    async "an answer is had again with another model and other settings"() {
      const page = await openWindow();
      await page.addInitScript((given) => localStorage.setItem("kiln-key", given), key);
      await page.route("**/v1/models", (route) => route.fulfill({ json: { data: [{ id: "small", status: { value: "loaded" }, max_model_len: 4096 }, { id: "large", status: { value: "unloaded" } }] } }));
      await page.goto(`${url}/`);
      await page.waitForFunction(() => document.querySelector("#model").value);
      await told(page, "Say it.", "Softly.");
      await page.getByRole("button", { name: "Answer with another" }).click();
      await page.locator("#again-dialog").waitFor();
      await accessible("another answer", page);
      await picture("desktop-again", page);
      await page.keyboard.press("Escape");
      assert.equal(await page.locator(".branches").count(), 0);
      await page.getByRole("button", { name: "Answer with another" }).click();
      await page.selectOption("#again-model", "large");
      await page.fill("#again-temperature", "1.5");
      await page.selectOption("#again-thinking", "none");
      const next = stage.next();
      await page.locator("#again-dialog").getByRole("button", { name: "Answer again" }).click();
      const answer = await next;
      assert.deepEqual([answer.body.model, answer.body.temperature, answer.body.reasoning_effort], ["large", 1.5, "none"]);
      answer.say("Loudly.");
      answer.end("length");
      await idle(page);
      assert.equal(await page.locator("article.assistant .branches").innerText(), "2/2");
      assert.match(await page.locator(".stats").innerText(), /large · temperature 1\.5 · thinking none$/);
      assert.equal(await page.inputValue("#model"), "small", "the conversation keeps its model");
      // It goes on as it began, also after a reload; a new question is the conversation's own.
      await page.reload();
      await says(page, "Loudly.");
      const more = stage.next();
      await page.getByRole("button", { name: "Continue" }).click();
      const rest = await more;
      assert.deepEqual([rest.body.model, rest.body.temperature], ["large", 1.5]);
      rest.end();
      await idle(page);
      const own = await ask(page, "And now?");
      assert.deepEqual([own.body.model, own.body.temperature], ["small", undefined]);
      own.say("Softly.");
      own.end();
      await idle(page);
      await page.context().close();
    },

    async "exports of Open WebUI, llama-server and this page come in, and nothing in them runs"() {
      const page = await reader();
      await bring(page, "open-webui.json", JSON.stringify(OPEN_WEBUI));
      await says(page, "1,250 °C");
      assert.equal(await page.locator(".branches").innerText(), "1/2");
      assert.match(await page.locator("#title").innerText(), /^Kilns <img/);
      assert.equal(await page.locator("details.file").count(), 1);
      await page.locator(".thinking summary").click();
      assert.equal(await page.locator(".thought").innerText(), "Stoneware, so");
      assert.equal(await page.locator("#conversations .group").first().innerText(), "Pinned");
      assert.equal((await storedIn(page, "ow-1")).system, "You fire clay.");
      await bring(page, "llama.json", JSON.stringify([LLAMA_SERVER]));
      await says(page, "Wood ash that melts.");
      assert.equal(await page.locator("article").count(), 2);
      assert.equal((await storedIn(page, "ls-1")).system, "Be brief.");
      assert.equal(await page.locator("article img, article script").count(), 0);
      await bring(page, "lines.jsonl", [LLAMA_SERVER, { ...LLAMA_SERVER, conv: { ...LLAMA_SERVER.conv, id: "ls-2", name: "Lines" } }].map((one) => JSON.stringify(one)).join("\n"));
      await page.locator("#toast", { hasText: "Imported 2 conversations." }).waitFor();
      await accessible("imported conversations", page);
      await picture("desktop-imported", page);
      // What this page writes, it reads: all of it, with the branch that was looked at.
      await page.click("#help");
      const [download] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name: "Export everything" }).click()]);
      const text = readFileSync(await download.path(), "utf8");
      assert.equal(JSON.parse(text).conversations.length, 3);
      const other = await reader();
      await bring(other, "all.json", text);
      await other.waitForFunction(() => document.querySelectorAll("#conversations .open").length === 3);
      const [before, after] = [await storedIn(page, "ow-1"), await storedIn(other, "ow-1")];
      assert.deepEqual(after, before);
      for (const [name, wrong] of [["a picture", "\u0089PNG"], ["another export", '[{"mapping": {}}]'], ["a loop", JSON.stringify({ conv: { id: "x" }, messages: [{ id: "1", role: "user", parent: "1", content: "x" }] })], ["odd ids", '{"nodes": {"__proto__": {"id": "__proto__", "role": "user", "parent": "constructor"}}}']]) {
        await bring(other, `${name}.json`, wrong);
        await other.locator("#toast", { hasText: `${name}.json could not be imported` }).waitFor();
      }
      assert.equal(await page.evaluate(() => window.broken), undefined);
      await page.context().close();
      await other.context().close();
    },

    async "what an older page kept is there, and so is what a private window cannot keep"() {
      const page = await openWindow();
      await page.addInitScript((given) => localStorage.setItem("kiln-key", given), key);
      await page.goto(`${url}/page/icon.svg`);
      await page.evaluate(() => new Promise((done) => {
        const asked = indexedDB.open("kiln", 1);
        asked.onupgradeneeded = () => asked.result.createObjectStore("talks", { keyPath: "id" });
        asked.onsuccess = () => {
          const change = asked.result.transaction("talks", "readwrite");
          change.objectStore("talks").put({ id: "old", title: "An old chat", made: 1, changed: 2, model: "", system: "", sampling: {}, nodes: { n: { id: "n", parent: "", role: "user", made: 1, content: "Old words" } }, shown: {} });
          change.oncomplete = () => {
            asked.result.close();
            done();
          };
        };
      }));
      await page.goto(`${url}/`);
      await row(page, "An old chat").locator("a").click();
      await page.locator("article.user", { hasText: "Old words" }).waitFor();
      await page.context().close();
      const bare = await openWindow();
      await bare.addInitScript((given) => {
        localStorage.setItem("kiln-key", given);
        indexedDB.open = () => {
          throw new Error("not here");
        };
      }, key);
      await bare.goto(`${url}/`);
      await bare.waitForFunction(() => document.querySelector("#model").value);
      await told(bare, "Not kept", "Still shown.");
      await bare.click("#new");
      await row(bare, "Not kept").locator("a").click();
      await says(bare, "Still shown.");
      await bare.fill("#find", "still");
      await row(bare, "Not kept").waitFor();
      await bare.context().close();
    },
  };
}
