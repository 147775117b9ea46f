"""Addresses without the version, and hints where there is nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.server.http.middleware import versioned
from tests.server.running_server import TINY, Running, running

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize(
    ("path", "with_version"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/responses/resp_1/input_items", "/v1/responses/resp_1/input_items"),
        ("/models/owner/name", "/v1/models/owner/name"),
        ("/audio/transcriptions", "/v1/audio/transcriptions"),
        ("/v1/models", "/v1/models"),
        ("/modelsx", "/modelsx"),
        ("/completions", "/completions"),
        ("/", "/"),
    ],
)
def test_an_address_gets_its_version(path: str, with_version: str) -> None:
    assert versioned(path) == with_version


def test_clients_whose_base_address_has_no_version_are_answered(tiny_server: Running) -> None:
    with tiny_server.http() as http:
        answers = [http.post(path, json=CHAT).json() for path in ("/v1/chat/completions", "/chat/completions")]
        assert answers[0]["choices"] == answers[1]["choices"] and answers[0]["choices"][0]["message"]["content"]
        assert http.get("/models").json() == http.get("/v1/models").json()
        message = {**CHAT, "temperature": 0.0}
        assert http.post("/messages", json=message).json()["type"] in ("message", "error")
    with tiny_server.client(base_url=tiny_server.url) as client:
        made = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hello"}], max_tokens=4, temperature=0
        )
        assert made.object == "chat.completion"
        assert client.responses.create(model="tiny", input="Hello", max_output_tokens=4).object == "response"
        assert [model.id for model in client.models.list()]


def test_a_key_is_needed_with_and_without_the_version(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    flags = (*TINY, "--api-key-file", str(tmp_path / "keys"))
    with running(tiny_model, tmp_path / "log", *flags) as server, server.http() as http:
        for path in ("/v1/chat/completions", "/chat/completions"):
            assert http.post(path, json=CHAT).status_code == 401
            allowed = http.post(path, json=CHAT, headers={"Authorization": "Bearer secret"})
            assert allowed.status_code == 200


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("/ping", "/health"),
        ("/ready", "/health"),
        ("/healthz", "/health"),
        ("/v1/conversations", "/v1/responses"),
        ("/v1/conversations/conv_1/items", "/v1/responses"),
        ("/v1/assistants", "/v1/responses"),
        ("/v1/embed", "/v2/embed"),
        ("/v1/chat", "/v1/chat/completions"),
        ("/invocations", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/chat/completions/", "/v1/chat/completions"),
        ("/v1/models/", "/v1/models"),
        ("/v1/embeddings/", "/v1/embeddings"),
        ("/health/", "/health"),
        ("/v1/chat/completion", "/v1/chat/completions"),
    ],
)
def test_where_there_is_nothing_it_is_said_what_there_is(path: str, named: str, tiny_server: Running) -> None:
    with tiny_server.http() as http:
        answer = http.get(path)
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "unknown_address"
    assert named in error["message"].partition(");")[2]
