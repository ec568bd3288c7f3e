// Names of characters as HTML 4 has them, and by their numbers. Browsers know them, too, but only as part of HTML, and no text of a
// model becomes that.

const LATIN = "nbsp iexcl cent pound curren yen brvbar sect uml copy ordf laquo not shy reg macr deg plusmn sup2 sup3 acute micro para middot cedil sup1 ordm raquo frac14 frac12 frac34 iquest Agrave Aacute Acirc Atilde Auml Aring AElig Ccedil Egrave Eacute Ecirc Euml Igrave Iacute Icirc Iuml ETH Ntilde Ograve Oacute Ocirc Otilde Ouml times Oslash Ugrave Uacute Ucirc Uuml Yacute THORN szlig agrave aacute acirc atilde auml aring aelig ccedil egrave eacute ecirc euml igrave iacute icirc iuml eth ntilde ograve oacute ocirc otilde ouml divide oslash ugrave uacute ucirc uuml yacute thorn yuml";
const GREEK = "Alpha Beta Gamma Delta Epsilon Zeta Eta Theta Iota Kappa Lambda Mu Nu Xi Omicron Pi Rho - Sigma Tau Upsilon Phi Chi Psi Omega - - - - - - - alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigmaf sigma tau upsilon phi chi psi omega";
const OTHERS = {
  quot: '"', amp: "&", lt: "<", gt: ">", apos: "'", OElig: "Œ", oelig: "œ", Scaron: "Š", scaron: "š", Yuml: "Ÿ", fnof: "ƒ", circ: "ˆ", tilde: "˜", thetasym: "ϑ", upsih: "ϒ", piv: "ϖ",
  ensp: "\u2002", emsp: "\u2003", thinsp: "\u2009", zwnj: "\u200c", zwj: "\u200d", lrm: "\u200e", rlm: "\u200f", ndash: "–", mdash: "—", lsquo: "‘", rsquo: "’", sbquo: "‚", ldquo: "“", rdquo: "”", bdquo: "„",
  dagger: "†", Dagger: "‡", bull: "•", hellip: "…", permil: "‰", prime: "′", Prime: "″", lsaquo: "‹", rsaquo: "›", oline: "‾", frasl: "⁄", euro: "€", image: "ℑ", weierp: "℘", real: "ℜ", trade: "™", alefsym: "ℵ",
  larr: "←", uarr: "↑", rarr: "→", darr: "↓", harr: "↔", crarr: "↵", lArr: "⇐", uArr: "⇑", rArr: "⇒", dArr: "⇓", hArr: "⇔", forall: "∀", part: "∂", exist: "∃", empty: "∅", nabla: "∇", isin: "∈", notin: "∉", ni: "∋",
  prod: "∏", sum: "∑", minus: "−", lowast: "∗", radic: "√", prop: "∝", infin: "∞", ang: "∠", and: "∧", or: "∨", cap: "∩", cup: "∪", int: "∫", there4: "∴", sim: "∼", cong: "≅", asymp: "≈", ne: "≠", equiv: "≡", le: "≤", ge: "≥",
  sub: "⊂", sup: "⊃", nsub: "⊄", sube: "⊆", supe: "⊇", oplus: "⊕", otimes: "⊗", perp: "⊥", sdot: "⋅", lceil: "⌈", rceil: "⌉", lfloor: "⌊", rfloor: "⌋", lang: "⟨", rang: "⟩", loz: "◊", spades: "♠", clubs: "♣", hearts: "♥", diams: "♦", check: "✓", cross: "✗", star: "☆", num: "#", ast: "*", lowbar: "_", grave: "`", vert: "|", lbrack: "[", rbrack: "]", lbrace: "{", rbrace: "}", bsol: "\\", sol: "/", dollar: "$", percnt: "%", colon: ":", semi: ";", comma: ",", period: ".", excl: "!", quest: "?", equals: "=", plus: "+", commat: "@", lpar: "(", rpar: ")",
};

const NAMED = new Map(Object.entries(OTHERS));
for (const [first, names] of [[0xa0, LATIN], [0x391, GREEK]]) names.split(" ").forEach((name, i) => name !== "-" && NAMED.set(name, String.fromCharCode(first + i)));

const ENTITY = /^&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|([A-Za-z][A-Za-z\d]{1,9}));/;

/** The character that is named at the beginning of a text, and how long its name is. */
export function entity(text) {
  const found = ENTITY.exec(text);
  if (!found) return null;
  const [whole, decimal, hex, name] = found;
  if (name) return NAMED.has(name) ? { text: NAMED.get(name), length: whole.length } : null;
  const code = decimal ? parseInt(decimal, 10) : parseInt(hex, 16);
  const valid = code > 0 && code <= 0x10ffff && (code < 0xd800 || code > 0xdfff);
  return { text: valid ? String.fromCodePoint(code) : "\ufffd", length: whole.length };
}

/** A text with its names of characters replaced. */
export function decoded(text) {
  return text.replace(/&#?\w{1,9};/g, (named) => entity(named)?.text ?? named);
}
