"""What a response reads: its tokens, counted before it is made, and its items, listed after it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from tests.server.running_server import Running

ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)
SHORT: dict[str, Any] = {"model": "tiny", "max_output_tokens": 4, "temperature": 0}
TOOL: Any = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": False}
#: One of each kind.
ITEMS: list[Any] = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "1"},
    {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "2"}]},
    {"role": "assistant", "content": "yo", "id": "msg_mine", "status": "incomplete"},
]  # fmt: skip


@pytest.fixture(scope="module")
def client(tiny_server: Running) -> Iterator[openai.OpenAI]:
    with tiny_server.client() as client:
        yield client


@pytest.mark.parametrize("fields", [{"input": "hi"}, {"input": ITEMS[:2], "instructions": "be kind"}], ids=str)
def test_as_many_tokens_are_counted_as_a_response_reads(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    counted = client.responses.input_tokens.count(model="tiny", **fields)
    made = client.responses.create(**SHORT, **fields)
    assert counted.object == "response.input_tokens"
    assert made.usage is not None and counted.input_tokens == made.usage.input_tokens > 0
    again = client.responses.input_tokens.count(model="tiny", input="more", previous_response_id=made.id)
    more = client.responses.create(**SHORT, input="more", previous_response_id=made.id)
    assert more.usage is not None and again.input_tokens == more.usage.input_tokens > counted.input_tokens
    # The input may be missing.
    assert client.responses.input_tokens.count(previous_response_id=made.id).input_tokens > counted.input_tokens


def test_tools_are_counted(client: openai.OpenAI) -> None:
    function = {name: value for name, value in TOOL.items() if name not in ("type", "strict")}
    said = {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": function}]}
    tools: Any = [{"type": "function", **function}]
    counted = client.responses.input_tokens.count(input="x", tools=tools)
    assert counted.input_tokens == httpx.post(f"{client.base_url.join('/tokenize')}", json=said).json()["count"]
    assert counted.input_tokens > 2 * client.responses.input_tokens.count(input="x").input_tokens


def test_a_count_does_not_end_with_the_context_but_truncation_does(client: openai.OpenAI) -> None:
    turns: Any = [{"role": "user", "content": f"{i}" * 30} for i in range(10)]
    assert client.responses.input_tokens.count(input=turns).input_tokens > 256
    cut = client.responses.input_tokens.count(input=turns, truncation="auto").input_tokens
    made = client.responses.create(**SHORT, input=turns, truncation="auto")
    assert made.usage is not None and 200 < cut < 256 and abs(cut - made.usage.input_tokens) < 64


def test_what_cannot_be_counted_is_refused(client: openai.OpenAI) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"input": [{"type": "computer_call", "id": "c"}]}, "input"),
        ({"input": "x", "conversation": "conv_1"}, "conversation"),
        ({"input": "x", "tool_choice": "sometimes"}, "tool_choice"),
        ({}, "input"),
    ]
    for wrong, param in cases:
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.input_tokens.count(**wrong)
        assert caught.value.param == param, wrong
    for fields in ({"model": "other"}, {"previous_response_id": "resp_0"}):
        with pytest.raises(openai.NotFoundError):
            client.responses.input_tokens.count(input="x", **fields)  # type: ignore[arg-type]


def test_items_are_listed_as_the_api_has_them(client: openai.OpenAI) -> None:
    made = client.responses.create(**SHORT, input=ITEMS, instructions="not an item", truncation="auto")
    page = client.responses.input_items.list(made.id, order="asc")
    listed = [item.model_dump(exclude_none=True) for item in page.data]
    for item in listed:
        ITEM.validate_python(item, strict=True)
    assert len({item["id"] for item in listed}) == len(ITEMS) and not page.has_more
    assert [listed[2]["id"], listed[-1]["id"]] == ["rs_1", "msg_mine"]
    kinds = [item["id"].partition("_")[0] for item in listed]
    assert kinds == ["msg", "msg", "rs", "fc", "fco", "ctc", "ctco", "msg"]
    for item in listed:
        del item["id"]
    text = {"type": "input_text"}
    assert listed[:2] == [
        {"type": "message", "role": "system", "status": "completed", "content": [{**text, "text": "be short"}]},
        {"type": "message", "role": "user", "status": "completed", "content": ITEMS[1]["content"]},
    ]
    answer = {"type": "output_text", "text": "yo", "annotations": []}
    assert listed[-1] == {"type": "message", "role": "assistant", "status": "incomplete", "content": [answer]}
    for given, item in zip(ITEMS[2:7], listed[2:7], strict=True):
        assert item == {**{name: value for name, value in given.items() if name != "id"}, "status": "completed"}


def test_a_response_that_continues_others_has_read_their_items_too(client: openai.OpenAI) -> None:
    first = client.responses.create(**SHORT, input="one")
    second = client.responses.create(**SHORT, input="two", previous_response_id=first.id)
    [one] = client.responses.input_items.list(first.id)
    [two, answer, same] = client.responses.input_items.list(second.id)  # the newest first
    assert same == one and answer.id == first.output[0].id and answer.to_dict()["role"] == "assistant"
    assert two.to_dict()["content"] == [{"type": "input_text", "text": "two"}]
    again = client.responses.create(**SHORT, previous_response_id=first.id, input=[one.to_dict(), one.to_dict()])  # type: ignore[list-item]
    ids = [item.id for item in client.responses.input_items.list(again.id)]
    assert len(set(ids)) == 4, "an id that another item has is not taken"


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_pages_follow_each_other(client: openai.OpenAI, order: Any) -> None:
    turns: Any = [{"role": "user", "content": str(i)} for i in range(23)]
    made = client.responses.create(**SHORT, input=turns)
    expected = [str(i) for i in (range(23) if order == "asc" else reversed(range(23)))]
    for limit in (1, 5, 23, 100):
        pages: Any = client.responses.input_items.list(made.id, order=order, limit=limit)
        assert [item.content[0].text for item in pages] == expected
    first: Any = client.responses.input_items.list(made.id, order=order)
    assert len(first.data) == 20 and first.has_more and first.first_id == first.data[0].id
    rest: Any = client.responses.input_items.list(made.id, order=order, after=first.last_id)
    assert len(rest.data) == 3 and not rest.has_more and rest.last_id == rest.data[-1].id
    none: Any = client.responses.input_items.list(made.id, order=order, after=rest.last_id)
    assert none.data == [] and not none.has_more
    assert all(a.id != b.id for a, b in itertools.combinations([*first.data, *rest.data], 2))


def test_a_page_that_there_cannot_be_is_refused(client: openai.OpenAI) -> None:
    made = client.responses.create(**SHORT, input="hi")
    for name, value in (("limit", 0), ("limit", 101), ("order", "up"), ("after", "msg_0")):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.input_items.list(made.id, **{name: value})  # type: ignore[arg-type]
        assert caught.value.param == name
    with pytest.raises(openai.NotFoundError, match="not known here"):
        client.responses.input_items.list("resp_0")
