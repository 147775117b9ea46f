"""Schemas and grammars that cannot be served are refused in bounded time, and the server goes on."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.running_server import TINY, Running, running

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
#: Llguidance works on it for minutes.
SLOW = {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(20)]}
DEEP: dict[str, Any] = {}
for _ in range(500):
    DEEP = {"items": DEEP}


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    log = tmp_path_factory.mktemp("formats") / "log"
    with running(tiny_model, log, *TINY, "--structured-outputs-compile-seconds", "1") as server:
        yield server


def ask(http: httpx.Client, **given: Any) -> httpx.Response:
    return http.post(CHAT, json={"messages": MESSAGES, "max_tokens": 4, **given})


def refused(response: httpx.Response, param: str, words: str) -> None:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and words in error["message"] and len(error["message"]) < 1000, error


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"guided_json": {"type": "objekt"}}, "at /type: must be of null, boolean"),
        ({"guided_json": {"properties": {"a": {"items": {"not": {}}}}, "type": 1}}, "at /type: must be of null"),
        ({"guided_json": {"pattern": "a++"}}, "guided_json: pattern: possessive quantifiers"),
        ({"guided_json": {"items": {"$ref": "http://localhost:1/a.json"}}}, "at /items: the document"),
        ({"guided_json": {"items": {"$ref": "file:///etc/passwd"}}}, "at /items: the document"),
        ({"guided_json": {"$ref": "#/$defs/b", "$defs": {"b": {"$ref": "#"}}}}, "no value is complete"),
        ({"guided_json": SLOW}, "takes more than 1 seconds"),
        ({"guided_json": DEEP}, "deep"),
        ({"guided_json": "{"}, "not valid JSON"),
        ({"guided_json": {"const": 10**30}}, "at /const: must be made of numbers of less than 2^63, not 1000000"),
        ({"guided_json": {"minLength": 10**30}}, "at /minLength: must be made of numbers of less"),
        ({"guided_regex": "a{3,2}"}, "invalid repetition count range"),
        ({"guided_regex": "(" * 100_000}, ""),
        ({"guided_grammar": "start: start"}, "no text has this form"),
        ({"guided_grammar": 'start: "a" b\nb: c'}, 'line 2, column 4: unknown name: "c"'),
        ({"guided_grammar": "start: " + "b " * 5_000_000}, "at most 1048576"),
        ({"guided_choice": [f"choice {i}" for i in range(20_000)]}, "guided_choice has"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_a_form_that_cannot_be_served_is_refused(server: Running, given: dict[str, Any], words: str) -> None:
    with server.http() as http:
        response = ask(http, **given)
        if response.status_code == 413:
            assert len(json.dumps(given)) > 9_000_000  # longer than any body that the server reads
        else:
            refused(response, next(iter(given)), words)
        assert ask(http, guided_choice=["yes"], max_tokens=8).status_code == 200


def test_a_pattern_of_white_space_that_is_none_is_refused(server: Running) -> None:
    with server.http() as http:
        response = ask(http, guided_json={"type": "object"}, guided_whitespace_pattern="(")
        refused(response, "guided_whitespace_pattern", "unclosed group")


def test_a_grammar_that_becomes_too_costly_is_refused(server: Running) -> None:
    rules = [f'a{i}: "b"?' for i in range(2500)]
    grammar = "\n".join(['start: "xyz" ' + " ".join(f"a{i}?" for i in range(2500)), *rules])
    with server.http() as http:
        response = ask(http, guided_grammar=grammar, max_tokens=8)
        refused(response, "guided_grammar", "items; max is")
        assert ask(http, guided_choice=["yes"], max_tokens=8).status_code == 200


#: What they force, or may be, exceeds one limit or another of the parser with the first token or soon after.
TOO_COSTLY = {
    "items forced": {"guided_grammar": 'start: "a"{1000000000}'},
    "items forced by rules": {
        "guided_grammar": "\n".join(["start: a0", *(f"a{i}: a{i + 1} a{i + 1}" for i in range(60)), 'a60: "b"'])
    },
    "items of a row": {
        "guided_grammar": "\n".join(
            ["start: " + "".join(f"a{i} " for i in range(60)), *(f'a{i}: "b"*' for i in range(60))]
        )
    },
    "expressions": {"guided_regex": "((é){10000,1000000000}){100}"},
}


@pytest.mark.parametrize("kind", [*TOO_COSTLY])
def test_a_limit_that_a_form_exceeds_as_it_is_written_is_the_form_s_fault(server: Running, kind: str) -> None:
    with server.http() as http:
        response = ask(http, **TOO_COSTLY[kind], max_tokens=60, ignore_eos=True)
        refused(response, next(iter(TOO_COSTLY[kind])), "too costly")
        assert ask(http, guided_choice=["yes"], max_tokens=8).status_code == 200


def test_others_are_served_while_a_grammar_is_compiled(server: Running) -> None:
    answers: list[httpx.Response] = []

    def ask_slowly(i: int) -> None:
        with server.http() as http:
            answers.append(ask(http, guided_json={**SLOW, "title": str(i)}))

    with server.http() as http:
        ask(http, guided_regex="[a-z]")
        slow = threading.Thread(target=ask_slowly, args=(0,))
        slow.start()
        others = 0
        while slow.is_alive():
            assert ask(http, guided_regex=f"[a-z]{others}").status_code == 200
            assert ask(http).status_code == 200
            others += 1
            time.sleep(0.01)
    assert others >= 5
    refused(answers[0], "guided_json", "takes more than 1 seconds")


#: A form, and what forbids each text that has it: from the first token on, or from a later one.
CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "at once": {"guided_choice": ["a"], "bad_words": ["a"]},
    "later": {"guided_regex": "b{3}a", "bad_words": ["a", "ba", "bba", "bbba"]},
    "no token in common": {"guided_choice": ["a"], "allowed_token_ids": [5]},
}
PROMPTS: dict[str, dict[str, Any]] = {CHAT: {"messages": MESSAGES}, "/v1/completions": {"prompt": "x"}}


@pytest.mark.parametrize("route", PROMPTS)
@pytest.mark.parametrize("case", CONTRADICTIONS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_form_of_which_nothing_may_be_said_is_the_client_s_contradiction(
    server: Running, route: str, case: str, stream: bool
) -> None:
    given = CONTRADICTIONS[case]
    with server.http() as http:
        body = {**PROMPTS[route], "max_tokens": 20, "stream": stream, **given}
        response = http.post(route, json=body)
        if response.status_code == 200 and stream:  # it has begun
            data = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
            error = json.loads(data[-1])["error"]
        else:
            assert response.status_code == 400, response.text
            error = response.json()["error"]
        form, other = given
        assert error["type"] == "invalid_request_error" and error["param"] == other
        assert form in error["message"] and other in error["message"]
        assert ask(http, guided_choice=["yes"], max_tokens=8).status_code == 200


def test_a_call_whose_tokens_are_forbidden_is_told_of_the_tools(demo_server: Running) -> None:
    tool = {"type": "function", "function": {"name": "a", "parameters": {"type": "object", "properties": {}}}}
    with demo_server.http() as http:
        response = ask(http, tools=[tool], tool_choice="required", allowed_token_ids=[5])
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert "tools" in error["message"] and "structured_outputs" not in error["message"]
