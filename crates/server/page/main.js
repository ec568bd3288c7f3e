// The page: which conversation is shown, what is sent, and what the buttons and keys do.

import { askHow } from "./again.js";
import { Answers } from "./answers.js";
import * as api from "./api.js";
import { resultNode, stateOf } from "./calls.js";
import { Composer } from "./composer.js";
import { $, announce, icon, save, toast } from "./dom.js";
import { List } from "./list.js";
import * as menu from "./menu.js";
import { Messages } from "./messages.js";
import { openModels } from "./model_list.js";
import * as models from "./models.js";
import { askForKey, isSideOpen, openHelp, openSide, panel, toggleSide, wire as wirePanels } from "./panels.js";
import { addressOf, idOf } from "./route.js";
import { firstOf } from "./presets.js";
import { Remote } from "./remote.js";
import * as settings from "./settings.js";
import { page } from "./state.js";
import { titleIn, titleRequest } from "./titles.js";
import { conversationsOf, exportParts } from "./transfer.js";
import { fresh, grow, leaf, markdown, path, prune, rename, retitle, switchTo, tagsIn } from "./tree.js";
import { missing, welcome } from "./welcome.js";

const { library } = page;
library.remote = new Remote({ ask: api.json, told: toast });
const messages = new Messages({ retry, retryWith, resume, edit, show: showBranch, answerCalls, decide });
const composer = new Composer({ submit, up: editLast, sees: () => models.sees(page.talk) });
const list = new List($("conversations"), { forget, menu: rowMenu, rename: (id, name) => change(id, (talk) => rename(talk, name)), tag: (id, text) => change(id, (talk) => (talk.tags = tagsIn(text))) });
const answers = new Answers({
  chat: api.chat,
  request: (talk) => ({ ...settings.fields(talk), model: models.modelOf(talk) }),
  save: keep,
  begun: answerBegun,
  changed: answerChanged,
  ended: answerEnded,
  tools: page.tools,
  call: (call, signal) => api.post("/tools/call", call, signal),
});

// --- conversations ----------------------------------------------------------------------------------------------------

const hasMessages = (talk) => Object.keys(talk.nodes).length > 0;

/** Stores a conversation of the list; one that was deleted stays so. */
function keep(talk) {
  library.keep(talk).catch(() => toast("This browser could not keep the conversation: is its storage full?"));
}

/** Changes a conversation of the list, which need not be shown. */
async function change(id, work) {
  const talk = await library.get(id);
  if (!talk) return;
  work(talk);
  keep(talk);
  if (talk === page.talk) show();
  else showList();
}

/** What is sought in the list, and what was found so far. */
let sought = { text: "", ids: null, whole: true, stop: new AbortController() };

function showList() {
  const stateOf = (id) => (answers.of({ id }) ? "busy" : page.unread.has(id) ? "unread" : "");
  const all = library.list();
  const heads = sought.text ? all.filter((head) => sought.ids?.has(head.id)) : all;
  const note = !sought.whole ? "Searching…" : heads.length ? "" : sought.text ? "Nothing found" : "Conversations will be listed here.";
  list.show(heads, page.talk.id, stateOf, note);
}

function seek() {
  const text = $("find").value.trim().toLowerCase();
  sought.stop.abort();
  sought = { text, ids: null, whole: !text, stop: new AbortController() };
  $("conversations").scrollTop = 0;
  const { signal } = sought.stop;
  if (!text) showList();
  else library.search(text, signal, (ids, whole) => {
    Object.assign(sought, { ids, whole });
    showList();
  }).catch((error) => toast(error.message));
}

/** Shows a conversation, and its address. */
function open(talk, { replace = false } = {}) {
  const address = addressOf(hasMessages(talk) && talk.id);
  if (location.hash !== address && !talk.missing) history[replace ? "replaceState" : "pushState"](null, "", address);
  page.talk = talk;
  page.unread.delete(talk.id);
  library.trim((known) => known === talk || answers.of(known));
  composer.open(hasMessages(talk) ? talk.id : "");
  openSide(false);
  show();
  list.reveal(talk.id);
  $("prompt").focus({ preventScroll: true });
}

/** Shows what the address names: a conversation, or a new one. */
async function follow() {
  const id = idOf(location.hash);
  if (id === null) return open(another(), { replace: true });
  const talk = await library.get(id).catch(() => null);
  // The reader may have moved on meanwhile.
  if (idOf(location.hash) === id) open(talk ?? { ...another(), missing: true });
}

function show() {
  const { talk } = page;
  const title = talk.title || (talk.missing ? "Not found" : "New chat");
  $("title").textContent = title;
  document.title = talk.title ? `${talk.title} · Kiln` : "Kiln";
  models.show();
  messages.show(talk, () => (talk.missing ? missing(begin) : welcome(ask)));
  settings.show(talk, models.modelOf(talk), page.defaults, () => keep(talk));
  showList();
  showBusy();
}

/** A new conversation with the preset of its model, or with the settings of the one that is shown. */
function another() {
  const talk = fresh($("model").value);
  const from = firstOf(talk.model) ?? page.talk;
  if (from) Object.assign(talk, { system: from.system, sampling: { ...from.sampling } });
  return talk;
}

/** Gives a conversation that has not begun the preset of its model. */
function prepare(talk) {
  const preset = firstOf(models.modelOf(talk));
  if (preset && !hasMessages(talk)) Object.assign(talk, { system: preset.system, sampling: { ...preset.sampling } });
}

/** Lets another model answer in the conversation that is shown. */
function useModel(id) {
  const { talk } = page;
  talk.model = id;
  prepare(talk);
  keep(talk);
  show();
}

const begin = () => open(another());

async function forget(id) {
  const talk = await library.get(id);
  if (!talk) return;
  answers.stop(talk);
  const current = talk === page.talk;
  const next = list.beside(id, 1);
  const hadFocus = $("conversations").contains(document.activeElement);
  await library.remove(id);
  if (current) open(another(), { replace: true });
  else showList();
  if (hadFocus) list.focus(next);
  toast("Deleted.", { label: "Undo", work: () => {
    library.add(talk);
    keep(talk);
    if (current) open(talk);
    else showList();
  } });
}

/** What can be done with a conversation of the list. */
function rowMenu(row) {
  const { id } = row;
  const pinned = library.heads.get(id)?.pinned;
  menu.openMenu(row.more, [
    { label: pinned ? "Unpin" : "Pin", icon: "pin", work: () => change(id, (talk) => (talk.pinned = !pinned)) },
    { label: "Rename", icon: "edit", work: () => row.edit() },
    { label: "Tags", icon: "tag", work: () => row.editTags() },
    { label: "Title by the model", icon: "spark", work: async () => nameByModel(await library.get(id), toast) },
    { label: "Save as Markdown", icon: "save", work: async () => saveOne(await library.get(id)) },
    { label: "Delete", icon: "bin", work: () => forget(id) },
  ]);
}

/** Lets the model give a conversation its title; `told` hears why there is none. */
async function nameByModel(talk, told) {
  const last = path(talk).findLast((node) => node.role === "assistant" && node.content) ?? path(talk)[0];
  try {
    const title = titleIn(await api.post("/v1/chat/completions", titleRequest(talk, last, models.modelOf(talk))));
    if (title) await change(talk.id, (named) => rename(named, title));
    else told("The model gave no title.");
  } catch (error) {
    told(error.message);
  }
}

const saveOne = (talk) => save(`${talk.title || "chat"}.md`, "text/markdown", markdown(talk));

// --- asking -----------------------------------------------------------------------------------------------------------

/** Whether the conversation can be answered now; where it cannot, the reader is told why. */
function canAsk(talk) {
  const refusal = answers.refusal(talk);
  if (refusal) toast(refusal);
  return !refusal;
}

function ask(text) {
  $("prompt").value = text;
  submit();
}

function submit() {
  const { text, files } = composer;
  const { talk } = page;
  if ((!text && !files.length) || !canAsk(talk)) return;
  delete talk.missing;
  talk.model = $("model").value;
  const node = grow(talk, leaf(talk)?.id ?? "", { role: "user", content: text, files });
  retitle(talk, node);
  if (!library.has(talk)) library.add(talk);
  history.replaceState(null, "", addressOf(talk.id));
  composer.adopt(talk.id);
  composer.clear();
  messages.toEnd();
  answers.start(talk, node);
}

function retry(node, by = node.by) {
  const { talk } = page;
  if (!canAsk(talk)) return;
  const to = talk.nodes[node.parent];
  // An answer without a word is no branch that anybody would look at again.
  if (!node.content && !node.reasoning && !node.calls?.length) prune(talk, node);
  messages.toEnd();
  answers.start(talk, to, by);
}

async function retryWith(node) {
  const { talk } = page;
  if (!canAsk(talk)) return;
  const by = await askHow(talk, node);
  if (by && page.talk === talk) retry(node, Object.keys(by).length ? by : undefined);
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
  messages.toEnd();
  for (const { call, content } of results) node.calls.find((one) => one.id === call).result = { text: content };
  // Calls of the server's tools beside them have to have theirs, too.
  if (!node.calls.every((call) => call.result)) {
    keep(talk);
    show();
    answers.goOn(talk, node);
    return;
  }
  let parent = node;
  for (const call of node.calls) {
    const { text, content } = call.result;
    parent = grow(talk, parent.id, content ? resultNode(call) : { role: "tool", call: call.id, name: call.name, content: text });
    delete call.result;
  }
  answers.start(talk, parent, node.by);
}

/** Takes what the reader says to a call of a server's tool. */
function decide(node, call, said) {
  const { talk } = page;
  if (!canAsk(talk)) return;
  messages.toEnd();
  answers.decide(talk, node, call, said);
  announce(said === "no" ? "The call is not made" : "The call is made");
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

function answerEnded(talk, node, error, { calls = false } = {}) {
  if (page.talk === talk) show();
  else {
    if (library.has(talk)) page.unread.add(talk.id);
    showList();
  }
  models.refresh();
  const isFirst = path(talk).length === 2 && !node.end && !talk.named;
  if (isFirst && settings.namesByModel() && library.has(talk)) nameByModel(talk, () => {});
  if (error?.status === 401) askForKey();
  const waits = node.calls?.some((call) => stateOf(call, page.tools) === "ask") && !node.end;
  const said = calls ? "The tools have answered" : waits ? "The model wants to call a tool, and waits for you" : node.note || (node.end ? "The answer ended early" : "The answer is complete");
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
    const talks = conversationsOf(await file.text());
    for (const talk of talks) answers.stop(talk);
    await library.take(talks);
    toast(`Imported ${talks.length} conversation${talks.length > 1 ? "s" : ""}.`);
    $("help-dialog").close();
    open(await library.get(talks[0].id));
  } catch (error) {
    toast(`${file.name} could not be imported: ${error.message}`);
  }
}

/** Goes to the conversation above or below in the list. */
async function step(by) {
  const id = list.beside(page.talk.id, by) ?? (by > 0 && !library.heads.has(page.talk.id) && list.first());
  if (id) open(await library.get(id));
}

function keys(event) {
  const command = event.ctrlKey || event.metaKey;
  const writing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
  if (document.querySelector("dialog[open], #menu:popover-open")) return;
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
  else if (event.altKey && !command && event.key === "ArrowUp") does(() => step(-1));
  else if (event.altKey && !command && event.key === "ArrowDown") does(() => step(1));
  else if (command && !event.shiftKey && event.key.toLowerCase() === "b") does(toggleSide);
  else if (command && !event.shiftKey && event.key.toLowerCase() === "m") does(() => openModels(useModel));
  else if (command && event.key === ",") does(() => panel("settings"));
  else if (command && event.key === ".") does(() => panel("engine"));
  else if (!writing && !command && event.key === "/") does(() => $("prompt").focus());
  else if (!writing && !command && event.key === "?") does(openHelp);
}

function wire() {
  for (const button of document.querySelectorAll("[data-icon]")) button.prepend(icon(button.dataset.icon));
  wirePanels(connect);
  menu.wire();
  const click = (id, work) => $(id).addEventListener("click", work);
  click("new", begin);
  click("stop", () => answers.stop(page.talk));
  click("skip", (event) => {
    // The part behind `#` says which conversation is shown.
    event.preventDefault();
    $("prompt").focus();
  });
  click("export-one", () => saveOne(page.talk));
  click("export-all", async () => save("kiln-conversations.json", "application/json", ...(await exportParts(library.batches()))));
  click("import", () => $("import-file").click());
  $("import-file").addEventListener("change", async (event) => {
    if (event.target.files[0]) await importFile(event.target.files[0]);
    // The same file may be chosen again.
    event.target.value = "";
  });
  // On a phone the list closes also where the conversation is the one that is shown.
  $("conversations").addEventListener("click", (event) => event.target.closest("a") && openSide(false));
  let typing;
  $("find").addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(seek, 120);
  });
  $("model").addEventListener("focus", models.refresh);
  $("model").addEventListener("change", () => useModel($("model").value));
  click("show-models", () => openModels(useModel));
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
    sync();
    api.get("/tools").then((listed) => {
      page.tools.take(listed);
      show();
    }).catch((error) => toast(`The server's tools are not known: ${error.message}`));
    document.body.classList.remove("offline");
    prepare(page.talk);
    show();
  } catch (error) {
    if (error.status === 401) return askForKey();
    document.body.classList.add("offline");
    toast(error.status === 503 ? "The model is still loading." : error.message);
    setTimeout(connect, 2000);
  }
}

/** Brings what the server keeps into the list. */
async function sync() {
  try {
    if (!(await library.sync((id) => answers.of({ id })))) return;
    $("keeps").textContent = "Conversations are kept in this browser and on this server.";
    const { talk } = page;
    // The address may name one that only the server has, and the one that is shown may be newer there.
    if (talk.missing || (hasMessages(talk) && !library.has(talk))) await follow();
    else showList();
  } catch (error) {
    if (error.status !== 401) toast(`The conversations of the server cannot be read: ${error.message}`);
  }
}

wire();
document.addEventListener("visibilitychange", () => !document.hidden && library.remote.isOn && sync());
performance.mark("kiln-begin");
await library.load().catch(() => toast("The conversations of this browser cannot be read."));
await follow();
performance.mark("kiln-list");
const kept = localStorage.getItem("kiln-panel");
if (kept) panel(kept);
await connect();
