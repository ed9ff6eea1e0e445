// openai for JavaScript. Prints what features.py prints.

import assert from "node:assert/strict";

import OpenAI from "openai";

import { ANSWER, LOOKUP, NAME, QUESTION, RECORD, RECORD_SCHEMA, SERVER, UNLISTED, lookup, useAll } from "./features.mjs";

const client = new OpenAI({ baseURL: `${SERVER}/v1`, apiKey: "none", maxRetries: 0 });
const asked = { model: NAME, temperature: 0, max_tokens: 256 };
const messages = [{ role: "user", content: QUESTION }];

const features = {
  async models() {
    const found = [];
    for await (const model of client.models.list()) found.push(model.id);
    assert.deepEqual(found, [asked.model]);
  },

  async chat() {
    const answer = await client.chat.completions.create({ ...asked, messages });
    assert.equal(answer.choices[0].message.content, ANSWER);
  },

  async chat_streamed() {
    const stream = client.chat.completions.stream({ ...asked, messages });
    assert.equal(await stream.finalContent(), ANSWER);
  },

  async tools() {
    const runner = client.chat.completions.runTools({
      ...asked,
      messages: [{ role: "user", content: UNLISTED }],
      tools: [
        {
          type: "function",
          function: { ...LOOKUP, parse: JSON.parse, function: lookup },
        },
      ],
    });
    assert.equal(await runner.finalContent(), ANSWER);
  },

  async structured_output() {
    const answer = await client.chat.completions.parse({
      ...asked,
      messages,
      response_format: { type: "json_schema", json_schema: { name: "record", schema: RECORD_SCHEMA, strict: true } },
    });
    assert.deepEqual(JSON.parse(answer.choices[0].message.content), RECORD);
  },

  async responses() {
    const of = { model: asked.model, temperature: 0 };
    const first = await client.responses.create({ ...of, input: QUESTION });
    assert.equal(first.output_text, ANSWER);
    const next = await client.responses.create({ ...of, input: "And C009?", previous_response_id: first.id });
    assert.equal(next.output_text, "C009 B07 blue");
  },

  async responses_streamed() {
    const stream = client.responses.stream({ model: asked.model, temperature: 0, input: QUESTION });
    assert.equal((await stream.finalResponse()).output_text, ANSWER);
  },

  async completions() {
    const answer = await client.completions.create({ ...asked, prompt: "C4", max_tokens: 4 });
    assert.ok(answer.usage.completion_tokens <= 4);
  },

  async embeddings() {
    const { data } = await client.embeddings.create({ model: asked.model, input: ["berth", "crane"] });
    assert.deepEqual(data.map(({ embedding }) => embedding.length), [256, 256]);
  },

  async errors() {
    const unknown = client.chat.completions.create({ ...asked, model: "none", messages });
    await assert.rejects(unknown, OpenAI.NotFoundError);
  },
};

await useAll("openai", features);
