"""Tools that other services run or that take a text, and namespaces of tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.server.openai.response_request import ITEMS, ToolOrigin, messages_of
from octavo.server.openai.responses import GrowingResponse
from octavo.server.tool_parsers.tool_parser import ToolCallArguments, ToolCallStart
from tests.server.running_server import TINY, Running, running
from tests.server.test_growing_responses import USAGE, begun

OF_ANTHROPIC: list[dict[str, Any]] = [
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
    {"type": "bash_20250124", "name": "bash"},
]
OF_OPENAI: list[dict[str, Any]] = [
    {"type": "web_search"},
    {"type": "file_search", "vector_store_ids": []},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "mcp", "server_label": "a"},
    {"type": "image_generation"},
]
CUSTOM = {
    "type": "custom",
    "name": "patch",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"},
}
NAMESPACE = {
    "type": "namespace",
    "name": "mcp__files__",
    "tools": [{"type": "function", "name": "read", "parameters": {"type": "object", "properties": {}}}],
}


@pytest.fixture(scope="module")
def strict(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    log = tmp_path_factory.mktemp("strict") / "log"
    with running(tiny_model, log, *TINY, "--unsupported-tools", "refuse") as server, server.http() as http:
        yield http


def message(http: httpx.Client, **further: Any) -> httpx.Response:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "temperature": 0}
    return http.post("/v1/messages", json={**body, **further})


def response(http: httpx.Client, **further: Any) -> httpx.Response:
    return http.post("/v1/responses", json={"input": "hi", "max_output_tokens": 2, "temperature": 0, **further})


def test_tools_that_only_another_service_can_run_are_left_out(tiny_server: Running, strict: httpx.Client) -> None:
    with tiny_server.http() as http:
        plain = message(http).json()["content"]
        for tool in OF_ANTHROPIC:
            answer = message(http, tools=[tool])
            assert answer.status_code == 200 and answer.json()["content"] == plain
            refused = message(strict, tools=[tool])
            assert refused.status_code == 400 and str(tool["type"]) in refused.json()["error"]["message"]
        for tool in OF_OPENAI:
            answer = response(http, tools=[tool])
            assert answer.status_code == 200, answer.text
            assert answer.json()["output"][0]["content"][0]["text"] == plain[0]["text"]
            refused = response(strict, tools=[{"type": "function", "name": "f"}, tool])
            error = refused.json()["error"]
            assert refused.status_code == 400 and error["param"] == "tools" and "tools[1]" in error["message"]
        tiny_server.wait_for_log("left out: type 'web_search'")
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "tools": [{"type": "web_search"}]}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        refused = strict.post("/v1/chat/completions", json=body)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "tools"


def test_tools_that_take_a_text_and_tools_in_namespaces_are_functions_of_the_chat(strict: httpx.Client) -> None:
    answer = response(strict, tools=[CUSTOM, NAMESPACE])
    # What the template writes of them does not fit this model's context.
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"


def test_a_call_comes_in_the_form_of_its_tool() -> None:
    origins = {
        "patch": ToolOrigin("patch", is_custom=True),
        "mcp__files__read": ToolOrigin("read", "mcp__files__"),
    }
    growing = GrowingResponse(begun().response, origins)
    text = 'a "b"\nc'
    events = growing.begin()
    events += growing.add([ToolCallStart(0, "c1", "patch"), ToolCallArguments(0, json.dumps({"input": text}))])
    events += growing.add([ToolCallStart(1, "c2", "mcp__files__read"), ToolCallArguments(1, "{}")])
    events += growing.end(USAGE, is_whole=True)
    custom, function = (item.model_dump() for item in growing.response.output)
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "patch", text)
    assert (function["name"], function["namespace"], function["arguments"]) == ("read", "mcp__files__", "{}")
    deltas = [event for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(event["delta"] for event in deltas) == text
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == [custom, function]
    # The next turn tells the model what it called, under the names that it was shown.
    outputs = [
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {"type": "function_call_output", "call_id": "c2", "output": "x"},
    ]
    turn, *results = messages_of(ITEMS.validate_python([custom, function, *outputs]), [])
    calls = [call["function"] for call in turn["tool_calls"]]
    assert [call["name"] for call in calls] == ["patch", "mcp__files__read"]
    assert json.loads(calls[0]["arguments"]) == {"input": text}
    assert [result["content"] for result in results] == ["done", "x"]
