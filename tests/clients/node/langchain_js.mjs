// @langchain/openai, LangChain for JavaScript. Prints what features.py prints.

import assert from "node:assert/strict";

import { tool } from "@langchain/core/tools";
import { ChatOpenAI, OpenAIEmbeddings } from "@langchain/openai";
import { z } from "zod";

import { ANSWER, LOOKUP, NAME, QUESTION, RECORD, SERVER, UNLISTED, lookup, useAll } from "./features.mjs";

const server = { apiKey: "none", maxRetries: 0, configuration: { baseURL: `${SERVER}/v1` } };
const chatModel = new ChatOpenAI({ ...server, model: NAME, temperature: 0, maxTokens: 256 });
const schema = z.object({ container: z.literal("C417"), berth: z.literal("B42"), colour: z.literal("red") });
const lookupTool = tool(lookup, {
  name: LOOKUP.name,
  description: LOOKUP.description,
  schema: z.object({ container: z.string().regex(/^C[0-9]{3}$/) }),
});

const features = {
  async chat() {
    assert.equal((await chatModel.invoke(QUESTION)).content, ANSWER);
  },

  async chat_streamed() {
    let text = "";
    for await (const chunk of await chatModel.stream(QUESTION)) text += chunk.content;
    assert.equal(text, ANSWER);
  },

  async tools() {
    const bound = chatModel.bindTools([lookupTool]);
    const asked = { role: "user", content: UNLISTED };
    const first = await bound.invoke([asked]);
    const [call] = first.tool_calls;
    const result = await lookupTool.invoke({ ...call, type: "tool_call" });
    assert.equal((await bound.invoke([asked, first, result])).content, ANSWER);
  },

  async structured_output() {
    const found = await chatModel.withStructuredOutput(schema, { method: "jsonSchema" }).invoke(QUESTION);
    assert.deepEqual(found, RECORD);
  },

  async embeddings() {
    const embeddings = new OpenAIEmbeddings({ ...server, model: NAME });
    const vectors = await embeddings.embedDocuments(["berth", "crane"]);
    assert.deepEqual(vectors.map((vector) => vector.length), [256, 256]);
  },
};

await useAll("@langchain/openai", features);
