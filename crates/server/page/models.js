// Which model answers, which of several are loaded, and how much of the context a conversation fills.

import { get } from "./api.js";
import { $, h } from "./dom.js";
import { page } from "./state.js";
import { path } from "./tree.js";

/** From this share on the reader is told that little context is left. */
const NEARLY = 0.85;

export const isLoaded = (model) => model.status?.value !== "unloaded";

/** The model of a conversation: the one it had, where the server still has it. */
export function modelOf(talk) {
  return page.models.some((model) => model.id === talk.model) ? talk.model : page.models[0]?.id ?? "";
}

/** Fills the list of models. Several stand under what they are: loaded, or not yet. */
export function show() {
  const option = (model) => h("option", { value: model.id }, model.id);
  const [loaded, others] = [page.models.filter(isLoaded), page.models.filter((model) => !isLoaded(model))];
  const group = (label, models) => (models.length ? [h("optgroup", { label }, models.map(option))] : []);
  const state = JSON.stringify([loaded.map((m) => m.id), others.map((m) => m.id)]);
  if (state !== $("model").dataset.state) {
    $("model").dataset.state = state;
    $("model").replaceChildren(...(page.models.length > 1 ? [...group("Loaded", loaded), ...group("Loaded when asked", others)] : page.models.map(option)));
  }
  $("model").value = modelOf(page.talk);
  $("attach").ariaLabel = $("attach").title = sees(page.talk) ? "Attach pictures, PDF or text files" : "Attach PDF or text files";
  showState();
  showGauge(page.talk);
}

/** Marks whether the chosen model is loaded, where there are several. */
function showState() {
  const chosen = page.models.find((model) => model.id === $("model").value);
  const several = page.models.length > 1 && Boolean(chosen);
  $("model-state").hidden = !several;
  if (!several) return;
  $("model-state").className = isLoaded(chosen) ? "loaded" : "unloaded";
  const words = isLoaded(chosen) ? "loaded" : "not loaded: it is loaded when you ask";
  $("model-state").firstChild.textContent = words;
  $("model-state").title = words;
}

/** Asks anew which models are loaded. One model alone is known. */
export async function refresh() {
  if (page.models.length < 2) return showState();
  try {
    page.models = (await get("/v1/models")).data;
    show();
  } catch {
    // The next request that matters says what is wrong.
  }
}

/** Tokens of context that a conversation's model has; 0 where that is not known. */
export function contextOf(talk) {
  const model = page.models.find((known) => known.id === modelOf(talk));
  return model?.max_model_len ?? (page.models.length > 1 ? 0 : page.defaults.context ?? 0);
}

/** Whether a conversation's model is shown pictures. */
export function sees(talk) {
  const model = page.models.find((known) => known.id === modelOf(talk));
  return Boolean(model?.architecture?.input_modalities?.includes("image"));
}

/** Shows how much of the context the conversation filled when the model answered last. */
export function showGauge(talk) {
  const last = path(talk).findLast((node) => node.stats?.used);
  const context = contextOf(talk);
  const shown = Boolean(last && context);
  $("gauge").hidden = !shown;
  if (!shown) return;
  const used = Math.min(last.stats.used, context);
  const meter = $("gauge-meter");
  Object.assign(meter, { max: context, high: context * NEARLY, optimum: 0, value: used });
  const nearly = used >= context * NEARLY;
  $("gauge").classList.toggle("nearly", nearly);
  const number = (n) => n.toLocaleString("en");
  $("gauge-text").textContent = `${number(used)} of ${number(context)} tokens${nearly ? ": the context is nearly full" : ""}`;
}
