"""litellm: chats and streams over OpenAI's and Anthropic's routes."""
# CONFIGURE `model="openai/NAME"`, `api_base="http://HOST:8000/v1"`

from __future__ import annotations

import os

import litellm

MODEL, URL = os.environ["MODEL"], os.environ["URL"]
MESSAGES = [{"role": "user", "content": "Name a colour."}]
for name, base in (("openai/", URL + "/v1"), ("anthropic/", URL), ("hosted_vllm/", URL + "/v1")):
    asked = {"model": name + MODEL, "api_base": base, "api_key": "none", "messages": MESSAGES, "max_tokens": 16}
    assert litellm.completion(**asked).choices[0].message.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True))
print("WORKS chats and streams over OpenAI's and Anthropic's routes")
