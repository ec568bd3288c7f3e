// Checks of conversations: several at once, their addresses, titles and ends, and what readers see of them on other machines and screens.
// Answers are written by the test, so that each moment of a stream can be looked at.

import assert from "node:assert/strict";

import { hands } from "./page_hands.mjs";

const WIDE = "| Drink | Caffeine | Origin | Temperature | Preparation |\n|---|---|---|---|---|\n| Espresso | considerable | Ethiopia | 93 degrees | pressurised extraction |\n| Gyokuro | moderate | Japan | 60 degrees | shaded and steamed leaves |\n";
const SIGNS = "H<sub>2</sub>O &amp; CO<sub>2</sub> &copy; first<br>second, as said[^1].\n\n| a | b |\n|---|---|\n| x<br>y | 10<sup>3</sup> |\n\n$$A = \\begin{pmatrix} a & b \\\\ c & d \\\\ e & f \\end{pmatrix}, \\quad f(x) = \\begin{cases} 1 & x > 0 \\\\ 0 & x \\le 0 \\end{cases}$$\n\n[^1]: By the potter.\n";

/** A picture of 2 x 2 pixels. */
const PNG = Buffer.from("iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAAFklEQVR4nGM4YSMnZ3OC8dcJDakjIgAkLQUiyOr4DAAAAABJRU5ErkJggg==", "base64");

export function conversationChecks(tools) {
  const { openWindow, stage, url, key, accessible, picture } = tools;
  const { reader, ask, told, idle, words, row, menu, says } = hands(tools);

  return {
    async "pictures are chosen, dropped and pasted, seen before they are sent, and sent"() {
      const page = await reader();
      const file = { name: "kiln.png", mimeType: "image/png", buffer: PNG };
      // A model of text takes none, and says so.
      await page.setInputFiles("#picker", file);
      await page.locator("#toast", { hasText: "reads text only" }).waitFor();
      assert.equal(await page.locator("#files li").count(), 0);
      await page.route("**/v1/models", async (route) => {
        const response = await route.fetch();
        const json = await response.json();
        for (const model of json.data) model.architecture = { ...model.architecture, input_modalities: ["text", "image"] };
        await route.fulfill({ response, json });
      });
      await page.reload();
      await page.waitForFunction(() => document.querySelector("#attach").ariaLabel.includes("picture"));
      await page.setInputFiles("#picker", file);
      const bring = (kind) => page.evaluate(([kind, coded]) => {
        const bytes = Uint8Array.from(atob(coded), (c) => c.charCodeAt(0));
        const data = new DataTransfer();
        data.items.add(new File([bytes], `${kind}.png`, { type: "image/png" }));
        if (kind === "drop") document.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
        else document.querySelector("#prompt").dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true }));
      }, [kind, PNG.toString("base64")]);
      await bring("drop");
      await page.locator("#files li", { hasText: "drop.png" }).waitFor();
      await bring("paste");
      await page.locator("#files li", { hasText: "paste.png" }).waitFor();
      const drawn = (where) => page.waitForFunction((where) => [...document.querySelectorAll(`${where} img`)].length && [...document.querySelectorAll(`${where} img`)].every((img) => img.naturalWidth === 2), where);
      await drawn("#files");
      await accessible("pictures before they are sent", page);
      await picture("desktop-pictures", page);
      await page.click("#files li:nth-child(2) button");
      const answer = await ask(page, "What are these?");
      const content = answer.body.messages.at(-1).content;
      assert.deepEqual(content.map((part) => part.type), ["image_url", "image_url", "text"]);
      assert.equal(content[0].image_url.url, `data:image/png;base64,${PNG.toString("base64")}`);
      assert.equal(content[2].text, "What are these?");
      answer.say("Squares.");
      answer.end();
      await idle(page);
      await drawn("article.user");
      await accessible("pictures in a conversation", page);
      // They come back with the page.
      await page.reload();
      await page.waitForFunction(() => document.querySelector("#model").value);
      await drawn("article.user");
      await page.close();
    },

    async "conversations are answered at once, each with its own Stop"() {
      const page = await reader();
      const first = await ask(page, "First question");
      first.say("Alpha ");
      await says(page, "Alpha");
      await page.click("#new");
      assert.ok(await page.locator("#send").isVisible(), "a new chat can be asked while another is answered");
      const second = await ask(page, "Second question");
      second.say("Beta ");
      await says(page, "Beta");
      assert.equal(await page.locator("#conversations .mark.busy").count(), 2);
      await accessible("two answers at once", page);
      await picture("desktop-two-answers", page);
      // What is typed in one conversation stays there, and Enter in a busy one says why nothing is sent.
      await page.fill("#prompt", "a draft");
      await page.press("#prompt", "Enter");
      await page.locator("#toast", { hasText: "still answering" }).waitFor();
      await row(page, "First question").locator("a").click();
      await says(page, "Alpha");
      assert.equal(await page.inputValue("#prompt"), "");
      first.say("gamma ");
      second.say("delta ");
      await says(page, "Alpha gamma");
      assert.ok(await page.locator("#stop").isVisible());
      await page.click("#stop");
      await idle(page);
      assert.equal(await page.locator("#conversations .mark.busy").count(), 1, "the other answer is still written");
      assert.ok(!second.gone);
      second.end();
      await page.locator("#conversations .mark.unread").waitFor();
      await row(page, "Second question").locator("a").click();
      assert.equal((await words(page).innerText()).trim(), "Beta delta");
      assert.equal(await page.inputValue("#prompt"), "a draft");
      assert.equal(await page.locator("#conversations .mark:visible").count(), 0);
      // A conversation that is deleted while it is answered stays deleted.
      const third = await ask(page, "Third question");
      third.say("Epsilon ");
      await says(page, "Epsilon");
      await menu(page, "Second question", "Delete");
      await page.waitForFunction(() => document.querySelectorAll("#conversations .row").length === 1);
      await page.waitForTimeout(200);
      assert.equal(await page.locator("#conversations .row").count(), 1);
      await page.context().close();
    },

    async "each conversation has an address that outlasts reloads, and Back leads back"() {
      const page = await reader();
      await told(page, "Kept chat", "Kept words.");
      const kept = page.url();
      assert.match(kept, /#\/chat\/[\w-]+$/);
      await page.reload();
      await says(page, "Kept words.");
      assert.equal(await page.locator("#title").innerText(), "Kept chat");
      await page.click("#new");
      assert.match(page.url(), /#\/$/);
      await told(page, "Another chat", "Other words.");
      await page.goBack();
      await says(page, "Kept words.");
      await page.goForward();
      await says(page, "Other words.");
      const [opened] = await Promise.all([page.context().waitForEvent("page"), row(page, "Kept chat").locator("a").click({ modifiers: ["Control"] })]);
      await opened.waitForFunction(() => document.querySelector("#title").innerText === "Kept chat");
      await opened.close();
      await page.goto(`${url}/#/chat/nothing`);
      await page.locator(".welcome h2", { hasText: "This conversation is not here" }).waitFor();
      await accessible("an unknown conversation", page);
      await picture("desktop-not-found", page);
      await told(page, "From nowhere");
      assert.match(page.url(), /#\/chat\/(?!nothing)/);
      // A page that is left in an answer says so when it is seen again.
      const answer = await ask(page, "Long one");
      answer.say("Half a ");
      await says(page, "Half a");
      await page.waitForTimeout(2300);
      await page.reload();
      await page.locator(".end", { hasText: "The page was left" }).waitFor();
      assert.ok(await page.getByRole("button", { name: "Continue" }).isVisible());
      await page.context().close();
    },

    async "wide tables are scrolled on a phone, and words stay whole"() {
      const page = await reader({ viewport: { width: 390, height: 844 } });
      await told(page, "Compare the drinks.", WIDE);
      const seen = await page.evaluate(() => {
        const box = document.querySelector(".table");
        const lines = (cell) => {
          const range = document.createRange();
          range.selectNodeContents(cell);
          return new Set([...range.getClientRects()].map((rect) => rect.top)).size;
        };
        return { scrolls: box.scrollWidth > box.clientWidth, page: document.documentElement.scrollWidth, heads: [...box.querySelectorAll("th")].map(lines) };
      });
      assert.deepEqual(seen, { scrolls: true, page: 390, heads: [1, 1, 1, 1, 1] });
      await accessible("a wide table on a phone", page);
      await picture("phone-table", page);
      // The title has the room of the head but for its buttons.
      assert.ok((await page.locator("#title").boundingBox()).width > 200, "the title has no room");
      const model = await page.locator("#model").boundingBox();
      assert.ok(model.y >= (await page.locator("#title").boundingBox()).y + 10, "the model stands beside the title");
      await page.setViewportSize({ width: 320, height: 640 });
      assert.equal(await page.evaluate(() => document.documentElement.scrollWidth), 320);
      await picture("phone-320", page);
      await page.context().close();
    },

    async "panels that open do not end the view's following, the reader does"() {
      const page = await reader();
      const answer = await ask(page, "A long story");
      for (let i = 0; i < 60; i += 1) answer.say(`Paragraph ${i} of a story that is long enough to be wrapped when the column gets narrow, and longer still.\n\n`);
      await says(page, "Paragraph 59");
      const behind = () => page.evaluate(() => {
        const view = document.querySelector("#talk");
        return Math.round(view.scrollHeight - view.scrollTop - view.clientHeight);
      });
      for (const name of ["Engine", "Settings"]) {
        await page.click(`#show-${name.toLowerCase()}`);
        await page.waitForTimeout(150);
        assert.ok((await behind()) < 5, `${name}: the view is ${await behind()} behind`);
        answer.say(`With ${name}.\n\n`);
        await says(page, `With ${name}.`);
        await page.waitForTimeout(100);
        assert.ok((await behind()) < 5, `${name}: the view stays ${await behind()} behind`);
      }
      await page.setViewportSize({ width: 1150, height: 600 });
      await page.waitForTimeout(150);
      assert.ok((await behind()) < 5, "another window size");
      await page.locator("#talk").hover();
      await page.mouse.wheel(0, -500);
      await page.locator("#down").waitFor();
      const top = await page.evaluate(() => document.querySelector("#talk").scrollTop);
      answer.say("While somebody reads above.\n\n");
      await says(page, "While somebody");
      assert.equal(await page.evaluate(() => document.querySelector("#talk").scrollTop), top);
      await page.click("#panel-close");
      // What is typed into the settings stays when the answer ends.
      await page.click("#show-settings");
      await page.focus("#set-system");
      await page.keyboard.type("You are");
      answer.end();
      await idle(page);
      await page.keyboard.type(" kind.");
      assert.equal(await page.inputValue("#set-system"), "You are kind.");
      await page.context().close();
    },

    async "a connection that breaks is said, and the answer can be had again"() {
      const page = await reader();
      const answer = await ask(page, "Will you stay?");
      answer.say("I will st");
      await says(page, "I will st");
      answer.cut();
      await page.locator(".note", { hasText: "The connection was lost." }).waitFor();
      await accessible("a lost connection", page);
      await picture("desktop-lost", page);
      assert.ok(await page.getByRole("button", { name: "Continue" }).isVisible());
      const again = stage.next();
      await page.getByRole("button", { name: "Retry" }).click();
      const second = await again;
      second.say("I will stay.");
      second.end();
      await idle(page);
      assert.equal(await words(page).innerText(), "I will stay.");
      // A prompt that is too long is told in the reader's words.
      await page.route("**/v1/chat/completions", (route) => route.fulfill({ status: 400, contentType: "application/json", body: JSON.stringify({ error: { message: "raw", code: "context_length_exceeded", n_prompt_tokens: 9001, n_ctx: 8192 } }) }));
      await page.fill("#prompt", "More");
      await page.press("#prompt", "Enter");
      await page.locator(".note", { hasText: "has 9,001 tokens and no longer fits into the model's context of 8,192" }).waitFor();
      await page.context().close();
    },

    async "a page from another machine names it"() {
      const page = await reader({}, `http://kiln.test:${stage.port}/`);
      const text = await page.locator(".welcome").innerText();
      assert.match(text, /answers from kiln\.test:\d+\./);
      assert.doesNotMatch(text, /this machine|leaves/);
      const own = await reader();
      assert.match(await own.locator(".welcome").innerText(), /answers from this machine\..*Nothing you write leaves it/s);
      await page.context().close();
      await own.context().close();
    },

    async "entities, tags, footnotes and large brackets are drawn"() {
      const page = await reader();
      await told(page, "Signs, please.", SIGNS);
      const prose = words(page);
      assert.match(await prose.locator("p").first().innerText(), /^H2O & CO2 © first\nsecond, as said1\.$/);
      assert.equal(await prose.locator("td").first().innerText(), "x\ny");
      assert.equal(await prose.locator("td sup").innerText(), "3");
      await prose.getByRole("button", { name: "Footnote 1", exact: true }).click();
      assert.equal(await page.evaluate(() => document.activeElement.className), "footnote");
      await prose.getByRole("button", { name: "Back to the text" }).click();
      assert.equal(await page.evaluate(() => document.activeElement.className), "reference");
      assert.match(page.url(), /#\/chat\//, "a footnote is no address");
      await page.waitForFunction(() => document.fonts.check('16px "Kiln Math"', "("));
      const heights = await page.evaluate(() => [...document.querySelectorAll("mtable")].map((table) => table.previousSibling.getBoundingClientRect().height / table.getBoundingClientRect().height));
      assert.equal(heights.length, 2);
      for (const share of heights) assert.ok(share > 0.8, `a bracket has ${share} of the height of what it encloses`);
      await accessible("signs", page);
      await picture("desktop-signs", page);
      await page.emulateMedia({ colorScheme: "dark" });
      await page.setViewportSize({ width: 390, height: 844 });
      await accessible("signs on a phone in the dark", page);
      await picture("phone-signs-dark", page);
      await page.context().close();
    },

    async "a stopped answer says so, tells its numbers and can be continued"() {
      const page = await reader();
      const answer = await ask(page, "Count.");
      for (const n of ["one ", "two ", "three"]) answer.say(n);
      await says(page, "three");
      await page.keyboard.press("Escape");
      await page.locator(".end", { hasText: "Stopped" }).waitFor();
      assert.match(await page.locator(".stats").innerText(), /^3 tokens · .*3 of 40 prompt tokens cached/);
      await accessible("a stopped answer", page);
      await picture("desktop-stopped", page);
      await page.emulateMedia({ colorScheme: "dark" });
      await picture("desktop-stopped-dark", page);
      const again = stage.next();
      await page.getByRole("button", { name: "Continue" }).click();
      const rest = await again;
      assert.equal(rest.body.continue_final_message, true);
      assert.deepEqual(rest.body.messages.at(-1), { role: "assistant", content: "one two three" });
      rest.say(" four");
      rest.end("length");
      await page.locator(".end", { hasText: "cut off" }).waitFor();
      assert.equal(await words(page).innerText(), "one two three four");
      assert.match(await page.locator(".stats").innerText(), /^4 tokens/);
      // Behind a later message there is nothing to continue.
      await told(page, "Thanks.");
      assert.equal(await page.getByRole("button", { name: "Continue" }).count(), 0);
      await page.context().close();
    },

    async "titles follow the first message until somebody gives one"() {
      const page = await reader();
      await told(page, "Tell me a long story");
      await page.mouse.move(5, 5);
      const opacity = await page.locator("article.user .foot button").evaluateAll((all) => all.map((b) => getComputedStyle(b).opacity));
      assert.deepEqual(opacity, ["1", "1"], "the buttons of a message are seen without a pointer on it");
      const again = stage.next();
      await page.getByRole("button", { name: "Edit the message" }).first().click();
      await page.fill("textarea.editing", "Say hi.");
      await page.keyboard.press("Enter");
      (await again).end();
      await idle(page);
      assert.equal(await page.locator("#title").innerText(), "Say hi.");
      assert.equal(await page.locator("#conversations .label").innerText(), "Say hi.");
      await page.getByRole("button", { name: "Branch before" }).first().click();
      assert.equal(await page.locator("#title").innerText(), "Tell me a long story");
      await menu(page, "Tell me", "Rename");
      await accessible("a title that is edited", page);
      await page.keyboard.type("Stories");
      await page.keyboard.press("Enter");
      assert.equal(await page.locator("#title").innerText(), "Stories");
      await page.getByRole("button", { name: "Branch after" }).first().click();
      assert.equal(await page.locator("#title").innerText(), "Stories");
      await page.reload();
      await page.waitForFunction(() => document.querySelector("#title").innerText === "Stories");
      await menu(page, "Stories", "Rename");
      await page.fill("#conversations .title", "Never");
      await page.keyboard.press("Escape");
      assert.equal(await page.locator("#title").innerText(), "Stories");
      await row(page, "Stories").locator("a").press("F2");
      await page.fill("#conversations .title", "");
      await page.keyboard.press("Enter");
      assert.equal(await page.locator("#title").innerText(), "Say hi.");
      await page.context().close();
    },

    async "several models say which are loaded, and the context has a gauge"() {
      const page = await openWindow();
      await page.addInitScript((given) => localStorage.setItem("kiln-key", given), key);
      const models = [{ id: "small", status: { value: "loaded" }, max_model_len: 50 }, { id: "large", status: { value: "unloaded" } }];
      await page.route("**/v1/models", (route) => route.fulfill({ json: { data: models } }));
      await page.goto(`${url}/`);
      await page.locator("#model-state.loaded").waitFor();
      const groups = await page.locator("#model optgroup").evaluateAll((all) => all.map((group) => [group.label, [...group.children].map((option) => option.value)]));
      assert.deepEqual(groups, [["Loaded", ["small"]], ["Loaded when asked", ["large"]]]);
      assert.ok(await page.locator("#gauge").isHidden());
      const answer = await ask(page, "Fill it.");
      assert.equal(answer.body.model, "small");
      answer.say("a");
      await page.locator("#gauge-text", { hasText: "41 of 50 tokens" }).waitFor();
      for (const n of "bcdef") answer.say(n);
      await page.locator("#gauge.nearly", { hasText: "46 of 50 tokens: the context is nearly full" }).waitFor();
      answer.end();
      await idle(page);
      await accessible("several models and a full context", page);
      await picture("desktop-models", page);
      await page.selectOption("#model", "large");
      await page.locator("#model-state.unloaded").waitFor();
      assert.ok(await page.locator("#gauge").isHidden(), "nobody knows the context of a model that is not loaded");
      models[1] = { id: "large", status: { value: "loaded" }, max_model_len: 4096 };
      await told(page, "And now?");
      await page.locator("#model-state.loaded").waitFor();
      await page.locator("#gauge-text", { hasText: "41 of 4,096 tokens" }).waitFor();
      // Each conversation keeps its model.
      await page.click("#new");
      await page.selectOption("#model", "small");
      await told(page, "Small again");
      await row(page, "Fill it.").locator("a").click();
      assert.equal(await page.inputValue("#model"), "large");
      await page.context().close();
    },

    async "the APIs are described, also behind a key, and defaults are told as such"() {
      const page = await reader();
      await page.click("#help");
      assert.equal(await page.locator("#openapi").getAttribute("href"), "/openapi.json");
      const [download] = await Promise.all([page.waitForEvent("download"), page.click("#openapi")]);
      assert.equal(download.suggestedFilename(), "kiln-openapi.json");
      await accessible("help with the APIs", page);
      await page.keyboard.press("Escape");
      await page.click("#show-settings");
      assert.match(await page.locator("#set-temperature").getAttribute("placeholder"), /^default [\d.]+$/);
      assert.ok(await page.locator("#set-defaults").isDisabled());
      await page.fill("#set-temperature", "0.3");
      await page.press("#set-temperature", "Tab");
      await picture("desktop-settings", page);
      await page.click("#set-defaults");
      assert.equal(await page.inputValue("#set-temperature"), "");
      await page.context().close();
    },
  };
}
