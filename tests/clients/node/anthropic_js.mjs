// @anthropic-ai/sdk, the client of Anthropic's API. Prints what features.py prints.

import assert from "node:assert/strict";

import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";

import { ANSWER, LOOKUP, NAME, QUESTION, RECORD, RECORD_SCHEMA, SERVER, UNLISTED, lookup, useAll } from "./features.mjs";

const client = new Anthropic({ baseURL: SERVER, apiKey: "none", maxRetries: 0 });
const asked = { model: NAME, temperature: 0, max_tokens: 256 };
const messages = [{ role: "user", content: QUESTION }];
const { parameters: inputSchema, ...described } = LOOKUP;
const tool = betaTool({ ...described, inputSchema, run: lookup });

const features = {
  async models() {
    const found = [];
    for await (const model of client.models.list()) found.push(model.id);
    assert.deepEqual(found, [asked.model]);
  },

  async chat() {
    const answer = await client.messages.create({ ...asked, messages });
    assert.equal(answer.content[0].text, ANSWER);
    assert.equal(answer.stop_reason, "end_turn");
  },

  async chat_streamed() {
    assert.equal(await client.messages.stream({ ...asked, messages }).finalText(), ANSWER);
  },

  async tools() {
    const last = await client.beta.messages.toolRunner({
      ...asked,
      messages: [{ role: "user", content: UNLISTED }],
      tools: [tool],
    });
    assert.equal(last.content[0].text, ANSWER);
  },

  async structured_output() {
    const answer = await client.messages.create({
      ...asked,
      messages,
      output_config: { format: { type: "json_schema", schema: RECORD_SCHEMA } },
    });
    assert.deepEqual(JSON.parse(answer.content[0].text), RECORD);
  },

  async token_counts() {
    const counted = await client.messages.countTokens({ model: asked.model, messages });
    const answer = await client.messages.create({ ...asked, messages });
    assert.equal(counted.input_tokens, answer.usage.input_tokens + (answer.usage.cache_read_input_tokens ?? 0));
  },

  async errors() {
    const unknown = client.messages.create({ ...asked, model: "none", messages });
    await assert.rejects(unknown, Anthropic.NotFoundError);
  },
};

await useAll("@anthropic-ai/sdk", features);
