// System prompt, sampling and tools of the conversation that is shown.

import { $, h } from "./dom.js";
import { presetField } from "./presets.js";
import { page } from "./state.js";
import { toolsField } from "./tool_list.js";

const NUMBERS = [
  ["temperature", "Temperature", "Scales the logits: 0 is greedy, higher is more random", { min: 0, max: 5, step: 0.05 }],
  ["top_p", "Top p", "Sample from the smallest set of tokens with this total probability", { min: 0, max: 1, step: 0.01 }],
  ["top_k", "Top k", "Sample from this many of the likeliest tokens; 0 turns it off", { min: 0, step: 1 }],
  ["min_p", "Min p", "Drop tokens less likely than this fraction of the top token's probability", { min: 0, max: 1, step: 0.01 }],
  ["repeat_penalty", "Repeat penalty", "Above 1, recent tokens become less likely; 1 turns it off", { min: 0.1, max: 3, step: 0.01 }],
  ["presence_penalty", "Presence penalty", "Subtracted once from the logit of every token that was generated", { min: -2, max: 2, step: 0.1 }],
  ["frequency_penalty", "Frequency penalty", "Subtracted for each time that a token was generated", { min: -2, max: 2, step: 0.1 }],
  ["max_tokens", "Max tokens", "The longest answer, in tokens; empty for as long as the context allows", { min: 1, step: 1 }],
  ["seed", "Seed", "The same seed samples the same answer; empty for a random one", { step: 1 }],
];
const EXAMPLE = '[{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]';

/** How much a model thinks, where it can. */
export const THINKING = [["", "as the model likes"], ["none", "off"], ["low", "little"], ["medium", "some"], ["high", "much"]];

const TITLES = "kiln-titles";
/** Whether the model gives new conversations their titles. */
export const namesByModel = () => localStorage.getItem(TITLES) === "model";

/** What of the settings goes into a request. */
export function fields(talk) {
  const out = {};
  for (const [name] of NUMBERS) if (talk.sampling[name] !== undefined) out[name] = talk.sampling[name];
  if (talk.sampling.thinking) out.reasoning_effort = talk.sampling.thinking;
  const own = talk.sampling.tools?.trim() ? JSON.parse(talk.sampling.tools) : [];
  const all = [...page.tools.fields(talk), ...own];
  if (all.length) out.tools = all;
  return out;
}

/** A default is told as one: a bare number would look like a value that somebody set. */
const hint = (value) => (/^-?[\d.]+$/.test(value) ? `default ${value}` : value);

/** What holds where nothing is said. Some numbers of the server's mean something that is better said in words. */
function usual(name, defaults) {
  if (name === "seed") return Number(defaults.seed) === 0xffffffff ? "any" : defaults.seed ?? "any";
  if (name === "max_tokens") return Number(defaults.max_tokens) > 0 ? defaults.max_tokens : "no limit";
  return defaults[name] ?? "";
}

let shown = {};

/** Builds the form. `defaults` are the server's, by llama.cpp's names. */
export function show(talk, model, defaults, changed) {
  // What somebody is writing here stays while an answer ends.
  const tools = page.tools.list;
  if (shown.talk === talk && shown.defaults === defaults && shown.model === model && shown.tools === tools) return;
  shown = { talk, model, defaults, tools };
  const set = (name, value) => {
    if (value === undefined || value === "") delete talk.sampling[name];
    else talk.sampling[name] = value;
    reset.disabled = !Object.keys(talk.sampling).length;
    preset.refresh();
    changed();
  };
  const again = () => {
    shown = {};
    changed();
    show(talk, model, defaults, changed);
  };
  const preset = presetField(talk, model, again);
  const reset = h("button", { type: "button", id: "set-defaults", disabled: !Object.keys(talk.sampling).length, onclick: () => {
    talk.sampling = {};
    again();
    $("settings").focus();
  } }, "Back to the defaults");
  const number = ([name, label, why, limits]) => {
    const input = h("input", { type: "number", id: `set-${name}`, ...limits, step: limits.step, placeholder: hint(usual(name, defaults)), "aria-describedby": `why-${name}` });
    input.value = talk.sampling[name] ?? "";
    input.addEventListener("change", () => {
      const value = input.value === "" ? undefined : Number(input.value);
      if (value !== undefined && !input.checkValidity()) input.reportValidity();
      else set(name, value);
    });
    return h("div", { class: "setting" }, h("label", { htmlFor: `set-${name}` }, label), input, h("p", { id: `why-${name}` }, why));
  };
  const system = h("textarea", { id: "set-system", rows: 4, placeholder: "You are …" });
  system.value = talk.system;
  system.addEventListener("input", () => {
    talk.system = system.value;
    preset.refresh();
    changed();
  });
  const thinking = h("select", { id: "set-thinking" }, THINKING.map(([value, text]) => h("option", { value }, text)));
  thinking.value = talk.sampling.thinking ?? "";
  thinking.addEventListener("change", () => set("thinking", thinking.value));
  const own = h("textarea", { id: "set-tools", rows: 3, placeholder: EXAMPLE, spellcheck: false, "aria-describedby": "why-tools" });
  own.value = talk.sampling.tools ?? "";
  own.addEventListener("input", () => {
    let wrong = "";
    try {
      if (own.value.trim() && !Array.isArray(JSON.parse(own.value))) wrong = "This must be a list of tools";
    } catch (error) {
      wrong = error.message;
    }
    own.setCustomValidity(wrong);
    $("why-tools").textContent = wrong || WHY_TOOLS;
    if (!wrong) set("tools", own.value);
  });
  const titles = h("input", { type: "checkbox", id: "set-titles", checked: namesByModel(), "aria-describedby": "why-titles" });
  titles.addEventListener("change", () => localStorage.setItem(TITLES, titles.checked ? "model" : ""));
  $("settings").replaceChildren(...[
    preset.element,
    h("div", { class: "setting wide" }, h("label", { htmlFor: "set-system" }, "System prompt"), system, h("p", {}, "Who the model is in this conversation.")),
    ...NUMBERS.map(number),
    h("div", { class: "setting broad" }, h("label", { htmlFor: "set-thinking" }, "Thinking"), thinking, h("p", {}, "For models that think before they answer")),
    toolsField(talk, set),
    h("div", { class: "setting wide" }, h("label", { htmlFor: "set-tools" }, "Tools of your own"), own, h("p", { id: "why-tools" }, WHY_TOOLS)),
    h("div", { class: "setting wide" }, reset),
    h("div", { class: "setting" }, h("label", { htmlFor: "set-titles" }, "Titles by the model"), titles, h("p", { id: "why-titles" }, "After the first answer the model writes a title, in all conversations of this browser. It costs a short answer.")),
  ].filter(Boolean));
}

const WHY_TOOLS = "A JSON list as OpenAI's API has it. Calls are shown, and you say what they gave.";
