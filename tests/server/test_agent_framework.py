"""An agent framework (pydantic-ai) drives the server over both of OpenAI's APIs, unchanged."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, RunContext, ToolOutput
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.messages import ToolCallPart, ToolReturnPart
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

from tests.server.running_server import Running

SETTINGS = ModelSettings(temperature=0, max_tokens=40)
CAPITAL = "What is the capital of France?"


class City(BaseModel):
    name: str
    people: int


@pytest.fixture(params=[OpenAIChatModel, pytest.param(OpenAIResponsesModel, marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest, demo_server: Running) -> Model:
    found: Model = request.param("demo", provider=OpenAIProvider(base_url=f"{demo_server.url}/v1", api_key="none"))
    return found


def test_it_chats_whole_and_in_a_stream(model: Model, demo_server: Running) -> None:
    with demo_server.client() as client:
        answer = client.chat.completions.create(
            model="demo",
            messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": CAPITAL}],
            temperature=0,
            max_tokens=40,
        )
    wanted = answer.choices[0].message.content
    agent = Agent(model, instructions="Be brief.", model_settings=SETTINGS)
    run = agent.run_sync(CAPITAL)
    assert run.output == wanted and answer.usage is not None
    assert run.usage.output_tokens == answer.usage.completion_tokens

    async def streamed() -> list[str]:
        async with agent.run_stream(CAPITAL) as stream:
            return [text async for text in stream.stream_text(delta=True, debounce_by=None)]

    pieces = asyncio.run(streamed())
    assert len(pieces) > 1 and "".join(pieces) == wanted
    more = agent.run_sync("And of Italy?", message_history=run.all_messages())
    assert more.output and len(more.all_messages()) == 4


class FirstCallsTheTool(AbstractCapability[Any]):
    """The first request has to call a tool, later ones have to answer."""

    def get_model_settings(self) -> Any:
        def settings(context: RunContext[Any]) -> ModelSettings:
            return ModelSettings(tool_choice="required" if context.run_step == 1 else "none")

        return settings


@pytest.mark.parametrize("streaming", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_calls_a_tool_and_tells_its_result(model: Model, streaming: bool) -> None:
    asked: list[tuple[str, int]] = []
    agent = Agent(model, model_settings=SETTINGS, capabilities=[FirstCallsTheTool()])

    @agent.tool_plain
    def weather(city: str, days: int) -> str:
        """The weather of a city in the next days."""
        asked.append((city, days))
        return "Sunny, 21 degrees."

    async def run() -> Any:
        if not streaming:
            return await agent.run("What will the weather be in Rome?")
        async with agent.run_stream("What will the weather be in Rome?") as stream:
            await stream.get_output()
            return stream

    messages = asyncio.run(run()).all_messages()
    parts = [part for message in messages for part in message.parts]
    calls = [part for part in parts if isinstance(part, ToolCallPart)]
    results = [part for part in parts if isinstance(part, ToolReturnPart)]
    assert calls and len(asked) == len(calls) == len(results)
    for call, result in zip(calls, results, strict=True):
        assert call.tool_call_id == result.tool_call_id and result.content == "Sunny, 21 degrees."
        assert set(call.args_as_dict()) == {"city", "days"}


@pytest.mark.parametrize("kind", [NativeOutput, ToolOutput])
def test_it_gets_a_structured_result(model: Model, kind: Any) -> None:
    # A small model repeats line breaks between the tokens of JSON without end, if it may.
    settings = ModelSettings(temperature=0, max_tokens=200, extra_body={"frequency_penalty": 1.0})
    agent: Agent[None, City] = Agent(model, output_type=kind(City), model_settings=settings)
    city = agent.run_sync("Name a city and how many people live there.").output
    assert isinstance(city, City) and isinstance(city.people, int)
