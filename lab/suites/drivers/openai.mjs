// npm's `openai` against a server: node openai.mjs URL MODEL. Prints a line for each case, as JSON.
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Hello" }];
const limit = { model, max_tokens: 8 };

async function text(stream, part) {
  let whole = "";
  for await (const event of stream) whole += part(event) ?? "";
  if (!whole) throw new Error("an empty stream");
}

const cases = {
  "models.list": async () => {
    const names = [];
    for await (const each of client.models.list()) names.push(each.id);
    if (!names.includes(model)) throw new Error(`${model} is not in ${names}`);
  },
  "models.retrieve": async () => (await client.models.retrieve(model)).id,
  "completions.create": async () => {
    const answer = await client.completions.create({ ...limit, prompt: "Hello" });
    if (answer.usage.completion_tokens < 1) throw new Error(JSON.stringify(answer));
  },
  "completions.create, streamed": async () =>
    text(await client.completions.create({ ...limit, prompt: "Hello", stream: true }), (e) => e.choices[0]?.text),
  "chat.completions.create": async () => {
    const answer = await client.chat.completions.create({ ...limit, messages });
    if (answer.choices[0].message.role !== "assistant") throw new Error(JSON.stringify(answer));
  },
  "chat.completions.create, streamed": async () =>
    text(
      await client.chat.completions.create({ ...limit, messages, stream: true, stream_options: { include_usage: true } }),
      (e) => e.choices[0]?.delta.content,
    ),
  "chat.completions.stream": async () => {
    const stream = client.chat.completions.stream({ ...limit, messages });
    const final = await stream.finalChatCompletion();
    if (!final.choices[0].message.content) throw new Error(JSON.stringify(final));
  },
  "chat.completions.parse": async () => {
    const format = { type: "json_schema", json_schema: { name: "a", schema: { type: "object", properties: { a: { type: "boolean" } }, required: ["a"], additionalProperties: false }, strict: true } };
    const answer = await client.chat.completions.parse({ model, messages, response_format: format, max_tokens: 256 });
    if (typeof answer.choices[0].message.parsed?.a !== "boolean") throw new Error(JSON.stringify(answer));
  },
  "a stream that is left": async () => {
    const stream = await client.chat.completions.create({ model, messages, max_tokens: 2000, stream: true });
    for await (const _ of stream) break;
    stream.controller.abort();
  },
  "an unknown model is NotFoundError": async () => {
    try {
      await client.chat.completions.create({ ...limit, model: "absent", messages });
    } catch (error) {
      if (error instanceof OpenAI.NotFoundError && error.message) return;
      throw error;
    }
    throw new Error("no error");
  },
  "a wrong value is BadRequestError": async () => {
    try {
      await client.chat.completions.create({ ...limit, messages, temperature: 9 });
    } catch (error) {
      if (error instanceof OpenAI.BadRequestError && error.param === "temperature") return;
      throw error;
    }
    throw new Error("no error");
  },
};

for (const [name, run] of Object.entries(cases)) {
  let said = null;
  try {
    await run();
  } catch (error) {
    said = String(error?.message ?? error);
  }
  console.log(JSON.stringify({ name: `openai: ${name}`, said }));
}
