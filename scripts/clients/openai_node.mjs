// The openai package for Node: chats, streams, tools, responses.
// CONFIGURE `baseURL: "http://HOST:8000/v1"`, `apiKey: "none"`
import OpenAI from "openai";
const model = process.env.MODEL;
const client = new OpenAI({ baseURL: process.env.URL + "/v1", apiKey: "none" });
const messages = [{ role: "user", content: "Name a colour." }];
const answer = await client.chat.completions.create({ model, messages, max_tokens: 16 });
if (!answer.choices[0].message.content) throw new Error("no answer");
let text = "";
for await (const chunk of await client.chat.completions.create({ model, messages, max_tokens: 16, stream: true }))
  text += chunk.choices[0]?.delta?.content ?? "";
if (!text) throw new Error("no stream");
const tool = { type: "function", function: { name: "add", parameters: { type: "object", properties: {} } } };
const called = await client.chat.completions.create({ model, messages, tools: [tool], tool_choice: "required", max_tokens: 64 });
if (!called.choices[0].message.tool_calls) throw new Error("no call");
const response = await client.responses.create({ model, input: "Name a colour.", max_output_tokens: 16 });
if (!response.output_text) throw new Error("no response");
console.log("WORKS chats, streams, tools, responses");
