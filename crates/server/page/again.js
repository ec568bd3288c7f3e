// Another answer with another model or other settings, chosen for that answer alone.

import { $, h } from "./dom.js";
import * as models from "./models.js";
import { THINKING } from "./settings.js";
import { page } from "./state.js";

/** Asks what to answer with; null where the reader thinks better of it. */
export function askHow(talk, node) {
  const dialog = $("again-dialog");
  const by = node.by ?? {};
  $("again-model").replaceChildren(...page.models.map((model) => h("option", { value: model.id }, model.id, models.isLoaded(model) ? "" : " (not loaded)")));
  $("again-model").value = by.model ?? models.modelOf(talk);
  $("again-model").parentElement.hidden = page.models.length < 2;
  $("again-temperature").value = by.temperature ?? talk.sampling.temperature ?? "";
  $("again-temperature").placeholder = page.defaults.temperature ? `default ${page.defaults.temperature}` : "";
  $("again-thinking").replaceChildren(...THINKING.map(([value, label]) => h("option", { value }, label)));
  $("again-thinking").value = by.thinking ?? talk.sampling.thinking ?? "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "ok" ? chosen(talk) : null), { once: true }));
}

/** What differs from how the conversation is answered otherwise. */
function chosen(talk) {
  const by = {};
  const { value: model } = $("again-model");
  const { value: temperature } = $("again-temperature");
  const { value: thinking } = $("again-thinking");
  if (model && model !== models.modelOf(talk)) by.model = model;
  if (temperature !== "" && Number(temperature) !== talk.sampling.temperature) by.temperature = Number(temperature);
  if (thinking !== (talk.sampling.thinking ?? "")) by.thinking = thinking;
  return by;
}
