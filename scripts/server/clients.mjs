// Drives a running server with the npm package `openai`: node scripts/server/clients.mjs URL API_KEY real|random
// scripts/server/clients sets it up; NODE_PATH names the folder with the package.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { join } from "node:path";

const [url, apiKey, kind] = process.argv.slice(2);
const require = createRequire(join(process.env.NODE_PATH, "x.js"));
const OpenAI = require("openai");
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
const model = "judged";
const messages = [{ role: "user", content: "Say hello." }];

const checks = {
  async models() {
    const found = [];
    for await (const entry of client.models.list()) found.push(entry.id);
    assert.deepEqual(found, [model]);
  },
  async "a stream equals the whole"() {
    const ask = { model, messages, max_tokens: 16, temperature: 0 };
    const whole = await client.chat.completions.create(ask);
    let text = "";
    let usage;
    for await (const chunk of await client.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } })) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, whole.choices[0].message.content);
    assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
  },
  async "a schema is kept"() {
    const schema = { type: "object", properties: { age: { type: "integer", minimum: 0, maximum: 9 } }, required: ["age"], additionalProperties: false };
    const reply = await client.chat.completions.create({ model, messages, max_tokens: 60, temperature: 0, response_format: { type: "json_schema", json_schema: { name: "person", schema, strict: true } } });
    assert.ok(JSON.parse(reply.choices[0].message.content).age <= 9);
  },
  async "a response"() {
    const reply = await client.responses.create({ model, input: "Say hello.", max_output_tokens: 16 });
    assert.equal(typeof reply.output_text, "string");
    assert.ok(["completed", "incomplete"].includes(reply.status));
  },
  async "errors have their kind"() {
    await assert.rejects(client.chat.completions.create({ model: "none", messages }), (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found");
    const stranger = new OpenAI({ baseURL: `${url}/v1`, apiKey: "wrong", maxRetries: 0 });
    await assert.rejects(stranger.models.list(), OpenAI.AuthenticationError);
  },
  async "who aborts is heard"() {
    const controller = new AbortController();
    const stream = await client.chat.completions.create({ model, messages, max_tokens: 200, stream: true }, { signal: controller.signal });
    let chunks = 0;
    for await (const _ of stream) {
      chunks += 1;
      controller.abort();
    }
    assert.ok(chunks < 50, `${chunks} chunks came after all`);
  },
};
if (kind === "real") {
  checks["a forced call"] = async () => {
    const tool = { type: "function", function: { name: "get_weather", parameters: { type: "object", properties: { city: { type: "string", maxLength: 16 } }, required: ["city"], additionalProperties: false } } };
    const reply = await client.chat.completions.create({ model, messages: [{ role: "user", content: "Weather in Oslo?" }], tools: [tool], tool_choice: "required", parallel_tool_calls: false, max_tokens: 200 });
    assert.equal(typeof JSON.parse(reply.choices[0].message.tool_calls[0].function.arguments).city, "string");
  };
}

let failed = 0;
for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(`ok      npm: ${name}`);
  } catch (error) {
    failed += 1;
    console.log(`FAILED  npm: ${name}: ${error.stack}`);
  }
}
process.exit(failed ? 1 : 0);
