"""Marks and keys of prompt caching, through templates and as the clients' packages send them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types import CompletionUsage
from pydantic import TypeAdapter

from octavo.core.cache_hints import Breakpoint, CacheHints
from octavo.core.errors import InvalidRequestError
from octavo.engine.chat_template import render_chat
from octavo.server.anthropic import MessagesRequest, chat_call
from octavo.server.chat_call import read_chat
from octavo.server.fields import QueuedFields
from octavo.server.openai.protocol import ChatCompletionRequest
from octavo.server.openai.response_protocol import ResponsesRequest
from octavo.server.openai.response_request import ResponseInput, conversation, read_response_tools, response_call
from octavo.server.prompt_cache import cache_hints, common_prefix, ends_of_marks
from tests.server.answers import named_events
from tests.server.running_server import Running, Serve

CHATML = """{%- if tools %}<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' }}
# Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if not (tools and m.role == 'system') %}<|im_start|>{{ m.role }}
{{ m.content | trim }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
#: Writes known keys of functions alone, and the last message twice.
PLAIN = """{% for tool in tools or [] %}[{{ tool.function.name }}: {{ tool.function.description }}]
{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}Again: {{ messages[-1].content }}"""
SERVICE: Any = SimpleNamespace(leave_out_tool=lambda path, kind: None)
EPHEMERAL = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}
TOOLS = [
    {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {"at": {}}}},
    {"name": "listen", "description": "Listens.", "input_schema": {"type": "object", "properties": {"to": {}}}},
]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}], **fields}


def text(value: str, control: dict[str, str] | None = None) -> dict[str, Any]:
    return {"type": "text", "text": value, **({} if control is None else {"cache_control": control})}


def prefixes(template: str, **fields: Any) -> list[tuple[str, float]]:
    """The prompt up to each mark, with the mark's seconds."""
    call = chat_call(SERVICE, MessagesRequest.model_validate(body(**fields)))

    async def render(one: Any) -> str:
        return render_chat(template, one.messages, tools=one.tools.shown)

    prompt = asyncio.run(render(call))
    return [(prompt[:end], seconds) for end, seconds in asyncio.run(ends_of_marks(call, prompt, render))]


# --- where marked blocks end -----------------------------------------------------------------------------------------


def test_marks_end_behind_their_blocks() -> None:
    use = {"type": "tool_use", "id": "1", "name": "look", "input": {"at": "it"}, "cache_control": EPHEMERAL}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [text("seen", EPHEMERAL)]}
    found = prefixes(
        CHATML,
        tools=[TOOLS[0], {**TOOLS[1], "cache_control": HOUR}],
        system=[text("be short", HOUR), text("and kind")],
        messages=[
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ],
    )
    assert [(prompt[-9:], seconds) for prompt, seconds in found] == [
        ('Listens."', 3600.0),
        ("\nbe short", 3600.0),
        ('at": "it"', 300.0),
        ("tool\nseen", 300.0),
    ]
    assert all(prompt.startswith("<|im_start|>system\nbe short") for prompt, _ in found)


def test_templates_that_trim_or_write_twice_or_hide_keys() -> None:
    messages = [
        {"role": "user", "content": [text("  one \n", EPHEMERAL)]},
        {"role": "user", "content": [text("two", EPHEMERAL)]},
    ]
    [(first, _), (second, _)] = prefixes(CHATML, messages=messages)
    assert first.endswith("one") and second.endswith("two")
    [(first, _), (second, _)] = prefixes(
        PLAIN,
        tools=[{**TOOLS[0], "cache_control": EPHEMERAL}],
        messages=[{"role": "user", "content": [text("two", EPHEMERAL)]}],
    )
    assert first == "[look: Looks." and second.endswith("user: two")
    refuses = "{% if 'mark' in messages[0].content %}{{ raise_exception('no') }}{% endif %}" + CHATML
    assert prefixes(refuses, system=[text("be short", EPHEMERAL)]) == []
    # A template that drops the text has no such place.
    assert prefixes("{{ messages[-1].content }}", system=[text("gone", EPHEMERAL)]) == [("", 300.0)]


def test_openai_bodies_may_have_marks_of_both_apis() -> None:
    explicit = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    many = [{"type": "text", "text": c, **explicit} for c in "abcd"]
    call = read_chat(
        SERVICE,
        request := ChatCompletionRequest.model_validate(
            {
                "messages": [
                    {"role": "system", "content": [{"type": "text", "text": "zero", "cache_control": {}}]},
                    {"role": "system", "content": "one", "cache_control": HOUR},
                    {"role": "user", "content": [*many, {"type": "text", "text": "e", "cache_control": EPHEMERAL}]},
                ],
                "tools": [{"type": "function", "function": {"name": "f"}, "cache_control": EPHEMERAL}],
            }
        ),
        request.messages,
    )
    [marked] = call.marked  # the last four
    copy = "".join(part["text"] for part in marked.messages[-1]["content"])
    assert marked.messages[:2] == call.messages[:2]
    ends = marked.marks.ends("abcde", copy)
    assert sorted(zip(ends, marked.marks.seconds, strict=True)) == [(2, 1800.0), (3, 1800.0), (4, 1800.0), (5, 300.0)]
    request.messages = request.messages[:2]
    tools, messages = read_chat(SERVICE, request, request.messages).marked
    assert tools.marks.seconds == [300.0] and messages.marks.seconds == [3600.0]
    assert messages.marks.ends("one", messages.messages[1]["content"]) == [3]


def response_prefixes(**fields: Any) -> list[tuple[str, float]]:
    """As ``prefixes``, of a request of the Responses API."""
    body = ResponsesRequest.model_validate({"model": "tiny", **fields})
    assert isinstance(body.input, list)
    inputs = ResponseInput(
        None, body.input, 0, *conversation(body, body.input, []), *read_response_tools(SERVICE, body)
    )
    call = response_call(body, inputs)

    async def render(one: Any) -> str:
        return render_chat(CHATML, one.messages, tools=one.tools.shown)

    prompt = asyncio.run(render(call))
    return [(prompt[:end], seconds) for end, seconds in asyncio.run(ends_of_marks(call, prompt, render))]


def test_responses_obey_marks_of_both_apis() -> None:
    explicit = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    output = [{"type": "input_text", "text": "seen", **explicit}, {"type": "input_text", "text": "more"}]
    found = response_prefixes(
        instructions="be short",
        tools=[
            {"type": "function", "name": "f", "description": "Looks.", "parameters": {}, "cache_control": HOUR},
            {"type": "function", "name": "g", "description": "Listens.", "parameters": {}},
        ],
        input=[
            {"role": "system", "content": "and kind", "cache_control": EPHEMERAL},
            {"role": "user", "content": [{"type": "input_text", "text": "one", **explicit}]},
            call,
            {"type": "function_call_output", "call_id": "1", "output": output},
        ],
    )
    assert [(prompt[-8:], seconds) for prompt, seconds in found] == [
        ('ers": {}', 3600.0),
        ("and kind", 300.0),
        ("user\none", 1800.0),
        ("ool\nseen", 1800.0),
    ]
    many = [{"type": "input_text", "text": c, **explicit} for c in "abcde"]
    found = response_prefixes(input=[{"role": "user", "content": many}])
    assert [prompt[-1] for prompt, _ in found] == ["b", "c", "d", "e"]
    assert response_prefixes(input=[{"role": "user", "content": "hi"}]) == []


def test_an_automatic_mark_stands_at_the_last_block() -> None:
    [(prompt, seconds)] = prefixes(CHATML, cache_control=HOUR)
    assert prompt.endswith("user\nhi") and seconds == 3600.0
    marked = [{"role": "user", "content": [text("hi", EPHEMERAL)]}]
    [(prompt, seconds)] = prefixes(CHATML, cache_control=EPHEMERAL, messages=marked)
    assert prompt.endswith("user\nhi") and seconds == 300.0


@pytest.mark.parametrize(
    ("fields", "path", "problem"),
    [
        ({"system": [text(c, EPHEMERAL) for c in "abcde"]}, "system[4].cache_control", "at most 4"),
        ({"system": [text(c, EPHEMERAL) for c in "abcd"], "cache_control": EPHEMERAL}, "cache_control", "at most 4"),
        ({"system": [text("a", EPHEMERAL), text("b", HOUR)]}, "system[1].cache_control", "1h before 5m"),
        (
            {"tools": [{**TOOLS[0], "cache_control": EPHEMERAL}], "system": [text("a", HOUR)]},
            "system[0].cache_control",
            "than tools.0..cache_control",
        ),
        (
            {"messages": [{"role": "user", "content": [text("hi", EPHEMERAL)]}], "cache_control": HOUR},
            "cache_control",
            "another ttl",
        ),
    ],
)
def test_marks_that_the_api_refuses(fields: dict[str, Any], path: str, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as refusal:
        prefixes(CHATML, **fields)
    assert refusal.value.path == path


def test_the_common_beginning_of_two_lists() -> None:
    for length in range(6):
        for same in range(length + 1):
            assert common_prefix([0] * length, [0] * same + [1] * (length - same)) == same
    assert common_prefix("abc", "abcd") == 3 and common_prefix("", "x") == 0


@pytest.mark.parametrize(
    ("fields", "hints"),
    [
        ({}, None),
        ({"prompt_cache_key": "k"}, CacheHints((), 600.0, "k")),
        ({"prompt_cache_key": "k", "prompt_cache_retention": "24h"}, CacheHints((), 86400.0, "k")),
        ({"prompt_cache_retention": "in_memory"}, CacheHints((), 600.0)),
        ({"prompt_cache_options": {"ttl": "30m"}}, CacheHints((), 1800.0)),
        ({"prompt_cache_key": "k", "prompt_cache_options": {"mode": "explicit"}}, CacheHints((), 0.0, "k")),
        ({"prompt_cache_options": {}}, None),
    ],
)
def test_what_openai_fields_say(fields: dict[str, Any], hints: CacheHints | None) -> None:
    assert cache_hints(QueuedFields.model_validate(fields)) == hints
    marks = [Breakpoint(7, 300.0)]
    assert (cache_hints(QueuedFields.model_validate(fields), marks) or CacheHints()).breakpoints == (*marks,)


# --- served ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tiny_model: Any, start_module_server: Serve) -> Running:
    """60 blocks of 4 bytes may be held, 30 by a client; prompts have up to 256."""
    flags = ("--block-size", "4", "--num-gpu-blocks-override", "120", "--enable-admin-routes")
    return start_module_server(tiny_model, *flags, "--served-model-name", "tiny")


def flood(http: httpx.Client, name: str) -> None:
    """Prompts that fill the whole prefix cache."""
    for i in range(8):
        answer = http.post("/v1/completions", json={"prompt": f"{name} {i} " + 100 * "x", "max_tokens": 1})
        assert answer.status_code == 200, answer.text


def test_marked_blocks_are_found_after_others_have_used_the_whole_cache(server: Running) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    system = "You answer in one word, and always the same. " * 2
    kinds: dict[str, Any] = {"marked": {"cache_control": EPHEMERAL}, "plain": {}}

    def ask(name: str, question: str) -> Message:
        said: Any = [{"type": "text", "text": name + system, **kinds[name]}]
        asked: Any = [{"role": "user", "content": question}]
        return client.messages.create(model="tiny", max_tokens=4, messages=asked, system=said)

    with server.http() as http:
        for name, control in kinds.items():
            first = ask(name, "a?").usage
            whole = http.post("/tokenize", json={"messages": [
                {"role": "system", "content": name + system}, {"role": "user", "content": "a?"}]}).json()  # fmt: skip
            end = whole["prompt"].index(name + system) + len((name + system).rstrip())
            # Other tests have left a beginning such as "system: ".
            read = first.cache_read_input_tokens or 0
            assert read <= len("system: ")
            created = end // 4 * 4 - read if control else 0
            assert first.cache_creation_input_tokens == created
            assert first.cache_creation is not None
            assert first.cache_creation.ephemeral_5m_input_tokens == created
            assert first.input_tokens == whole["count"] - created - read
            flood(http, name)
            again = ask(name, "b?").usage
            if control:
                assert again.cache_read_input_tokens is not None
                assert end // 4 * 4 <= again.cache_read_input_tokens < whole["count"]
                assert again.cache_creation_input_tokens == 0
            else:
                assert (again.cache_read_input_tokens or 0) <= len("system: ")


def test_a_stream_says_what_was_found_and_kept_from_its_beginning(server: Running) -> None:
    fields = body(
        stream=True,
        messages=[
            {"role": "user", "content": [text("in one hour " * 4, HOUR), text("in five minutes " * 4, EPHEMERAL)]}
        ],
    )
    with server.http() as http:
        seen = []
        for _ in range(2):
            events = named_events(http, "/v1/messages", fields)
            for event in events:
                if event["type"] != "ping":
                    TypeAdapter[Any](RawMessageStreamEvent).validate_python(event, strict=True)
            start, end = events[0]["message"]["usage"], events[-2]["usage"]
            same = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "cache_creation")
            assert all(start[name] == end[name] for name in same)
            seen.append(end)
    first, again = seen
    split = first["cache_creation"]
    assert split["ephemeral_1h_input_tokens"] > 40 and split["ephemeral_5m_input_tokens"] > 50
    assert sum(split.values()) == first["cache_creation_input_tokens"] and first["cache_read_input_tokens"] == 0
    assert again["cache_creation_input_tokens"] == 0
    assert again["cache_read_input_tokens"] >= first["cache_creation_input_tokens"]
    assert sum(v for k, v in first.items() if k.endswith("input_tokens")) == sum(
        v for k, v in again.items() if k.endswith("input_tokens")
    )


def test_answers_are_the_same_with_and_without_hints(server: Running) -> None:
    plain = body(temperature=0, messages=[{"role": "user", "content": [text("tell me " * 9)]}])
    marked = body(temperature=0, messages=[{"role": "user", "content": [text("tell me " * 9, EPHEMERAL)]}])
    with server.http() as http:
        answers = [http.post("/v1/messages", json=each).json()["content"] for each in (plain, marked, plain, marked)]
    assert answers == answers[:1] * 4 and answers[0]


def test_the_openai_package_keeps_a_conversation_by_its_key(server: Running) -> None:
    client = server.client()
    question = "What comes next in this conversation? " * 2

    def ask(**fields: Any) -> CompletionUsage:
        said = [{"role": "user", "content": question + fields.pop("end", "")}]
        messages: Any = said
        usage = client.chat.completions.create(model="tiny", messages=messages, max_tokens=2, **fields).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        return usage

    with server.http() as http:
        usage = ask(prompt_cache_key="chat 1", prompt_cache_retention="24h")
        details = usage.prompt_tokens_details
        assert details is not None and (details.cached_tokens or 0) <= len("user: ")
        assert details.cache_write_tokens == usage.prompt_tokens // 4 * 4 - (details.cached_tokens or 0)
        flood(http, "key")
        found = ask(prompt_cache_key="chat 1", prompt_cache_retention="24h", end="more").prompt_tokens_details
        assert found is not None and (found.cached_tokens or 0) >= len(question)
        response = client.responses.create(model="tiny", input=question, max_output_tokens=16, prompt_cache_key="other")
        assert response.usage is not None
        assert response.usage.input_tokens_details.cached_tokens >= len(question)
        answer = http.post("/v1/completions", json={"prompt": "x", "prompt_cache_retention": "1y"})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt_cache_retention"


def test_an_operator_holds_and_releases_prefixes(server: Running) -> None:
    prefix = "The rules of this house are long and many. " * 2
    with server.http() as http:
        # Others may use up the share before.
        pinned = http.post("/v1/cache/pin", json={"prompt": prefix, "ttl": "1h"}).json()
        assert pinned["tokens"] == len(prefix) and pinned["held_tokens"] == len(prefix) // 4 * 4, pinned
        flood(http, "pin")

        def cached() -> int:
            answer = http.post("/v1/completions", json={"prompt": prefix + "?", "max_tokens": 1}).json()
            found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            return found

        assert cached() >= len(prefix) // 4 * 4
        chat = [{"role": "user", "content": "hello"}]
        other = http.post("/v1/cache/pin", json={"messages": chat, "ttl": 60}).json()
        listed = http.get("/v1/cache").json()
        assert {one["id"] for one in listed["data"]} == {pinned["id"], other["id"]} and listed["held_blocks"] > 0
        for one in (pinned, other):
            assert http.post("/v1/cache/release", json={"id": one["id"]}).json() == {"id": one["id"], "released": True}
        flood(http, "after")
        assert cached() == 0
        assert http.get("/v1/cache").json()["data"] == []
        assert http.post("/v1/cache/release", json={"id": pinned["id"]}).status_code == 404
        for refused in ({"ttl": "1h"}, {"prompt": "x", "messages": chat, "ttl": "1h"}, {"prompt": "x", "ttl": "2h"}):
            assert http.post("/v1/cache/pin", json=refused).status_code == 400
        answer = http.post("/v1/cache/pin", json={"prompt": "z" * 250, "ttl": "1h"})
        assert answer.status_code == 409 and "cache_hold_share" in answer.json()["error"]["message"]
        assert (
            http.post(
                "/v1/cache/pin", json={"prompt": "z", "ttl": 1}, headers={"Origin": "https://a.example"}
            ).status_code
            == 403
        )
    assert server.metric("octavo_prefix_cache_holdings_ended_total", cause="released") == 2


def test_without_admin_routes_nobody_pins(tiny_server: Running) -> None:
    with tiny_server.http() as http:
        assert http.post("/v1/cache/pin", json={"prompt": "x", "ttl": "1h"}).status_code == 404


def test_a_mark_of_a_long_prompt_is_exact_in_tokens(tiny_model: Any) -> None:
    from octavo.engine.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(tiny_model)
    said = "naïve 𝄞 text <eos> " * 3
    ids, ends = tokenizer.encode_with_ends(said, add_special_tokens=False)
    assert ids == tokenizer.encode(said, add_special_tokens=False) and ends[-1] == len(said)
    for end in (3, 4, 7, 8, 20):
        count = sum(one <= end for one in ends)
        assert tokenizer.decode(ids[:count], skip_special_tokens=False) == said[:end] or end == 20
