"""Many clients that ask for vectors beside many that generate: nothing is lost, and every result has its bits."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.busy_machine import PATIENCE
from tests.server.running_server import Running, Serve

CLIENTS = 64
SECONDS = float(os.environ.get("OCTAVO_LOAD_SECONDS", "120"))
TEXTS = ["a", "some words", "x" * 200, "the quick brown fox jumps over the lazy dog", "0123456789" * 10]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 600)]


@pytest.fixture(scope="module")
def server(tiny_model: Path, start_module_server: Serve) -> Running:
    return start_module_server(tiny_model, "--served-model-name", "tiny", "--max-connections-per-address", "200")


def test_nothing_is_lost(server: Running) -> None:
    counts: Counter[str] = Counter()
    inputs = Counter[str]()
    seen: dict[str, set[str]] = {}

    async def embed(http: httpx.AsyncClient, number: int) -> None:
        texts = [TEXTS[(number + i) % len(TEXTS)] for i in range(number % 7 + 1)]
        response = await http.post("/v1/embeddings", json={"input": texts, "encoding_format": "base64"})
        assert response.status_code == 200, response.text
        data = response.json()["data"]
        assert [entry["index"] for entry in data] == list(range(len(texts)))
        for text, entry in zip(texts, data, strict=True):
            seen.setdefault(text, set()).add(entry["embedding"])
        inputs["embed"] += len(texts)

    async def generate(http: httpx.AsyncClient, number: int) -> None:
        text = TEXTS[number % len(TEXTS)][:40]
        body = {"prompt": text, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        response = await http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["completion_tokens"] == 12
        seen.setdefault(f"answer to {text}", set()).add(response.json()["choices"][0]["text"])
        inputs["generate"] += 1

    async def leave(http: httpx.AsyncClient, number: int) -> None:
        """A client that does not wait for its vectors."""
        with pytest.raises(httpx.TimeoutException):
            await http.post("/v1/embeddings", json={"input": [TEXTS[2]] * 200}, timeout=0.01)

    async def client(number: int, end: float) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as http:
            for turn in itertools.count():
                if time.monotonic() > end:
                    return
                kind = embed if number % 2 else generate
                kind = leave if number == 0 and turn % 8 == 7 else kind
                await kind(http, number + turn)
                counts[kind.__name__] += 1

    async def main() -> None:
        end = time.monotonic() + SECONDS
        async with asyncio.TaskGroup() as tasks:
            for number in range(CLIENTS):
                tasks.create_task(client(number, end))

    asyncio.run(main())
    assert {name: len(bits) for name, bits in seen.items() if len(bits) != 1} == {}, (
        "each text has one vector, one answer"
    )
    assert len(seen) == 2 * len(TEXTS) and min(counts["embed"], counts["generate"]) > SECONDS
    server.wait_until_idle()
    assert server.metric("octavo_requests", state="waiting") == 0
    name = "octavo_pooling_requests_finished_total"
    assert server.metric(name, task="embed", reason="stop") >= inputs["embed"]
    assert server.metric("octavo_requests_finished_total", reason="length") == inputs["generate"]
    assert server.metric("octavo_requests_finished_total", reason="error") == 0
    # Some answers to clients that left were written before the server knew it.
    answered = server.metric("octavo_http_responses_total", route="/v1/embeddings", code="200")
    assert counts["embed"] <= answered <= counts["embed"] + counts["leave"]
    print(counts, inputs)
