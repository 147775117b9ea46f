// The ollama package for Node: chats, streams, formats, models.
// CONFIGURE `host: "http://HOST:8000"`
import { Ollama } from "ollama";
const model = process.env.MODEL;
const client = new Ollama({ host: process.env.URL });
const messages = [{ role: "user", content: "Name a colour." }];
const options = { num_predict: 16 };
const answer = await client.chat({ model, messages, options });
if (!answer.message.content || !answer.eval_count) throw new Error("no answer");
let text = "";
for await (const part of await client.chat({ model, messages, options, stream: true })) text += part.message.content;
if (!text) throw new Error("no stream");
const made = await client.generate({ model, prompt: "Name a colour.", options });
if (!made.response || !made.context.length) throw new Error("no text");
const format = { type: "object", properties: { red: { type: "boolean" } }, required: ["red"] };
const formed = await client.chat({ model, messages, format, options: { num_predict: 64, temperature: 0 } });
if (typeof JSON.parse(formed.message.content).red !== "boolean") throw new Error("no format");
const [first] = (await client.list()).models;
if (!first.name.startsWith(model)) throw new Error("no list");
const shown = await client.show({ model });
if (!shown.capabilities.includes("completion")) throw new Error("no capabilities");
if ((await client.ps()).models.length !== 1) throw new Error("nothing is loaded");
try {
  await client.chat({ model: "none", messages });
  throw new Error("no error");
} catch (error) {
  if (error.status_code !== 404) throw error;
}
console.log("WORKS chats, streams, formats, models");
