"""Refused requests: status, OpenAI's error format, a helpful message, and the server continues."""

from __future__ import annotations

import json
import socket
from typing import Any

import openai
import pytest

from tests.busy_machine import PATIENCE
from tests.server.running_server import Running, check_refusal

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temperature": -1}, "temperature", ["-1"]),
        ({"temperature": "hot"}, "temperature", ["number"]),
        ({"top_p": 0}, "top_p", []),
        ({"n": 0}, "n", []),
        ({"n": True}, "n", ["integer"]),
        ({"n": 10**30}, "n", []),
        ({"max_tokens": -1}, "max_tokens", []),
        ({"max_tokens": 1.5}, "max_tokens", ["integer"]),
        ({"seed": 2**80}, "seed", []),
        ({"priority": 2**40}, "priority", []),
        ({"priority": True}, "priority", []),
        ({"priority": "1"}, "priority", []),
        ({"priority": 1.5}, "priority", ["1.5", "fcfs", "static"]),
        ({"ttft_target": 0.5}, "ttft_target", ["fcfs", "deadline"]),
        ({"tpot_target": -1.0}, "tpot_target", ["-1.0"]),
        ({"logit_bias": {"a": 1}}, "logit_bias", []),
        ({"logit_bias": {"99999999": 1}}, "logit_bias", ["vocabulary"]),
        ({"stop": ["x", ""]}, "stop", []),
        ({"stop_token_ids": [-1]}, "stop_token_ids", []),
        ({"frequency_penalty": 3}, "frequency_penalty", []),
        ({"repetition_penalty": 0}, "repetition_penalty", []),
        ({"best_of": 1, "n": 2}, "best_of", []),
        ({"n": 257}, "n", ["256"]),
        ({"n": 2, "best_of": 300}, "best_of", ["300"]),
        ({"stop": "x" * 300}, "stop", ["256"]),
        ({"guided_regex": "a("}, "guided_regex", ["unclosed group"]),
        ({"stream_options": {"include_usage": True}}, "stream_options", ["stream=true"]),
        ({"use_beam_search": True, "n": 2, "stop": "x"}, "stop", ["beam"]),
        ({"use_beam_search": True, "n": 1000}, None, []),
        ({"length_penalty": 1.0}, "length_penalty", ["use_beam_search"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("route", [TEXT, CHAT])
def test_a_wrong_parameter_is_named(
    tiny_server: Running, route: str, fields: dict[str, Any], param: str | None, words: list[str]
) -> None:
    body = {**HELLO, **fields} if route == CHAT else {"prompt": "hello", **fields}
    with tiny_server.http() as http:
        check_refusal(http.post(route, json=body), 400, *words, param=param)
        if "stream_options" not in fields:
            # An error before the first token has its status in a stream too.
            check_refusal(http.post(route, json={**body, "stream": True}), 400, *words, param=param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ],
    ids=str,
)
def test_a_chat_that_cannot_be_had_is_refused(tiny_server: Running, fields: dict[str, Any], param: str | None) -> None:
    with tiny_server.http() as http:
        check_refusal(http.post(CHAT, json={**HELLO, **fields}), 400, param=param)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": ""}, ["empty"]),
        ({"prompt": []}, ["empty"]),
        ({"prompt": [[]]}, ["empty"]),
        ({"prompt": ["a", ""]}, ["empty"]),
        ({"prompt": [1, "a"]}, []),
        ({"prompt": None}, []),
        ({"prompt": {"text": "a"}}, []),
        ({"prompt": [999999]}, ["257"]),
        ({"prompt": [-1]}, ["-1"]),
        ({"prompt": [True]}, []),
        ({"prompt": "x" * 300}, ["256"]),
        ({"prompt": "x" * 100_000}, ["characters"]),
        ({"prompt": ["x"] * 1000}, ["1000"]),
        ({"prompt": ["x"] * 100, "n": 3}, ["300"]),
        ({"prompt": "a", "suffix": "b"}, ["suffix"]),
        ({}, ["prompt"]),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_prompt_that_cannot_be_served_is_refused(
    tiny_server: Running, fields: dict[str, Any], words: list[str]
) -> None:
    with tiny_server.http() as http:
        check_refusal(http.post(TEXT, json=fields), 400, *words)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\x00\xff\xfe",
        b'{"prompt": "\xff\xfe"}',
        '{"prompt": "a'.encode("utf-32"),
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "stop": "\\udfff"}',
        b'{"prompt": "a", "model": "\\ud800"}',
        b"[" * 100_000,
        b'{"prompt":' * 50_000,
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": ["a", {"b": ' + b"[" * 500 + b"]" * 500 + b"}]}",
        b'{"messages": [{"role": "user", "content": "a", "b": ' + b"[" * 500 + b"]" * 500 + b"}]}",
        b'{"messages": [{"role": "user", "content": [{"b": ' + b"[" * 500 + b"]" * 500 + b"}]}]}",
        b'{"messages": [{"role": "user", "tool_calls": [' + b'{"function":' * 400 + b"1" + b"}" * 400 + b"]}]}",
    ],
    ids=lambda body: repr(body[:30]),
)
def test_garbage_is_refused_and_the_server_goes_on(tiny_server: Running, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    with tiny_server.http() as http:
        for route in (TEXT, CHAT, "/tokenize", "/detokenize"):
            response = http.post(route, content=body, headers=headers)
            check_refusal(response, response.status_code)
        assert http.get("/health").status_code == 200


def test_text_in_utf16_with_a_mark_is_understood_as_json_allows(tiny_server: Running) -> None:
    body = json.dumps({"prompt": "é"}, ensure_ascii=False).encode("utf-16")
    with tiny_server.http() as http:
        answer = http.post("/tokenize", content=body, headers={"Content-Type": "application/json"})
    assert answer.json()["count"] == 2


def test_a_body_that_does_not_say_it_is_json_is_refused_as_web_pages_can_send_such(tiny_server: Running) -> None:
    with tiny_server.http() as http:
        for content_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            response = http.post(TEXT, content=b'{"prompt": "a"}', headers={"Content-Type": content_type})
            check_refusal(response, 400, "Content-Type: application/json")


def test_unknown_addresses_methods_and_models_have_their_status(tiny_server: Running) -> None:
    with tiny_server.http() as http:
        check_refusal(http.get("/v2/completions"), 404)
        check_refusal(http.get(TEXT), 405)
        assert check_refusal(
            http.post(TEXT, json={"model": "gpt-x", "prompt": "a"}), 404, "gpt-x", "tiny", param="model"
        )
        check_refusal(http.get("/v1/models/a/b"), 404, "a/b")
    with tiny_server.client() as client, pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-x", messages=[{"role": "user", "content": "a"}])
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("tokens", [[10**30], [-1], [258], [2**31 - 1], ["a"], None])
def test_ids_that_are_no_tokens_have_no_text(tiny_server: Running, tokens: Any) -> None:
    with tiny_server.http() as http:
        check_refusal(http.post("/detokenize", json={"tokens": tokens}), 400)


def test_a_prompt_of_special_tokens_only_is_served(tiny_server: Running) -> None:
    with tiny_server.http() as http:
        for prompt in ("<bos>", "<eos><eos>", [0], [1, 1, 0]):
            answer = http.post(TEXT, json={"prompt": prompt, "max_tokens": 3, "echo": True, "logprobs": 1})
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["prompt_tokens"] == (
                len(prompt) if isinstance(prompt, list) else len(prompt) // 5
            )


def test_ids_of_requests_come_back_and_bad_ones_are_replaced(tiny_server: Running) -> None:
    with tiny_server.http() as http:
        assert http.get("/health", headers={"X-Request-Id": "mine-1.2:3"}).headers["x-request-id"] == "mine-1.2:3"
        for bad in ("a b", "x" * 200, "a\tb"):
            assert http.get("/health", headers={"X-Request-Id": bad}).headers["x-request-id"].startswith("req-")
        response = http.post(TEXT, json={"prompt": "a", "n": 0}, headers={"X-Request-Id": "of-a-refusal"})
        assert response.headers["x-request-id"] == "of-a-refusal"
    tiny_server.wait_for_log("request_id=of-a-refusal")


def test_a_request_that_is_not_http_is_refused(tiny_server: Running) -> None:
    for data in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"GET /nothing HTTP/9.9\r\n\r\n",
        b"\0" * 100_000,
    ):
        with socket.create_connection(tiny_server.address, timeout=PATIENCE) as connection:
            connection.sendall(data)
            try:
                answer = connection.recv(1000)
            except ConnectionResetError:
                answer = b""
            assert answer.startswith(b"HTTP/1.1 4") or not answer
    with tiny_server.http() as http:
        assert http.get("/health").status_code == 200


def test_prompts_are_not_logged(tiny_server: Running) -> None:
    with tiny_server.http() as http:
        http.post(TEXT, json={"prompt": "my secret text", "max_tokens": 1})
        http.post(TEXT, json={"prompt": "my secret text", "n": 0})
        http.post(CHAT, json={"messages": [{"role": "my secret text", "content": None}]})
        http.get("/health", headers={"X-Request-Id": "the-last-of-these"})
    assert "secret" not in tiny_server.wait_for_log("request_id=the-last-of-these")
