"""LangChain: chats, streams, tools, structured output."""
# CONFIGURE `ChatOpenAI(model=NAME, ...)` with `base_url="http://HOST:8000/v1"`, `api_key="none"`

from __future__ import annotations

import os

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Colour(BaseModel):
    """A colour."""

    hue: int


@tool
def add(a: int) -> int:
    """Adds one."""
    return a + 1


model = ChatOpenAI(model=os.environ["MODEL"], base_url=os.environ["URL"] + "/v1", api_key="none", max_tokens=64)
assert model.invoke("Name a colour.").content
assert "".join(chunk.content for chunk in model.stream("Name a colour."))
assert model.bind_tools([add], tool_choice="required").invoke("Add one to 4.").tool_calls
model.with_structured_output(Colour, method="json_schema", include_raw=True).invoke("A colour.")
print("WORKS chats, streams, tools, structured output")
