"""What a request without sampling parameters is sampled with, on every route that generates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.main import main
from tests.server.running_server import Running, running

QUESTION = "What is the capital of France?"
MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    log = tmp_path_factory.mktemp("defaults") / "log"
    with running("smollm2-135m", log, "--num-gpu-blocks-override", "200", "--num-threads", "1") as server:
        yield server


def prompt(server: Running) -> str:
    """The question as the model's template writes it."""
    with server.http() as http:
        text: str = http.post("/apply-template", json={"messages": MESSAGES}).json()["prompt"]
    return text


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/responses", {"input": QUESTION}),
        ("/v1/messages", {"model": "smollm2-135m", "messages": MESSAGES, "max_tokens": 100}),
        ("/v1/completions", {"prompt": None}),
        ("/completion", {"prompt": None}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_demo_model_answers_a_simple_question(server: Running, route: str, body: dict[str, Any]) -> None:
    if "prompt" in body:
        body = {"prompt": prompt(server)}
    with server.http() as http:
        for _ in range(4):
            answer = http.post(route, json=body)
            assert answer.status_code == 200
            assert "Paris" in answer.text


def test_the_server_tells_its_defaults(server: Running) -> None:
    with server.http() as http:
        [model] = http.get("/v1/models").json()["data"]
        told = model["default_sampling_params"]
        assert (told["temperature"], told["top_p"]) == (0.2, 0.9) and isinstance(told["top_k"], int)
        assert {"temperature", "top_p"} <= set(model["own_sampling_params"]) <= set(told)
        params = http.get("/props").json()["default_generation_settings"]["params"]
        assert params.items() >= told.items() and params["repeat_penalty"] == told["repetition_penalty"]
        begun = http.post("/v1/responses", json={"input": QUESTION, "max_output_tokens": 1}).json()
        assert (begun["temperature"], begun["top_p"]) == (0.2, 0.9)


def test_a_request_may_have_parameters_of_its_own(server: Running) -> None:
    with server.http() as http:
        body = {"input": QUESTION, "temperature": 0.5, "max_output_tokens": 1}
        answer = http.post("/v1/responses", json=body).json()
    assert (answer["temperature"], answer["top_p"]) == (0.5, 0.9)


def test_programs_without_a_server_have_them_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = ("--num-gpu-blocks-override", "200", "--num-threads", "1")
    assert main(["generate", "smollm2-135m", "--chat", QUESTION, *engine]) == 0
    assert "Paris" in capsys.readouterr().out
    rows = tmp_path / "rows.jsonl"
    row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": MESSAGES}}
    rows.write_text(json.dumps(row) + "\n")
    answers = tmp_path / "answers.jsonl"
    assert main(["batch", "run", "smollm2-135m", "-i", str(rows), "-o", str(answers), *engine]) == 0
    assert "Paris" in answers.read_text()
