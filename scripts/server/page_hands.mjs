// What checks of the page do again and again: open a window, ask, wait for words.

export function hands({ openWindow, stage, url, key }) {
  /** A window that knows the key. */
  async function reader(options = {}, address = `${url}/`) {
    const page = await openWindow(options);
    // Frames without an origin have no storage.
    await page.addInitScript((given) => self.origin !== "null" && localStorage.setItem("kiln-key", given), key);
    await page.goto(address);
    await page.waitForFunction(() => document.querySelector("#model").value);
    return page;
  }

  /** Asks, and gives the answer to write. */
  async function ask(page, text) {
    const answer = stage.next();
    await page.fill("#prompt", text);
    await page.press("#prompt", "Enter");
    return answer;
  }
  async function told(page, text, content = "Said.") {
    const answer = await ask(page, text);
    answer.say(content);
    answer.end();
    await idle(page);
  }
  const idle = (page) => page.locator("#stop").waitFor({ state: "hidden" });
  const words = (page) => page.locator("article.assistant .prose:not(.thought)").last();
  const row = (page, title) => page.locator("#conversations .row", { hasText: title });
  const says = (page, text) => page.waitForFunction((wanted) => [...document.querySelectorAll("article.assistant .prose:not(.thought)")].at(-1)?.innerText.includes(wanted), text);

  /** Does what the menu of a conversation offers. */
  async function menu(page, title, item) {
    await row(page, title).hover();
    await row(page, title).locator(".more").click();
    await page.locator("#menu").getByRole("menuitem", { name: item }).click();
  }

  /** Brings in a file of conversations. */
  async function bring(page, name, text) {
    await page.evaluate(() => document.querySelector("#help-dialog").open || document.querySelector("#help").click());
    await page.setInputFiles("#import-file", { name, mimeType: "application/json", buffer: Buffer.from(text) });
  }

  return { reader, ask, told, idle, words, row, says, menu, bring };
}
