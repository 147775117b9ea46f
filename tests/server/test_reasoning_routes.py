"""Reasoning over the routes of OpenAI's Responses API and of Anthropic's Messages API, as their packages see it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.server.running_server import Running

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client(special_server: Running) -> Iterator[openai.OpenAI]:
    with special_server.client() as client:
        yield client


@pytest.fixture(scope="module")
def claude(special_server: Running) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=special_server.url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def ends_soon(special_server: Running) -> dict[str, Any]:
    """A random model has to be told to end its reasoning; spaces and line breaks, to end a form."""
    with special_server.http() as http:
        tokens = {
            text: http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in ("</think>", " \n\t")
        }
    bias = {str(token): -50 for token in tokens[" \n\t"]} | {str(tokens["</think>"][0]): 3.5}
    return {"temperature": 1.0, "seed": 3, "logit_bias": bias}


def test_reasoning_is_an_item_before_the_message(client: openai.OpenAI, ends_soon: dict[str, Any]) -> None:
    given: dict[str, Any] = {
        "model": "tiny", "input": "hi", "max_output_tokens": 150, "extra_body": ends_soon,
        "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
    }  # fmt: skip
    response = client.responses.create(**given)
    assert response.status == "completed" and response.usage is not None
    reasoning, message = response.output
    assert reasoning.type == "reasoning" and message.type == "message"
    assert reasoning.content and reasoning.content[0].text and "think>" not in reasoning.content[0].text
    assert isinstance(json.loads(response.output_text)["a"], bool)
    thought = response.usage.output_tokens_details.reasoning_tokens
    assert 0 < thought < response.usage.output_tokens
    with client.responses.stream(**given) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message"]
    assert (
        final.output_text == response.output_text
        and final.output[0].to_dict()["content"] == (reasoning.to_dict()["content"])
    )
    pieces = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert len(pieces) > 1 and "".join(pieces) == reasoning.content[0].text
    # What the template leaves out of later turns is accepted there.
    items: list[Any] = [*HI, *[item.to_dict() for item in response.output], *HI]
    assert client.responses.create(model="tiny", input=items, max_output_tokens=2).output
    assert client.responses.create(
        model="tiny", input="hi", previous_response_id=response.id, max_output_tokens=2
    ).output


def test_logprobs_are_those_of_the_message_without_its_reasoning(
    client: openai.OpenAI, ends_soon: dict[str, Any]
) -> None:
    given: dict[str, Any] = {
        "model": "tiny", "input": "hi", "max_output_tokens": 150, "extra_body": ends_soon,
        "include": ["message.output_text.logprobs"],
        "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
    }  # fmt: skip
    message = client.responses.create(**given).output[1]
    assert message.type == "message" and message.content[0].type == "output_text"
    logprobs = message.content[0].logprobs or []
    # A token of this model is a byte.
    assert "".join(entry.token for entry in logprobs) == message.content[0].text
    streamed = []
    with client.responses.stream(**given) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                assert "".join(entry.token for entry in event.logprobs) == event.delta
                streamed += [entry.to_dict() for entry in event.logprobs]
    assert streamed == [entry.to_dict() for entry in logprobs]


def test_reasoning_that_is_cut_off_leaves_no_message(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    response = client.responses.create(model="tiny", input="hi", max_output_tokens=5, extra_body={"ignore_eos": True})
    [reasoning] = response.output
    assert reasoning.type == "reasoning"
    assert (reasoning.status, response.status) == ("incomplete", "incomplete")
    message = claude.messages.create(model="tiny", messages=HI, max_tokens=5, extra_body={"ignore_eos": True})
    [thinking] = message.content
    assert (thinking.type, message.stop_reason) == ("thinking", "max_tokens")


def test_reasoning_is_a_block_before_the_text(claude: anthropic.Anthropic, ends_soon: dict[str, Any]) -> None:
    given: dict[str, Any] = {
        "model": "tiny", "messages": HI, "max_tokens": 150, "extra_body": ends_soon,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    }  # fmt: skip
    message = claude.messages.create(**given)
    thinking, text = message.content
    assert thinking.type == "thinking" and thinking.thinking and text.type == "text"
    assert isinstance(json.loads(text.text)["a"], bool) and message.stop_reason == "end_turn"
    assert message.usage.output_tokens_details is not None
    assert 0 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens
    with claude.messages.stream(**given) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in message.content]
    assert {"thinking", "text"} <= kinds
    again = claude.messages.create(
        model="tiny", messages=[*HI, message.to_param(), *HI], max_tokens=2, thinking={"type": "disabled"}
    )
    assert again.content[0].type == "text"


def test_thinking_sets_the_variable_of_the_template(special_server: Running, claude: anthropic.Anthropic) -> None:
    kinds: Any = ({"type": "adaptive"}, {"type": "enabled", "budget_tokens": 5}, {"type": "disabled"})
    counts = [
        claude.messages.count_tokens(model="tiny", messages=HI, thinking=thinking).input_tokens
        for thinking in kinds
    ]  # fmt: skip
    assert counts[0] == counts[1] == counts[2] - 1
    with special_server.http() as http:
        body = {"model": "tiny", "input": "hi", "max_output_tokens": 4, "ignore_eos": True}
        answer = http.post("/v1/responses", json={**body, "reasoning": {"effort": "none"}}).json()
        assert [item["type"] for item in answer["output"]] == ["message"]
        # The template has no levels, but reasoning can be turned on.
        answer = http.post("/v1/responses", json={**body, "reasoning": {"effort": "high"}}).json()
        assert answer["output"][0]["type"] == "reasoning"


@pytest.mark.parametrize("budget", [0, 6])
def test_reasoning_is_closed_after_its_budget_on_every_route(
    special_server: Running, client: openai.OpenAI, claude: anthropic.Anthropic, budget: int
) -> None:
    free: dict[str, Any] = {"ignore_eos": True}
    given = {**free, "thinking_token_budget": budget}
    with special_server.http() as http:
        chat = http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 20, **given}).json()
        text = http.post("/v1/completions", json={"prompt": "x<think>", "max_tokens": 20, **given}).json()
        whole = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 20, **given}).json()
    message, usage = chat["choices"][0]["message"], chat["usage"]
    assert message["content"] and len(message.get("reasoning_content") or "") <= budget
    # With the mark that ends it.
    assert usage["completion_tokens_details"]["reasoning_tokens"] == budget + 1
    assert text["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 20
    response = client.responses.create(model="tiny", input="hi", max_output_tokens=20, extra_body=given)
    assert response.usage is not None and response.usage.output_tokens_details.reasoning_tokens == budget + 1
    assert response.output[-1].type == "message"
    if budget:
        thinking: Any = {"type": "enabled", "budget_tokens": budget}
        answer = claude.messages.create(model="tiny", messages=HI, max_tokens=20, thinking=thinking, extra_body=free)
        assert [block.type for block in answer.content] == ["thinking", "text"]
    # The tiny model's random text must not happen to end its reasoning.
    endless = {**free, "thinking_token_budget": -1, "bad_words": ["</think>"]}
    with special_server.http() as http:
        chat = http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 20, **endless}).json()
    assert not chat["choices"][0]["message"]["content"]
