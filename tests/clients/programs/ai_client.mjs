// Vercel's AI SDK at the gateway: `node ai_client.mjs URL MODEL`, in a folder whose node_modules have it.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, streamText } from "ai";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
const asked = { baseURL: `${url}/v1`, apiKey: "x", name: "kvasir" };
const schema = z.object({ letter: z.enum(["A", "B"]), points: z.number().int() });
const found = {};
const models = {
  openai: createOpenAI(asked).chat(name),
  compatible: createOpenAICompatible(asked)(name),
  structured: createOpenAICompatible({ ...asked, supportsStructuredOutputs: true })(name),
};
for (const [kind, model] of Object.entries(models)) {
  found[`${kind} generateText`] = (await generateText({ model, prompt: "What is a queue?", maxRetries: 0 })).text;
  found[`${kind} streamText`] = await streamText({ model, prompt: "What is a queue?", maxRetries: 0 }).text;
  if (kind !== "compatible") {
    found[`${kind} generateObject`] = (await generateObject({ model, schema, prompt: "Grade.", maxRetries: 0 })).object;
  }
}
console.log(JSON.stringify(found));
