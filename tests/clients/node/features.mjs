// What the client programs for JavaScript share: what features.py is for those in Python.

import { readFileSync } from "node:fs";
import { basename } from "node:path";

const [url, folder] = process.argv.slice(2);
export const SERVER = url;
export const NAME = basename(folder);
export const QUESTION = "C417 B42 red\nC009 B07 blue\nWhere is C417?";
export const ANSWER = "C417 B42 red";
export const UNLISTED = "Where is C417?"; // here the model calls `lookup`, if it has the tool
export const RECORD = { container: "C417", berth: "B42", colour: "red" };

export const RECORD_SCHEMA = {
  type: "object",
  properties: Object.fromEntries(Object.entries(RECORD).map(([name, value]) => [name, { const: value }])),
  required: Object.keys(RECORD),
  additionalProperties: false,
};
export const LOOKUP = {
  name: "lookup",
  description: "The record of a container.",
  parameters: {
    type: "object",
    properties: { container: { type: "string", pattern: "^C[0-9]{3}$" } },
    required: ["container"],
    additionalProperties: false,
  },
};

export const lookup = ({ container }) => `${container} B42 red`;

// Use the features of a client, which this package is.
export async function useAll(name, features) {
  const installed = readFileSync(new URL(`node_modules/${name}/package.json`, import.meta.url), "utf8");
  console.log("@", `npm:${name}`, JSON.parse(installed).version);
  for (const [feature, use] of Object.entries(features)) {
    await use();
    console.log("@", feature);
  }
}
