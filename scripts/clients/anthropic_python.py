"""The anthropic package: messages, streams, tools, counting tokens, models."""
# CONFIGURE `base_url="http://HOST:8000"`, `api_key="none"`

from __future__ import annotations

import os

import anthropic

MODEL = os.environ["MODEL"]
client = anthropic.Anthropic(base_url=os.environ["URL"], api_key="none")
MESSAGES = [{"role": "user", "content": "Name a colour."}]
TOOL = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}

message = client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=16)
assert message.content[0].text
with client.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=16) as stream:
    assert "".join(stream.text_stream)
called = client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=64, tools=[TOOL], tool_choice={"type": "any"})
assert called.stop_reason in ("tool_use", "max_tokens")
assert client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens
assert client.models.list().data[0].id
print("WORKS messages, streams, tools, counting tokens, models")
