// The AI SDK with its providers for OpenAI-compatible servers and for Anthropic.
// CONFIGURE `createOpenAICompatible({name, baseURL: "http://HOST:8000/v1"})`, or `createAnthropic({baseURL: "http://HOST:8000/v1"})`
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";
const url = process.env.URL;
const providers = [
  createOpenAICompatible({ name: "octavo", baseURL: url + "/v1" }),
  createAnthropic({ baseURL: url + "/v1", apiKey: "none" }),
];
for (const provider of providers) {
  const model = provider(process.env.MODEL);
  const answer = await generateText({ model, prompt: "Name a colour.", maxOutputTokens: 16 });
  if (!answer.text) throw new Error("no answer");
  let text = "";
  for await (const part of streamText({ model, prompt: "Name a colour.", maxOutputTokens: 16 }).textStream) text += part;
  if (!text) throw new Error("no stream");
}
console.log("WORKS texts and streams, as an OpenAI-compatible server and as Anthropic");
