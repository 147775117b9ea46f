"""Compressed bodies: the same requests, bounded in the bytes that they become."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable

import httpx
import pytest

from octavo.server.http import middleware
from octavo.server.http.errors import ApiError
from octavo.server.http.middleware import decompressed

BODY = json.dumps({"prompt": "hello", "max_tokens": 4, "temperature": 0}).encode()
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
    monkeypatch.setattr(middleware, "_STEP", step)
    monkeypatch.setattr(middleware, "_PIECE", step)
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
