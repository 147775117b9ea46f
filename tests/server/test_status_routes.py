"""HEAD, the list of models for clients of both APIs, and addresses that do not exist."""

from __future__ import annotations

import anthropic
import httpx
import pytest

from tests.server.running_server import Running


@pytest.mark.parametrize("path", ["/", "/health", "/version", "/v1/models", "/v1/models/tiny", "/metrics"])
def test_head_is_get_without_the_body(http: httpx.Client, path: str) -> None:
    get, head = http.get(path), http.head(path)
    assert get.status_code == head.status_code == 200
    assert head.content == b"" and get.content
    assert head.headers["content-type"] == get.headers["content-type"]


def test_the_root_says_what_answers(http: httpx.Client) -> None:
    assert http.get("/").json()["name"] == "Octavo"


def test_models_come_in_anthropics_form_to_its_clients(tiny_server: Running, http: httpx.Client) -> None:
    client = anthropic.Anthropic(base_url=str(http.base_url), api_key="none")
    page = client.models.list()
    ids = [model["id"] for model in http.get("/v1/models").json()["data"]]
    assert [model.id for model in page.data] == ids and page.has_more is False
    assert (page.first_id, page.last_id) == (ids[0], ids[-1])
    assert {model.type for model in page.data} == {"model"}
    one = client.models.retrieve(ids[0])
    assert one.display_name == ids[0] and one.created_at.year >= 2026


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/embed_all", "/v1/embeddings"),
        ("/v1/health", "/health"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/zzz", "/docs"),
    ],
)
def test_an_address_that_does_not_exist_says_what_this_server_has(http: httpx.Client, path: str, words: str) -> None:
    answer = http.post(path, json={})
    assert answer.status_code == 404 and words in answer.json()["error"]["message"], answer.text
