// The engine as it runs: asked once a second while the panel is open, drawn as small charts.

import { get } from "./api.js";
import { $, h } from "./dom.js";

const SAMPLES = 90;
const NS = "http://www.w3.org/2000/svg";

/** A line over the last samples, with its newest value as a number. */
class Chart extends HTMLElement {
  connectedCallback() {
    if (this.values) return;
    this.values = [];
    this.number = h("output");
    this.svg = document.createElementNS(NS, "svg");
    this.svg.setAttribute("viewBox", `0 0 ${SAMPLES} 40`);
    this.svg.setAttribute("preserveAspectRatio", "none");
    this.svg.setAttribute("aria-hidden", "true");
    this.area = document.createElementNS(NS, "path");
    this.line = document.createElementNS(NS, "path");
    this.area.setAttribute("class", "area");
    this.line.setAttribute("class", "line");
    this.svg.append(this.area, this.line);
    this.append(h("div", { class: "chart-head" }, h("span", {}, this.getAttribute("name")), this.number), this.svg, h("small", {}));
  }

  /** Adds a value; `top` is the height of the chart where that is known. */
  add(value, shown, top, note = "") {
    this.values.push(value);
    if (this.values.length > SAMPLES) this.values.shift();
    const most = top || Math.max(...this.values, 1e-9) * 1.1;
    const left = SAMPLES - this.values.length;
    const points = this.values.map((v, i) => `${left + i},${(39 - (Math.min(v, most) / most) * 37).toFixed(2)}`);
    this.line.setAttribute("d", `M${points.join("L")}`);
    this.area.setAttribute("d", `M${left},40L${points.join("L")}L${SAMPLES - 1},40Z`);
    this.number.textContent = shown;
    this.lastChild.textContent = note;
  }
}
customElements.define("kiln-chart", Chart);

const CHARTS = [["written", "Tokens/s written"], ["read", "Prompt tokens/s read"], ["batch", "Texts at once"], ["queue", "Waiting"], ["pages", "Cache pages in use"], ["memory", "Share of the memory"]];
const gib = (bytes) => `${(bytes / 2 ** 30).toFixed(bytes < 10 * 2 ** 30 ? 2 : 0)} GiB`;
const rate = (n) => (n < 10 ? n.toFixed(1) : Math.round(n).toLocaleString("en"));

let timer = null;
let before = null;

/** The model that the conversation is with; another one starts the charts anew. */
const which = () => new URLSearchParams({ model: $("model").value });

function build() {
  const measure = h("button", { type: "button", onclick: () => kernels(measure) }, "Measure one step");
  $("engine").replaceChildren(
    h("dl", { id: "engine-facts" }),
    ...CHARTS.map(([id, name]) => h("kiln-chart", { id: `chart-${id}`, name })),
    h("section", { class: "kernels", "aria-labelledby": "kernels-title" }, h("h3", { id: "kernels-title" }, "Time per kernel"), h("p", {}, "One token goes through the model step by step, and each step is timed."), measure, h("div", { id: "kernels" })),
  );
}

async function kernels(button) {
  button.disabled = true;
  try {
    const { kernels: found, microseconds } = await get(`/engine/kernels?${which()}`);
    const most = Math.max(...found.map((k) => k.microseconds), 1e-9);
    const row = (k) => {
      const bar = h("div", { class: "bar" });
      bar.style.width = `${(100 * k.microseconds) / most}%`;
      return h("tr", {}, h("th", { scope: "row" }, k.name), h("td", {}, bar), h("td", {}, `${Math.round((100 * k.microseconds) / microseconds)} %`));
    };
    $("kernels").replaceChildren(h("table", {}, h("caption", {}, `${(microseconds / 1000).toFixed(2)} ms in all`), h("tbody", {}, found.map(row))));
  } catch (error) {
    $("kernels").replaceChildren(h("p", { class: "note" }, error.message));
  }
  button.disabled = false;
}

function facts(now) {
  const rows = [["Model", now.model], ["Runs on", now.device], ["Context", now.loaded ? `${now.context.toLocaleString("en")} tokens` : "known when it is loaded"], ["Cached beginnings", now.tokens.prompt ? `${Math.round((100 * now.tokens.cached) / now.tokens.prompt)} % of prompt tokens` : "none yet"]];
  $("engine-facts").replaceChildren(...rows.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

async function look() {
  let now;
  try {
    now = await get(`/engine?${which()}`);
  } catch (error) {
    $("engine-facts").replaceChildren(h("dt", {}, "Engine"), h("dd", {}, error.message));
    return;
  }
  if (before && before.now.model !== now.model) before = null;
  const time = performance.now();
  const since = before ? (time - before.time) / 1000 : 0;
  const per = (name) => (since ? Math.max(0, now.tokens[name] - before.now.tokens[name]) / since : 0);
  const { load, memory } = now;
  const read = Math.max(0, per("prompt") - per("cached"));
  const used = load.pages - load.free_pages;
  $("chart-written").add(per("generated"), rate(per("generated")));
  $("chart-read").add(read, rate(read));
  $("chart-batch").add(load.reading + load.writing, load.reading + load.writing, now.sequences, `${load.reading} read, ${load.writing} write, of ${now.sequences}`);
  $("chart-queue").add(load.waiting, load.waiting, undefined, load.swapped ? `${load.swapped} moved to host memory` : "");
  $("chart-pages").add(used, `${used} of ${load.pages}`, load.pages || 1);
  $("chart-memory").hidden = !memory;
  if (memory) $("chart-memory").add(memory.total - memory.free, `${Math.round(100 - (100 * memory.free) / memory.total)} %`, memory.total, `${gib(memory.total - memory.free)} of ${gib(memory.total)} ${memory.place}`);
  facts(now);
  before = { time, now };
}

export function start() {
  if (timer) return;
  if (!$("engine-facts")) build();
  look();
  timer = setInterval(look, 1000);
}

export function stop() {
  clearInterval(timer);
  timer = null;
  before = null;
}
