"""The calls that the routes of chats make: the same of the same chat, with the names that each route's clients know."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from octavo.core.errors import InvalidRequestError
from octavo.server import anthropic, cohere
from octavo.server.chat_call import ChatCall, Function, RequestTools, read_chat
from octavo.server.openai.protocol import ChatCompletionRequest
from octavo.server.openai.response_protocol import ResponsesRequest
from octavo.server.openai.response_request import ResponseInput, conversation, read_response_tools, response_call

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "Tells the weather.", "parameters": SCHEMA}
SERVICE: Any = SimpleNamespace(leave_out_tool=lambda path, kind: None)


def of_chat() -> ChatCall:
    body = ChatCompletionRequest.model_validate(
        {
            "messages": [{"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": "required",
            "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
            "temperature": 0.5,
            "stop": ["x"],
            "max_completion_tokens": 7,
        }
    )
    return read_chat(SERVICE, body, body.messages)


def of_response() -> ChatCall:
    body = ResponsesRequest.model_validate(
        {
            "instructions": "be short",
            "input": [{"role": "user", "content": "hi"}],
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": "required",
            "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
            "temperature": 0.5,
            "stop": ["x"],
            "max_output_tokens": 7,
        }
    )
    items: Any = body.input
    inputs = ResponseInput(None, items, 0, *conversation(body, items, []), *read_response_tools(SERVICE, body))
    return response_call(body, inputs)


def of_message() -> ChatCall:
    body = anthropic.MessagesRequest.model_validate(
        {
            "model": "m",
            "system": "be short",
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [{"name": "weather", "description": "Tells the weather.", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"},
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
            "temperature": 0.5,
            "stop_sequences": ["x"],
            "max_tokens": 7,
        }
    )
    return anthropic.chat_call(SERVICE, body)


def of_cohere() -> ChatCall:
    body = cohere.CohereChatRequest.model_validate(
        {
            "messages": [{"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": "REQUIRED",
            "response_format": {"type": "json_object", "schema": SCHEMA},
            "temperature": 0.5,
            "stop_sequences": ["x"],
            "max_tokens": 7,
        }
    )
    return cohere.chat_call(SERVICE, body)


@pytest.mark.parametrize("make", [of_chat, of_response, of_message, of_cohere])
def test_all_routes_make_the_same_call_of_the_same_chat(make: Any) -> None:
    call = make()
    assert call.messages == [{"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}]
    assert (call.tools.choice, call.tools.parallel, call.tools.callable) == ("required", True, {"weather": SCHEMA})
    assert [tool["function"] for tool in call.tools.shown] == [FUNCTION]
    assert call.answer_format.params.json == SCHEMA
    assert (call.fields.temperature, call.fields.stop, call.max_tokens) == (0.5, ["x"], 7)
    assert call.fields.top_p is None and call.fields.response_format is call.fields.stream_options


@pytest.mark.parametrize(
    ("make", "paths"),
    [
        (of_chat, ["messages[1].content", "response_format.json_schema.schema", "max_completion_tokens", "stop"]),
        (of_response, ["input[0].content", "text.format.schema", "max_output_tokens", "stop"]),
        (of_message, ["messages[1].content", "output_config.format.schema", "max_tokens", "stop_sequences"]),
        (of_cohere, ["messages[1].content", "response_format.schema", "max_tokens", "stop_sequences"]),
    ],
)
def test_errors_name_the_fields_of_the_route(make: Any, paths: list[str]) -> None:
    names = make().names
    here = ["messages[1].content", "structured_outputs.json", "max_tokens", "stop"]
    assert [InvalidRequestError("is wrong", path=path).renamed(names).path for path in here] == paths


def test_functions_are_refused_where_they_are_defined() -> None:
    functions = [Function.of(f"tools[{i}].function", "f", {"parameters": SCHEMA}) for i in range(2)]
    for wrong, path in (
        (lambda: RequestTools.of(functions), "tools[1].function.name"),
        (lambda: RequestTools.of([Function.of("tools[0]", "a b", {})]), "tools[0].name"),
        (lambda: Function.of("tools[0]", "f", {"parameters": {"type": "array"}}, field="in"), "tools[0].in.type"),
        (lambda: Function.of("tools[0]", "f", {"parameters": {"items": 5}}), "tools[0].parameters.items"),
        (lambda: RequestTools.of(functions[:1], "named", ["g"]), "tool_choice"),
        (lambda: RequestTools.of([], "required"), "tool_choice"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            wrong()
        assert caught.value.path == path
