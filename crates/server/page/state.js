// What the page knows, in one place that its parts share.

import { Tools } from "./calls.js";
import { Library } from "./library.js";

export const page = {
  /** All conversations that are kept. */
  library: new Library(),
  /** The conversation that is shown; a new one is in the library as soon as it has a message. */
  talk: null,
  /** Ids of conversations whose answer came while another one was shown. */
  unread: new Set(),
  /** The server's models, as `/v1/models` lists them. */
  models: [],
  /** The tools that the server has. */
  tools: new Tools(),
  /** What the server does where a request says nothing. */
  defaults: {},
  /** The engine of the model that was loaded first, as `/engine` told it. */
  engine: null,
};
