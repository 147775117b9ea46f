"""``suffix`` of ``/v1/completions``: the gap is filled by a model that has tokens for this, and refused by others."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.answers import answer_of
from tests.server.running_server import Running

TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def server(special_server: Running) -> Running:
    return special_server


def complete(server: Running, **body: Any) -> dict[str, Any]:
    with server.http() as http:
        answer: dict[str, Any] = answer_of(http, TEXT, **{"max_tokens": 8, "temperature": 0, **body})
    return answer


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def test_a_gap_is_filled_by_what_the_model_writes_after_the_middle_token(server: Running) -> None:
    with server.http() as http:
        written = "<fim_prefix>def f(<fim_suffix>): pass<fim_middle>"
        ids = http.post("/tokenize", json={"prompt": written}).json()["tokens"]
    assert len(ids) == 3 + len("def f(") + len("): pass")
    wanted = complete(server, prompt=ids, ignore_eos=True)
    found = complete(server, prompt="def f(", suffix="): pass", ignore_eos=True)
    assert texts(found) == texts(wanted)
    assert found["usage"]["prompt_tokens"] == wanted["usage"]["prompt_tokens"] == len(ids)
    both = complete(server, prompt=["x", "def f("], suffix="): pass", ignore_eos=True)
    assert texts(both)[1:] == texts(wanted)
    assert texts(complete(server, prompt="def f(", suffix="")) == texts(complete(server, prompt="def f("))
    with server.client() as client:
        stream = client.completions.create(
            model="tiny", prompt="def f(", suffix="): pass", max_tokens=8, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        assert "".join(chunk.choices[0].text for chunk in stream) == texts(wanted)[0]


def test_llamas_infill_fills_the_same_gap(server: Running) -> None:
    [text] = texts(complete(server, prompt="def f(", suffix="): pass"))
    body = {"input_prefix": "def f(", "input_suffix": "): pass", "n_predict": 8, "temperature": 0}
    with server.http() as http:
        answer = http.post("/infill", json=body).json()
    assert answer["content"] == text and answer["tokens_predicted"] <= 8


def test_a_middle_ends_with_the_tokens_that_end_middles(server: Running) -> None:
    with server.http() as http:
        [end] = http.post("/tokenize", json={"prompt": "<|endoftext|>"}).json()["tokens"]
    body = {"prompt": "a", "suffix": "b", "logit_bias": {str(end): 100}}
    (choice,) = complete(server, **body)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", end)
    (choice,) = complete(server, **body, ignore_eos=True)["choices"]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("further", "param"),
    [
        ({"echo": True}, "echo"),
        ({"use_beam_search": True, "n": 2}, "use_beam_search"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"prompt": [5, 6]}, "suffix"),
        ({"suffix": 5}, "suffix"),
        ({"suffix": "b" * 9000}, "prompt"),
    ],
    ids=str,
)
def test_what_does_not_go_with_a_suffix_is_refused(server: Running, further: dict[str, Any], param: str) -> None:
    with server.http() as http:
        response = http.post(TEXT, json={"prompt": "a", "suffix": "b", **further})
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


def test_a_model_without_such_tokens_refuses_by_name(tiny_server: Running) -> None:
    with tiny_server.http() as http:
        response: httpx.Response = http.post(TEXT, json={"prompt": "a", "suffix": "b"})
    error = response.json()["error"]
    assert response.status_code == 400 and (error["param"], error["code"]) == ("suffix", "unsupported_parameter")
    assert "vocabulary has no tokens" in error["message"]
