"""Tools and reasoning served by a model that has learned neither: what is promised with any model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.server.openai_judge import events, judge_chat, judge_chunk
from tests.server.running_server import Running, running

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "days"],
}
SUM = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}


def tool(name: str, schema: Any, **further: Any) -> Any:
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": schema, **further}}


TOOLS = [tool("get_weather", WEATHER), tool("add", SUM)]
SCHEMAS = {"get_weather": WEATHER, "add": SUM}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
#: Tokens of the model that begin JSON, and a call.
BRACE, LESS = 107, 44
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
ASK: Any = [{"role": "user", "content": "What is the weather in Rome for three days?"}]


@pytest.fixture(scope="module")
def server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    flags = ("--num-gpu-blocks-override", "400", "--max-model-len", "1024", "--num-threads", "1")
    parser = (
        "--served-model-name",
        "demo",
        "--trust-request-chat-template",
        "--reasoning-parser",
        "tests.server.marked_reasoning:IssueReasoning",
    )
    with running(demo_model, tmp_path_factory.mktemp("tools") / "log", *flags, *parser) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[OpenAI]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with server.http() as http:
        yield http


def body_of(given: dict[str, Any]) -> dict[str, Any]:
    return {"model": "demo", "messages": ASK, "tools": TOOLS, "max_tokens": 120, "temperature": 0, **given}


def ask(client: OpenAI, **given: Any) -> ChatCompletion:
    answer: ChatCompletion = client.chat.completions.create(**body_of(given))
    return answer


def stream(client: OpenAI, **given: Any) -> list[ChatCompletionChunk]:
    return list(client.chat.completions.create(**body_of(given), stream=True))


def summed(chunks: list[ChatCompletionChunk]) -> tuple[str | None, list[tuple[str, str]], str | None]:
    """Content, calls and finish reason of a stream's only choice."""
    content: str | None = None
    calls: dict[int, list[str]] = {}
    ids: dict[int, str | None] = {}
    for chunk in chunks:
        delta = chunk.choices[0].delta
        if delta.content:
            content = (content or "") + delta.content
        for call in delta.tool_calls or []:
            assert call.function is not None
            if call.index not in calls:
                assert call.id and call.type == "function" and call.function.name
                calls[call.index], ids[call.index] = [call.function.name, ""], call.id
            else:
                assert call.id is None and call.function.name is None
            calls[call.index][1] += call.function.arguments or ""
    assert list(calls) == list(range(len(calls))) and len(set(ids.values())) == len(ids)
    return content, [(name, arguments) for name, arguments in calls.values()], chunks[-1].choices[0].finish_reason


def calls_of(answer: ChatCompletion) -> list[tuple[str, str]]:
    found = answer.choices[0].message.tool_calls or []
    return [(call.function.name, call.function.arguments) for call in found if call.type == "function"]


def check(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
def test_calls_that_have_to_be_are_valid_with_any_model(client: OpenAI, choice: Any, reason: str) -> None:
    answer = ask(client, tool_choice=choice)
    calls = calls_of(answer)
    assert calls and answer.choices[0].message.content is None
    assert answer.choices[0].finish_reason == reason
    check(calls)
    if choice is NAMED:
        assert [name for name, _ in calls] == ["get_weather"]
    content, streamed, streamed_reason = summed(stream(client, tool_choice=choice))
    assert (content, streamed, streamed_reason) == (None, calls, reason)


@pytest.mark.slow
def test_calls_at_high_temperature_are_valid(client: OpenAI) -> None:
    answer = ask(client, tool_choice="required", parallel_tool_calls=False, temperature=1.5, seed=1, n=4)
    for choice in answer.choices:
        (call,) = choice.message.tool_calls or []
        assert call.type == "function" and choice.finish_reason == "tool_calls"
        check([(call.function.name, call.function.arguments)])


def test_a_call_that_max_tokens_cuts_says_so(client: OpenAI) -> None:
    answer = ask(client, tool_choice=NAMED, max_tokens=20)
    assert answer.choices[0].finish_reason == "length"
    ((name, arguments),) = calls_of(answer)
    assert name == "get_weather" and arguments.startswith("{")


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("cut", [1, 3, 7])
def test_a_call_that_is_cut_before_its_arguments_is_no_text(client: OpenAI, choice: Any, cut: int) -> None:
    answer = ask(client, tool_choice=choice, max_tokens=cut)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("", "length")
    assert calls_of(answer) == []
    assert summed(stream(client, tool_choice=choice, max_tokens=cut)) == (None, [], "length")


@pytest.mark.parametrize("streams", [False, True])
def test_a_call_that_is_cut_is_no_text_on_other_routes(http: httpx.Client, streams: bool) -> None:
    given: dict[str, Any] = {"model": "demo", "stream": streams, "temperature": 0}
    flat = {"type": "function", "name": "add", "parameters": SUM}
    body = {**given, "input": "x", "tools": [flat], "tool_choice": "required", "max_output_tokens": 4}
    text = http.post("/v1/responses", json=body).text
    last = json.loads(text.rpartition("data: ")[2])["response"] if streams else json.loads(text)
    assert (last["status"], last["incomplete_details"]["reason"]) == ("incomplete", "max_output_tokens")
    assert [part["text"] for item in last["output"] for part in item["content"]] == [""]
    assert "response.output_text.delta" not in text
    anthropic = {"name": "add", "input_schema": SUM}
    body = {**given, "messages": ASK, "tools": [anthropic], "tool_choice": {"type": "any"}, "max_tokens": 4}
    text = http.post("/v1/messages", json=body).text
    assert '"stop_reason":"max_tokens"' in text and "content_block" not in text
    assert streams or json.loads(text)["content"] == []


def test_only_allowed_tools_are_called(client: OpenAI) -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "add"}}]}
    calls = calls_of(ask(client, tool_choice={"type": "allowed_tools", "allowed_tools": allowed}))
    check(calls)
    assert {name for name, _ in calls} == {"add"}


def test_the_model_may_answer_in_words(client: OpenAI) -> None:
    answer = ask(client, max_tokens=20)
    assert answer.choices[0].message.content and answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "length"
    content, calls, _ = summed(stream(client, max_tokens=20))
    assert (content, calls) == (answer.choices[0].message.content, [])


@pytest.mark.parametrize("strict", [False, True])
def test_a_call_that_the_model_chooses_to_make(client: OpenAI, strict: bool) -> None:
    """Calls of earlier turns show it how."""
    function = tool("get_weather", {"type": "object", "properties": {"city": {"type": "string"}}}, strict=strict)
    messages: list[Any] = []
    for city in ("Oslo", "Paris", "Madrid"):
        call = {
            "id": city,
            "type": "function",
            "function": {"name": "get_weather", "arguments": f'{{"city": "{city}"}}'},
        }
        messages += [
            {"role": "user", "content": f"What is the weather in {city}?"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": city, "content": "Sunny"},
            {"role": "assistant", "content": f"It is sunny in {city}."},
        ]
    messages.append({"role": "user", "content": "What is the weather in Rome?"})
    given = {"messages": messages, "tools": [function], "max_tokens": 60}
    answer = ask(client, **given)
    assert answer.choices[0].message.content is None and answer.choices[0].finish_reason == "tool_calls"
    ((name, arguments),) = calls_of(answer)
    assert name == "get_weather" and json.loads(arguments) == {"city": "Rome"}
    streamed = summed(stream(client, **given))
    assert streamed == (None, [(name, arguments)], "tool_calls")


def test_json_or_calls(client: OpenAI) -> None:
    """With a form of the answer and tools, the model answers in the form or calls."""
    strict = [tool(name, schema, strict=True) for name, schema in SCHEMAS.items()]
    answer, call = (
        ask(client, tools=strict, response_format=FORM, logit_bias={str(first): 100}, parallel_tool_calls=False)
        for first in (BRACE, LESS)
    )
    assert not calls_of(answer) and answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)
    assert calls_of(call) and call.choices[0].message.content is None
    check(calls_of(call))
    none = ask(client, response_format=FORM, tool_choice="none").choices[0].message
    jsonschema.validate(json.loads(none.content or ""), SCHEMA)


def test_a_round_trip(client: OpenAI) -> None:
    first = ask(client, tool_choice=NAMED).choices[0].message
    assert first.tool_calls is not None
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "Sunny, 24 degrees."}
    messages = [*ASK, first.model_dump(exclude_none=True), result]
    second = ask(client, messages=messages, tool_choice="none", max_tokens=30)
    assert second.choices[0].message.content and second.choices[0].message.tool_calls is None
    assert second.usage is not None and second.usage.prompt_tokens > 60


def test_the_prompt_describes_tools_calls_and_results(http: httpx.Client) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    messages = [
        *ASK,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
    ]
    prompt = http.post("/tokenize", json={"messages": messages, "tools": TOOLS}).json()["prompt"]
    assert json.dumps(TOOLS[1]) in prompt
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>' in prompt
    assert "<|im_start|>user\n<tool_response>\n3\n</tool_response>" in prompt


def test_answers_are_those_of_the_openai_api(http: httpx.Client) -> None:
    body = {"messages": ASK, "tools": TOOLS, "tool_choice": "required", "max_tokens": 100, "temperature": 0}
    judge_chat(http.post(CHAT, json=body).json())
    for chunk in events(http.post(CHAT, json={**body, "stream": True}).text):
        judge_chunk(chunk)


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        ({"tools": [tool("a", {}), tool("a", {})]}, "tools", "tools[1].function.name: there are two functions 'a'"),
        ({"tools": [tool("no spaces", {})]}, "tools", "tools[0].function.name"),
        ({"tools": [tool("x" * 65, {})]}, "tools", "1 to 64"),
        ({"tools": [tool("a", {"type": "array"})]}, "tools", "tools[0].function.parameters.type"),
        ({"tools": [tool("a", {"properties": {"x": {"type": "text"}}})]}, "tools", "parameters.properties.x.type"),
        ({"tools": [tool("a", {"properties": {"x": 5}})]}, "tools", "parameters.properties.x must be a JSON schema"),
        ({"tools": [tool("a", {"required": "x"})]}, "tools", "parameters.required"),
        ({"tools": [tool("a", "x")]}, "tools", "tools[0].function.parameters"),
        ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools", "tools[0].custom.name"),
        ({"tools": [{"type": "web_search", "function": {"name": "a"}}]}, "tools", "tools[0].type: 'web_search'"),
        ({"tools": [{**tool("a", {}), "defer_loading": True}]}, "tools", "tools[0].defer_loading"),
        ({"tools": [tool(f"f{i}", {}) for i in range(129)]}, "tools", "at most 128"),
        ({"tools": [tool("a", {"properties": {"x": {"pattern": "("}}})], "tool_choice": "required"}, "tools",
         "tools[0].function.parameters at /properties/x: "),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"uniqueItems": 1}}}],
          "tool_choice": "required"}, "tools", "tools[0].function.parameters at /uniqueItems: "),
        ({"tools": [{"type": "function", "function": {"name": "a", "strict": True, "parameters": {
            "type": "object", "properties": {"x": {"not": {"multipleOf": 2}}}}}}]},
         "tools", "tools[0].function.parameters at /properties/x/not: "),
        ({"tool_choice": "required"}, "tool_choice", "only with tools"),
        ({"tool_choice": NAMED}, "tool_choice", "only with tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "'any'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "b"}}}, "tool_choice", "'b'"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice", "custom"),
        ({"tools": TOOLS, "tool_choice": "required", "use_beam_search": True, "n": 2}, "tool_choice", "beam"),
        ({"functions": [{"name": "f"}]}, "functions", "tools"),
        ({"tools": TOOLS, "structured_outputs": {"regex": "a+"}}, "tools", "regex"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_tools_is_named(http: httpx.Client, given: dict[str, Any], param: str, words: str) -> None:
    response = http.post(CHAT, json={"messages": ASK, "max_tokens": 8, **given})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and words in error["message"], error


# Reasoning -----------------------------------------------------------------------------------------------------------

#: A template that opens the reasoning, as those of reasoning models do.
THINKING = (
    "{% for m in messages %}{{ m.role }}: {{ m.reasoning_content }}{{ m.content }}\n{% endfor %}"
    "assistant: {% if enable_thinking is defined and not enable_thinking %}<issue_start>\n<issue_closed>\n"
    "{% else %}<issue_start>\n{% endif %}"
)
END = 10  # <issue_closed>


def think(http: httpx.Client, **given: Any) -> Any:
    body = {"messages": ASK, "chat_template": THINKING, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **given}
    response = http.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    return response.json() if not given.get("stream") else events(response.text)


def test_an_answer_that_ends_within_the_reasoning(http: httpx.Client) -> None:
    answer = think(http)
    message = answer["choices"][0]["message"]
    assert message["content"] == "" and message["reasoning_content"] == message["reasoning"] != ""
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 12}
    assert "reasoning" not in think(http, include_reasoning=False)["choices"][0]["message"]
    kept = think(http, separate_reasoning=False)
    assert "reasoning" not in kept["choices"][0]["message"]
    assert kept["choices"][0]["message"]["content"].strip() == message["reasoning"].strip()
    assert "completion_tokens_details" not in kept["usage"]


def test_reasoning_is_streamed_under_both_names(http: httpx.Client) -> None:
    whole = think(http)["choices"][0]["message"]["reasoning"]
    deltas = [c["choices"][0]["delta"] for c in think(http, stream=True)]
    assert "".join(d.get("reasoning", "") for d in deltas) == whole
    assert "".join(d.get("reasoning_content", "") for d in deltas) == whole
    assert "".join(d.get("content", "") for d in deltas) == ""


def test_without_thinking_all_is_answer(http: httpx.Client) -> None:
    answer = think(http, chat_template_kwargs={"enable_thinking": False})
    assert answer["choices"][0]["message"]["content"] and "reasoning" not in answer["choices"][0]["message"]
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert think(http, reasoning_effort="none")["choices"][0]["message"] == answer["choices"][0]["message"]


def test_the_form_binds_after_the_reasoning(http: httpx.Client) -> None:
    thinking = think(http, response_format=FORM, max_tokens=20)["choices"][0]["message"]
    assert thinking["reasoning"] and thinking["content"] == ""  # it goes on thinking: no form binds that
    bias = {str(END): 100}  # ends the reasoning at once; then the form forbids that token
    answer = think(http, response_format=FORM, logit_bias=bias, max_tokens=40, ignore_eos=False)
    assert answer["choices"][0]["finish_reason"] == "stop"
    jsonschema.validate(json.loads(answer["choices"][0]["message"]["content"]), SCHEMA)
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}
    off = {"response_format": FORM, "chat_template_kwargs": {"enable_thinking": False}, "max_tokens": 40}
    plain = think(http, **off, ignore_eos=False)["choices"][0]["message"]
    jsonschema.validate(json.loads(plain["content"]), SCHEMA)


def test_calls_follow_the_reasoning(http: httpx.Client) -> None:
    bias = {str(END): 100}
    given = {"tools": TOOLS, "tool_choice": "required", "logit_bias": bias, "max_tokens": 200, "ignore_eos": False}
    message = think(http, **given)["choices"][0]["message"]
    check([(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]])
    assert message["content"] is None


def test_reasoning_of_earlier_turns_is_given_to_the_template(http: httpx.Client) -> None:
    for name in ("reasoning", "reasoning_content"):
        messages = [*ASK, {"role": "assistant", "content": "Sun.", name: "Look it up. "}, *ASK]
        prompt = http.post("/tokenize", json={"messages": messages, "chat_template": THINKING}).json()["prompt"]
        assert "assistant: Look it up. Sun." in prompt


# Tools of other kinds -------------------------------------------------------------------------------------------------

PATCH: Any = {"type": "custom", "custom": {"name": "patch", "description": "Changes a file."}}


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "custom": {"name": "patch"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "custom", "custom": {"name": "patch"}}]},
        },
    ],
    ids=["named", "allowed"],
)
def test_a_tool_that_takes_a_text_is_called_with_one(client: OpenAI, choice: Any) -> None:
    given: Any = {"tools": [*TOOLS, PATCH], "tool_choice": choice, "parallel_tool_calls": False}
    answer = ask(client, **given)
    [call] = answer.choices[0].message.tool_calls or []
    assert call.type == "custom" and call.custom.name == "patch" and call.custom.input
    assert not call.custom.input.startswith("{")
    pieces: list[Any] = [
        call
        for chunk in stream(client, **given)
        for call in chunk.choices[0].delta.model_dump().get("tool_calls") or []
    ]
    assert pieces[0]["type"] == "custom" and pieces[0]["custom"] == {"name": "patch", "input": ""} and pieces[0]["id"]
    assert "".join(piece["custom"]["input"] for piece in pieces) == call.custom.input
    assert {piece["index"] for piece in pieces} == {0}


def test_the_next_turn_tells_the_model_what_it_called(http: httpx.Client) -> None:
    call = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": 'a "b"'}}
    messages = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "done"}]  # fmt: skip
    template = (
        "{{ tools | tojson }}{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}={{ c.function.arguments | tojson }}{% endfor %}{{ m.content or '' }}{% endfor %}"
    )
    body = {"messages": messages, "tools": [PATCH], "chat_template": template}
    prompt = http.post("/tokenize", json=body).json()["prompt"]
    assert 'patch={"input": "a \\"b\\""}' in prompt
    shown = json.loads(prompt.partition(ASK[0]["content"])[0])
    assert shown[0]["function"]["name"] == "patch" and "input" in shown[0]["function"]["parameters"]["properties"]


@pytest.mark.parametrize("kind", ["web_search", "web_search_preview", "code_interpreter"])
def test_tools_that_only_another_service_can_run_are_left_out_of_chats(http: httpx.Client, kind: str) -> None:
    body = {"messages": ASK, "max_tokens": 2, "temperature": 0}
    other = {"type": kind, "web_search": {"enable": True}}
    plain = http.post(CHAT, json=body).json()["choices"][0]["message"]
    answer = http.post(CHAT, json={**body, "tools": [other], "tool_choice": "auto"})
    assert answer.status_code == 200 and answer.json()["choices"][0]["message"] == plain
    shown = [
        http.post("/tokenize", json={"messages": ASK, "tools": tools}).json() for tools in (TOOLS, [other, *TOOLS])
    ]
    assert shown[0] == shown[1]
