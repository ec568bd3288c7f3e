// A server between the page and kiln: answers that a test wants to write itself are the test's, everything else is kiln's. So a stream
// can stand still, go on and break as a check needs it.

import { readFileSync } from "node:fs";
import { createServer, request } from "node:http";
import { join } from "node:path";

const KINDS = { js: "text/javascript", css: "text/css", svg: "image/svg+xml", html: "text/html", woff2: "font/woff2", txt: "text/plain", webmanifest: "application/manifest+json" };

/** An answer that a test writes. */
class Answer {
  constructor(body, response) {
    Object.assign(this, { body, response, tokens: 0, gone: false });
    response.on("close", () => (this.gone = true));
    response.writeHead(200, { "Content-Type": "text/event-stream" });
    response.flushHeaders();
  }

  chunk(value) {
    const usage = { prompt_tokens: 40, completion_tokens: this.tokens, prompt_tokens_details: { cached_tokens: 3 } };
    this.response.write(`data: ${JSON.stringify({ usage, ...value })}\n\n`);
  }

  /** A piece of text; each is a token. */
  say(content) {
    this.tokens += 1;
    this.chunk({ choices: [{ index: 0, delta: { content }, finish_reason: null }] });
  }

  end(reason = "stop") {
    this.chunk({ choices: [{ index: 0, delta: {}, finish_reason: reason }] });
    this.chunk({ choices: [] });
    this.response.end("data: [DONE]\n\n");
  }

  /** The connection breaks. */
  cut() {
    this.response.destroy();
  }
}

export class Stage {
  /** `folder` holds files of the page that are newer than kiln's, if any. */
  static async open(upstream, folder) {
    const stage = new Stage(upstream, folder);
    await new Promise((done) => stage.server.listen(0, "127.0.0.1", done));
    stage.port = stage.server.address().port;
    stage.url = `http://127.0.0.1:${stage.port}`;
    return stage;
  }

  constructor(upstream, folder) {
    Object.assign(this, { upstream: new URL(upstream), folder, waiting: [] });
    this.server = createServer((asked, response) => this.serve(asked, response));
  }

  close() {
    this.server.closeAllConnections();
    this.server.close();
  }

  /** The next answer that the page asks for is written by the test. Call this before the page asks. */
  next() {
    return new Promise((done) => this.waiting.push(done));
  }

  async serve(asked, response) {
    if (asked.method === "POST" && asked.url === "/v1/chat/completions" && this.waiting.length) {
      const take = this.waiting.shift();
      let body = "";
      for await (const piece of asked) body += piece;
      take(new Answer(JSON.parse(body), response));
      return;
    }
    const headers = { ...asked.headers, host: this.upstream.host };
    if (headers.origin) headers.origin = this.upstream.origin;
    const through = request({ hostname: this.upstream.hostname, port: this.upstream.port, path: asked.url, method: asked.method, headers }, (reply) => {
      const own = this.file(asked);
      if (own) {
        reply.resume();
        // The policy of kiln holds for newer files, too.
        const policy = reply.headers["content-security-policy"];
        response.writeHead(200, { "Content-Type": own.kind, "Cache-Control": "no-cache", ...(policy && { "Content-Security-Policy": policy }) });
        response.end(own.bytes);
        return;
      }
      response.writeHead(reply.statusCode, reply.headers);
      reply.pipe(response);
    });
    through.on("error", () => response.destroy());
    response.on("close", () => through.destroy());
    asked.pipe(through);
  }

  file(asked) {
    if (!this.folder) return null;
    const root = asked.url === "/" && (asked.headers.accept ?? "").includes("text/html");
    const name = root ? "index.html" : /^\/page\/([\w.-]+)$/.exec(asked.url)?.[1];
    return name ? { kind: KINDS[name.split(".").pop()], bytes: readFileSync(join(this.folder, name)) } : null;
  }
}
