"""How many tries it takes to find what of a conversation fits the context."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.server.chat_call import ChatCall, generation_fields
from octavo.server.openai import response_request as responses
from octavo.server.openai.response_protocol import ResponsesRequest


def truncate(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], room: int, *, around: int = 6, roles: list[str] | None = None
) -> tuple[list[dict[str, Any]], int, int]:
    """The messages that are kept, of messages with so many tokens (a letter each), their prompt's length, and tries."""
    tries = []

    async def make_chat_prompt(service: Any, request: Any, call: ChatCall) -> Any:
        tries.append(call.messages)
        tokens = sum(len(message["content"]) + around for message in call.messages)
        return SimpleNamespace(tokens={"prompt_token_ids": range(tokens)})

    monkeypatch.setattr(responses, "make_chat_prompt", make_chat_prompt)
    tokenizer = SimpleNamespace(encode_batch=lambda texts, special: [list(text) for text in texts])
    service: Any = SimpleNamespace(
        llm=SimpleNamespace(tokenizer=tokenizer, max_model_len=room),
        max_prompt_chars=4 * room,
        default_max_tokens=lambda otherwise: otherwise,
    )
    messages: list[Any] = [{"role": "system", "content": "x" * 9}]
    messages += [{"role": r, "content": "x" * n} for r, n in zip(roles or ["user"] * len(sizes), sizes, strict=True)]
    call = ChatCall(messages=messages, fields=generation_fields(ResponsesRequest.model_validate({"input": "x"})))
    kept, prompt = asyncio.run(responses._truncate(service, SimpleNamespace(), call))  # type: ignore[arg-type]
    return kept.messages, len(prompt.tokens["prompt_token_ids"]), len(tries)


@pytest.mark.parametrize("around", [0, 6, 40])
@pytest.mark.parametrize("count", [3, 40, 1000])
def test_the_most_messages_that_fit_are_kept(monkeypatch: pytest.MonkeyPatch, count: int, around: int) -> None:
    sizes = [1 + i * 7919 % 90 for i in range(count)]
    room = sum(sizes[count // 2 :]) + around * count // 2 + 20
    kept, length, tries = truncate(monkeypatch, sizes, room, around=around)
    fitting = next(k for k in range(count) if sum(sizes[k:]) + around * (count - k + 1) + 9 < room)
    assert [len(m["content"]) for m in kept[1:]] == sizes[fitting:]
    assert kept[0]["role"] == "system"
    assert length < room and tries <= 4


def test_the_output_of_a_call_is_not_kept_without_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, *_ = truncate(monkeypatch, [50, 50, 5, 5], 50, roles=["user", "user", "tool", "user"])
    assert [m["role"] for m in kept] == ["system", "user"]


def test_of_what_never_fits_the_newest_message_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, length, _ = truncate(monkeypatch, [50, 50, 500], 100)
    assert [len(m["content"]) for m in kept] == [9, 500] and length > 100
