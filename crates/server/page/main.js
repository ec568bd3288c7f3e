// The page: which conversation is shown, what is sent, and what the buttons and keys do.

import * as api from "./api.js";
import { $, announce, copy, h, icon, save, toast } from "./dom.js";
import * as engine from "./engine.js";
import { Messages, size } from "./messages.js";
import * as settings from "./settings.js";
import * as store from "./store.js";
import { fresh, grow, imported, leaf, markdown, path, requestMessages, switchTo } from "./tree.js";

/** Pasted text of so many characters becomes a file. */
const LONG_PASTE = 4000;
const MOST_FILE_BYTES = 4 << 20;
const EXAMPLES = ["Explain what a kiln does, as if to a friend.", "Write a Python function that finds the primes below n.", "Compare tea and coffee in a table."];

const page = { talks: [], talk: null, files: [], answering: null, defaults: {}, device: "", models: [] };

const actions = { retry, edit, show: showBranch, answerCalls };
const messages = new Messages(actions);

// --- conversations ----------------------------------------------------------------------------------------------------

function keep(talk = page.talk) {
  if (!Object.keys(talk.nodes).length) return;
  if (!page.talks.includes(talk)) page.talks.unshift(talk);
  // What is being written is no state to come back to.
  const nodes = Object.fromEntries(Object.entries(talk.nodes).map(([id, { busy, ...node }]) => [id, node]));
  store.put({ ...talk, nodes }).catch(() => toast("This browser could not keep the conversation: is its storage full?"));
}

function when(time) {
  const days = Math.floor((new Date().setHours(0, 0, 0, 0) - new Date(time).setHours(0, 0, 0, 0)) / 86_400_000);
  return days <= 0 ? "Today" : days === 1 ? "Yesterday" : days < 7 ? "This week" : days < 31 ? "This month" : "Older";
}

function showList() {
  const wanted = $("find").value.trim().toLowerCase();
  const has = (talk) => talk.title.toLowerCase().includes(wanted) || Object.values(talk.nodes).some((node) => node.content.toLowerCase().includes(wanted));
  const found = page.talks.filter((talk) => !wanted || has(talk)).sort((a, b) => b.changed - a.changed);
  const rows = [];
  let group = "";
  for (const talk of found) {
    const now = when(talk.changed);
    if (now !== group) rows.push(h("li", { class: "group" }, now));
    group = now;
    const current = talk === page.talk;
    rows.push(h("li", { class: current ? "current" : null },
      h("button", { type: "button", class: "open", "aria-current": current ? "page" : null, onclick: () => open(talk) }, talk.title || "Untitled"),
      h("button", { type: "button", class: "quiet", icon: "bin", "aria-label": `Delete ${talk.title || "Untitled"}`, onclick: () => forget(talk) })));
  }
  $("conversations").replaceChildren(...(rows.length ? rows : [h("li", { class: "none" }, wanted ? "Nothing found" : "Conversations will be listed here.")]));
}

function open(talk) {
  page.talk = talk;
  closeSide();
  show();
  $("prompt").focus({ preventScroll: true });
}

function show() {
  const { talk } = page;
  $("title").textContent = talk.title || "New chat";
  document.title = talk.title ? `${talk.title} · Kiln` : "Kiln";
  messages.show(talk, welcome);
  settings.show(talk, page.defaults, () => keep(talk));
  if (talk.model && page.models.includes(talk.model)) $("model").value = talk.model;
  showList();
  showBusy();
}

function begin() {
  const talk = fresh($("model").value);
  // A new chat goes on with the settings of the one before it.
  if (page.talk) Object.assign(talk, { system: page.talk.system, sampling: { ...page.talk.sampling } });
  open(talk);
}

async function forget(talk) {
  if (page.answering?.talk === talk) page.answering.stop.abort();
  page.talks.splice(page.talks.indexOf(talk), 1);
  await store.remove(talk.id);
  if (talk === page.talk) begin();
  else showList();
  const undo = h("button", { type: "button", onclick: () => {
    page.talks.unshift(talk);
    store.put(talk);
    showList();
    $("toast").hidePopover();
  } }, "Undo");
  toast("Deleted. ");
  $("toast").append(undo);
}

function welcome() {
  const facts = [page.device, page.defaults.context && `${page.defaults.context.toLocaleString("en")} tokens of context`].filter(Boolean).join(", ");
  const runs = page.asleep ? "It is loaded when you ask. " : facts && `It runs on ${facts}. `;
  const example = (text) => h("li", {}, h("button", { type: "button", onclick: () => {
    $("prompt").value = text;
    submit();
  } }, text));
  return h("div", { class: "welcome" },
    h("img", { src: "/page/icon.svg", alt: "", width: 56, height: 56 }),
    h("h2", {}, "What shall we make?"),
    h("p", {}, h("strong", {}, $("model").value || "The model"), " answers from this machine. ", runs, "Nothing you write leaves it, and conversations stay in this browser."),
    h("ul", {}, EXAMPLES.map(example)),
    h("p", { class: "small" }, "Attach or drop text files. Edit a message to branch. ", h("button", { type: "button", class: "link", onclick: () => openHelp() }, "All keys, and the address for programs")));
}

// --- asking -----------------------------------------------------------------------------------------------------------

function submit() {
  const text = $("prompt").value.trim();
  if ((!text && !page.files.length) || page.answering) return;
  const { talk } = page;
  talk.model = $("model").value;
  if (!talk.title) talk.title = title(text || page.files[0].name);
  const last = leaf(talk);
  const node = grow(talk, last?.id ?? "", { role: "user", content: text, files: page.files });
  $("prompt").value = "";
  page.files = [];
  showFiles();
  fitPrompt();
  answer(talk, node);
}

const title = (text) => {
  const line = text.split("\n").find((l) => l.trim()) ?? "";
  return line.length > 60 ? `${line.slice(0, 57).trimEnd()}…` : line;
};

function retry(node) {
  if (!page.answering) answer(page.talk, page.talk.nodes[node.parent]);
}

function edit(node, text) {
  if (page.answering || !text.trim()) return;
  answer(page.talk, grow(page.talk, node.parent, { role: "user", content: text.trim(), files: node.files }));
}

function answerCalls(node, results) {
  let parent = node;
  for (const result of results) parent = grow(page.talk, parent.id, { role: "tool", ...result });
  answer(page.talk, parent);
}

function showBranch(node) {
  switchTo(page.talk, node.id);
  keep();
  show();
}

/** Lets the model answer a message. */
async function answer(talk, to) {
  const node = grow(talk, to.id, { role: "assistant", busy: true, reasoning: "", calls: [] });
  const stop = new AbortController();
  const times = { start: performance.now(), first: 0, words: 0 };
  page.answering = { talk, node, stop };
  keep(talk);
  show();
  messages.toEnd();
  announce("The model answers");
  let drawn = 0;
  const draw = () => {
    // One drawing for each picture of the screen, however fast tokens come.
    drawn ||= requestAnimationFrame(() => {
      drawn = 0;
      if (page.talk === talk) messages.refresh(node);
    });
  };
  const saving = setInterval(() => keep(talk), 2000);
  try {
    const body = { ...settings.fields(talk), model: $("model").value, messages: requestMessages(talk, to.id) };
    await api.chat(body, stop.signal, (chunk) => {
      take(node, chunk, times);
      draw();
    });
  } catch (error) {
    if (error.name !== "AbortError") node.note = error.message;
    if (error.status === 401) askForKey();
  }
  clearInterval(saving);
  const ended = performance.now();
  node.stats ??= {};
  if (times.first) node.stats.first = Math.round(times.first - times.start);
  if (node.stats.tokens > 1 && times.first && ended - times.first > 20) node.stats.rate = (node.stats.tokens - 1) / ((ended - times.first) / 1000);
  if (!node.content && !node.reasoning && !node.calls.length && !node.note) node.note = stop.signal.aborted ? "Stopped before anything was said." : "The model said nothing.";
  node.busy = false;
  page.answering = null;
  keep(talk);
  if (page.talk === talk) show();
  announce(node.note || "The answer is complete");
}

function take(node, chunk, times) {
  if (chunk.usage) {
    const cached = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
    node.stats = { ...node.stats, tokens: chunk.usage.completion_tokens, prompt: chunk.usage.prompt_tokens, cached };
  }
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const { delta } = choice;
  // Which of the two names it has is a flag of the server.
  const thought = delta.reasoning_content ?? delta.reasoning ?? "";
  if (delta.content || thought || delta.tool_calls) times.first ||= performance.now();
  if (delta.content && !times.words) {
    times.words = performance.now();
    if (node.reasoning) node.stats = { ...node.stats, thought: Math.round(times.words - times.first) };
  }
  node.content += delta.content ?? "";
  node.reasoning += thought;
  for (const call of delta.tool_calls ?? []) {
    const known = (node.calls[call.index] ??= { id: call.id, name: "", arguments: "" });
    known.name += call.function?.name ?? "";
    known.arguments += call.function?.arguments ?? "";
  }
  if (choice.finish_reason === "length") node.note = "The answer was cut off: it reached its longest length, or the context is full.";
}

function showBusy() {
  const busy = Boolean(page.answering);
  $("send").hidden = busy;
  $("stop").hidden = !busy;
}

// --- files ------------------------------------------------------------------------------------------------------------

async function addFiles(list) {
  for (const file of list) {
    if (file.size > MOST_FILE_BYTES) {
      toast(`${file.name} is larger than 4 MB, which no context holds.`);
      continue;
    }
    const text = await file.text();
    if (text.includes("\u0000") || (text.match(/\ufffd/g)?.length ?? 0) > text.length / 100) toast(`${file.name} is no text; this model reads text only.`);
    else page.files.push({ name: file.name, text });
  }
  showFiles();
  $("prompt").focus();
}

function showFiles() {
  $("files").hidden = !page.files.length;
  $("files").replaceChildren(...page.files.map((file) => h("li", { icon: "file" }, h("span", {}, file.name), h("small", {}, size(file.text)), h("button", { type: "button", class: "quiet", icon: "close", "aria-label": `Remove ${file.name}`, onclick: () => {
    page.files.splice(page.files.indexOf(file), 1);
    showFiles();
  } }))));
}

function fitPrompt() {
  const prompt = $("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight, innerHeight * 0.4)}px`;
}

// --- panels, dialogs, keys --------------------------------------------------------------------------------------------

function closeSide() {
  document.body.classList.remove("side-open");
  $("side-open").setAttribute("aria-expanded", "false");
}

function toggleSide(open = !document.body.classList.contains("side-open")) {
  document.body.classList.toggle("side-open", open);
  $("side-open").setAttribute("aria-expanded", String(open));
  if (open) $("new").focus();
}

/** Shows a tab of the panel, or closes the panel where it is shown already. */
function panel(name) {
  const open = Boolean(name) && ($("panel").hidden || $(name).hidden);
  $("panel").hidden = !open;
  for (const tab of ["settings", "engine"]) {
    const on = open && tab === name;
    if (open) $(tab).hidden = !on;
    $(`tab-${tab}`).setAttribute("aria-selected", String(on));
    $(`tab-${tab}`).tabIndex = on ? 0 : -1;
    $(`show-${tab}`).setAttribute("aria-expanded", String(on));
  }
  if (open && name === "engine") engine.start();
  else engine.stop();
  localStorage.setItem("kiln-panel", open && innerWidth > 1100 ? name : "");
}

const THEMES = ["automatic", "light", "dark"];
function useTheme(theme) {
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("kiln-theme", theme);
  $("theme").lastChild.textContent = `Colours: ${theme}`;
}

function askForKey() {
  const dialog = $("key-dialog");
  if (!dialog.open) dialog.showModal();
}

function openHelp() {
  $("address").textContent = `${location.origin}/v1`;
  $("help-dialog").showModal();
}

async function importFile(file) {
  try {
    const value = JSON.parse(await file.text());
    const talks = (Array.isArray(value.conversations) ? value.conversations : [value]).map(imported).filter(Boolean);
    if (!talks.length) throw new Error("there is no conversation in it");
    for (const talk of talks) {
      const known = page.talks.findIndex((other) => other.id === talk.id);
      if (known >= 0) page.talks.splice(known, 1);
      page.talks.push(talk);
      await store.put(talk);
    }
    toast(`Imported ${talks.length} conversation${talks.length > 1 ? "s" : ""}.`);
    $("help-dialog").close();
    open(talks[0]);
  } catch (error) {
    toast(`${file.name} could not be imported: ${error.message}`);
  }
}

function keys(event) {
  const command = event.ctrlKey || event.metaKey;
  const writing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
  if (document.querySelector("dialog[open]")) return;
  const does = (work) => {
    event.preventDefault();
    work();
  };
  if (event.key === "Escape") {
    if (page.answering) page.answering.stop.abort();
    else if (document.body.classList.contains("side-open")) closeSide();
    else if (!$("panel").hidden) panel("");
    $("prompt").focus();
  } else if (command && event.key.toLowerCase() === "k") does(() => {
    if (innerWidth <= 800) toggleSide(true);
    $("find").focus();
  });
  else if (command && event.shiftKey && event.key.toLowerCase() === "o") does(begin);
  else if (command && event.key === ",") does(() => panel("settings"));
  else if (command && event.key === ".") does(() => panel("engine"));
  else if (!writing && !command && event.key === "/") does(() => $("prompt").focus());
  else if (!writing && !command && event.key === "?") does(openHelp);
}

function promptKeys(event) {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  } else if (event.key === "ArrowUp" && !$("prompt").value && !page.answering) {
    const mine = path(page.talk).findLast((node) => node.role === "user");
    if (mine) {
      event.preventDefault();
      messages.edit(mine);
    }
  }
}

function wire() {
  for (const button of document.querySelectorAll("[data-icon]")) button.prepend(icon(button.dataset.icon));
  const click = (id, work) => $(id).addEventListener("click", work);
  click("new", begin);
  click("side-open", () => toggleSide());
  click("side-close", closeSide);
  click("theme", () => useTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]));
  click("help", openHelp);
  click("attach", () => $("picker").click());
  click("stop", () => page.answering?.stop.abort());
  click("copy-address", () => copy($("address").textContent, $("copy-address")));
  click("export-one", () => save(`${page.talk.title || "chat"}.md`, "text/markdown", markdown(page.talk)));
  click("export-all", () => save("kiln-conversations.json", "application/json", JSON.stringify({ kiln: 1, conversations: page.talks }, null, 1)));
  click("import", () => $("import-file").click());
  click("panel-close", () => panel(""));
  for (const tab of ["settings", "engine"]) {
    click(`show-${tab}`, () => panel(tab));
    click(`tab-${tab}`, () => $(tab).hidden && panel(tab));
    $(`tab-${tab}`).addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      const other = tab === "settings" ? "engine" : "settings";
      panel(other);
      $(`tab-${other}`).focus();
    });
  }
  $("import-file").addEventListener("change", async (event) => {
    if (event.target.files[0]) await importFile(event.target.files[0]);
    // The same file may be chosen again.
    event.target.value = "";
  });
  $("picker").addEventListener("change", (event) => {
    addFiles([...event.target.files]);
    event.target.value = "";
  });
  $("find").addEventListener("input", showList);
  $("model").addEventListener("change", () => {
    page.talk.model = $("model").value;
    keep();
  });
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  $("prompt").addEventListener("keydown", promptKeys);
  $("prompt").addEventListener("input", fitPrompt);
  $("prompt").addEventListener("paste", (event) => {
    const files = [...event.clipboardData.files];
    const text = event.clipboardData.getData("text");
    if (files.length) addFiles(files);
    else if (text.length > LONG_PASTE) {
      page.files.push({ name: `pasted-${page.files.length + 1}.txt`, text });
      showFiles();
    } else return;
    event.preventDefault();
  });
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    addFiles([...event.dataTransfer.files]);
  });
  document.addEventListener("keydown", keys);
  $("key-dialog").addEventListener("close", () => {
    api.useKey($("key").value.trim());
    connect();
  });
}

// --- the beginning ----------------------------------------------------------------------------------------------------

/** Asks the server what it has; again after a while where it is still loading. */
async function connect() {
  try {
    const [models, props, engine] = await Promise.all(["/v1/models", "/props", "/engine"].map(api.get));
    page.models = models.data.map((model) => model.id);
    $("model").replaceChildren(...page.models.map((id) => h("option", { value: id }, id)));
    const { params, n_ctx } = props.default_generation_settings;
    const plain = (value) => (typeof value === "number" ? String(Math.round(value * 1000) / 1000) : value);
    page.defaults = { ...Object.fromEntries(Object.entries(params).map(([name, value]) => [name, plain(value)])), context: n_ctx };
    [page.device, page.asleep] = [engine.device, engine.loaded === false];
    document.body.classList.remove("offline");
    show();
  } catch (error) {
    if (error.status === 401) return askForKey();
    document.body.classList.add("offline");
    toast(error.status === 503 ? "The model is still loading." : error.message);
    setTimeout(connect, 2000);
  }
}

wire();
useTheme(localStorage.getItem("kiln-theme") ?? "automatic");
page.talks = await store.all();
begin();
const kept = localStorage.getItem("kiln-panel");
if (kept) panel(kept);
await connect();
