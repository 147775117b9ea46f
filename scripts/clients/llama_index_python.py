"""LlamaIndex: completions, chats, streams."""
# CONFIGURE `OpenAILike(model=NAME, api_base="http://HOST:8000/v1", api_key="none", is_chat_model=True)`

from __future__ import annotations

import os

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

model = OpenAILike(
    model=os.environ["MODEL"], api_base=os.environ["URL"] + "/v1", api_key="none", is_chat_model=True, max_tokens=16
)
assert model.complete("Name a colour.").text
assert model.chat([ChatMessage(role="user", content="Name a colour.")]).message.content
assert "".join(chunk.delta or "" for chunk in model.stream_complete("Name a colour."))
print("WORKS completions, chats, streams")
