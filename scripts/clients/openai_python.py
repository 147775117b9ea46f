"""The openai package: chats, streams, tools, structured output, responses."""
# CONFIGURE `base_url="http://HOST:8000/v1"`, `api_key="none"`

from __future__ import annotations

import os

import openai
from pydantic import BaseModel

MODEL = os.environ["MODEL"]
client = openai.OpenAI(base_url=os.environ["URL"] + "/v1", api_key="none")
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
MESSAGES = [{"role": "user", "content": "Name a colour."}]


class Colour(BaseModel):
    """What the model fills in."""

    name: str


answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=16)
assert answer.choices[0].message.content
chunks = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=16, stream=True)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
called = client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice="required", max_tokens=64)
assert called.choices[0].message.tool_calls
form = {"type": "json_schema", "json_schema": {"name": "c", "schema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}, "strict": True}}
assert client.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=form, max_tokens=64).choices
response = client.responses.create(model=MODEL, input="Name a colour.", max_output_tokens=16)
assert response.output_text
with client.responses.stream(model=MODEL, input="Name a colour.", max_output_tokens=16) as stream:
    assert [event.type for event in stream][-1] in ("response.completed", "response.incomplete")
print("WORKS chats, streams, tools, structured output, responses")
