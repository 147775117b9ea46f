"""Requests to a running server: the JSON, the error or the events of an answer."""

from __future__ import annotations

import json
from typing import Any

import httpx


def answer_of(http: httpx.Client, route: str, *, status: int = 200, **body: Any) -> Any:
    """The JSON of an answer, whose status is checked."""
    answer = http.post(route, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def error_of(http: httpx.Client, route: str, *, status: int = 400, **body: Any) -> dict[str, Any]:
    """The error of a request that is refused."""
    error: dict[str, Any] = answer_of(http, route, status=status, **body)["error"]
    return error


def chat_text(http: httpx.Client, messages: list[dict[str, Any]], **body: Any) -> str:
    """The text of a greedy chat of 8 tokens."""
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, **body}
    text: str = answer_of(http, "/v1/chat/completions", **body)["choices"][0]["message"]["content"]
    return text


def named_events(http: httpx.Client, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, each of which says its name twice."""
    with http.stream("POST", route, json={**body, "stream": True}) as answer:
        text = answer.read().decode()
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"), text
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events
