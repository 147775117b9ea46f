"""Clients of Ollama against a server with a model of Ollama's store: its Python client, and requests of programs.

The requests are those of Zed (crates/ollama), GitHub Copilot Chat (ollamaProvider.ts) and Open WebUI
(routers/ollama.py), by their public sources.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from pydantic import BaseModel

from octavo.loader.builtin import BUILTIN, fetch_builtin
from tests.fake_hub import FakeHub, serving_hub
from tests.ollama_store import LIBRARY, Store
from tests.server.running_server import Running, running

MODEL = "llama3.2"
ASK = [{"role": "user", "content": "What is the capital of France?"}]
SHORT = {"num_predict": 12, "temperature": 0, "num_ctx": 4096}
SYSTEM = "You are a geographer."


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    with serving_hub() as hub:
        hub.add("owner/m-GGUF", {"m-Q8_0.gguf": b"GGUF" + b"x" * 3_000_000})
        yield hub


@pytest.fixture(scope="module")
def server(hub: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of the demo model, as Ollama keeps it, at an address of Ollama's too."""
    folder = tmp_path_factory.mktemp("ollama")
    store = Store(folder / "models")
    gguf = fetch_builtin(BUILTIN["smollm2-135m"])
    store.add(f"{LIBRARY}/{MODEL}/latest", gguf, params={"temperature": 0.5, "stop": ["STOP"]}, system=SYSTEM)
    store.add(f"{LIBRARY}/other/1b", gguf, license="MIT")
    env = {
        "OLLAMA_MODELS": str(store.root),
        "OLLAMA_HOST": "127.0.0.1:0",
        "OCTAVO_CACHE": str(folder / "cache"),
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_CACHE": str(folder / "hf" / "hub"),
        "HF_ENDPOINT": hub.url,
    }
    flags = ("--num-gpu-blocks-override", "300", "--num-threads", "1", "--max-model-len", "2048", "--max-num-seqs", "8")
    with running(MODEL, folder / "log", "--ollama", "--allow-pull", *flags, env=env) as server:
        yield server


@pytest.fixture(scope="module")
def url(server: Running) -> str:
    """Ollama's address."""
    found = re.search(r"Ollama's API is at (\S+)", server.log.read_text())
    assert found is not None
    return found[1]


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[ollama.Client]:
    with ollama.Client(url) as client:
        yield client


@pytest.fixture(scope="module")
def at_ollama(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as http:
        yield http


def test_it_chats(client: ollama.Client, server: Running) -> None:
    answer = client.chat(MODEL, messages=ASK, options=SHORT)
    assert answer.message.role == "assistant" and answer.message.content and answer.done
    assert answer.eval_count and answer.eval_duration and answer.prompt_eval_count and answer.total_duration
    parts = list(client.chat(MODEL, messages=ASK, options=SHORT, stream=True))
    assert "".join(part["message"]["content"] for part in parts) == answer.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    # The system prompt of the model's own layer, unless the request has one.
    with server.http() as http:
        messages = [{"role": "system", "content": SYSTEM}, *ASK]
        body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 12}
        assert http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"] == (
            answer.message.content
        )
    history: list[Any] = [*ASK, answer.message, {"role": "user", "content": "And of Italy?"}]
    assert client.chat(MODEL, messages=history, options=SHORT).message.content


def test_it_generates(client: ollama.Client) -> None:
    answer = client.generate(MODEL, ASK[0]["content"], options=SHORT)
    assert answer.response == client.chat(MODEL, messages=ASK, options=SHORT).message.content
    assert answer.context and not answer.thinking
    parts = list(client.generate(MODEL, ASK[0]["content"], options=ollama.Options(**SHORT), stream=True))
    assert "".join(part.response or "" for part in parts) == answer.response
    with_logprobs = client.generate(MODEL, "Hi", logprobs=True, top_logprobs=2, options=SHORT)
    assert with_logprobs.logprobs and len(with_logprobs.logprobs[0].top_logprobs or ()) == 2
    assert client.generate(MODEL, keep_alive=0).done_reason == "load"
    # As Go's clients send it: empty for what they leave out.
    empty = {"suffix": "", "system": "", "template": "", "images": None, "context": None, "format": None}
    body = {"model": MODEL, "prompt": ASK[0]["content"], "stream": False, "options": SHORT, **empty}
    assert client._client.post("/api/generate", json=body).json()["response"] == answer.response


def test_it_calls_asynchronously(url: str) -> None:
    async def run() -> tuple[str | None, str]:
        async with ollama.AsyncClient(url) as client:
            answer = await client.chat(MODEL, messages=ASK, options=SHORT)
            parts = await client.chat(MODEL, messages=ASK, options=SHORT, stream=True)
            text = "".join([part.message.content or "" async for part in parts])
            assert (await client.ps()).models
            return answer.message.content, text

    whole, streamed = asyncio.run(run())
    assert whole == streamed and whole


class Country(BaseModel):
    name: str
    capital: str


def test_it_structures_answers(client: ollama.Client) -> None:
    options = {"temperature": 0, "num_predict": 100}
    answer = client.chat(MODEL, messages=ASK, format=Country.model_json_schema(), options=options)
    assert Country.model_validate_json(answer.message.content or "")


def add_two_numbers(a: int, b: int) -> int:
    """
    Add two numbers

    Args:
        a (int): The first number
        b (int): The second number

    Returns:
        int: The sum
    """
    return a + b


def test_it_sends_functions_and_their_results(client: ollama.Client) -> None:
    answer = client.chat(MODEL, messages=ASK, tools=[add_two_numbers], options=SHORT)
    assert answer.message.content or answer.message.tool_calls
    call = ollama.Message.ToolCall(
        function=ollama.Message.ToolCall.Function(name="add_two_numbers", arguments={"a": 1})
    )
    messages: list[Any] = [
        *ASK,
        ollama.Message(role="assistant", content="", tool_calls=[call]),
        {"role": "tool", "content": "2", "tool_name": "add_two_numbers"},
    ]
    assert client.chat(MODEL, messages=messages, tools=[add_two_numbers], options=SHORT).message.role == "assistant"


def test_it_lists_and_shows_models(client: ollama.Client) -> None:
    models = {model.model: model for model in client.list().models}
    assert set(models) == {f"{MODEL}:latest", "other:1b"}
    served = models[f"{MODEL}:latest"]
    assert served.digest and len(served.digest) == 64 and served.digest != models["other:1b"].digest
    assert served.details is not None and served.size and served.modified_at
    details = served.details
    assert (details.format, details.family, details.parameter_size) == ("gguf", "llama", "134.5M")
    assert details.quantization_level == "Q4_1"
    [running_model] = client.ps().models
    assert running_model.model == f"{MODEL}:latest" and running_model.context_length == 2048
    shown = client.show(MODEL)
    assert shown.capabilities == ["completion", "tools"] and "im_start" in (shown.template or "")
    assert shown.modelinfo is not None and shown.modelinfo["general.architecture"] == "llama"
    assert shown.modelinfo["llama.context_length"] == 2048 and shown.modelinfo["tokenizer.ggml.tokens"] is None
    assert re.search(r'^temperature +0.5$\n(?:.*\n)*^stop +"STOP"$', shown.parameters or "", re.MULTILINE)
    other = client.show("other:1b")
    assert other.license == "MIT" and other.capabilities == ["completion", "tools"]
    assert other.modelinfo is not None and other.modelinfo["llama.context_length"] == 8192


def test_errors_are_those_that_it_knows(client: ollama.Client) -> None:
    for name, words in (("llama3.1", "did you mean 'llama3.2'"), ("other:1b", "on this machine")):
        with pytest.raises(ollama.ResponseError) as error:
            client.chat(name, messages=ASK)
        assert error.value.status_code == 404 and "not found" in error.value.error and words in error.value.error
    with pytest.raises(ollama.ResponseError, match="does not support thinking"):
        list(client.chat(MODEL, messages=ASK, think=True, stream=True))
    with pytest.raises(ollama.ResponseError, match="not created"):
        client.create("mine", from_=MODEL)


def test_it_pulls_with_progress_and_deletes(client: ollama.Client, hub: FakeHub) -> None:
    steps = list(client.pull("owner/m-GGUF:Q8_0", stream=True))
    assert steps[0].status == "pulling manifest" and steps[-1].status == "success"
    files = [step for step in steps if step.digest]
    assert files[-1].completed == files[-1].total == 3_000_004 and (files[-1].digest or "").startswith("sha256:")
    assert client.pull("hf.co/owner/m-GGUF:Q8_0").status == "success"  # it is there
    assert "owner/m-GGUF:Q8_0" in {model.model for model in client.list().models}
    assert len(hub.received("m-Q8_0.gguf")) == 1
    assert client.delete("owner/m-GGUF:Q8_0").status == "success"
    assert "owner/m-GGUF:Q8_0" not in {model.model for model in client.list().models}
    for name in ("owner/m-GGUF:Q8_0", "none"):
        with pytest.raises(ollama.ResponseError) as error:
            client.delete(name)
        assert error.value.status_code == 404
    for name in ("nobody/none", "../secret", "/etc/passwd", "llama9"):
        with pytest.raises(ollama.ResponseError) as error:
            list(client.pull(name, stream=True))
        assert error.value.error and "secret'?" not in error.value.error
    with pytest.raises(ollama.ResponseError, match="another program"):
        client.delete("other:1b")
    with pytest.raises(ollama.ResponseError, match="served now"):
        client.delete(MODEL)


def test_a_copy_is_an_alias(client: ollama.Client, server: Running) -> None:
    client.copy(MODEL, "gpt-4")
    assert client.chat("gpt-4", messages=ASK, options=SHORT).model == "gpt-4"
    assert server.complete(model="gpt-4:latest", prompt="x", max_tokens=1)
    with pytest.raises(ollama.ResponseError, match="already exists"):
        client.copy(MODEL, "gpt-4")
    client.delete("gpt-4")
    with pytest.raises(ollama.ResponseError, match="not found"):
        client.chat("gpt-4", messages=ASK)


def test_its_own_address_has_only_its_routes(at_ollama: httpx.Client, server: Running) -> None:
    for method in ("GET", "HEAD"):
        answer = at_ollama.request(method, "/")
        assert answer.status_code == 200 and answer.text == ("Ollama is running" if method == "GET" else "")
    assert at_ollama.get("/v1/models").json()["data"][0]["id"] == MODEL
    assert at_ollama.get("/api/version").json()["version"].count(".") == 2
    for path in ("/health", "/metrics", "/docs", "/v1/models2", "/engine/events"):
        assert at_ollama.get(path).status_code == 404
    with server.http() as http:
        assert http.get("/health").status_code == 200 and "Ollama is running" not in http.get("/").text
        assert http.get("/api/version").status_code == 200


def test_requests_of_zed(at_ollama: httpx.Client) -> None:
    [name, *_] = [
        model["name"] for model in at_ollama.get("/api/tags", headers={"Accept": "application/json"}).json()["models"]
    ]
    assert "tools" in at_ollama.post("/api/show", json={"model": name}).json()["capabilities"]
    tool = {
        "type": "function",
        "function": {"name": "now", "description": "The time", "parameters": {"type": "object"}},
    }
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You help."},
        {"role": "user", "content": "What time is it?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "now", "arguments": {}}}],
            "thinking": None,
        },
        {"role": "tool", "tool_name": "now", "content": "Noon."},
        {"role": "user", "content": "Thanks."},
    ]
    options: dict[str, Any] = {"num_ctx": 2048, "num_predict": None, "stop": [], "temperature": 1.0, "top_p": None}
    body = {
        "model": name, "messages": messages, "stream": True, "keep_alive": -1, "options": options, "tools": [tool],
        "think": None,
    }  # fmt: skip
    body["options"] = {**options, "num_predict": 8}
    lines = at_ollama.post("/api/chat", json=body).text.splitlines()
    assert len(lines) > 1 and '"done":true' in lines[-1]


def test_requests_of_copilot(at_ollama: httpx.Client) -> None:
    version = [int(part) for part in at_ollama.get("/api/version").json()["version"].split(".")]
    assert version >= [0, 6, 4]
    [model, *_] = at_ollama.get("/api/tags").json()["models"]
    shown = at_ollama.post("/api/show", json={"model": model["model"]}).json()
    info = shown["model_info"]
    assert info["general.basename"] and info[f"{info['general.architecture']}.context_length"] == 2048
    assert shown["template"] and shown["details"]["family"] == "llama"
    body = {"model": model["model"], "messages": ASK, "stream": True, "max_tokens": 8, "temperature": 0}
    answer = at_ollama.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200 and "data: [DONE]" in answer.text


def test_requests_of_open_webui(at_ollama: httpx.Client) -> None:
    """It leaves out fields without a value, and adds the tag to names without one."""
    user = {"Authorization": "Bearer a", "X-OpenWebUI-User-Name": "A", "X-OpenWebUI-User-Role": "admin"}
    name = f"{MODEL}:latest"
    assert at_ollama.get("/api/version", headers=user).json()["version"]
    assert name in [listed["model"] for listed in at_ollama.get("/api/tags", headers=user).json()["models"]]
    assert at_ollama.get("/api/ps", headers=user).json()["models"]
    assert at_ollama.post("/api/show", json={"name": name, "model": name}, headers=user).json()["details"]
    options = {"temperature": 0.8, "top_k": 40, "num_predict": 8, "num_ctx": 2048, "repeat_last_n": 64, "mirostat": 0}
    message = {"role": "user", "content": "Hello", "images": []}
    body = {"model": name, "messages": [message], "options": options, "stream": True, "keep_alive": "5m"}
    answer = at_ollama.post("/api/chat", json=body, headers=user)
    assert answer.status_code == 200 and answer.text.count("\n") > 1
    unload = at_ollama.post("/api/generate", json={"model": name, "prompt": "", "keep_alive": 0}, headers=user)
    assert unload.json()["done"]
    embedded = at_ollama.post("/api/embed", json={"model": name, "input": ["a", "b"], "truncate": True}, headers=user)
    assert len(embedded.json()["embeddings"]) == 2


def test_the_log_names_the_store(server: Running, tmp_path: Path) -> None:
    assert f"serving {MODEL} on" in server.log.read_text()
