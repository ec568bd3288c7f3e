// All models of the server: what they are, which are loaded, and buttons to load and to unload them.

import * as api from "./api.js";
import { $, announce, h, toast } from "./dom.js";
import { weight } from "./messages.js";
import * as models from "./models.js";
import { page } from "./state.js";

/** Types of weights as file names have them. */
const QUANTISATION = /(?:^|[-_.])((?:I?Q\d\w*|T?Q\d_\d|BF16|F16|F32|MXFP4|NVFP4))(?:[-_.]|$)/i;

const number = (n) => n.toLocaleString("en");
const parameters = (n) => (n >= 1e9 ? `${(n / 1e9).toFixed(1)} billion` : `${Math.round(n / 1e6)} million`);

/** What is known of a model, in words; `file` is what Ollama's API tells of it. */
export function facts(model, file) {
  const { meta, max_model_len: context } = model;
  const size = file?.size ?? meta?.size;
  const type = QUANTISATION.exec(model.id)?.[1]?.toUpperCase() ?? file?.details?.quantization_level;
  const trained = meta?.n_ctx_train && meta.n_ctx_train !== context ? ` (trained with ${number(meta.n_ctx_train)})` : "";
  return [
    size && weight(size), type, meta?.n_params && `${parameters(meta.n_params)} parameters`, file?.details?.family,
    context && `${number(context)} tokens of context${trained}`, model.architecture?.input_modalities?.includes("image") && "sees pictures",
  ].filter(Boolean);
}

/** Models that are being loaded or unloaded. */
const busy = new Map();
let files = new Map();
let choose = () => {};

/** Loads or unloads a model: a request without a prompt does nothing else. */
async function change(model, word, fields) {
  busy.set(model.id, word);
  show();
  try {
    const reply = await api.post("/api/generate", { model: model.id, stream: false, ...fields });
    if (fields.keep_alive === 0 && reply.done_reason !== "unload") toast("The server keeps this model: it was started with it alone.");
  } catch (error) {
    toast(`${model.id}: ${error.message}`);
  }
  busy.delete(model.id);
  await look();
  announce(models.isLoaded(page.models.find((known) => known.id === model.id) ?? model) ? `${model.id} is loaded` : `${model.id} is not loaded`);
}

function row(model) {
  const loaded = models.isLoaded(model);
  const chosen = model.id === models.modelOf(page.talk);
  const word = busy.get(model.id);
  const use = chosen ? h("span", { class: "chosen" }, "in use here") : h("button", { type: "button", onclick: () => choose(model.id), "aria-label": `Use ${model.id}` }, "Use");
  const turn = loaded
    ? h("button", { type: "button", disabled: Boolean(word), onclick: () => change(model, "is unloaded…", { keep_alive: 0 }), "aria-label": `Unload ${model.id}` }, "Unload")
    : h("button", { type: "button", disabled: Boolean(word), onclick: () => change(model, "is loaded…", {}), "aria-label": `Load ${model.id}` }, "Load");
  return h("li", { "aria-busy": String(Boolean(word)) },
    h("div", {}, h("strong", {}, model.id), h("p", {}, h("span", { class: loaded ? "state loaded" : "state" }), word ?? (loaded ? "loaded" : "not loaded"), ...facts(model, files.get(model.id)).map((fact) => ` · ${fact}`))),
    h("div", { class: "buttons" }, page.models.length > 1 && turn, use));
}

function show() {
  $("models-list").replaceChildren(...page.models.map(row));
}

/** Asks what there is, and shows it. */
async function look() {
  try {
    const [known, tags] = await Promise.all([api.get("/v1/models"), api.get("/api/tags")]);
    page.models = known.data;
    files = new Map(tags.models.map((file) => [file.name, file]));
    models.show();
  } catch (error) {
    toast(error.message);
  }
  show();
}

/** Opens the list. `chosen` hears of the model that the reader takes. */
export function openModels(chosen) {
  choose = (id) => {
    $("models-dialog").close();
    chosen(id);
  };
  show();
  $("models-dialog").showModal();
  look();
}
