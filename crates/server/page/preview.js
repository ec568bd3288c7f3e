// A document that the model wrote, shown in a frame that has no origin and no network: scripts/server/page_reading.mjs tries the ways out.

import { h } from "./dom.js";

const DRAWING = '<!doctype html><meta charset="utf-8"><style>body{margin:0;min-height:100vh;display:grid;place-items:center}svg{max-width:100%;max-height:100vh}</style>';

/** Whether code of this language is a document that can be looked at. */
export function canPreview(language, text) {
  return ["html", "htm", "xhtml", "svg"].includes(language) || (["xml", ""].includes(language) && /^\s*(<\?xml[^>]*>\s*)?<svg[\s>]/.test(text)) || (!language && /^\s*<!doctype html/i.test(text));
}

/** A frame that shows a document. */
export function preview(language, text) {
  const isDrawing = !["html", "htm", "xhtml"].includes(language) && !/^\s*<!doctype html/i.test(text);
  const frame = h("iframe", { class: "preview", title: "Preview of the code", sandbox: "allow-scripts", allow: "", referrerPolicy: "no-referrer", src: "/page/preview.html" });
  const ready = (event) => {
    if (event.source !== frame.contentWindow) return;
    removeEventListener("message", ready);
    // The frame has no origin that could be named; what is sent is what it shows.
    frame.contentWindow.postMessage(isDrawing ? DRAWING + text : text, "*");
  };
  addEventListener("message", ready);
  return frame;
}
