"""``/v1/messages`` as the anthropic package sees it, and beside the chats that it stands for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent, message_create_params
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from pydantic import TypeAdapter

from octavo.server.anthropic import CountTokensRequest, MessagesRequest, chat_call
from octavo.server.fields import marks_of
from tests.server.answers import answer_of, chat_text, named_events
from tests.server.running_server import Running

ROUTE = "/v1/messages"
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
HI = [{"role": "user", "content": "hi"}]
#: A conversation in blocks, and the messages that say the same.
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
    {"role": "user", "content": "there"},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "yo"}]},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
]  # fmt: skip
MESSAGES = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "hi\nthere"},
    {"role": "assistant", "content": "yo", "reasoning_content": "hm"},
    {"role": "user", "content": "a\nb"},
]


def create(http: httpx.Client, **body: Any) -> dict[str, Any]:
    """A message, checked by the types of the anthropic package."""
    body = {"model": "tiny", "messages": HI, "max_tokens": 8, "temperature": 0, **body}
    raw: dict[str, Any] = answer_of(http, ROUTE, **body)
    Message.model_validate(raw, strict=True)
    return raw


def streamed(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each checked by the types of the anthropic package."""
    body = {"model": "tiny", "messages": HI, "max_tokens": 8, "temperature": 0, **body}
    events = named_events(http, ROUTE, body)
    for event in events:
        if event["type"] != "ping":
            EVENT.validate_python(event, strict=True)
    return events


def refused(http: httpx.Client, status: int = 400, path: str = ROUTE, **body: Any) -> dict[str, Any]:
    answer = http.post(path, json={"model": "tiny", "messages": HI, "max_tokens": 2, **body})
    assert answer.status_code == status, answer.text
    raw = answer.json()
    assert set(raw) == {"type", "error", "request_id"} and set(raw["error"]) == {"type", "message"}
    assert raw["type"] == "error" and raw["request_id"] == answer.headers["x-request-id"]
    error: dict[str, Any] = raw["error"]
    return error


def text_of(message: dict[str, Any]) -> str:
    return "".join(block["text"] for block in message["content"])


# Answers ------------------------------------------------------------------------------------------------------------


def test_a_message_is_the_chat_that_its_blocks_say(http: httpx.Client) -> None:
    assert text_of(create(http)) == chat_text(http, HI)
    for system in ("be short", [{"type": "text", "text": "be short", "cache_control": {"type": "ephemeral"}}]):
        assert text_of(create(http, system=system, messages=TURNS)) == chat_text(http, MESSAGES)


def test_a_last_message_of_the_assistant_is_continued(http: httpx.Client) -> None:
    begun = [*HI, {"role": "assistant", "content": "a b"}]
    continued = {"continue_final_message": True, "add_generation_prompt": False}
    assert text_of(create(http, messages=begun)) == chat_text(http, begun, **continued)


def test_a_message_says_why_it_ended_and_what_it_used(http: httpx.Client) -> None:
    message = create(http, ignore_eos=True)
    assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)
    usage = message["usage"]
    prompt = http.post("/tokenize", json={"messages": HI}).json()["count"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == prompt and usage["output_tokens"] == 8
    message = create(http, logit_bias={"1": 100})
    assert (message["stop_reason"], message["content"]) == ("end_turn", [])
    text = text_of(create(http))
    message = create(http, stop_sequences=["never", text[3]])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", text[3])
    assert text_of(message) == text[: text.index(text[3])]


def test_the_events_of_a_stream_add_up_to_the_message(http: httpx.Client) -> None:
    whole = create(http, system="be short", messages=TURNS)
    events = streamed(http, system="be short", messages=TURNS)
    kinds = [event["type"] for event in events]
    deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert kinds == [
        "message_start", "content_block_start", "ping", *["content_block_delta"] * len(deltas), "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert len(deltas) > 1 and "".join(deltas) == text_of(whole)
    last = events[-2]
    assert last["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_the_anthropic_package_drives_it(tiny_server: Running) -> None:
    client = anthropic.Anthropic(base_url=tiny_server.url, api_key="none", max_retries=0)
    given: dict[str, Any] = {"model": "tiny", "messages": HI, "max_tokens": 6, "extra_body": {"temperature": 0}}
    message = client.messages.create(**given)
    [block] = message.content
    assert isinstance(block, anthropic.types.TextBlock) and block.text and message.model == "tiny"
    with client.messages.stream(**given) as stream:
        assert "".join(stream.text_stream) == block.text
        final = stream.get_final_message()
    assert (final.content[0].to_dict()["text"], final.stop_reason) == (block.text, message.stop_reason)
    assert final.usage.output_tokens == message.usage.output_tokens
    count = client.messages.count_tokens(model="tiny", messages=[{"role": "user", "content": "hi"}])
    assert count.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    with pytest.raises(anthropic.NotFoundError, match="other"):
        client.messages.create(**{**given, "model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**{**given, "max_tokens": 0})


def test_tokens_are_counted_as_a_message_has_them(http: httpx.Client) -> None:
    body = {"model": "tiny", "system": "be short", "messages": TURNS}
    counted = http.post(f"{ROUTE}/count_tokens", json=body).json()
    MessageTokensCount.model_validate(counted, strict=True)
    usage = create(http, **body)["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    error = refused(
        http, path=f"{ROUTE}/count_tokens", max_tokens=None, messages=[{"role": "user", "content": [{"type": "image"}]}]
    )
    assert "messages[0].content[0]" in error["message"]


# Fields -------------------------------------------------------------------------------------------------------------

WORKS, HARMLESS, REFUSED = "works", "harmless", "refused"
KEEPS = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
TOOL = {"name": "f", "input_schema": {"type": "object", "properties": {}}}
#: Field of Anthropic's API -> what becomes of it, a value of which this holds, and values of a refused one that are
#: accepted.
TABLE: dict[str, tuple[Any, ...]] = {
    "max_tokens": (WORKS, 3),
    "messages": (WORKS, [{"role": "user", "content": "bye"}]),
    "model": (WORKS, "alias"),
    "cache_control": (HARMLESS, {"type": "ephemeral"}),
    "container": (REFUSED, "c"),
    "diagnostics": (REFUSED, {"previous_message_id": None}),
    "inference_geo": (REFUSED, "us"),
    "metadata": (HARMLESS, {"user_id": "me"}),
    "output_config": (WORKS, {}),
    "service_tier": (HARMLESS, "batch"),
    "speed": (HARMLESS, "fast"),
    "stop_sequences": (WORKS, ["x"]),
    "system": (WORKS, "be short"),
    # The template has no place for it.
    "thinking": (HARMLESS, {"type": "enabled", "budget_tokens": 1024}),
    "tool_choice": (WORKS, {"type": "none"}),
    "tools": (WORKS, []),
    "user_profile_id": (HARMLESS, "u"),
    "workspace_id": (HARMLESS, "w"),
    "stream": (WORKS, None),
    # Earlier versions, and betas
    "temperature": (WORKS, 1.0),
    "top_p": (WORKS, 0.5),
    "top_k": (WORKS, 5),
    "mcp_servers": (REFUSED, [{"type": "url", "name": "a", "url": "https://a.example"}], []),
    "context_management": (REFUSED, {"edits": [{"type": "clear_tool_uses_20250919"}]}, {"edits": []}, KEEPS),
    "anthropic_beta": (HARMLESS, ["context-management-2025-06-27"]),
    "anthropic_version": (HARMLESS, "vertex-2023-10-16"),
    "betas": (HARMLESS, ["context-management-2025-06-27"]),
    "billing_policy": (HARMLESS, {}),
    "compaction": (REFUSED, {"type": "auto"}),
    "fallback_credit_token": (HARMLESS, "a"),
    "fallbacks": (HARMLESS, [{"model": "m"}]),
    "thread": (REFUSED, {"id": "t"}),
}


@pytest.mark.parametrize("name", TABLE)
def test_a_field_does_what_the_table_says(http: httpx.Client, name: str) -> None:
    outcome, value, *accepted = TABLE[name]
    if outcome == REFUSED:
        error = refused(http, **{name: value})
        assert error["type"] == "invalid_request_error" and name in error["message"], error
    else:
        create(http, **{name: value})
    for harmless in (None, *accepted) if outcome == REFUSED else (value,) if outcome == HARMLESS else ():
        assert text_of(create(http, **{name: harmless})) == text_of(create(http))


def test_the_table_has_every_field_of_anthropic() -> None:
    known = {*message_create_params.MessageCreateParamsBase.__annotations__, *MessageCountTokensParams.__annotations__}
    assert known - set(TABLE) == set()
    assert set(TABLE) - set(MessagesRequest.model_fields) == set()
    for name, mark in marks_of(MessagesRequest).items():
        if mark is not None and name in TABLE:
            assert TABLE[name][0] == (HARMLESS if mark.is_hint else REFUSED), name
    assert set(CountTokensRequest.model_fields) < set(MessagesRequest.model_fields)


def blocks(role: str, *content: Any) -> dict[str, Any]:
    return {"messages": [*HI, {"role": role, "content": list(content)}, *HI[: role == "assistant"]]}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": None}, ["max_tokens"]),
        ({"model": None}, ["model"]),
        ({"messages": []}, ["messages"]),
        ({"messages": ["hi"]}, ["messages"]),
        ({"messages": [{"role": "tool", "content": "a"}]}, ["messages[0].role", "tool"]),
        ({"messages": [{"role": "user"}]}, ["messages[0].content"]),
        ({"messages": [{"role": "user", "content": "a", "name": "Ann"}]}, ["messages[0].name"]),
        (blocks("user", {"type": "image", "source": {}}), ["messages[1].content[0]", "image"]),
        (blocks("user", {"type": "document", "source": {}}), ["document"]),
        (blocks("user", {"type": "document", "source": {"type": "text"}}), ["messages[1].content[0].source.data"]),
        (blocks("user", {"type": "document", "source": {
            "type": "base64", "media_type": "application/pdf", "data": "AA=="}}), ["content[0].source", "base64"]),
        (blocks("user", {"type": "document", "source": {"type": "text", "data": "a"}, "citations": {"enabled": True}}),
         ["content[0].citations"]),
        (blocks("assistant", {"type": "web_search_tool_result", "tool_use_id": "a", "content": []}), ["tool_use 'a'"]),
        (blocks("user", {"type": "tool_use", "id": "a", "name": "f", "input": {}}), ["tool_use"]),
        (blocks("user", {"type": "tool_result", "tool_use_id": "a", "content": "1"}), ["no tool_use 'a'"]),
        (blocks("user", {"type": "text", "text": "a", "tone": "loud"}), ["messages[1].content[0].tone"]),
        (blocks("assistant", {"type": "redacted_thinking", "data": "x"}), ["redacted_thinking"]),
        (blocks("assistant", {"type": "server_tool_use", "id": "a"}), ["server_tool_use"]),
        (blocks("assistant", {"type": "tool_use", "id": "a", "name": "f", "input": "{}"}), ["content[0].input"]),
        ({"messages": [*HI, {"role": "assistant", "content": [
            {"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]}, ["tool_result must follow"]),
        ({"system": [{"type": "image"}]}, ["system[0]", "image"]),
        ({"tools": [{"name": "f"}]}, ["tools[0].input_schema"]),
        ({"tools": [{**TOOL, "allowed_callers": ["code_execution"]}]}, ["tools[0].allowed_callers"]),
        ({"tool_choice": {"type": "some"}}, ["tool_choice.type", "some"]),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, ["thinking.budget_tokens"]),
        ({"thinking": {"type": "adaptive", "display": "loud"}}, ["thinking.display"]),
        ({"output_config": {"format": {"type": "xml"}}}, ["output_config.format.type"]),
        ({"output_config": {"tone": "loud"}}, ["output_config.tone"]),
        ({"metadata": {"tag": "x"}}, ["metadata.tag"]),
        ({"temperature": -1}, ["temperature", "-1"]),
        ({"messages": [{"role": "user", "content": "a" * 300}]}, ["maximum context length", "messages"]),
        ({"stop_sequences": [""]}, ["stop"]),
        ({"temprature": 1}, ["did you mean temperature?"]),
        ({"top_k": "5"}, ["top_k"]),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_wrong_or_not_supported_is_named(http: httpx.Client, body: dict[str, Any], words: list[str]) -> None:
    for stream in (False, True):
        error = refused(http, **{"stream": stream, **body})
        assert error["type"] == "invalid_request_error"
        for word in words:
            assert word in error["message"], error


def test_a_message_that_asks_for_more_than_the_context_holds_ends_with_it(http: httpx.Client) -> None:
    answer = create(http, max_tokens=1000, ignore_eos=True)
    assert answer["stop_reason"] == "model_context_window_exceeded"
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"] == 256
    assert create(http, max_tokens=3, ignore_eos=True)["stop_reason"] == "max_tokens"


# Ends ---------------------------------------------------------------------------------------------------------------


def test_a_client_that_leaves_ends_its_message(tiny_server: Running) -> None:
    body = {"model": "tiny", "messages": HI, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with tiny_server.http() as http, http.stream("POST", ROUTE, json=body) as answer:
        next(answer.iter_text())
    tiny_server.wait_until_idle()


def test_documents_of_plain_text_are_read(http: httpx.Client) -> None:
    text = {"type": "text", "media_type": "text/plain", "data": "The sky is green."}
    inner = {"type": "content", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]}
    content = [
        {"type": "document", "source": text, "title": "Sky", "context": "a report", "citations": {"enabled": False}},
        {"type": "document", "source": inner, "cache_control": {"type": "ephemeral"}},
        {"type": "search_result", "source": "https://a.example", "title": "A", "content": inner["content"][:1]},
        {"type": "text", "text": "What is green?"},
    ]
    [message] = messages_of([{"role": "user", "content": content}])  # blocks are lines of one text
    said = message["content"]
    assert "<document>\n<title>Sky</title>\n<context>a report</context>\nThe sky is green.\n</document>" in said
    words = ["One", "two", "https://a.example", "What is green?"]
    assert [said.index(word) for word in words] == sorted(said.index(word) for word in words)
    assert said.count("<document>") == said.count("</document>") == 3
    # And where a tool has given one.
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "document", "source": text}]}
    given = [*HI, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    assert "The sky is green." in str(messages_of(given)[-1]["content"])
    assert create(http, messages=given)["type"] == "message"


def test_searches_of_another_service_are_calls_of_an_earlier_turn(http: httpx.Client) -> None:
    page = {"type": "web_search_result", "title": "Rhine", "url": "https://r.example", "page_age": "1 day",
            "encrypted_content": "x"}  # fmt: skip
    found: Any
    for found, words in (([page], "Rhine: https://r.example (1 day)"), (
        {"type": "web_search_tool_result_error", "error_code": "unavailable"}, "Error: unavailable")):  # fmt: skip
        said = [
            {"type": "text", "text": "I look."},
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "rivers"}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": found},
            {"type": "text", "text": "The Rhine.", "citations": [{"type": "web_search_result_location"}]},
        ]
        given = [*HI, {"role": "assistant", "content": said}, *HI]
        _, call, result, answer, _ = messages_of(given)
        assert call["content"] == "I look." and answer["content"] == "The Rhine."
        assert call["tool_calls"][0]["function"] == {"name": "web_search", "arguments": '{"query": "rivers"}'}
        assert (result["role"], result["tool_call_id"], result["content"]) == ("tool", "s", words)
        assert create(http, messages=given)["type"] == "message"


def messages_of(messages: list[Any]) -> list[dict[str, Any]]:
    """The chat's messages of a request."""
    body = MessagesRequest.model_validate(
        {"model": "tiny", "max_tokens": 2, "messages": messages}, context={"sees_images": False}
    )
    service: Any = SimpleNamespace()  # of which messages need nothing
    return chat_call(service, body).messages
