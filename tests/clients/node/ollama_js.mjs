// ollama, the official client of Ollama's API, for JavaScript. Prints what features.py prints.

import assert from "node:assert/strict";

import { Ollama } from "ollama";

import { ANSWER, LOOKUP, NAME, QUESTION, RECORD, RECORD_SCHEMA, SERVER, UNLISTED, lookup, useAll } from "./features.mjs";

const client = new Ollama({ host: SERVER });
const asked = { model: NAME, options: { temperature: 0, num_predict: 256 } };
const messages = [{ role: "user", content: QUESTION }];

const features = {
  async models() {
    assert.deepEqual((await client.list()).models.map(({ model }) => model), [NAME]);
    assert.ok((await client.show({ model: NAME })).capabilities.includes("tools"));
  },

  async chat() {
    const answer = await client.chat({ ...asked, messages });
    assert.equal(answer.message.content, ANSWER);
    assert.equal(answer.done_reason, "stop");
  },

  async chat_streamed() {
    let text = "";
    for await (const part of await client.chat({ ...asked, messages, stream: true })) text += part.message.content;
    assert.equal(text, ANSWER);
  },

  async tools() {
    const tools = [{ type: "function", function: LOOKUP }];
    const turns = [{ role: "user", content: UNLISTED }];
    const first = (await client.chat({ ...asked, messages: turns, tools })).message;
    const content = lookup(first.tool_calls[0].function.arguments);
    turns.push(first, { role: "tool", tool_name: "lookup", content });
    assert.equal((await client.chat({ ...asked, messages: turns, tools })).message.content, ANSWER);
  },

  async structured_output() {
    const answer = await client.chat({ ...asked, messages, format: RECORD_SCHEMA });
    assert.deepEqual(JSON.parse(answer.message.content), RECORD);
  },

  async completions() {
    const answer = await client.generate({ ...asked, prompt: QUESTION });
    assert.equal(answer.response, ANSWER);
  },

  async embeddings() {
    const { embeddings } = await client.embed({ model: NAME, input: ["berth", "crane"] });
    assert.deepEqual(embeddings.map((embedding) => embedding.length), [256, 256]);
  },

  async errors() {
    await assert.rejects(client.chat({ ...asked, model: "none", messages }), { name: "ResponseError" });
  },
};

await useAll("ollama", features);
