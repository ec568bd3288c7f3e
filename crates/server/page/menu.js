// A short list of what can be done with something, beside the button that opened it.

import { $, h } from "./dom.js";

/** Shows a menu. Each item has a `label`, an `icon` and its `work`. */
export function openMenu(anchor, items) {
  const menu = $("menu");
  const button = ({ label, icon, work }) => h("button", { type: "button", role: "menuitem", tabIndex: -1, icon, onclick: () => {
    menu.hidePopover();
    work();
  } }, label);
  menu.replaceChildren(...items.map(button));
  menu.showPopover();
  const [at, own] = [anchor.getBoundingClientRect(), menu.getBoundingClientRect()];
  const below = at.bottom + own.height + 8 < innerHeight;
  menu.style.top = `${below ? at.bottom + 4 : Math.max(4, at.top - own.height - 4)}px`;
  menu.style.left = `${Math.max(8, Math.min(at.left, innerWidth - own.width - 8))}px`;
  menu.firstChild.focus();
  // Closed without a choice, it leads back to where it was opened.
  menu.onbeforetoggle = (event) => {
    if (event.newState === "closed" && menu.contains(document.activeElement)) anchor.focus();
  };
}

/** The keys of menus. */
export function wire() {
  $("menu").addEventListener("keydown", (event) => {
    const all = [...$("menu").children];
    const at = all.indexOf(document.activeElement);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: -1 }[event.key];
    if (event.key === "Tab") $("menu").hidePopover();
    if (to === undefined) return;
    event.preventDefault();
    all.at(to % all.length).focus();
  });
}
