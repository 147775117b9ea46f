// The anthropic package for Node: messages, streams.
// CONFIGURE `baseURL: "http://HOST:8000"`, `apiKey: "none"`
import Anthropic from "@anthropic-ai/sdk";
const model = process.env.MODEL;
const client = new Anthropic({ baseURL: process.env.URL, apiKey: "none" });
const messages = [{ role: "user", content: "Name a colour." }];
const message = await client.messages.create({ model, messages, max_tokens: 16 });
if (!message.content[0].text) throw new Error("no answer");
const final = await client.messages.stream({ model, messages, max_tokens: 16 }).finalMessage();
if (!final.content[0].text) throw new Error("no stream");
console.log("WORKS messages, streams");
