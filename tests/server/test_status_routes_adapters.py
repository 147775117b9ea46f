"""Adapters over HTTP: by their names as models, loaded at the start, by routes and on first use."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from openai import NotFoundError

from octavo.core.stats import EngineEvent
from tests.adapters import write_adapter
from tests.busy_machine import PATIENCE, eventually
from tests.server.running_server import Running, Serve, check_refusal

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
BODY = {"prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the server may read: adapters ``found``, ``late``, ``other`` and ``wide``; ``outside`` beside."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("start", "found", "late", "other", "team/deep")):
        write_adapter(root / "allowed" / name, tiny_model, seed=seed)
    write_adapter(root / "allowed" / "wide", tiny_model, rank=32)
    write_adapter(root / "outside", tiny_model, seed=9)
    (root / "allowed" / "empty").mkdir()
    (root / "allowed" / "link").symlink_to(root / "outside")
    return root / "allowed"


@pytest.fixture(scope="module")
def server(tiny_model: Path, folder: Path, start_module_server: Serve) -> Running:
    """A server with all ways to name an adapter; each test leaves only ``start`` loaded, and adapters found by name."""
    flags = (
        "--served-model-name", "tiny,alias", "--enable-lora", "--max-loras", "2",
        "--lora-modules", f"start={folder}/start",
        f'{{"name": "again", "path": "{folder}/start"}}', "--lora-folder", str(folder), "--enable-lora-routes",
        "--lora-resolver", "folder",
    )  # fmt: skip
    return start_module_server(tiny_model, *flags)


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with server.http() as http:
        yield http


def complete(http: httpx.Client, model: str) -> str:
    """The text of an adapter's, or the model's, answer."""
    answer = http.post("/v1/completions", json={**BODY, "model": model})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    text: str = answer.json()["choices"][0]["text"]
    return text


def names(http: httpx.Client) -> list[str]:
    return [model["id"] for model in http.get("/v1/models").json()["data"]]


def test_adapters_are_models_of_the_server(server: Running, http: httpx.Client) -> None:
    models = {model["id"]: model for model in http.get("/v1/models").json()["data"]}
    assert list(models)[:4] == ["tiny", "alias", "start", "again"]
    assert (models["tiny"]["root"], models["tiny"]["parent"]) == ("tiny", None)
    assert (models["start"]["root"], models["start"]["parent"]) == ("start", "tiny")
    assert http.get("/v1/models/start").json() == models["start"]
    base, start = complete(http, "tiny"), complete(http, "start")
    assert complete(http, "alias") == base
    assert complete(http, "again") == start != base
    client = server.client()
    messages: Any = [{"role": "user", "content": "hello"}]
    chat = [
        client.chat.completions.create(model=model, messages=messages, max_tokens=8, temperature=0)
        for model in ("tiny", "start")
    ]
    assert [answer.model for answer in chat] == ["tiny", "start"]
    assert chat[0].choices[0].message.content != chat[1].choices[0].message.content
    chunks = list(client.completions.create(model="start", prompt="hello", stream=True, max_tokens=8, temperature=0))
    assert {chunk.model for chunk in chunks} == {"start"}
    response = client.responses.create(model="start", input="hello", max_output_tokens=8, temperature=0)
    assert (response.model, response.output_text) == ("start", chat[1].choices[0].message.content)
    given = {"messages": messages, "max_tokens": 8, "temperature": 0, "model": "start"}
    message = http.post("/v1/messages", json=given).json()
    assert (message["model"], message["content"][0]["text"]) == ("start", response.output_text)
    for route, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
        assert http.post(route, json={**body, "model": "start"}).status_code == 200
        assert http.post(route, json={**body, "model": "nothing"}).status_code == 404


def test_the_view_of_the_engine_names_the_adapters_in_slots(http: httpx.Client) -> None:
    complete(http, "again")
    with http.stream("GET", "/engine/events", timeout=PATIENCE) as stream:
        lines = (line.removeprefix("data: ") for line in stream.iter_lines() if line)
        events = (msgspec.json.decode(line, type=EngineEvent) for line in lines)
        view = next(view for event in events for view in event.views if view.adapters)
    assert [(one.names, one.num_running) for one in view.adapters if "again" in one.names] == [(["start", "again"], 0)]


def test_an_unknown_name_says_what_there_is(server: Running, http: httpx.Client) -> None:
    with pytest.raises(NotFoundError, match=r"'nothing' does not exist here; served: tiny, alias, start, again"):
        server.client().completions.create(model="nothing", prompt="x")
    check_refusal(http.get("/v1/models/nothing"), 404, "does not exist here")


@pytest.mark.parametrize(
    "field", [{"lora_request": {"lora_name": "start"}}, {"lora_path": "start"}, {"lora": [{"id": 0}]}]
)
def test_other_fields_say_where_the_name_goes(http: httpx.Client, field: dict[str, Any]) -> None:
    error = check_refusal(http.post("/v1/completions", json={**BODY, **field}), 400, "the request's model field")
    assert error["param"] in field


def test_an_adapter_is_loaded_and_unloaded_while_the_server_runs(http: httpx.Client, folder: Path) -> None:
    base = complete(http, "tiny")
    load = {"lora_name": "mine", "lora_path": "team/deep"}
    assert http.post(LOAD, json=load).json() == {"lora_name": "mine", "status": "loaded"}
    assert http.get("/v1/models/mine").json()["root"] == "team/deep"
    assert complete(http, "mine") != base
    assert http.post(LOAD, json={**load, "lora_path": str(folder / "team/deep")}).json()["status"] == "loaded already"
    error = check_refusal(
        http.post(LOAD, json={**load, "lora_path": "other"}), 409, "'mine' already, with other content"
    )
    assert error["code"] == "adapter_conflict"
    before = complete(http, "mine")
    assert http.post(LOAD, json={**load, "lora_path": "other", "load_inplace": True}).json()["status"] == "loaded"
    assert complete(http, "mine") != before
    assert http.post(UNLOAD, json={"lora_name": "mine"}).json() == {"lora_name": "mine", "status": "unloaded"}
    assert "mine" not in names(http)
    check_refusal(http.post("/v1/completions", json={**BODY, "model": "mine"}), 404, "does not exist here")
    check_refusal(http.post(UNLOAD, json={"lora_name": "mine"}), 404, "no adapter 'mine' is loaded")


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"lora_path": "../outside"}, 400, "not within the folder"),
        ({"lora_path": "/etc"}, 400, "not within the folder"),
        ({"lora_path": "link"}, 400, "not within the folder"),
        ({"lora_path": "a\0"}, 400, "null character"),
        ({"lora_path": "nothing"}, 404, "there is no adapter at"),
        ({"lora_path": "empty"}, 400, "adapter_config.json"),
        ({"lora_path": "wide"}, 400, "max_lora_rank"),
        ({"lora_path": "late", "lora_name": "tiny"}, 409, "a name of the model itself"),
        ({"lora_path": "late", "lora_name": "alias"}, 409, "a name of the model itself"),
        ({"lora_path": "late", "lora_name": ""}, 400, "1 to 256"),
        ({"lora_path": "late", "lora_name": "a\nb"}, 400, "printable"),
        ({"lora_path": "late", "base_model_name": "m"}, 404, "'m' is not served"),
        ({"lora_path": "late", "more": 1}, 400, "more"),
        ({}, 400, "lora_path"),
    ],
)
def test_what_cannot_be_loaded_is_check_refusal(
    http: httpx.Client, body: dict[str, Any], status: int, words: str
) -> None:
    before = names(http)
    check_refusal(http.post(LOAD, json={"lora_name": "mine", **body}), status, words)
    assert names(http) == before
    assert http.post(LOAD, json={"lora_name": "mine", **body}, headers={"Origin": "https://a.example"}).status_code in (
        400,
        403,
    )


def test_an_adapter_in_use_is_not_unloaded_unless_that_may_wait(server: Running, http: httpx.Client) -> None:
    base = complete(http, "tiny")
    assert http.post(LOAD, json={"lora_name": "busy", "lora_path": "late"}).status_code == 200
    core = server.core_pid()
    long = {"model": "busy", "prompt": "x", "max_tokens": 240, "ignore_eos": True, "stream": True}
    answers: list[httpx.Response] = []
    with http.stream("POST", "/v1/completions", json=long) as stream:
        pieces = stream.iter_text()
        next(pieces)
        os.kill(core, signal.SIGSTOP)  # so that it does not end before
        try:
            check_refusal(http.post(UNLOAD, json={"lora_name": "busy"}), 409, "in use by 1 open requests")
            body = {"lora_name": "busy", "wait": True}
            waiter = threading.Thread(
                target=lambda: answers.append(httpx.post(server.url + UNLOAD, json=body, timeout=60))
            )
            waiter.start()
            eventually(lambda: "busy" in names(http) and http.get("/v1/models/busy").status_code == 409)
            check_refusal(http.post("/v1/completions", json={**BODY, "model": "busy"}), 409, "being unloaded")
            check_refusal(http.post(LOAD, json={"lora_name": "busy", "lora_path": "late"}), 409, "being unloaded")
            assert not answers
        finally:
            os.kill(core, signal.SIGCONT)
        assert "[DONE]" in "".join(pieces)
    waiter.join(60)
    assert answers[0].json() == {"lora_name": "busy", "status": "unloaded"}
    assert "busy" not in names(http)
    assert complete(http, "tiny") == base


def test_a_resolver_finds_an_adapter_when_it_is_first_named(server: Running, http: httpx.Client) -> None:
    assert "found" not in names(http)
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(complete(http, "found"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 8 and len(set(found)) == 1 and found[0] != complete(http, "tiny")
    assert "found" in names(http)
    for name in ("../outside", "team/deep", "..", "link", "wide", "empty"):
        answer = http.post("/v1/completions", json={**BODY, "model": name})
        assert answer.status_code == (400 if name in ("link", "wide", "empty") else 404), answer.text
    assert http.post(UNLOAD, json={"lora_name": "found"}).status_code == 200


def test_files_that_change_before_they_are_needed_fail_their_requests(
    http: httpx.Client, tiny_model: Path, folder: Path
) -> None:
    write_adapter(folder / "moving", tiny_model, seed=20)
    assert http.post(LOAD, json={"lora_name": "moved", "lora_path": "moving"}).status_code == 200
    write_adapter(folder / "moving", tiny_model, seed=21)
    for body in (BODY, {**BODY, "prompt": ["x", "y"]}):
        response = http.post("/v1/completions", json={**body, "model": "moved"})
        error = check_refusal(response, 409, "'moved'", code="adapter_conflict")
        assert str(folder) not in error["message"]
    assert complete(http, "start") != complete(http, "tiny")
    again = {"lora_name": "moved", "lora_path": "moving", "load_inplace": True}
    assert http.post(LOAD, json=again).json()["status"] == "loaded"
    complete(http, "moved")
    assert http.post(UNLOAD, json={"lora_name": "moved"}).status_code == 200


def test_without_options_there_are_no_such_routes(tiny_server: Running) -> None:
    with tiny_server.http() as http:
        for route in (LOAD, UNLOAD):
            assert http.post(route, json={"lora_name": "a", "lora_path": "b"}).status_code == 404
        assert not {LOAD, UNLOAD} & set(http.get("/openapi.json").json()["paths"])
        assert names(http) == ["tiny", "alias"]


def test_metrics_and_log_name_adapters(server: Running, http: httpx.Client) -> None:
    before = server.metric("octavo_adapter_requests_finished_total", adapter="start")
    complete(http, "start")
    assert server.metric("octavo_adapter_requests_finished_total", adapter="start") == before + 1
    assert server.metric("octavo_adapter_generation_tokens_total", adapter="start") >= 8
    assert "adapter=start" in server.wait_for_log("adapter=start")
