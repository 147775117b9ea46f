"""What clients ask of a server before they use it: HEAD, the list of models, compressed bodies, addresses."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable

import anthropic
import httpx
import pytest

from octavo.server.http import middleware as compressed_bodies
from octavo.server.http.errors import ApiError
from octavo.server.http.middleware import decompressed
from tests.server.running_server import Running

BODY = json.dumps({"prompt": "hello", "max_tokens": 4, "temperature": 0}).encode()


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


ENCODERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "identity": bytes,
    "deflate, gzip": lambda body: gzip.compress(zlib.compress(body)),
}


@pytest.mark.parametrize("encoding", ENCODERS)
def test_a_compressed_body_is_the_same_request(http: httpx.Client, encoding: str) -> None:
    headers = {"content-type": "application/json"}
    plain = http.post("/v1/completions", content=BODY, headers=headers)
    packed = {**headers, "content-encoding": encoding}
    answer = http.post("/v1/completions", content=ENCODERS[encoding](BODY), headers=packed)
    assert answer.status_code == 200 and answer.json()["choices"] == plain.json()["choices"]


@pytest.mark.parametrize(
    ("content", "encoding", "status"),
    [
        (BODY, "br", 415),
        (gzip.compress(gzip.compress(gzip.compress(BODY))), "gzip, gzip, gzip", 415),
        (gzip.compress(BODY), ",".join(["gzip"] * 300), 415),
        (gzip.compress(BODY), "gzip, zstd, deflate", 415),
        (BODY, "gzip", 400),
        (gzip.compress(BODY)[:-9], "gzip", 400),
        (gzip.compress(b"[" + b"0," * (40 << 20) + b"0]", 1), "gzip", 413),
    ],
    ids=["unknown", "three", "very many", "three kinds", "not in it", "cut", "too large"],
)
def test_a_body_that_cannot_be_unpacked_is_refused(
    http: httpx.Client, content: bytes, encoding: str, status: int
) -> None:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    answer = http.post("/v1/completions", content=content, headers=headers)
    assert answer.status_code == status, answer.text
    assert http.get("/health").status_code == 200


def test_what_a_body_becomes_is_bounded_at_every_step() -> None:
    bomb = gzip.compress(gzip.compress(bytes(10 << 20)))
    with pytest.raises(ApiError) as caught:
        decompressed(bomb, "gzip, gzip", 1 << 20)
    assert caught.value.status == 413


@pytest.mark.parametrize("size", [0, 1, 5, 63, 64, 65, 1000])
@pytest.mark.parametrize("step", [1, 7, 64])
def test_a_body_is_unpacked_in_steps(size: int, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed_bodies, "_STEP", step)
    monkeypatch.setattr(compressed_bodies, "_PIECE", step)
    for body in (bytes(size), os.urandom(size)):
        assert decompressed(zlib.compress(body), "deflate", size) == body
        assert decompressed(gzip.compress(gzip.compress(body)), "gzip, gzip", 2 * size + 100) == body
        if size:
            with pytest.raises(ApiError) as caught:
                decompressed(zlib.compress(body), "deflate", size - 1)
            assert caught.value.status == 413


def test_a_body_that_grows_is_counted_before_it_is_whole() -> None:
    body = os.urandom(1 << 20)
    sizes: list[int] = []
    packed = gzip.compress(zlib.compress(body), mtime=0)
    assert decompressed(packed, "deflate, identity, , GZIP", 2 << 20, sizes.append) == body
    assert sizes[0] < len(body) / 2 and sizes.count(len(body)) == 1

    def refuse(size: int) -> None:
        raise ApiError(503, "no room")

    with pytest.raises(ApiError, match="no room"):
        decompressed(packed, "deflate, gzip", 2 << 20, refuse)
    for end in (0, 1, len(packed) // 2, len(packed) - 1):
        with pytest.raises(ApiError) as caught:
            decompressed(packed[:end], "gzip", 2 << 20)
        assert caught.value.status == 400


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/embed_all", "/v1/embeddings"),
        ("/v1/health", "/health"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/api/chat", "/v1/chat/completions"),
        ("/zzz", "/docs"),
    ],
)
def test_an_address_that_does_not_exist_says_what_this_server_has(http: httpx.Client, path: str, words: str) -> None:
    answer = http.post(path, json={})
    assert answer.status_code == 404 and words in answer.json()["error"]["message"], answer.text
