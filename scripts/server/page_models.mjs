// Checks of models, presets and what is attached: what is known of a model, loading, names for settings, PDF files, and what a message costs.

import assert from "node:assert/strict";

import { hands } from "./page_hands.mjs";

export function modelChecks(tools) {
  const { openWindow, url, key, accessible, picture } = tools;
  const { reader, ask, told, idle } = hands(tools);

  return {
    async "models are listed with what they are, loaded and unloaded"() {
      const page = await openWindow();
      await page.addInitScript((given) => localStorage.setItem("kiln-key", given), key);
      const loaded = new Set(["small-Q4_K_M"]);
      await page.route("**/v1/models", (route) => route.fulfill({ json: { data: ["small-Q4_K_M", "large-Q8_0"].map((id) => ({ id, status: { value: loaded.has(id) ? "loaded" : "unloaded" }, ...(loaded.has(id) && { max_model_len: 4096, meta: { n_params: 1.5e9, n_ctx_train: 32_768 }, architecture: { input_modalities: ["text", "image"] } }) })) } }));
      await page.route("**/api/tags", (route) => route.fulfill({ json: { models: [{ name: "small-Q4_K_M", size: 1.1e9, details: { family: "llama" } }, { name: "large-Q8_0", size: 8.5e9, details: {} }] } }));
      const asked = [];
      let hold;
      await page.route("**/api/generate", async (route) => {
        const body = route.request().postDataJSON();
        asked.push(body);
        await new Promise((done) => (hold = done));
        if (body.model === "small-Q4_K_M") return route.fulfill({ status: 503, json: { error: "there is no memory for it" } });
        loaded[body.keep_alive === 0 ? "delete" : "add"](body.model);
        await route.fulfill({ json: { done: true, done_reason: body.keep_alive === 0 ? "unload" : "load" } });
      });
      await page.goto(`${url}/`);
      await page.waitForFunction(() => document.querySelector("#model").value);
      await page.click("#show-models");
      const list = page.locator("#models-list");
      await list.locator("li", { hasText: "small" }).locator("p", { hasText: "loaded · 1.1 GB · Q4_K_M · 1.5 billion parameters · llama · 4,096 tokens of context (trained with 32,768) · sees pictures" }).waitFor();
      assert.match(await list.locator("li", { hasText: "large" }).innerText(), /not loaded · 8\.5 GB · Q8_0/);
      await accessible("the models", page);
      await picture("desktop-model-list", page);
      await page.getByRole("button", { name: "Load large-Q8_0" }).click();
      await list.locator("[aria-busy=true]", { hasText: "is loaded…" }).waitFor();
      hold();
      await page.getByRole("button", { name: "Unload large-Q8_0" }).click();
      await list.locator("[aria-busy=true]", { hasText: "is unloaded…" }).waitFor();
      hold();
      await page.getByRole("button", { name: "Load large-Q8_0" }).waitFor();
      assert.deepEqual(asked, [{ model: "large-Q8_0", stream: false }, { model: "large-Q8_0", stream: false, keep_alive: 0 }]);
      await page.getByRole("button", { name: "Unload small-Q4_K_M" }).click();
      await list.locator("[aria-busy=true]").waitFor();
      hold();
      await page.locator("#toast", { hasText: "small-Q4_K_M: there is no memory for it" }).waitFor();
      await page.getByRole("button", { name: "Use large-Q8_0" }).click();
      assert.equal(await page.inputValue("#model"), "large-Q8_0");
      await page.setViewportSize({ width: 320, height: 640 });
      const [models, settings] = [await page.locator("#show-models").boundingBox(), await page.locator("#show-settings").boundingBox()];
      assert.ok(models.x + models.width <= settings.x, "the buttons of the head lie on each other");
      await page.keyboard.press("Control+m");
      await list.waitFor();
      await accessible("the models on a small phone", page);
      await picture("phone-320-models", page);
      await page.context().close();
    },

    async "system prompts and settings have names, and serve other conversations"() {
      const page = await reader();
      await page.click("#show-settings");
      await page.fill("#set-system", "You are a potter.");
      await page.fill("#set-temperature", "0.2");
      await page.press("#set-temperature", "Tab");
      await page.fill("#set-preset-name", "Potter <b>");
      await page.press("#set-preset-name", "Enter");
      assert.equal(await page.inputValue("#set-preset"), "Potter <b>");
      await accessible("presets", page);
      await picture("desktop-presets", page);
      await page.fill("#set-temperature", "0.9");
      await page.press("#set-temperature", "Tab");
      assert.equal(await page.inputValue("#set-preset"), "", "what was changed is no preset");
      await page.reload();
      await page.waitForFunction(() => document.querySelector("#model").value);
      await page.selectOption("#set-preset", "Potter <b>");
      assert.equal(await page.inputValue("#set-system"), "You are a potter.");
      const answer = await ask(page, "Who are you?");
      assert.equal(answer.body.temperature, 0.2);
      assert.deepEqual(answer.body.messages[0], { role: "system", content: "You are a potter." });
      answer.end();
      await idle(page);
      await page.check("#set-first");
      await page.selectOption("#set-preset", "");
      assert.equal(await page.inputValue("#set-system"), "");
      assert.ok(await page.locator("#set-first").isDisabled());
      // A new chat with the model begins with it, also after a reload.
      await page.reload();
      await page.waitForFunction(() => document.querySelector("#model").value);
      await page.click("#new");
      assert.equal(await page.inputValue("#set-preset"), "Potter <b>");
      await page.reload();
      await page.waitForFunction(() => document.querySelector("#set-preset")?.value === "Potter <b>");
      assert.ok(await page.isChecked("#set-first"));
      await page.uncheck("#set-first");
      await page.locator("#settings").getByRole("button", { name: "Delete" }).click();
      await page.click("#new");
      assert.deepEqual(await page.locator("#set-preset option").allInnerTexts(), ["none"]);
      assert.equal(await page.inputValue("#set-temperature"), "0.2", "the conversation keeps what it has");
      await page.evaluate(() => localStorage.setItem("kiln-presets", '[null, {"name": 3}, {"name": "x", "system": "y"}]'));
      await page.reload();
      await page.waitForFunction(() => document.querySelector("#set-preset"));
      await page.context().close();
    },

    async "PDF files go along as text, and what a message costs is said before"() {
      const page = await reader();
      const maker = await openWindow();
      await maker.setContent(`<style>@page { size: A5 }</style><h1>The kiln’s diary</h1><p>Fired to <b>1,250&nbsp;°C</b> — naïve café, “quoted”. ${"The glaze was even. ".repeat(20)}</p><table><tr><td>cone</td><td>10</td></tr></table><p style="break-before: page">Second page: Привет, Ελλάδα.</p>`);
      const pdf = await maker.pdf();
      await maker.context().close();
      await page.setInputFiles("#picker", { name: "diary.pdf", mimeType: "application/pdf", buffer: pdf });
      await page.locator("#files li", { hasText: "diary.pdf" }).waitFor();
      await page.locator("#files li", { hasText: /2 pages · [\d.]+ k?B · \d+ tokens/ }).waitFor();
      await page.fill("#prompt", "What is in it?");
      await page.locator("#cost", { hasText: /^This message: \d+ tokens$/ }).waitFor();
      await accessible("a PDF file", page);
      await picture("desktop-pdf", page);
      const answer = await ask(page, "What is in it?");
      const { content } = answer.body.messages.at(-1);
      assert.match(content, /^diary\.pdf\n```\n\[page 1\]\nThe kiln’s diary\n+Fired to 1,250.°C — naïve café, “quoted”\. The glaze was even\. The/);
      assert.match(content, /cone 10\n\n\[page 2\]\nSecond page: Привет, Ελλάδα\.\n```\n\nWhat is in it\?$/);
      answer.end();
      await idle(page);
      assert.ok(await page.locator("#cost").isHidden());
      // More than is left of the context is said, and how much that is.
      await page.route("**/input_tokens", (route) => route.fulfill({ json: { input_tokens: 123_456 } }));
      await page.fill("#prompt", "Much too long");
      await page.locator("#cost.nearly", { hasText: /^This message: 123,456 tokens, more than the [\d,]+ that are left$/ }).waitFor();
      await accessible("too long a message", page);
      await picture("desktop-cost", page);
      const wrong = { "no.pdf": ["hello", "is no PDF file"], "secret.pdf": ["%PDF-1.4\ntrailer\n<< /Encrypt 5 0 R >>", "is encrypted"], "scan.pdf": ["%PDF-1.4\n1 0 obj << /Type /Page >> endobj", "has no text"], "deep.pdf": [`%PDF-1.4\n1 0 obj ${"[".repeat(100_000)} endobj ${"<<".repeat(100_000)}`, "has no text"] };
      for (const [name, [text, why]] of Object.entries(wrong)) {
        await page.setInputFiles("#picker", { name, mimeType: "application/pdf", buffer: Buffer.from(text) });
        await page.locator("#toast", { hasText: `${name} ${why}` }).waitFor();
      }
      await page.context().close();
    },
  };
}
