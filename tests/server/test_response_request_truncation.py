"""How many tries it takes to find what of a conversation fits the context."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.server.http.errors import ApiError
from octavo.server.openai import response_request as responses
from octavo.server.openai.response_protocol import ResponsesRequest
from octavo.server.openai.response_request import ResponseTools


def truncate(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], room: int, *, around: int = 6, roles: list[str] | None = None
) -> tuple[list[dict[str, Any]], int]:
    """The messages that are kept, of messages with so many tokens (a letter each), and the number of tries."""
    tries = []

    async def prepare_chat(service: Any, request: Any, body: Any, *, prefix: str) -> Any:
        tries.append(body.messages)
        tokens = sum(len(m.content) + around for m in body.messages)
        if tokens >= room:
            raise ApiError(400, "too long", param="messages", code="context_length_exceeded")
        return [m.model_dump(exclude_none=True) for m in body.messages]

    monkeypatch.setattr(responses, "prepare_chat", prepare_chat)
    tokenizer = SimpleNamespace(encode_batch=lambda texts, special: [list(text) for text in texts])
    service: Any = SimpleNamespace(
        llm=SimpleNamespace(tokenizer=tokenizer, max_model_len=room, inputs=SimpleNamespace(image_prompts=None)),
        max_prompt_chars=4 * room,
        images=SimpleNamespace(are_seen=False, check=lambda messages: [], placeholder=None),
    )
    messages: list[Any] = [{"role": "system", "content": "x" * 9}]
    messages += [{"role": r, "content": "x" * n} for r, n in zip(roles or ["user"] * len(sizes), sizes, strict=True)]
    for message in messages:
        if message["role"] == "tool":
            message["tool_call_id"] = "a"
    body = ResponsesRequest.model_validate({"input": "x", "truncation": "auto"})
    request: Any = SimpleNamespace()
    kept: Any = asyncio.run(responses.prepare_response_chat(service, request, body, messages, ResponseTools()))
    return kept, len(tries)


@pytest.mark.parametrize("around", [0, 6, 40])
@pytest.mark.parametrize("count", [3, 40, 1000])
def test_the_most_messages_that_fit_are_kept(monkeypatch: pytest.MonkeyPatch, count: int, around: int) -> None:
    sizes = [1 + i * 7919 % 90 for i in range(count)]
    room = sum(sizes[count // 2 :]) + around * count // 2 + 20
    kept, tries = truncate(monkeypatch, sizes, room, around=around)
    fitting = next(k for k in range(count) if sum(sizes[k:]) + around * (count - k + 1) + 9 < room)
    assert [len(m["content"]) for m in kept[1:]] == sizes[fitting:]
    assert kept[0]["role"] == "system"
    assert tries <= (4 if around == 6 else 24)


def test_the_output_of_a_call_is_not_kept_without_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, _ = truncate(monkeypatch, [50, 50, 5, 5], 50, roles=["user", "user", "tool", "user"])
    assert [m["role"] for m in kept] == ["system", "user"]


def test_what_never_fits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ApiError, match="too long"):
        truncate(monkeypatch, [50, 50, 500], 100)
