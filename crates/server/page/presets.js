// System prompts and settings under names, kept in this browser, for any conversation.

import { $, h } from "./dom.js";

const KEPT = "kiln-presets";
/** Which preset new conversations with a model begin with. */
const FIRST = "kiln-first-presets";
const MOST_LETTERS = 80;

/** The presets that are kept. What is no preset among them was written by something else. */
export function presets() {
  try {
    const known = JSON.parse(localStorage.getItem(KEPT) ?? "[]");
    return known.filter((one) => typeof one?.name === "string" && typeof one.system === "string" && typeof one.sampling === "object" && one.sampling);
  } catch {
    return [];
  }
}

function keep(all) {
  localStorage.setItem(KEPT, JSON.stringify(all.sort((a, b) => a.name.localeCompare(b.name))));
}

function firsts() {
  try {
    const known = JSON.parse(localStorage.getItem(FIRST) ?? "{}");
    return typeof known === "object" && known ? known : {};
  } catch {
    return {};
  }
}

/** The preset that new conversations with a model begin with, if any. */
export function firstOf(model) {
  const all = firsts();
  return presets().find(({ name }) => Object.hasOwn(all, model) && name === all[model]);
}

/** The part of the settings that saves and applies presets. `applied` is called when the conversation has other settings. */
export function presetField(talk, model, applied) {
  const chooser = h("select", { id: "set-preset", "aria-describedby": "why-preset" });
  const same = (one) => one.system === talk.system && JSON.stringify(one.sampling) === JSON.stringify(talk.sampling);
  const fill = () => {
    chooser.replaceChildren(h("option", { value: "" }, "none"), ...presets().map(({ name }) => h("option", { value: name }, name)));
    chooser.value = presets().find(same)?.name ?? "";
    remove.disabled = !chooser.value;
    first.checked = Boolean(chooser.value) && firstOf(model)?.name === chooser.value;
    first.disabled = !chooser.value;
  };
  const first = h("input", { type: "checkbox", id: "set-first", onchange: () => {
    const others = firsts();
    delete others[model];
    localStorage.setItem(FIRST, JSON.stringify(first.checked ? { ...others, [model]: chooser.value } : others));
  } });
  const remove = h("button", { type: "button", onclick: () => {
    keep(presets().filter(({ name }) => name !== chooser.value));
    fill();
  } }, "Delete");
  chooser.addEventListener("change", () => {
    const found = presets().find(({ name }) => name === chooser.value);
    if (found) Object.assign(talk, { system: found.system, sampling: { ...found.sampling } });
    else Object.assign(talk, { system: "", sampling: {} });
    applied();
    $("set-preset").focus();
  });
  const name = h("input", { type: "text", id: "set-preset-name", maxLength: MOST_LETTERS, placeholder: "Name", "aria-label": "Name of a new preset", autocomplete: "off" });
  const form = h("form", { class: "save-preset", onsubmit: (event) => {
    event.preventDefault();
    const given = name.value.trim();
    if (!given) return name.focus();
    keep([...presets().filter((one) => one.name !== given), { name: given, system: talk.system, sampling: { ...talk.sampling } }]);
    name.value = "";
    fill();
  } }, name, h("button", { type: "submit" }, "Save"), remove);
  fill();
  return { refresh: fill, element: h("div", { class: "setting broad" }, h("label", { htmlFor: "set-preset" }, "Preset"), chooser, form, h("label", { class: "first" }, first, " Begin new chats with this model with it"), h("p", { id: "why-preset" }, "System prompt and sampling under a name, kept in this browser.")) };
}
