"""``/v1/responses`` as the openai package sees it, and beside the chats that it stands for."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent, response_create_params
from pydantic import TypeAdapter

from octavo.server.fields import marks_of
from octavo.server.openai.response_protocol import ResponsesRequest
from tests.server.answers import answer_of, chat_text, error_of, named_events
from tests.server.running_server import Running

ROUTE, CHAT = "/v1/responses", "/v1/chat/completions"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
#: Of a conversation in items, and the messages that say the same.
ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
     "content": [{"type": "output_text", "text": "yo", "annotations": [], "logprobs": []}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"role": "assistant", "content": "so"},
    {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
]  # fmt: skip
MESSAGES = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "assistant", "content": "so", "reasoning_content": "hm"},
    {"role": "user", "content": "a\nb"},
]


def create(http: httpx.Client, **body: Any) -> dict[str, Any]:
    """A response, checked by the types of the openai package."""
    body = {"input": "hi", "max_output_tokens": 8, "temperature": 0, **body}
    raw: dict[str, Any] = answer_of(http, ROUTE, **body)
    Response.model_validate(raw, strict=True)
    return raw


def streamed(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each checked by the types of the openai package."""
    events = named_events(http, ROUTE, {"input": "hi", "max_output_tokens": 8, "temperature": 0, **body})
    for event in events:
        EVENT.validate_python(event, strict=True)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def refused(http: httpx.Client, status: int = 400, **body: Any) -> dict[str, Any]:
    return error_of(http, ROUTE, status=status, **{"input": "hi", "max_output_tokens": 2, **body})


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


# Answers ------------------------------------------------------------------------------------------------------------


def test_a_response_is_the_chat_that_its_items_say(http: httpx.Client) -> None:
    assert text_of(create(http)) == chat_text(http, [{"role": "user", "content": "hi"}])
    response = create(http, instructions="be short", input=ITEMS)
    assert text_of(response) == chat_text(http, MESSAGES)
    developer = [{"role": "developer", "content": "be short"}, *ITEMS]
    assert text_of(create(http, input=developer)) == text_of(response)
    both = create(http, instructions="be", input=[{"role": "system", "content": "short"}, *ITEMS])
    assert text_of(both) == chat_text(http, [{"role": "system", "content": "be\n\nshort"}, *MESSAGES[1:]])


def test_a_response_repeats_its_request(http: httpx.Client) -> None:
    given = {"metadata": {"a": "b"}, "user": "me", "instructions": "x", "truncation": "auto", "top_p": 0.5}
    response = create(http, **given, text={"format": {"type": "text"}, "verbosity": "medium"}, ignore_eos=True)
    assert {name: response[name] for name in given} == given
    assert response["text"] == {"format": {"type": "text"}, "verbosity": "medium"}
    assert (response["max_output_tokens"], response["temperature"], response["store"]) == (8, 0, True)
    usage = response["usage"]
    assert usage["output_tokens"] == 8 and usage["total_tokens"] == usage["input_tokens"] + 8
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    [item] = response["output"]
    assert item["status"] == "incomplete"


def test_a_response_repeats_its_tools(http: httpx.Client) -> None:
    bare = {"type": "function", "name": "g"}
    response = create(http, tools=[FUNCTION, bare], tool_choice="none")
    assert response["tools"] == [{**FUNCTION, "strict": False}, {**bare, "parameters": None, "strict": False}]
    assert response["tool_choice"] == "none" and response["parallel_tool_calls"] is True


def test_an_answer_that_ends_by_itself_is_completed(http: httpx.Client) -> None:
    response = create(http, logit_bias={"1": 100})
    assert (response["status"], response["incomplete_details"]) == ("completed", None)
    assert text_of(response) == "" and response["output"][0]["status"] == "completed"
    assert response["completed_at"] >= response["created_at"]


def test_the_events_of_a_stream_add_up_to_the_response(http: httpx.Client) -> None:
    whole = create(http, instructions="be short", input=ITEMS)
    events = streamed(http, instructions="be short", input=ITEMS)
    kinds = [event["type"] for event in events]
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * len(deltas), "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert len(deltas) > 1 and "".join(deltas) == text_of(whole)
    final = events[-1]["response"]
    new = dict.fromkeys(("id", "created_at", "completed_at", "usage"))
    assert {**final, **new, "output": [{**final["output"][0], "id": ""}]} == {
        **whole, **new, "output": [{**whole["output"][0], "id": ""}],
    }  # fmt: skip
    assert events[-2]["item"] == final["output"][0]
    assert http.get(f"{ROUTE}/{final['id']}").json() == final


def test_the_openai_package_drives_it(tiny_server: Running) -> None:
    with tiny_server.client() as client:
        first = client.responses.create(model="tiny", input="hi", max_output_tokens=6, temperature=0)
        assert first.output_text and first.model == "tiny"
        with client.responses.stream(model="tiny", input="hi", max_output_tokens=6, temperature=0) as stream:
            deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(deltas) == first.output_text
        second = client.responses.create(
            model="tiny", input="more", previous_response_id=first.id, max_output_tokens=6, temperature=0
        )
        assert second.previous_response_id == first.id
        assert client.responses.retrieve(second.id).output_text == second.output_text
        client.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError, match="not known here"):
            client.responses.retrieve(second.id)


def test_logprobs_are_those_of_the_chat(http: httpx.Client) -> None:
    include = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    [choice] = http.post(
        CHAT,
        json={
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 8,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 2,
        },
    ).json()["choices"]
    response = create(http, **include)
    assert response["output"][0]["content"][0]["logprobs"] == choice["logprobs"]["content"]
    events = streamed(http, **include)
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == choice["logprobs"]["content"]
    assert create(http)["output"][0]["content"][0]["logprobs"] == []


# Conversations ------------------------------------------------------------------------------------------------------


def test_a_response_is_continued_with_its_own_input_and_output_but_other_instructions(http: httpx.Client) -> None:
    first = create(http, instructions="be short", input="one")
    second = create(http, input="two", previous_response_id=first["id"], instructions="be long")
    third = create(http, input="three", previous_response_id=second["id"])
    said = [{"role": "user", "content": "one"}, {"role": "assistant", "content": text_of(first)}]
    said += [{"role": "user", "content": "two"}]
    assert text_of(second) == chat_text(http, [{"role": "system", "content": "be long"}, *said])
    said += [{"role": "assistant", "content": text_of(second)}, {"role": "user", "content": "three"}]
    assert text_of(third) == chat_text(http, said)


def test_what_is_not_kept_is_not_found(http: httpx.Client) -> None:
    unstored = create(http, store=False)
    assert unstored["store"] is False
    for gone in (unstored["id"], "resp_no", "x" * 300):
        error = refused(http, 404, previous_response_id=gone)
        assert error["code"] == "response_not_found" and error["param"] == "previous_response_id"
        assert "forgets older ones" in error["message"]
        assert http.get(f"{ROUTE}/{gone}").status_code == 404 == http.delete(f"{ROUTE}/{gone}").status_code
    stored = create(http)
    assert http.get(f"{ROUTE}/{stored['id']}", params={"stream": "true"}).status_code == 400
    assert http.delete(f"{ROUTE}/{stored['id']}").json() == {"id": stored["id"], "object": "response", "deleted": True}
    assert http.get(f"{ROUTE}/{stored['id']}").status_code == 404


def test_truncation_leaves_out_the_oldest_messages(http: httpx.Client) -> None:
    turns = [{"role": "user", "content": f"{i}" * 30} for i in range(10)]
    for truncation in (None, "disabled"):
        error = refused(http, input=turns, instructions="sys", max_output_tokens=None, truncation=truncation)
        assert error["code"] == "context_length_exceeded" and error["param"] == "input"
    response = create(http, input=turns, instructions="sys", truncation="auto")
    kept = [{"role": "system", "content": "sys"}, *turns]
    while True:
        answer = http.post(CHAT, json={"messages": kept, "max_tokens": 8, "temperature": 0})
        if answer.status_code == 200:
            break
        del kept[1]
    assert 2 < len(kept) < 10 and text_of(response) == answer.json()["choices"][0]["message"]["content"]
    error = refused(http, input="x" * 300, truncation="auto")
    assert error["code"] == "context_length_exceeded"
    error = refused(http, truncation="auto", max_output_tokens=1000)
    assert (error["param"], error["code"]) == ("max_output_tokens", "context_length_exceeded")


# Fields -------------------------------------------------------------------------------------------------------------

WORKS, HARMLESS, REFUSED = "works", "harmless", "refused"
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
#: Field of OpenAI's API -> what becomes of it, a value of which this holds, and values of a refused one that are
#: accepted.
TABLE: dict[str, tuple[Any, ...]] = {
    "background": (WORKS, False),  # true: see test_background_responses.py
    "context_management": (REFUSED, [{"type": "compaction"}], []),
    "conversation": (REFUSED, "conv_1"),
    "include": (REFUSED, ["all"], ["reasoning.encrypted_content", "web_search_call.action.sources"]),
    "input": (WORKS, "bye"),
    "instructions": (WORKS, "be short"),
    "max_output_tokens": (WORKS, 3),
    "max_tool_calls": (HARMLESS, 3),
    "metadata": (HARMLESS, {"a": "b"}),
    "model": (WORKS, "alias"),
    "moderation": (REFUSED, {"model": "m"}),
    "parallel_tool_calls": (WORKS, False),
    "previous_response_id": (WORKS, None),
    "prompt": (REFUSED, {"id": "pmpt_1"}),
    "prompt_cache_key": (HARMLESS, "a"),
    "prompt_cache_options": (HARMLESS, {}),
    "prompt_cache_retention": (HARMLESS, "24h"),
    "reasoning": (WORKS, {"summary": "auto"}),
    "safety_identifier": (HARMLESS, "a"),
    "service_tier": (HARMLESS, "priority"),
    "store": (WORKS, False),
    "stream": (WORKS, None),
    "stream_options": (REFUSED, {"include_obfuscation": True}),  # without stream
    "temperature": (WORKS, 2.0),
    "text": (WORKS, {"format": {"type": "text"}}),
    "tool_choice": (WORKS, "none"),
    "tools": (WORKS, []),
    "top_logprobs": (HARMLESS, 2),  # without include
    "top_p": (WORKS, 0.5),
    "truncation": (WORKS, "auto"),
    "user": (WORKS, "me"),
}


@pytest.mark.parametrize("name", TABLE)
def test_a_field_does_what_the_table_says(http: httpx.Client, name: str) -> None:
    outcome, value, *accepted = TABLE[name]
    if outcome == REFUSED:
        error = refused(http, **{name: value})
        assert error["param"] == name and name in error["message"], error
    else:
        create(http, **{name: value})
    for harmless in (None, *accepted) if outcome == REFUSED else (value,) if outcome == HARMLESS else ():
        assert text_of(create(http, **{name: harmless})) == text_of(create(http))


def test_the_table_has_every_field_of_openai() -> None:
    known = set(response_create_params.ResponseCreateParamsBase.__annotations__) | {"stream"}
    assert set(TABLE) == known
    for name in known:
        mark = marks_of(ResponsesRequest)[name]
        assert mark is None or TABLE[name][0] == (HARMLESS if mark.is_hint else REFUSED), name


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": None}, "input", []),
        ({"input": []}, "input", []),
        ({"input": ["hi"]}, "input", []),
        ({"input": [{"role": "critic", "content": "a"}]}, "input", ["input[0].role", "critic"]),
        ({"input": [{"role": "user"}]}, "input", ["input[0].content"]),
        ({"input": [{"role": "user", "content": "a", "name": "Ann"}]}, "input", ["input[0].name"]),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]}, "input",
         ["input[0].content[0]", "input_image"]),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input", ["input_file"]),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "1"}]}, "input",
         ["input[0].call_id", "no function call 'c'"]),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", ["previous_response_id"]),
        ({"input": [{"type": "computer_call", "id": "c"}]}, "input", ["input[0]", "computer_call"]),
        ({"input": [{"type": "mcp_call", "id": "c"}]}, "input", ["input[0]", "mcp_call"]),
        ({"tools": [{"type": "function"}]}, "tools", ["tools[0].name"]),
        ({"tools": [{**FUNCTION, "allowed_callers": ["programmatic"]}]}, "tools", ["tools[0].allowed_callers"]),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice", ["web_search_preview"]),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}},
         "tool_choice", ["'g'"]),
        ({"tool_choice": "sometimes"}, "tool_choice", []),
        ({"text": {"format": {"type": "xml"}}}, "text", ["text.format.type", "xml"]),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text", ["text.format.schema"]),
        ({"text": {"format": {"type": "text", "style": "short"}}}, "text", ["text.format.style"]),
        ({"reasoning": {"budget": 5}}, "reasoning", ["reasoning.budget"]),
        ({"metadata": {"a": 1}}, "metadata", []),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", []),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options", ["include_usage"]),
        ({"temperature": -1}, "temperature", ["-1"]),
        ({"max_output_tokens": -1}, "max_output_tokens", []),
        ({"max_tokens": 5}, "max_tokens", []),
        ({"messages": [1]}, "messages", []),
        ({"n": 2}, "n", []),
        ({"temprature": 1}, "temprature", ["did you mean temperature?"]),
        ({"top_k": "5"}, "top_k", []),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_wrong_or_not_supported_is_named(
    http: httpx.Client, body: dict[str, Any], param: str, words: list[str]
) -> None:
    for stream in (False, True):
        error = refused(http, **{"stream": stream, **body})
        assert error["param"] == param and error["type"] == "invalid_request_error", error
        for word in words:
            assert word in error["message"], error


def test_an_unknown_model_is_not_found(http: httpx.Client) -> None:
    assert refused(http, 404, model="other")["code"] == "model_not_found"


# Ends ---------------------------------------------------------------------------------------------------------------


def test_a_client_that_leaves_ends_its_response(tiny_server: Running) -> None:
    body = {"input": "hi", "max_output_tokens": 200, "ignore_eos": True, "stream": True}
    with tiny_server.http() as http, http.stream("POST", ROUTE, json=body) as answer:
        next(answer.iter_text())
    tiny_server.wait_until_idle()
