// The message box: text, files and pictures that are not sent yet. Each conversation has its own.

import { $, h, toast } from "./dom.js";
import { size, weight } from "./messages.js";
import * as pictures from "./pictures.js";
import { weigh } from "./tokens.js";

/** Pasted text longer than this many characters becomes a file. */
const LONG_PASTE = 4000;
const MOST_FILE_BYTES = 4 << 20;
/** PDF files hold pictures and fonts beside their text. */
const MOST_PDF_BYTES = 40 << 20;

/** The text of a PDF file. What reads it is loaded when there is one. */
async function pdfText(file) {
  if (file.size > MOST_PDF_BYTES) throw new Error("is larger than 40 MB");
  const { textOf } = await import("./pdf.js");
  const { text, pages } = await textOf(new Uint8Array(await file.arrayBuffer()));
  if (text.length > MOST_FILE_BYTES) throw new Error("has more than 4 MB of text, which no context holds");
  return { name: file.name, text, pages };
}

/** How large a file is, in what is known of it. */
function told(file) {
  if (file.picture) return weight(pictures.bytesOf(file));
  const pages = file.pages && `${file.pages} page${file.pages > 1 ? "s" : ""}`;
  return [pages, size(file.text), file.tokens !== undefined && `${file.tokens.toLocaleString("en")} tokens`].filter(Boolean).join(" · ");
}

export class Composer {
  /** `submit` sends what is in the box, `up` is the arrow key in an empty one, `sees` says whether the model is shown pictures. */
  constructor({ submit, up, sees }) {
    this.sees = sees;
    this.files = [];
    /** What was begun elsewhere, by conversation. */
    this.drafts = new Map();
    this.place = null;
    $("attach").addEventListener("click", () => $("picker").click());
    $("picker").addEventListener("change", (event) => {
      this.add([...event.target.files]);
      event.target.value = "";
    });
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      submit();
    });
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        submit();
      } else if (event.key === "ArrowUp" && !$("prompt").value && up()) event.preventDefault();
    });
    $("prompt").addEventListener("input", () => {
      this.fit();
      this.weigh();
    });
    $("prompt").addEventListener("paste", (event) => this.paste(event));
    const over = (on) => document.body.classList.toggle("dropping", on);
    document.addEventListener("dragover", (event) => {
      event.preventDefault();
      over(event.dataTransfer.types.includes("Files"));
    });
    // Out of the window, and not from one element to the next.
    document.addEventListener("dragleave", (event) => !event.relatedTarget && over(false));
    document.addEventListener("drop", (event) => {
      event.preventDefault();
      over(false);
      this.add([...event.dataTransfer.files]);
    });
  }

  get text() {
    return $("prompt").value.trim();
  }

  /** Moves to another conversation's draft. */
  open(place) {
    if (place === this.place) return;
    this.drafts.set(this.place, { text: $("prompt").value, files: this.files });
    this.place = place;
    this.set(this.drafts.get(place) ?? { text: "", files: [] });
  }

  /** The conversation that the box belongs to has its first message, and with it an id. */
  adopt(place) {
    this.place = place;
  }

  weigh() {
    weigh(this.text, this.files, () => this.draw());
  }

  set({ text, files }) {
    $("prompt").value = text;
    this.files = files;
    this.show();
    this.fit();
  }

  clear() {
    this.set({ text: "", files: [] });
  }

  paste(event) {
    const files = [...event.clipboardData.files];
    const text = event.clipboardData.getData("text");
    if (files.length) this.add(files);
    else if (text.length > LONG_PASTE) {
      this.files.push({ name: `pasted-${this.files.length + 1}.txt`, text });
      this.show();
    } else return;
    event.preventDefault();
  }

  async add(list) {
    const { files } = this;
    for (const file of list) {
      if (pictures.isPicture(file)) {
        const refusal = pictures.refusal(file, this.sees());
        if (refusal) toast(refusal);
        else files.push(await pictures.read(file));
        continue;
      }
      if (file.type === "application/pdf" || /\.pdf$/i.test(file.name)) {
        toast(`${file.name} is being read…`);
        try {
          files.push(await pdfText(file));
          $("toast").hidePopover();
        } catch (error) {
          toast(`${file.name} ${error.message}.`);
        }
        continue;
      }
      if (file.size > MOST_FILE_BYTES) {
        toast(`${file.name} is larger than 4 MB, which no context holds.`);
        continue;
      }
      const text = await file.text();
      if (text.includes("\u0000") || (text.match(/\ufffd/g)?.length ?? 0) > text.length / 100) toast(`${file.name} is neither text, nor a picture, nor a PDF file.`);
      else files.push({ name: file.name, text });
    }
    this.show();
    $("prompt").focus();
  }

  show() {
    this.draw();
    this.weigh();
  }

  draw() {
    $("files").hidden = !this.files.length;
    $("files").replaceChildren(...this.files.map((file) => h("li", file.picture ? { class: "picture" } : { icon: "file" }, file.picture && h("img", { src: pictures.address(file), alt: "" }), h("span", {}, file.name), h("small", {}, told(file)), h("button", { type: "button", class: "quiet", icon: "close", "aria-label": `Remove ${file.name}`, onclick: () => {
      this.files.splice(this.files.indexOf(file), 1);
      this.show();
    } }))));
  }

  /** Makes the box as high as its text. */
  fit() {
    const prompt = $("prompt");
    prompt.style.height = "auto";
    prompt.style.height = `${Math.min(prompt.scrollHeight, innerHeight * 0.4)}px`;
  }
}
