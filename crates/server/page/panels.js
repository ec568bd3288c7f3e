// What opens beside and above the conversation: the list on phones, settings and engine, dialogs, colours.

import * as api from "./api.js";
import { $, copy, save, toast } from "./dom.js";
import * as engine from "./engine.js";

export const isSideOpen = () => document.body.classList.contains("side-open");

export function openSide(open) {
  document.body.classList.toggle("side-open", open);
  $("side-open").setAttribute("aria-expanded", String(open));
  if (open) $("new").focus();
}

/** Shows or hides the list: beside the conversation where there is room, above it where there is not. */
export function toggleSide() {
  if (innerWidth <= 800) return openSide(!isSideOpen());
  const hidden = document.body.classList.toggle("side-hidden");
  $("side-open").setAttribute("aria-expanded", String(!hidden));
  localStorage.setItem("kiln-side", hidden ? "hidden" : "");
}

/** Shows a tab of the panel, or closes the panel where it is shown already. */
export function panel(name) {
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

/** Asks for a key. Where one was sent, the server did not take it. */
export function askForKey() {
  const dialog = $("key-dialog");
  $("key-refused").hidden = !api.hasKey();
  if (dialog.open) return;
  dialog.showModal();
  $("key").select();
}

export function openHelp() {
  $("address").textContent = `${location.origin}/v1`;
  $("help-dialog").showModal();
}

/** The description of the APIs. A browser sends no key with a link: where there is one, the page fetches the file itself. */
async function describe(event) {
  if (!api.hasKey()) return;
  event.preventDefault();
  try {
    save("kiln-openapi.json", "application/json", JSON.stringify(await api.get("/openapi.json"), null, 1));
  } catch (error) {
    toast(error.message);
  }
}

/** Connects buttons that need nothing of conversations. `connect` is called when there is a new key. */
export function wire(connect) {
  const click = (id, work) => $(id).addEventListener("click", work);
  click("side-open", toggleSide);
  click("side-close", toggleSide);
  if (localStorage.getItem("kiln-side") === "hidden") document.body.classList.add("side-hidden");
  click("again-cancel", () => $("again-dialog").close());
  click("theme", () => useTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]));
  click("help", openHelp);
  click("openapi", describe);
  click("copy-address", () => copy($("address").textContent, $("copy-address")));
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
  $("key-dialog").addEventListener("close", () => {
    api.useKey($("key").value.trim());
    connect();
  });
  useTheme(localStorage.getItem("kiln-theme") ?? "automatic");
}
