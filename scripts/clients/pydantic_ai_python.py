"""pydantic-ai: an agent with a tool, and with an output type."""
# CONFIGURE `OpenAIProvider` with `base_url="http://HOST:8000/v1"`, `api_key="none"`

from __future__ import annotations

import os

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(os.environ["MODEL"], provider=OpenAIProvider(base_url=os.environ["URL"] + "/v1", api_key="none"))
agent = Agent(model, model_settings={"max_tokens": 32})


@agent.tool_plain
def add(a: int) -> int:
    """Adds one."""
    return a + 1


assert agent.run_sync("Name a colour.").output is not None
print("WORKS agents with tools")
