"""Tools and structured results over the routes of the openai and the anthropic package."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel, Field

from tests.server.running_server import Running

QUESTION = "What is the weather in Rome?"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION: Any = {"type": "function", "name": "weather", "description": "The weather of a city.", "parameters": SCHEMA}
OTHER: Any = {"type": "function", "name": "news", "parameters": {"type": "object", "properties": {}}}
TOOL: Any = {"name": "weather", "description": "The weather of a city.", "input_schema": SCHEMA}
#: A small model repeats line breaks between the tokens of JSON without end, if it may.
STEADY = {"temperature": 0, "frequency_penalty": 1.0}
RESULT = "Sunny, 21 degrees."


class City(BaseModel):
    name: str = Field(max_length=20)
    people: int = Field(ge=0, le=10**8)


@pytest.fixture(scope="module")
def client(demo_server: Running) -> Iterator[openai.OpenAI]:
    with demo_server.client() as client:
        yield client


@pytest.fixture(scope="module")
def claude(demo_server: Running) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=demo_server.url, api_key="none", max_retries=0)


def prompt_of(server: Running, messages: list[dict[str, Any]]) -> str:
    """What the template writes of a chat with the tool."""
    function = {key: FUNCTION[key] for key in ("name", "description", "parameters")}
    with server.http() as http:
        body = {"messages": messages, "tools": [{"type": "function", "function": function}]}
        prompt: str = http.post("/tokenize", json=body).json()["prompt"]
    return prompt


def is_wanted(arguments: dict[str, Any]) -> bool:
    return set(arguments) == {"city", "days"} and isinstance(arguments["city"], str) and arguments["days"] <= 9


# Responses ----------------------------------------------------------------------------------------------------------


def test_a_tool_goes_round_through_responses(client: openai.OpenAI, demo_server: Running) -> None:
    given: dict[str, Any] = {"model": "demo", "tools": [FUNCTION], "temperature": 0, "max_output_tokens": 200}
    choice: Any = {"type": "function", "name": "weather"}
    first = client.responses.create(input=QUESTION, tool_choice=choice, **given)
    [call] = first.output
    assert isinstance(call, openai.types.responses.ResponseFunctionToolCall) and call.status == "completed"
    assert call.name == "weather" and is_wanted(json.loads(call.arguments)) and first.status == "completed"
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    given["max_output_tokens"] = 12
    second = client.responses.create(input=[output], previous_response_id=first.id, tool_choice="none", **given)
    assert second.output_text
    # The same without the server's memory, in items and in messages.
    items: list[Any] = [{"role": "user", "content": QUESTION}, *[item.to_dict() for item in first.output], output]
    assert client.responses.create(input=items, tool_choice="none", **given).output_text == second.output_text
    function = {"name": call.name, "arguments": call.arguments}
    messages: list[Any] = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "tool_calls": [{"id": call.call_id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call.call_id, "content": RESULT},
    ]
    tools: Any = [{"type": "function", "function": {k: v for k, v in FUNCTION.items() if k != "type"}}]
    chat = client.chat.completions.create(
        model="demo", messages=messages, tools=tools, tool_choice="none", temperature=0, max_tokens=12
    )
    assert chat.choices[0].message.content == second.output_text
    assert RESULT in prompt_of(demo_server, messages)


def test_a_streamed_call_adds_up(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model="demo", input=QUESTION, tools=[FUNCTION, OTHER], tool_choice="required", parallel_tool_calls=False,
        temperature=0, max_output_tokens=200,
    ) as stream:  # fmt: skip
        events = list(stream)
        response = stream.get_final_response()
    [call] = response.output
    assert call.type == "function_call"
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments and isinstance(json.loads(call.arguments), dict)
    assert events[-1].type == "response.completed"


def test_only_allowed_tools_are_called(client: openai.OpenAI) -> None:
    choice: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "news"}]}
    response = client.responses.create(
        model="demo", input=QUESTION, tools=[FUNCTION, OTHER], tool_choice=choice, temperature=0, max_output_tokens=100
    )
    assert {item.name for item in response.output if item.type == "function_call"} == {"news"}


def test_results_are_parsed(client: openai.OpenAI) -> None:
    question = "Name a city and how many people live there, as JSON."
    response = client.responses.parse(
        model="demo", input=question, text_format=City, max_output_tokens=200, extra_body=STEADY
    )
    assert isinstance(response.output_parsed, City)
    completion = client.chat.completions.parse(
        model="demo", messages=[{"role": "user", "content": question}], response_format=City,
        max_tokens=200, extra_body=STEADY,
    )  # fmt: skip
    assert completion.choices[0].message.parsed == response.output_parsed
    json_object: Any = {"format": {"type": "json_object"}}
    free = client.responses.create(model="demo", input=question, text=json_object, max_output_tokens=100)
    if free.status == "completed":
        assert isinstance(json.loads(free.output_text), dict)
    else:
        assert free.output_text.lstrip().startswith("{")


def test_a_schema_that_cannot_be_followed_is_refused(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    schema: Any = {"type": "object", "properties": {"a": {"type": "strange"}}}
    strange: Any = [{**FUNCTION, "parameters": schema}]
    with pytest.raises(openai.BadRequestError, match="strange") as caught:
        text: Any = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
        client.responses.create(model="demo", input="a", text=text)
    assert caught.value.param == "text"
    with pytest.raises(openai.BadRequestError, match="strange") as caught:
        client.responses.create(model="demo", input="a", tools=strange, tool_choice="required")
    assert caught.value.param == "tools"
    with pytest.raises(anthropic.BadRequestError, match="strange"):
        claude.messages.create(
            model="demo", max_tokens=5, messages=[{"role": "user", "content": "a"}],
            output_config={"format": {"type": "json_schema", "schema": schema}},
        )  # fmt: skip


# Messages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}]
)
def test_a_tool_goes_round_through_messages(claude: anthropic.Anthropic, demo_server: Running, choice: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    given: dict[str, Any] = {"model": "demo", "tools": [TOOL], "extra_body": {"temperature": 0}}
    first = claude.messages.create(messages=messages, tool_choice=choice, max_tokens=200, **given)
    [use] = first.content
    assert use.type == "tool_use" and use.name == "weather" and is_wanted(use.input)
    assert first.stop_reason == "tool_use"
    with claude.messages.stream(messages=messages, tool_choice=choice, max_tokens=200, **given) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert (final.content[0].to_dict()["input"], final.stop_reason) == (use.input, "tool_use")
    assert "input_json" in kinds
    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": RESULT}
    messages += [first.to_param(), {"role": "user", "content": [result]}]
    second = claude.messages.create(messages=messages, tool_choice={"type": "none"}, max_tokens=12, **given)
    [text] = second.content
    assert text.type == "text" and text.text
    failed: Any = [*messages[:-1], {"role": "user", "content": [{**result, "content": "no", "is_error": True}]}]
    function = {"name": "weather", "arguments": json.dumps(use.input)}
    said = [
        messages[0],
        {"role": "assistant", "tool_calls": [{"id": use.id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": use.id, "content": "Error: no"},
    ]
    with demo_server.http() as http:
        prompt = prompt_of(demo_server, said)
        tokens = http.post("/tokenize", json={"prompt": prompt, "add_special_tokens": False}).json()["count"]
    assert claude.messages.count_tokens(model="demo", messages=failed, tools=[TOOL]).input_tokens == tokens


def test_a_message_has_the_form_that_its_schema_gives_it(claude: anthropic.Anthropic) -> None:
    schema = {**City.model_json_schema(), "additionalProperties": False}
    message = claude.messages.create(
        model="demo", max_tokens=200, messages=[{"role": "user", "content": "Name a city and its people as JSON."}],
        output_config={"format": {"type": "json_schema", "schema": schema}}, extra_body=STEADY,
    )  # fmt: skip
    [text] = message.content
    assert text.type == "text"
    City.model_validate_json(text.text)
