"""What tests of routes that stand for a chat share: the text of that chat, and the events of their own streams."""

from __future__ import annotations

import json
from typing import Any

import httpx


def chat_text(http: httpx.Client, messages: list[dict[str, Any]], **body: Any) -> str:
    """What a greedy chat of 8 tokens answers."""
    answer = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 8, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
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
