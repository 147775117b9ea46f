"""Routes that free the engine's memory: off by default, behind the keys, and clear about what they refuse."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import httpx

from tests.busy_machine import eventually
from tests.server.openai_judge import events
from tests.server.running_server import Running

TEXT = "/v1/completions"
BODY = {"prompt": "hello", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


def test_without_the_option_there_are_no_such_routes(tiny_server: Running) -> None:
    with tiny_server.http() as http:
        for answer in (http.post("/sleep"), http.post("/wake_up"), http.get("/is_sleeping")):
            assert answer.status_code == 404
        assert not {"/sleep", "/wake_up", "/is_sleeping"} & set(http.get("/openapi.json").json()["paths"])


def test_a_server_sleeps_and_wakes_whole_or_part_by_part(serve: Callable[..., Running]) -> None:
    flags = ("--enable-admin-routes", "--served-model-name", "tiny")
    server = serve(*flags, env={"OCTAVO_API_KEYS": "key"})
    with server.http() as http:
        for path in ("/sleep", "/wake_up"):
            assert http.post(path).status_code == 401
        assert http.get("/is_sleeping").status_code == 401
    with server.http(headers={"Authorization": "Bearer key"}) as http:
        # Before the first step.
        assert 'octavo_kv_cache_capacity_blocks{model_name="tiny",replica="0"} 400.0' in http.get("/metrics").text
        before = http.post(TEXT, json=BODY).json()["choices"]
        for level in ("0", "3", "x"):
            answer = http.post("/sleep", params={"level": level})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "level", answer.text
        assert http.post("/sleep", headers={"Origin": "https://a.example"}).status_code == 403
        _refused_while_a_request_runs(server, http)
        for params in ({}, {"level": 1}):
            assert http.post("/sleep", params=params).json() == {"is_sleeping": True}
            assert http.get("/is_sleeping").json() == {"is_sleeping": True}
            for stream in (False, True):
                answer = http.post(TEXT, json={**BODY, "stream": stream})
                assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_asleep"
                assert "/wake_up" in answer.json()["error"]["message"]
            assert http.get("/health").status_code == 200
            for _ in range(2):
                assert http.post("/wake_up").json() == {"is_sleeping": False}
            assert http.get("/is_sleeping").json() == {"is_sleeping": False}
            assert http.post(TEXT, json=BODY).json()["choices"] == before
        _wakes_part_by_part(http)


def _wakes_part_by_part(http: httpx.Client) -> None:
    before = http.post(TEXT, json=BODY).json()["choices"]
    assert http.post("/sleep").json() == {"is_sleeping": True}
    for tags in ("weight", ""):
        answer = http.post("/wake_up", params={"tags": tags})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "tags", answer.text
        assert "weights, kv_cache" in answer.json()["error"]["message"]
    assert http.post("/wake_up", params={"tags": "weights"}).json() == {"is_sleeping": True}
    assert http.post(TEXT, json=BODY).status_code == 503
    assert http.post("/wake_up", params={"tags": "kv_cache"}).json() == {"is_sleeping": False}
    assert http.post(TEXT, json=BODY).json()["choices"] == before
    http.post("/sleep")
    assert http.post("/wake_up?tags=kv_cache&tags=weights").json() == {"is_sleeping": False}
    assert http.post(TEXT, json=BODY).json()["choices"] == before


def _refused_while_a_request_runs(server: Running, http: httpx.Client) -> None:
    core = server.core_pid()
    body = {"prompt": ["x"] * 200, "max_tokens": 240, "ignore_eos": True, "stream": True}
    with http.stream("POST", TEXT, json=body) as answer:
        assert answer.status_code == 200
        pieces = answer.iter_text()  # the stream is closed when this is dropped
        next(pieces)
        os.kill(core, signal.SIGSTOP)  # so that it does not end before
        try:
            refused = http.post("/sleep")
        finally:
            os.kill(core, signal.SIGCONT)
    assert refused.status_code == 409 and "unfinished" in refused.json()["error"]["message"]
    eventually(
        lambda: 'octavo_requests{model_name="tiny",replica="0",state="running"} 0.0' in http.get("/metrics").text
    )


def test_replicas_are_drained_and_started_again_under_streams(serve: Callable[..., Running]) -> None:
    server = serve("--enable-admin-routes", "--data-parallel-size", "2")
    body = {**BODY, "max_tokens": 240, "prompt": ["hello"] * 8, "temperature": 1, "seed": 3}
    with server.http() as http:
        right = http.post(TEXT, json=body).json()["choices"]
        states = [{"replica": i, "status": "ready", "open_requests": 0, "restarts": 0} for i in range(2)]
        assert http.get("/admin/replicas").json() == {"replicas": states}
        for path in ("/admin/drain", "/admin/undrain"):
            answer = http.post(path, params={"replica": 2})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "replica"
        assert http.post("/admin/restart", headers={"Origin": "https://a.example"}).status_code == 403
        steps: list[Callable[[], httpx.Response]] = [
            lambda: http.post("/admin/drain", params={"replica": 0}),
            lambda: http.post("/admin/undrain", params={"replica": 0}),
            lambda: http.post("/admin/restart"),
        ]
        said = []
        for step in steps:
            with server.http() as other, other.stream("POST", TEXT, json={**body, "stream": True}) as response:
                lines = response.iter_lines()
                text = [next(lines)]
                said.append(step().json()["replicas"])
                text += lines
            pieces = [c for chunk in events("\n".join([*text, ""])) for c in chunk["choices"]]
            for choice in right:
                assert "".join(c["text"] for c in pieces if c["index"] == choice["index"]) == choice["text"]
        assert [[replica["status"] for replica in replicas] for replicas in said] == [
            ["drained", "ready"],
            ["ready", "ready"],
            ["ready", "ready"],
        ]
        assert said[0][0]["open_requests"] == 0
        http.post("/admin/drain", params={"replica": 0})
        answer = http.post("/admin/drain", params={"replica": 1})
        assert answer.status_code == 409 and answer.json()["error"]["code"] == "cannot_drain"
        assert http.post(TEXT, json=body).json()["choices"] == right
