// Making elements, and the few icons of the page.

/** An element with properties and children. Names that begin with `on` are listeners; `class` and `aria-…` are attributes. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "icon") element.append(icon(value));
    else if (name in element && !name.includes("-") && name !== "list") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const $ = (id) => document.getElementById(id);

const ICONS = {
  plus: "M12 5v14M5 12h14",
  close: "M6 6l12 12M18 6L6 18",
  menu: "M4 7h16M4 12h16M4 17h10",
  sliders: "M4 8h9m5 0h2M4 16h2m5 0h9M13 8a2.5 2.5 0 1 0 5 0 2.5 2.5 0 0 0-5 0M6 16a2.5 2.5 0 1 0 5 0 2.5 2.5 0 0 0-5 0",
  pulse: "M3 12h4l3-8 4 16 3-8h4",
  clip: "M20 11.5l-8.2 8.2a5 5 0 0 1-7-7l8.5-8.5a3.4 3.4 0 0 1 4.8 4.8l-8.4 8.4a1.7 1.7 0 0 1-2.4-2.4l7.6-7.6",
  up: "M12 19V5M6 11l6-6 6 6",
  down: "M12 5v14M6 13l6 6 6-6",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h11v11H9zM15 9V4H4v11h5",
  check: "M5 13l4 4L19 7",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  retry: "M20 11a8 8 0 1 0-2.3 6.3M20 5v6h-6",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  bin: "M5 7h14M10 4h4M7 7l1 13h8l1-13",
  help: "M12 21a9 9 0 1 0 0-18 9 9 0 0 0 0 18M9.5 9.5a2.5 2.5 0 1 1 3.6 2.3c-.8.4-1.1 1-1.1 1.8M12 17v.01",
  theme: "M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18v18M12 8l5.5 5.5M12 13l4 4M12 4l6.5 6",
  file: "M7 3h7l5 5v13H7zM14 3v5h5",
  more: "M5 12h.01M12 12h.01M19 12h.01",
  tag: "M4 12V4h8l8 8-8 8zM8 8h.01",
  pin: "M9 4h6l-1 6 3 3H7l3-3zM12 13v7",
  spark: "M12 4l1.8 5.2L19 11l-5.2 1.8L12 18l-1.8-5.2L5 11l5.2-1.8zM19 17v4M17 19h4",
  save: "M12 4v11M7 11l5 5 5-5M5 20h14",
  wrap: "M4 6h16M4 12h12.5a3.5 3.5 0 0 1 0 7H12M14 16.5L11.5 19l2.5 2.5M4 18h4",
  play: "M7 5l11 7-11 7z",
  chip: "M7 7h10v10H7zM10 3v4M14 3v4M10 17v4M14 17v4M3 10h4M3 14h4M17 10h4M17 14h4",
  tool: "M14.5 6.5a4 4 0 0 1 5-1l-2.6 2.6 1 1L20.5 6.5a4 4 0 0 1-5.3 5.3L8 19a2 2 0 0 1-3-3l7.2-7.2a4 4 0 0 1 2.3-2.3z",
};

export function icon(name) {
  const ns = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(ns, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(ns, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** Says something to those who do not see the page. */
export function announce(text) {
  $("news").textContent = text;
}

let toastTimer;
/** Shows a short message for a while; longer, where it has something to press. */
export function toast(text, { label, work } = {}) {
  const box = $("toast");
  const pressed = () => {
    box.hidePopover();
    work();
  };
  box.replaceChildren(text, ...(label ? [" ", h("button", { type: "button", onclick: pressed }, label)] : []));
  // Shown anew, it lies above a dialog that was opened since.
  box.hidePopover();
  box.showPopover();
  announce(text);
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => box.hidePopover(), label ? 10_000 : 4000);
}

/** Copies a text; the button shows for a moment that it did. */
export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Pages of plain HTTP on another machine have no clipboard; a selection works everywhere.
    const area = h("textarea", { class: "unseen" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  announce("Copied");
  const before = button.querySelector("svg");
  if (!before) return;
  const done = icon("check");
  before.replaceWith(done);
  setTimeout(() => done.replaceWith(before), 1200);
}

/** Gives a file to the user. */
export function save(name, type, ...parts) {
  const url = URL.createObjectURL(new Blob(parts, { type }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
