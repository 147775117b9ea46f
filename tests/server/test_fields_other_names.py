"""Fields of other servers do what the field here does that says the same; two that differ are refused by both names."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from octavo.core.errors import InvalidRequestError
from octavo.server.answer_format import read_answer_format
from octavo.server.anthropic import MessagesRequest
from octavo.server.http.errors import ApiError
from octavo.server.llamacpp import LlamaCompletionRequest
from octavo.server.openai.protocol import ChatCompletionRequest, CompletionRequest
from octavo.server.openai.response_protocol import ResponsesRequest
from tests.server.running_server import Running

USER = {"role": "user", "content": "hi"}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}


def chat(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"messages": [USER], **fields})


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"repeat_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"repeat_penalty": 1.5, "repetition_penalty": 1.5, "repeat_last_n": 64}, "repetition_penalty", 1.5),
        ({"repeat_penalty": 1.5, "repeat_last_n": 0}, "repetition_penalty", 1.0),
        ({"n_predict": 7}, "max_tokens", 7),
        ({"num_predict": 7, "n_predict": 7, "max_tokens": 7}, "max_tokens", 7),
        ({"num_predict": 7, "max_completion_tokens": 7}, "max_completion_tokens", 7),
        ({"num_predict": -1}, "max_tokens", None),
        ({"num_predict": -1, "max_tokens": 7}, "max_tokens", 7),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking_token_budget", 9),
        ({"thinking": {"type": "disabled"}}, "thinks", False),
        ({"thinking": {"type": "adaptive"}}, "thinks", None),
        ({"thinking": True}, "thinks", True),
        ({"enable_thinking": False, "thinking": False}, "thinks", False),
        ({"reasoning": {"enabled": True}}, "thinks", True),
        ({"reasoning": {"effort": "high"}}, "reasoning_effort", "high"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "low"}, "reasoning_effort", "low"),
        ({"reasoning": {"max_tokens": 9}}, "thinking_token_budget", 9),
        ({"reasoning": {"exclude": True}}, "include_reasoning", False),
        ({"reasoning": {"effort": "none"}, "enable_thinking": False}, "reasoning_effort", "none"),
    ],
    ids=str,
)
def test_another_name_says_what_the_field_here_says(fields: dict[str, Any], name: str, value: Any) -> None:
    assert getattr(chat(**fields), name) == value


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"repeat_penalty": 1.5, "repetition_penalty": 1.1}, ["repeat_penalty", "repetition_penalty"]),
        ({"n_predict": 7, "max_tokens": 8}, ["n_predict", "max_tokens"]),
        ({"n_predict": 7, "max_completion_tokens": 8}, ["n_predict", "max_completion_tokens"]),
        ({"n_predict": 7, "num_predict": 8}, ["n_predict", "num_predict"]),
        ({"enable_thinking": True, "thinking": False}, ["enable_thinking", "thinking"]),
        ({"thinking": {"type": "disabled"}, "reasoning": {"enabled": True}}, ["thinking", "reasoning.enabled"]),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}, "thinking_token_budget": 8}, ["thinking.budget_tokens"]),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, ["reasoning.effort", "reasoning_effort"]),
        ({"reasoning_effort": "none", "enable_thinking": True}, ["reasoning_effort", "enable_thinking"]),
        ({"reasoning": {"exclude": True}, "include_reasoning": True}, ["reasoning.exclude", "include_reasoning"]),
    ],
    ids=str,
)
def test_two_names_with_different_values_are_refused_by_both(fields: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(ApiError) as error:
        chat(**fields)
    assert error.value.status == 400 and error.value.param in fields
    assert all(name in error.value.message for name in names)


def test_each_route_has_its_own_name_of_the_most_tokens() -> None:
    assert CompletionRequest.model_validate({"prompt": "a", "num_predict": 3}).max_tokens == 3
    assert CompletionRequest.model_validate({"prompt": "a", "num_predict": -1}).has_no_token_limit
    assert ResponsesRequest.model_validate({"input": "a", "n_predict": 3}).max_output_tokens == 3
    assert LlamaCompletionRequest.model_validate({"prompt": "a", "num_predict": 3}).n_predict == 3
    body = {"model": "m", "messages": [USER], "max_tokens": 3}
    assert MessagesRequest.model_validate({**body, "num_predict": 3, "repeat_penalty": 1.5}).repetition_penalty == 1.5
    with pytest.raises(ApiError, match="max_tokens"):
        MessagesRequest.model_validate({**body, "num_predict": 4})


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": SCHEMA, "structured_outputs": {"json": SCHEMA}},
        {"guided_json": '{"properties": {"a": {"type": "integer"}}, "type": "object"}', "json_schema": SCHEMA},
        {"guided_choice": ["a", "b"], "structured_outputs": {"choice": ["a", "b"]}},
        {"guided_regex": "a+", "regex": "a+", "structured_outputs": {"regex": "a+", "disable_any_whitespace": None}},
        {"guided_grammar": 'root ::= "a"', "ebnf": 'root ::= "a"'},
        {
            "guided_json": SCHEMA,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        },
    ],
    ids=str,
)
def test_a_form_may_be_given_under_several_names(fields: dict[str, Any]) -> None:
    one = {name: value for name, value in list(fields.items())[:1]}
    several, alone = read_answer_format(chat(**fields)), read_answer_format(chat(**one))
    assert several is not None and alone is not None and several.params.form == alone.params.form


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": SCHEMA, "structured_outputs": {"json": {"type": "string"}}},
        {"guided_choice": ["a", "b"], "structured_outputs": {"choice": ["b", "a"]}},
        {"guided_regex": "a+", "guided_choice": ["a"]},
    ],
    ids=str,
)
def test_forms_that_differ_are_refused_by_their_names(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as error:
        read_answer_format(chat(**fields))
    assert error.value.path in fields and all(name in error.value.problem for name in fields)


@pytest.fixture(scope="module")
def special(special_server: Running) -> httpx.Client:
    return special_server.http()


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, True),
        ({"enable_thinking": False}, False),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "enabled"}}, True),
        ({"reasoning": {"enabled": False}}, False),
        ({"reasoning": {"effort": "none"}}, False),
        ({"reasoning": {"effort": "high"}}, True),
    ],
    ids=str,
)
def test_templates_that_can_turn_reasoning_off_are_told(
    special: httpx.Client, fields: dict[str, Any], thinks: bool
) -> None:
    for route in ("/tokenize", "/apply-template"):
        response = special.post(route, json={"messages": [USER], **fields})
        assert response.status_code == 200, response.text
        assert response.json()["prompt"].endswith("<think>") == thinks
    response = special.post("/v1/chat/completions", json={"messages": [USER], "max_tokens": 2, **fields})
    assert response.status_code == 200, response.text


def test_a_contradiction_with_the_templates_variable_is_refused(special: httpx.Client) -> None:
    fields = {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}
    response = special.post("/v1/chat/completions", json={"messages": [USER], "max_tokens": 2, **fields})
    assert response.status_code == 400 and response.json()["error"]["param"] == "chat_template_kwargs"
    assert "enable_thinking" in response.json()["error"]["message"]


def test_a_conflict_is_an_error_of_the_api_on_every_route(http: httpx.Client) -> None:
    both = {"repeat_penalty": 1.5, "repetition_penalty": 1.1}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [USER]},
        "/v1/completions": {"prompt": "a"},
        "/v1/responses": {"input": "a"},
        "/v1/messages": {"model": "tiny", "messages": [USER], "max_tokens": 2},
        "/completion": {"prompt": "a"},
    }
    for route, body in bodies.items():
        response = http.post(route, json={**body, **both})
        assert response.status_code == 400, (route, response.text)
        assert all(name in response.json()["error"]["message"] for name in both), response.text


def test_the_penalty_and_the_limit_are_obeyed(http: httpx.Client) -> None:
    body = {"prompt": "hello", "temperature": 0, "ignore_eos": True}

    def text(**fields: Any) -> str:
        found: str = http.post("/v1/completions", json={**body, **fields}).json()["choices"][0]["text"]
        return found

    assert text(num_predict=8, repeat_penalty=2.0) == text(max_tokens=8, repetition_penalty=2.0) != text(max_tokens=8)
