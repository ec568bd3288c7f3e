// Server-sent events, read from bytes as they come.

export class Events {
  constructor() {
    this.decoder = new TextDecoder();
    this.rest = "";
  }

  /** The data of all events that are whole now. Comments, which only show that the server is alive, are left out. */
  push(bytes) {
    this.rest += this.decoder.decode(bytes, { stream: true });
    const lines = this.rest.split("\n");
    this.rest = lines.pop();
    return lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim());
  }
}
