// npm's `ai` with `@ai-sdk/openai-compatible` against a server: node ai_sdk.mjs URL MODEL. A line for each case, as JSON.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, generateObject, jsonSchema, streamText, tool } from "ai";

const [url, name] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: "server", baseURL: `${url}/v1`, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true,
});
const model = provider(name);
const limit = { maxOutputTokens: 8, maxRetries: 0 };
const schema = jsonSchema({ type: "object", properties: { a: { type: "boolean" } }, required: ["a"], additionalProperties: false });

const cases = {
  generateText: async () => {
    const { text, usage } = await generateText({ model, prompt: "Hello", ...limit });
    if (!text || !(usage.outputTokens >= 1)) throw new Error(JSON.stringify({ text, usage }));
  },
  "generateText, of a completion model": async () => {
    const { text } = await generateText({ model: provider.completionModel(name), prompt: "Hello", ...limit });
    if (!text) throw new Error("no text");
  },
  "generateText, a conversation with a system message": async () => {
    const messages = [
      { role: "user", content: "Hello" }, { role: "assistant", content: "Hi" }, { role: "user", content: "Go on" },
    ];
    await generateText({ model, system: "Be short.", messages, temperature: 0, seed: 1, stopSequences: ["\n"], ...limit });
  },
  streamText: async () => {
    const answer = streamText({ model, prompt: "Hello", ...limit, onError: () => {} });
    let whole = "";
    for await (const part of answer.fullStream) {
      if (part.type === "error") throw part.error;
      if (part.type === "text-delta") whole += part.text ?? part.delta ?? "";
    }
    const usage = await answer.usage;
    if (!whole || !(usage.outputTokens >= 1)) throw new Error(JSON.stringify({ whole, usage }));
  },
  generateObject: async () => {
    const { object } = await generateObject({ model, prompt: "Hello", schema, maxOutputTokens: 256, maxRetries: 0 });
    if (typeof object.a !== "boolean") throw new Error(JSON.stringify(object));
  },
  "generateText, with a tool at hand": async () => {
    const tools = { weather: tool({ description: "Tells the weather.", inputSchema: schema }) };
    await generateText({ model, prompt: "Hello", tools, toolChoice: "none", ...limit });
  },
};

for (const [caseName, run] of Object.entries(cases)) {
  let said = null;
  try {
    await run();
  } catch (error) {
    said = String(error?.message ?? error);
  }
  console.log(JSON.stringify({ name: `ai: ${caseName}`, said }));
}
