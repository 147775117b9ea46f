"""vLLM's route for several conversations in one request."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.server.openai.protocol import ChatCompletion
from tests.server.running_server import Running

PATH = "/v1/chat/completions/batch"
GREEDY: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
CONVERSATIONS = [[{"role": "user", "content": text}] for text in ("Hello", "What?", "A longer question.")]


def post(server: Running, path: str, **body: Any) -> Any:
    with server.http() as http:
        return http.post(path, json={**GREEDY, **body})


def test_each_conversation_is_answered_as_if_it_were_alone(tiny_server: Running) -> None:
    options = {"logprobs": True, "top_logprobs": 1}
    answer = post(tiny_server, PATH, messages=CONVERSATIONS, **options)
    assert answer.status_code == 200, answer.text
    made = answer.json()
    ChatCompletion.model_validate(made)
    alone = [post(tiny_server, "/v1/chat/completions", messages=each, **options).json() for each in CONVERSATIONS]
    assert [choice["index"] for choice in made["choices"]] == [0, 1, 2]
    for choice, one in zip(made["choices"], alone, strict=True):
        assert choice | {"index": 0} == one["choices"][0]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert made["usage"][name] == sum(one["usage"][name] for one in alone)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"stream": True}, "stream", ""),
        ({"n": 2}, "n", ""),
        ({"use_beam_search": True}, "use_beam_search", ""),
        ({"messages": []}, "messages", ""),
        ({"messages": CONVERSATIONS[0]}, "messages", ""),
        ({"messages": [*CONVERSATIONS, []]}, "messages", "messages[3]"),
        ({"messages": [CONVERSATIONS[0], [{"role": "user", "content": "a" * 5000}]]}, "messages", "messages[1]"),
        ({"temperature": -1}, "temperature", ""),
        ({"messages": [CONVERSATIONS[0]] * 5000}, "messages", "at most"),
    ],
)
def test_refusals(fields: dict[str, Any], param: str, said: str, tiny_server: Running) -> None:
    answer = post(tiny_server, PATH, **{"messages": CONVERSATIONS, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and said in error["message"]
