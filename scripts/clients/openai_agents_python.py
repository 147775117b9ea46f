"""openai-agents: an agent with a tool over responses and over chats."""
# CONFIGURE `AsyncOpenAI` with `base_url="http://HOST:8000/v1"`, `api_key="none"`

from __future__ import annotations

import os

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from agents import set_tracing_disabled
from openai import AsyncOpenAI


@function_tool
def add(a: int) -> int:
    """Adds one."""
    return a + 1


set_tracing_disabled(True)
client = AsyncOpenAI(base_url=os.environ["URL"] + "/v1", api_key="none")
for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
    model = kind(model=os.environ["MODEL"], openai_client=client)
    agent = Agent(name="a", instructions="Be short.", model=model, tools=[add], model_settings=ModelSettings(max_tokens=2000))
    assert Runner.run_sync(agent, "Name a colour.", max_turns=4).final_output is not None
print("WORKS agents with tools, over responses and chats")
