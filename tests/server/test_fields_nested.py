"""Fields within fields: what the model cannot be given is refused with its place, and nothing is lost unsaid."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types import chat
from openai.types.chat import completion_create_params
from openai.types.chat.chat_completion_assistant_message_param import ContentArrayOfContentPart
from openai.types.chat.chat_completion_content_part_param import ChatCompletionContentPartParam

from octavo.engine.chat_messages import template_variables
from tests.server.running_server import TINY, running

CHAT = "/v1/chat/completions"
READ, HARMLESS, REFUSED = "read", "harmless", "refused"
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}

#: Field of a message -> what becomes of it with a template of roles and texts, its role, and a value.
MESSAGE: dict[str, tuple[str, str, Any]] = {
    "role": (READ, "user", "user"),
    "content": (READ, "user", "bye"),
    "name": (HARMLESS, "user", "Ann"),
    "audio": (REFUSED, "assistant", {"id": "a"}),
    "function_call": (REFUSED, "assistant", {"name": "f", "arguments": "{}"}),
    "refusal": (REFUSED, "assistant", "no"),
    "tool_calls": (READ, "assistant", [CALL]),
    "tool_call_id": (HARMLESS, "tool", "c"),
    # Of other servers
    "annotations": (HARMLESS, "assistant", [{"type": "url_citation"}]),
    "cache_control": (HARMLESS, "user", {"type": "ephemeral"}),
    "reasoning": (HARMLESS, "assistant", "hm"),
    "reasoning_content": (HARMLESS, "assistant", "hm"),
    "reasoning_details": (HARMLESS, "assistant", [{"type": "reasoning.text", "text": "hm"}]),
    "thinking_blocks": (HARMLESS, "assistant", [{"type": "thinking", "thinking": "hm", "signature": ""}]),
    "provider_specific_fields": (HARMLESS, "assistant", {"a": 1}),
    "prefix": (REFUSED, "assistant", True),
    "partial": (REFUSED, "assistant", True),
    "tone": (REFUSED, "user", "loud"),
}
#: Type of a part of a message's content -> what becomes of it, and its further fields.
PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": (READ, {"text": "bye"}),
    "image_url": (REFUSED, {"image_url": {"url": "data:,"}}),
    "input_audio": (REFUSED, {"input_audio": {"data": "", "format": "wav"}}),
    "file": (REFUSED, {"file": {"file_id": "f"}}),
    "refusal": (REFUSED, {"refusal": "no"}),
    "video_url": (REFUSED, {"video_url": {"url": "data:,"}}),
    "audio_url": (REFUSED, {"audio_url": {"url": "data:,"}}),
    "image_pil": (REFUSED, {"image_pil": None}),
}


def answer(http: httpx.Client, *messages: dict[str, Any], **further: Any) -> tuple[int, Any]:
    body = {"messages": messages, "max_tokens": 4, "temperature": 0, **further}
    response = http.post(CHAT, json=body)
    return response.status_code, response.json()


def text_of(found: Any) -> str:
    (choice,) = found["choices"]
    text: str = choice["message"]["content"]
    return text


def fields_of(*kinds: Any) -> set[str]:
    return {name for kind in kinds for name in kind.__annotations__}


@pytest.mark.parametrize("name", MESSAGE)
def test_a_field_of_a_message_does_what_the_table_says(http: httpx.Client, name: str) -> None:
    outcome, role, value = MESSAGE[name]
    plain = {"role": role, "content": "hello"}
    status, without = answer(http, plain)
    assert status == 200, without
    status, found = answer(http, {"role": "user", "content": "hi"}, {**plain, name: value})
    if outcome == REFUSED:
        assert status == 400 and found["error"]["param"] == "messages", found
        assert f"messages[1].{name}" in found["error"]["message"]
    else:
        assert status == 200, found
    if outcome == HARMLESS:
        assert text_of(answer(http, {**plain, name: value})[1]) == text_of(without)
    for empty in (None, type(value)()) if name not in ("role", "content") else ():
        assert text_of(answer(http, {**plain, name: empty})[1]) == text_of(without)


@pytest.mark.parametrize("kind", PARTS)
def test_a_part_of_a_message_does_what_the_table_says(http: httpx.Client, kind: str) -> None:
    outcome, further = PARTS[kind]
    parts = [{"type": "text", "text": "hello"}, {"type": kind, **further}]
    status, found = answer(http, {"role": "user", "content": parts})
    if outcome == READ:
        assert status == 200
        marked = [{**part, "prompt_cache_breakpoint": {"mode": "explicit"}, "cache_control": {}} for part in parts]
        assert text_of(answer(http, {"role": "user", "content": marked})[1]) == text_of(found)
    else:
        assert status == 400 and found["error"]["code"] == "unsupported_parameter", found
        assert "messages[0].content[1]" in found["error"]["message"] and repr(kind) in found["error"]["message"]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("text", "content"),
        ({"text": "a"}, "content[0].type: it is missing"),
        ({"type": "text"}, "content[0].text: it is missing"),
        ({"type": "text", "text": 5}, "content[0].text: Input should be a valid string"),
        ({"type": "text", "text": "a", "language": "en"}, "content[0].language"),
    ],
    ids=str,
)
def test_a_malformed_part_is_refused_with_its_place(http: httpx.Client, part: Any, words: str) -> None:
    status, found = answer(http, {"role": "user", "content": [part]})
    assert status == 400 and words in found["error"]["message"] and "messages[0]" in found["error"]["message"], found


def test_the_tables_have_every_field_and_every_part_of_openai() -> None:
    assert fields_of(*typing.get_args(chat.ChatCompletionMessageParam)) - set(MESSAGE) == set()
    parts = [*typing.get_args(ChatCompletionContentPartParam), *typing.get_args(ContentArrayOfContentPart)]
    kinds = {kind for part in parts for kind in typing.get_args(typing.get_type_hints(part)["type"])}
    assert kinds - set(PARTS) == set()
    # What is sent above.
    assert fields_of(chat.ChatCompletionContentPartTextParam) == {"type", "text", "prompt_cache_breakpoint"}
    assert fields_of(chat.ChatCompletionStreamOptionsParam) == {"include_usage", "include_obfuscation"}
    formats = typing.get_args(completion_create_params.ResponseFormat)
    assert fields_of(*formats) == {"type", "json_schema"}


@pytest.mark.parametrize(
    "further",
    [
        {"stream": True, "stream_options": {"include_usages": True}},
        {"stream": True, "stream_options": {"include_usage": "yes"}},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "style": "short"}}},
        {"response_format": {"type": "json_object", "schemas": {"type": "object"}}},
        {"tools": [{"type": "custom", "custom": {"title": "a"}}]},
        {"tools": [{"type": "custom", "function": {"name": "a"}}]},
        {"tools": [{"type": "web_search", "function": {"name": "a"}}]},
        {"tool_choice": {"type": "custom", "custom": {"name": "a"}}},
    ],
    ids=str,
)
def test_a_wrong_inner_field_is_refused_under_the_name_of_the_outer(http: httpx.Client, further: Any) -> None:
    status, found = answer(http, {"role": "user", "content": "hi"}, **further)
    assert status == 400 and found["error"]["param"] in further, found


def test_of_many_fields_the_first_is_named(http: httpx.Client) -> None:
    message = {"role": "user", "content": "hi", **{f"field{i}": 1 for i in range(1000)}}
    status, found = answer(http, message)
    assert status == 400 and found["error"]["message"].startswith("messages[0].field0:")


# Templates that write more ------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for d in documents or [] %}[{{ d.text }}]{% endfor %}{{ note }}"
    "{% for m in messages %}{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}: {{ m.content }}\n{% endfor %}"
)


@pytest.fixture(scope="module")
def lenient(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    log = tmp_path_factory.mktemp("lenient") / "log"
    flags = ("--unknown-fields", "ignore", "--trust-request-chat-template")
    with running(tiny_model, log, *TINY, *flags) as server, server.http() as http:
        yield http


def prompt_of(http: httpx.Client, **body: Any) -> str:
    response = http.post("/tokenize", json=body)
    assert response.status_code == 200, response.text
    prompt: str = response.json()["prompt"]
    return prompt


def test_a_field_that_the_template_writes_is_read(lenient: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hi", "name": "Ann"}]
    variables = {"documents": [{"text": "a"}], "chat_template_kwargs": {"note": "!"}}
    assert prompt_of(lenient, messages=messages, chat_template=TEMPLATE, **variables) == "[a]!user Ann: hi\n"


@pytest.mark.parametrize(
    ("template", "status"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", 200),
        ("{% for m in messages %}{{ 'critic' if m.role == 'critic' else 'U' }}: {{ m.content }}\n{% endfor %}", 200),
        ("{% for m in messages %}{{ 'A' if m.role == 'assistant' else 'U' }}: {{ m.content }}\n{% endfor %}", 400),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}\n{% endfor %}", 400),
    ],
)
def test_a_role_of_ones_own_is_served_where_the_template_names_or_writes_it(
    lenient: httpx.Client, template: str, status: int
) -> None:
    messages = [{"role": "critic", "content": "bad"}, {"role": "user", "content": "hi"}]
    response = lenient.post("/tokenize", json={"messages": messages, "chat_template": template})
    assert response.status_code == status, response.text
    if status == 200:
        assert response.json()["prompt"].startswith("critic: bad\n")
    else:
        error = response.json()["error"]
        assert error["param"] == "messages" and "messages[0].role" in error["message"] and "critic" in error["message"]


def test_a_template_sees_fields_and_tools_as_they_were_sent(lenient: httpx.Client) -> None:
    template = (
        "{{ tools | tojson }}{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{{ '(null)' if m.name is none else '' if m.name is undefined else m.name }}{% endfor %}"
    )
    tools = [{"function": {"description": "d", "name": "f", "strict": True, "x": None}, "type": "function"}]
    messages = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b", "name": None}]
    text = prompt_of(lenient, messages=messages, tools=tools, chat_template=template)
    assert text == f"{json.dumps(tools)}system:auser:b(null)"
    names = "{% if false %}'developer'{% endif %}" + template
    assert "developer:auser:b" in prompt_of(lenient, messages=messages, tools=tools, chat_template=names)


def test_reasoning_is_read_under_each_of_its_names(lenient: httpx.Client) -> None:
    template = "{% for m in messages %}{{ m.reasoning_content }}/{{ m.reasoning }}/{{ m.content }}{% endfor %}"
    details = [{"type": "reasoning.text", "text": "h"}, {"type": "reasoning.text", "text": "m", "signature": "x"},
               {"type": "reasoning.encrypted", "data": "x"}]  # fmt: skip
    for given in ({"reasoning_content": "hm"}, {"reasoning": "hm"}, {"reasoning_details": details}):
        messages = [{"role": "assistant", "content": "a", **given}]
        assert prompt_of(lenient, messages=messages, chat_template=template) == "hm/hm/a"


def test_a_users_message_that_the_template_loses_is_refused_with_its_place(lenient: httpx.Client) -> None:
    messages = [{"role": "user", "content": text} for text in ("one", "two")]
    body = {"messages": messages, "chat_template": "{{ messages[-1].content }}"}
    response = lenient.post("/tokenize", json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == "messages"
    assert "messages[0].content" in response.json()["error"]["message"]
    # A system message may be left out on purpose.
    messages[0]["role"] = "system"
    assert prompt_of(lenient, **body) == "two"


def test_fields_that_are_unknown_or_not_supported_are_ignored_on_request(lenient: httpx.Client) -> None:
    message = {"role": "user", "content": "hi"}
    plain = prompt_of(lenient, messages=[message])
    assert prompt_of(lenient, messages=[{**message, "name": "Ann"}], chat_template_kwargs={"mood": 1}) == plain
    assert prompt_of(lenient, messages=[message], documents=[{"text": "a"}]) == plain
    for further in ({"refusal": "no"}, {"audio": {"id": "a"}}):
        assert prompt_of(lenient, messages=[{**message, **further}]) == plain
    status, found = answer(lenient, message, web_search_options={}, logits_processors=["a.b"], mirostat=2)
    assert status == 200, found
    name = lenient.get("/v1/models").json()["data"][0]["id"]
    body = {"model": name, "messages": [message], "max_tokens": 2, "mcp_servers": [{"type": "url"}]}
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}, {"type": "b", "keep": "all"}, {"type": "c"}]}
    response = lenient.post("/v1/messages", json={**body, "context_management": edits})
    assert response.status_code == 200, response.text
    # What a field holds is not left out: it is part of the message.
    status, found = answer(
        lenient, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    )
    assert status == 400 and found["error"]["param"] == "messages"


def test_variables_that_the_template_does_not_read_are_refused(http: httpx.Client) -> None:
    message = {"role": "user", "content": "hi"}
    for further in ({"documents": [{"text": "a"}]}, {"chat_template_kwargs": {"mood": 1}}):
        status, found = answer(http, message, **further)
        assert status == 400 and found["error"]["param"] in further, found
        assert next(iter(further)) in found["error"]["message"]
    # A model that cannot reason cannot do more or less of it.
    for variables in ({"mood": None}, {"enable_thinking": False}, {"thinking": True}, {"reasoning_effort": "high"}):
        assert answer(http, message, documents=[], chat_template_kwargs=variables)[0] == 200


def test_the_variables_of_a_template() -> None:
    assert template_variables(TEMPLATE) == {"documents", "note", "messages"}
    assert template_variables("{% set a = b %}{{ a }}{{ raise_exception(c) }}") == {"b", "c"}


def test_a_body_is_json(http: httpx.Client) -> None:
    response = http.post(CHAT, content=json.dumps([]).encode())
    assert response.status_code == 400 and "JSON object" in response.json()["error"]["message"]
