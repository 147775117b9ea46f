"""Cohere's API: ``/v2/chat`` and ``/v2/embed``, as its own client drives them."""

from __future__ import annotations

import base64
from typing import Any

import cohere
import numpy as np
import pytest

from octavo.server.cohere import CohereChat, CohereEmbeddings
from tests.server.answers import answer_of
from tests.server.running_server import Running

HELLO = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "maximum": 9}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


def client(server: Running) -> Any:
    return cohere.ClientV2(api_key="none", base_url=server.url)


def chat_of(server: Running, **fields: Any) -> Any:
    with server.http() as http:
        return answer_of(http, "/v1/chat/completions", **{"messages": HELLO, **GREEDY, **fields})


def test_a_chat_is_that_of_the_other_routes(tiny_server: Running) -> None:
    wanted = chat_of(tiny_server)
    made = client(tiny_server).chat(model="tiny", messages=HELLO, **GREEDY)
    assert "".join(part.text for part in made.message.content) == wanted["choices"][0]["message"]["content"]
    assert made.message.role == "assistant"
    assert made.finish_reason == ("MAX_TOKENS" if wanted["choices"][0]["finish_reason"] == "length" else "COMPLETE")
    assert made.usage.tokens.input_tokens == wanted["usage"]["prompt_tokens"]
    assert made.usage.billed_units.output_tokens == wanted["usage"]["completion_tokens"]
    with tiny_server.http() as http:
        body = http.post("/v2/chat", json={"messages": HELLO, **GREEDY}).json()
    CohereChat.model_validate(body, strict=True)


def test_a_stream_adds_up_to_the_whole_answer(tiny_server: Running) -> None:
    whole = client(tiny_server).chat(model="tiny", messages=HELLO, **GREEDY)
    events = list(client(tiny_server).chat_stream(model="tiny", messages=HELLO, **GREEDY))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message-start", "content-start"] and kinds[-2:] == ["content-end", "message-end"]
    text = "".join(event.delta.message.content.text for event in events if event.type == "content-delta")
    assert text == whole.message.content[0].text
    assert events[-1].delta.finish_reason == whole.finish_reason
    assert events[-1].delta.usage.tokens == whole.usage.tokens


def test_tools_that_must_be_called(demo_server: Running) -> None:
    fields = {"tools": [TOOL], "tool_choice": "REQUIRED", "max_tokens": 200, "temperature": 0.0, "seed": 1}
    made = client(demo_server).chat(model="demo", messages=HELLO, strict_tools=True, **fields)
    assert made.message.tool_calls and {call.function.name for call in made.message.tool_calls} == {"add"}
    events = list(client(demo_server).chat_stream(model="demo", messages=HELLO, strict_tools=True, **fields))
    started = [event for event in events if event.type == "tool-call-start"]
    assert len(started) == len(made.message.tool_calls)
    of_first = [event for event in events if event.type == "tool-call-delta" and event.index == 0]
    arguments = "".join(event.delta.message.tool_calls.function.arguments for event in of_first)
    assert arguments == made.message.tool_calls[0].function.arguments
    assert [event.type for event in events].count("tool-call-end") == len(started)


def test_samplers_forms_and_stops_have_their_own_names(tiny_server: Running) -> None:
    made = client(tiny_server).chat(
        model="tiny",
        messages=HELLO,
        max_tokens=40,
        k=1,
        p=0.9,
        response_format={
            "type": "json_object",
            "json_schema": {"type": "object", "properties": {}, "additionalProperties": False},
        },
    )
    assert made.message.content[0].text.replace(" ", "").replace("\n", "").startswith("{")
    text = client(tiny_server).chat(model="tiny", messages=HELLO, **GREEDY).message.content[0].text
    if text:
        ended = client(tiny_server).chat(model="tiny", messages=HELLO, stop_sequences=[text[0]], **GREEDY)
        assert ended.finish_reason == "STOP_SEQUENCE"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"p": 3.0}, "p"),
        ({"k": -5}, "k"),
        ({"logprobs": True}, "logprobs"),
        ({"citation_options": {"mode": "FAST"}}, "citation_options"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
        ({"stop_sequence": ["a"]}, "stop_sequence"),
    ],
)
def test_refusals_name_the_field_of_this_route(fields: dict[str, Any], param: str, tiny_server: Running) -> None:
    with tiny_server.http() as http:
        answer = http.post("/v2/chat", json={"messages": HELLO, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_earlier_turns_with_tools_and_documents_are_those_of_the_other_routes(demo_server: Running) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    result = {"type": "document", "document": {"id": "d", "data": {"sum": 3}}}
    made = client(demo_server).chat(
        model="demo",
        messages=[
            *HELLO,
            {"role": "assistant", "tool_plan": "I add.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": [result]},
        ],
        tools=[TOOL],
        **GREEDY,
    )
    messages = [
        *HELLO,
        {"role": "assistant", "content": "I add.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": '{"id": "d", "sum": 3}'},
    ]
    wanted = chat_of(demo_server, messages=messages, tools=[TOOL])
    assert made.usage.tokens.input_tokens == wanted["usage"]["prompt_tokens"]
    texts = [part.text for part in made.message.content or []]
    assert "".join(texts) == (wanted["choices"][0]["message"]["content"] or "")


def test_vectors_are_those_of_the_other_routes(vector_server: Running) -> None:
    texts = ["the river", "bread and butter"]
    with vector_server.http() as http:
        wanted = http.post("/v1/embeddings", json={"input": texts}).json()["data"]
        query = http.post("/v1/embeddings", json={"input": texts, "input_type": "search_query"}).json()["data"]
    rows = np.array([entry["embedding"] for entry in wanted], np.float32)
    made = client(vector_server).embed(
        model="vectors",
        texts=texts,
        input_type="classification",
        embedding_types=["float", "base64", "binary", "ubinary"],
    )
    assert np.array_equal(np.array(made.embeddings.float_, np.float32), rows)
    assert np.array_equal(np.frombuffer(base64.b64decode(made.embeddings.base64[1]), "<f4"), rows[1])
    bits = np.unpackbits(np.array(made.embeddings.ubinary, np.uint8), axis=1)[:, : rows.shape[1]]
    assert np.array_equal(bits.astype(bool), rows > 0)
    assert np.array_equal(np.array(made.embeddings.binary) + 128, np.array(made.embeddings.ubinary))
    assert made.texts == texts and made.meta.billed_units.input_tokens > 0
    asked = client(vector_server).embed(
        model="vectors", texts=texts, input_type="search_query", embedding_types=["float"]
    )
    assert np.array_equal(np.array(asked.embeddings.float_), np.array([entry["embedding"] for entry in query]))


def test_inputs_in_parts_long_texts_and_refusals(vector_server: Running) -> None:
    with vector_server.http() as http:

        def embed(**body: Any) -> Any:
            return http.post("/v2/embed", json=body)

        parts = [{"content": [{"type": "text", "text": "the "}, {"type": "text", "text": "river"}]}]
        plain = embed(texts=["the river"]).json()
        CohereEmbeddings.model_validate(plain, strict=True)
        assert embed(inputs=parts).json()["embeddings"] == plain["embeddings"]
        long = "river " * 5000
        assert embed(texts=[long]).status_code == embed(texts=[long], truncate="END").status_code == 200
        refused = embed(texts=["a", long], truncate="NONE").json()["error"]
        assert refused["code"] == "context_length_exceeded" and refused["param"] == "texts"
        for body, param in (
            ({}, "texts"),
            ({"texts": []}, "texts"),
            ({"texts": ["a"], "inputs": parts}, "texts"),
            ({"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types"),
            ({"texts": ["a"], "truncate": "START"}, "truncate"),
            ({"images": ["data:..."]}, "images"),
            ({"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "a"}}]}]}, "inputs"),
        ):
            answer = embed(**body)
            assert answer.status_code == 400, body
            assert answer.json()["error"]["param"] == param
