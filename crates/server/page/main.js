// The page: which conversation is shown, what is sent, and what the buttons and keys do.

import { Answers } from "./answers.js";
import * as api from "./api.js";
import { Composer } from "./composer.js";
import { $, announce, h, icon, save, toast } from "./dom.js";
import { List } from "./list.js";
import { Messages } from "./messages.js";
import * as models from "./models.js";
import { askForKey, isSideOpen, openHelp, openSide, panel, wire as wirePanels } from "./panels.js";
import { addressOf, idOf, isLoopback } from "./route.js";
import * as settings from "./settings.js";
import { page } from "./state.js";
import * as store from "./store.js";
import { fresh, grow, imported, leaf, markdown, path, prune, rename, retitle, stored, switchTo } from "./tree.js";

const EXAMPLES = ["Explain what a kiln does, as if to a friend.", "Write a Python function that finds the primes below n.", "Compare tea and coffee in a table."];

const messages = new Messages({ retry, resume, edit, show: showBranch, answerCalls });
const composer = new Composer({ submit, up: editLast, sees: () => models.sees(page.talk) });
const list = new List($("conversations"), { forget, rename: (talk, name) => {
  rename(talk, name);
  keep(talk);
  show();
} });
const answers = new Answers({
  chat: api.chat,
  request: (talk) => ({ ...settings.fields(talk), model: models.modelOf(talk) }),
  save: keep,
  begun: answerBegun,
  changed: answerChanged,
  ended: answerEnded,
});

// --- conversations ----------------------------------------------------------------------------------------------------

const hasMessages = (talk) => Object.keys(talk.nodes).length > 0;

/** Stores a conversation of the list; one that was deleted stays so. */
function keep(talk) {
  if (!page.talks.includes(talk)) return;
  store.put(stored(talk)).catch(() => toast("This browser could not keep the conversation: is its storage full?"));
}

function showList() {
  const stateOf = (talk) => (answers.of(talk) ? "busy" : page.unread.has(talk.id) ? "unread" : "");
  list.show(page.talks, page.talk, $("find").value.trim().toLowerCase(), stateOf);
}

/** Shows a conversation, and its address. */
function open(talk, { replace = false } = {}) {
  const address = addressOf(talk);
  if (location.hash !== address && !talk.missing) history[replace ? "replaceState" : "pushState"](null, "", address);
  page.talk = talk;
  page.unread.delete(talk.id);
  composer.open(hasMessages(talk) ? talk.id : "");
  openSide(false);
  show();
  $("prompt").focus({ preventScroll: true });
}

/** Shows what the address names: a conversation, or a new one. */
async function follow() {
  const id = idOf(location.hash);
  if (id === null) return open(another(), { replace: true });
  let talk = page.talks.find((known) => known.id === id);
  if (!talk) {
    talk = await store.find(id).catch(() => null);
    // The reader may have moved on meanwhile.
    if (idOf(location.hash) !== id) return;
    if (talk) page.talks.push(talk);
  }
  open(talk ?? { ...another(), missing: true });
}

function show() {
  const { talk } = page;
  const title = talk.title || (talk.missing ? "Not found" : "New chat");
  $("title").textContent = title;
  document.title = talk.title ? `${talk.title} · Kiln` : "Kiln";
  models.show();
  messages.show(talk, talk.missing ? missing : welcome);
  settings.show(talk, page.defaults, () => keep(talk));
  showList();
  showBusy();
}

/** A new conversation with the settings of the one that is shown. */
function another() {
  const talk = fresh($("model").value);
  if (page.talk) Object.assign(talk, { system: page.talk.system, sampling: { ...page.talk.sampling } });
  return talk;
}

const begin = () => open(another());

async function forget(talk) {
  answers.stop(talk);
  page.talks.splice(page.talks.indexOf(talk), 1);
  await store.remove(talk.id);
  const current = talk === page.talk;
  if (current) open(another(), { replace: true });
  else showList();
  const undo = h("button", { type: "button", onclick: () => {
    page.talks.unshift(talk);
    keep(talk);
    if (current) open(talk);
    else showList();
    $("toast").hidePopover();
  } }, "Undo");
  toast("Deleted. ");
  $("toast").append(undo);
}

function welcome() {
  const here = isLoopback(location.hostname);
  const model = page.models.find((known) => known.id === $("model").value);
  const context = models.contextOf(page.talk);
  const facts = [page.engine?.model === model?.id && page.engine?.device, context && `${context.toLocaleString("en")} tokens of context`].filter(Boolean);
  const runs = model && !models.isLoaded(model) ? "It is loaded when you ask. " : facts.length && `It runs ${facts.length > 1 ? "on" : "with"} ${facts.join(", ")}. `;
  const privacy = here ? "Nothing you write leaves it, and conversations stay in this browser." : "What you write is sent there; conversations are kept in this browser.";
  const example = (text) => h("li", {}, h("button", { type: "button", onclick: () => {
    $("prompt").value = text;
    submit();
  } }, text));
  return h("div", { class: "welcome" },
    h("img", { src: "/page/icon.svg", alt: "", width: 56, height: 56 }),
    h("h2", {}, "What shall we make?"),
    h("p", {}, h("strong", {}, $("model").value || "The model"), " answers from ", here ? "this machine" : h("strong", {}, location.host), ". ", runs || "", privacy),
    h("ul", {}, EXAMPLES.map(example)),
    h("p", { class: "small" }, models.sees(page.talk) ? "Attach, paste or drop pictures and text files. " : "Attach or drop text files. ", "Edit a message to branch. ", h("button", { type: "button", class: "link", onclick: () => openHelp() }, "All keys, and the address for programs")));
}

/** What stands where an address names no conversation of this browser. */
function missing() {
  return h("div", { class: "welcome" },
    h("h2", {}, "This conversation is not here"),
    h("p", {}, "The address names a conversation that this browser does not have. It was deleted, or it was held in another browser: conversations stay in the one that began them."),
    h("p", {}, h("button", { type: "button", class: "main", onclick: begin }, "New chat")));
}

// --- asking -----------------------------------------------------------------------------------------------------------

/** Whether the conversation can be answered now; where it cannot, the reader is told why. */
function canAsk(talk) {
  const refusal = answers.refusal(talk);
  if (refusal) toast(refusal);
  return !refusal;
}

function submit() {
  const { text, files } = composer;
  const { talk } = page;
  if ((!text && !files.length) || !canAsk(talk)) return;
  delete talk.missing;
  talk.model = $("model").value;
  const node = grow(talk, leaf(talk)?.id ?? "", { role: "user", content: text, files });
  retitle(talk, node);
  if (!page.talks.includes(talk)) page.talks.unshift(talk);
  history.replaceState(null, "", addressOf(talk));
  composer.adopt(talk.id);
  composer.clear();
  messages.toEnd();
  answers.start(talk, node);
}

function retry(node) {
  const { talk } = page;
  if (!canAsk(talk)) return;
  const to = talk.nodes[node.parent];
  // An answer without a word is no branch that anybody would look at again.
  if (!node.content && !node.reasoning && !node.calls?.length) prune(talk, node);
  messages.toEnd();
  answers.start(talk, to);
}

function resume(node) {
  if (!canAsk(page.talk)) return;
  messages.toEnd();
  answers.resume(page.talk, node);
}

function edit(node, text) {
  const { talk } = page;
  if (!text.trim() || !canAsk(talk)) return;
  const edited = grow(talk, node.parent, { role: "user", content: text.trim(), files: node.files });
  retitle(talk, edited);
  messages.toEnd();
  answers.start(talk, edited);
}

/** Edits the last message of the reader; says whether there is one. */
function editLast() {
  const mine = path(page.talk).findLast((node) => node.role === "user");
  if (!mine || answers.of(page.talk)) return false;
  messages.edit(mine);
  return true;
}

function answerCalls(node, results) {
  const { talk } = page;
  if (!canAsk(talk)) return;
  let parent = node;
  for (const result of results) parent = grow(talk, parent.id, { role: "tool", ...result });
  messages.toEnd();
  answers.start(talk, parent);
}

function showBranch(node) {
  switchTo(page.talk, node.id);
  retitle(page.talk, node);
  keep(page.talk);
  show();
}

function answerBegun(talk) {
  if (page.talk === talk) show();
  else showList();
  announce("The model answers");
}

let drawing = 0;
const grown = new Set();

/** Draws once for each picture of the screen, however fast tokens come. */
function answerChanged(talk, node) {
  if (page.talk !== talk) return;
  grown.add(node);
  drawing ||= requestAnimationFrame(() => {
    drawing = 0;
    for (const changed of grown) messages.refresh(changed);
    grown.clear();
    models.showGauge(page.talk);
  });
}

function answerEnded(talk, node, error) {
  if (page.talk === talk) show();
  else {
    if (page.talks.includes(talk)) page.unread.add(talk.id);
    showList();
  }
  models.refresh();
  if (error?.status === 401) askForKey();
  const said = node.note || (node.end ? "The answer ended early" : "The answer is complete");
  announce(page.talk === talk ? said : `${talk.title}: ${said}`);
}

function showBusy() {
  const busy = Boolean(answers.of(page.talk));
  $("send").hidden = busy;
  $("stop").hidden = !busy;
}

// --- files of conversations, keys -------------------------------------------------------------------------------------

async function importFile(file) {
  try {
    const value = JSON.parse(await file.text());
    const talks = (Array.isArray(value.conversations) ? value.conversations : [value]).map(imported).filter(Boolean);
    if (!talks.length) throw new Error("there is no conversation in it");
    for (const talk of talks) {
      const known = page.talks.findIndex((other) => other.id === talk.id);
      if (known >= 0) {
        answers.stop(page.talks[known]);
        page.talks.splice(known, 1);
      }
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
    if (answers.of(page.talk)) answers.stop(page.talk);
    else if (isSideOpen()) openSide(false);
    else if (!$("panel").hidden) panel("");
    $("prompt").focus();
  } else if (command && event.key.toLowerCase() === "k") does(() => {
    if (innerWidth <= 800) openSide(true);
    $("find").focus();
  });
  else if (command && event.shiftKey && event.key.toLowerCase() === "o") does(begin);
  else if (command && event.key === ",") does(() => panel("settings"));
  else if (command && event.key === ".") does(() => panel("engine"));
  else if (!writing && !command && event.key === "/") does(() => $("prompt").focus());
  else if (!writing && !command && event.key === "?") does(openHelp);
}

function wire() {
  for (const button of document.querySelectorAll("[data-icon]")) button.prepend(icon(button.dataset.icon));
  wirePanels(connect);
  const click = (id, work) => $(id).addEventListener("click", work);
  click("new", begin);
  click("stop", () => answers.stop(page.talk));
  click("skip", (event) => {
    // The part behind `#` says which conversation is shown.
    event.preventDefault();
    $("prompt").focus();
  });
  click("export-one", () => save(`${page.talk.title || "chat"}.md`, "text/markdown", markdown(page.talk)));
  click("export-all", () => save("kiln-conversations.json", "application/json", JSON.stringify({ kiln: 1, conversations: page.talks.map(stored) }, null, 1)));
  click("import", () => $("import-file").click());
  $("import-file").addEventListener("change", async (event) => {
    if (event.target.files[0]) await importFile(event.target.files[0]);
    // The same file may be chosen again.
    event.target.value = "";
  });
  // On a phone the list closes also where the conversation is the one that is shown.
  $("conversations").addEventListener("click", (event) => event.target.closest("a") && openSide(false));
  $("find").addEventListener("input", showList);
  $("model").addEventListener("focus", models.refresh);
  $("model").addEventListener("change", () => {
    page.talk.model = $("model").value;
    keep(page.talk);
    show();
  });
  document.addEventListener("keydown", keys);
  window.addEventListener("popstate", follow);
}

// --- the beginning ----------------------------------------------------------------------------------------------------

/** Asks the server what it has; again after a while where it is still loading. */
async function connect() {
  try {
    const [known, props, engine] = await Promise.all(["/v1/models", "/props", "/engine"].map(api.get));
    page.models = known.data;
    const { params, n_ctx } = props.default_generation_settings;
    const plain = (value) => (typeof value === "number" ? String(Math.round(value * 1000) / 1000) : value);
    page.defaults = { ...Object.fromEntries(Object.entries(params).map(([name, value]) => [name, plain(value)])), context: n_ctx };
    page.engine = engine;
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
page.talks = await store.all();
await follow();
const kept = localStorage.getItem("kiln-panel");
if (kept) panel(kept);
await connect();
