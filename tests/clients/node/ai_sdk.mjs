// The AI SDK (`ai`) with its provider for servers with OpenAI's API. Prints what features.py prints.

import assert from "node:assert/strict";

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embedMany, generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

import { ANSWER, NAME, QUESTION, RECORD, SERVER, UNLISTED, lookup, useAll } from "./features.mjs";


const provider = createOpenAICompatible({
  name: "longshore",
  baseURL: `${SERVER}/v1`,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const asked = { model: provider(NAME), temperature: 0, maxOutputTokens: 256, maxRetries: 0 };
const schema = z.object({
  container: z.literal("C417"),
  berth: z.literal("B42"),
  colour: z.literal("red"),
});
const tools = {
  lookup: tool({
    description: "The record of a container.",
    inputSchema: z.object({ container: z.string().regex(/^C[0-9]{3}$/) }),
    execute: async (given) => lookup(given),
  }),
};

async function textOf(stream) {
  let text = "";
  for await (const part of stream) text += part;
  return text;
}

const features = {
  async chat() {
    const answer = await generateText({ ...asked, prompt: QUESTION });
    assert.equal(answer.text, ANSWER);
    assert.equal(answer.finishReason, "stop");
    assert.equal(answer.usage.outputTokens, 4);
  },

  async chat_streamed() {
    const stream = streamText({ ...asked, prompt: QUESTION });
    assert.equal(await textOf(stream.textStream), ANSWER);
    assert.equal((await stream.usage).outputTokens, 4);
  },

  async chat_with_history() {
    const messages = [{ role: "user", content: QUESTION }];
    const first = await generateText({ ...asked, messages });
    messages.push(...first.response.messages, { role: "user", content: "And C009?" });
    assert.equal((await generateText({ ...asked, messages })).text, "C009 B07 blue");
  },

  async tools() {
    const answer = await generateText({ ...asked, prompt: UNLISTED, tools, stopWhen: stepCountIs(3) });
    assert.equal(answer.steps.length, 2);
    assert.equal(answer.text, ANSWER);
  },

  async tools_streamed() {
    const stream = streamText({ ...asked, prompt: UNLISTED, tools, stopWhen: stepCountIs(3) });
    assert.equal(await textOf(stream.textStream), ANSWER);
    assert.equal((await stream.steps).length, 2);
  },

  async forced_tool_calls() {
    const answer = await generateText({ ...asked, prompt: QUESTION, tools, toolChoice: "required" });
    assert.ok(answer.toolCalls.length >= 1);
    const isCut = answer.finishReason === "length"; // then the last call is not complete
    const calls = isCut ? answer.toolCalls.slice(0, -1) : answer.toolCalls;
    for (const call of calls) assert.match(call.input.container, /^C[0-9]{3}$/);
  },

  async structured_output() {
    assert.deepEqual((await generateObject({ ...asked, prompt: QUESTION, schema })).object, RECORD);
  },

  async structured_output_streamed() {
    const stream = streamObject({ ...asked, prompt: QUESTION, schema });
    for await (const _ of stream.partialObjectStream);
    assert.deepEqual(await stream.object, RECORD);
  },

  async completions() {
    const model = provider.completionModel(NAME);
    const answer = await generateText({ ...asked, model, prompt: "C417", maxOutputTokens: 4 });
    assert.ok(answer.usage.outputTokens <= 4);
  },

  async embeddings() {
    const model = provider.embeddingModel(NAME);
    const { embeddings } = await embedMany({ model, values: ["berth", "crane"], maxRetries: 0 });
    assert.deepEqual(embeddings.map((embedding) => embedding.length), [256, 256]);
  },

  async errors() {
    const unknown = generateText({ ...asked, model: provider("other"), prompt: QUESTION });
    await assert.rejects(unknown, (error) => APICallError.isInstance(error) && error.statusCode === 404);
  },
};

await useAll("ai", features);
