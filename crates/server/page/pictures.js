// Pictures beside a message: which files are some, what is kept of them, and how they look.

/** What the server decodes. Drawings of text (SVG) are text. */
const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp", "image/tiff"];
/** Larger ones fill the browser's storage, and a request. */
const MOST_BYTES = 12 << 20;

/** Whether a file of the reader's is a picture, whether or not the server can read it. */
export const isPicture = (file) => file.type.startsWith("image/") && !file.type.startsWith("image/svg");

/** Why a picture cannot be sent, or nothing. */
export function refusal(file, sees) {
  if (!sees) return `${file.name} is a picture; this model reads text only.`;
  if (!KINDS.includes(file.type)) return `${file.name} is of a kind that is not read (${file.type}): PNG, JPEG, WebP, GIF, BMP and TIFF are.`;
  if (file.size > MOST_BYTES) return `${file.name} is larger than ${MOST_BYTES >> 20} MB. A smaller version shows the model as much.`;
  return "";
}

/** The bytes of a file as base64, in pieces that a call takes. */
export function base64(bytes) {
  let text = "";
  for (let at = 0; at < bytes.length; at += 0x8000) text += String.fromCharCode(...bytes.subarray(at, at + 0x8000));
  return btoa(text);
}

/** What is kept of a picture: its name, and itself as the API takes it. */
export async function read(file) {
  return { name: file.name, picture: `data:${file.type};base64,${base64(new Uint8Array(await file.arrayBuffer()))}` };
}

const DATA = /^data:(image\/[a-z]+);base64,([A-Za-z0-9+/]+=*)$/;

/** Whether a text is a picture of a kind that is known: what was imported may be anything. */
export const isData = (text) => typeof text === "string" && KINDS.includes(DATA.exec(text)?.[1]);

/** What a tool may show. */
const SHOWN = ["image/png", "image/jpeg", "image/gif", "image/webp"];

/** Whether a piece of a tool's result is a picture that can be shown. */
export const isResultPicture = ({ mime, data }) => SHOWN.includes(mime) && typeof data === "string" && isData(`data:${mime};base64,${data}`);

/** Bytes of a picture. */
export const bytesOf = ({ picture }) => Math.floor(((picture.length - picture.indexOf(",") - 1) * 3) / 4);

const addresses = new WeakMap();

/** An address of a picture within this page. */
export function address(file) {
  if (!addresses.has(file)) {
    const [, type, coded] = DATA.exec(file.picture);
    addresses.set(file, URL.createObjectURL(new Blob([Uint8Array.from(atob(coded), (c) => c.charCodeAt(0))], { type })));
  }
  return addresses.get(file);
}
