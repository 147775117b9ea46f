"""A step that fails under 16 streams: 15 lose nothing, one ends with an error, and the dump of the step opens."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.main import main
from octavo.cli.view import make_server
from octavo.core.stats import read_recording
from octavo.engine.step_dumps import read_dump
from tests.server.failing_step import POISON
from tests.server.running_server import Running, Serve

SECRET = "a secret prompt"


def stream(server: Running, number: int, **fields: Any) -> tuple[list[Any], Any]:
    """The pieces of an answer with their logprobs, and the error that ended it."""
    # Their prompts differ in one token: none finds text that another has generated, which a dump does not tell.
    prompt = f"{SECRET} {chr(ord('a') + number)}"
    body = {"prompt": prompt, "max_tokens": 200, "seed": number, "ignore_eos": True, "logprobs": 1}
    with (
        server.http() as http,
        http.stream("POST", "/v1/completions", json={**body, "stream": True, **fields}) as answer,
    ):
        told = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    lines = [json.loads(data) for data in told if data != "[DONE]"]
    error = next((line["error"] for line in lines if "error" in line), None)
    return [(c["text"], c["logprobs"]) for line in lines for c in line.get("choices", [])], error


def all_streams(server: Running, count: int, **last: Any) -> list[tuple[list[Any], Any]]:
    with ThreadPoolExecutor(count) as threads:
        fields: list[dict[str, Any]] = [{}] * (count - 1) + [last]
        return list(threads.map(lambda number: stream(server, number, **fields[number]), range(count)))


@pytest.mark.parametrize("flags", [(), pytest.param(("--async-scheduling", "true"), marks=pytest.mark.slow)])
def test_a_step_that_fails_under_16_streams(
    serve: Serve, flags: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(
        "--scheduling-policy", "tests.server.failing_step:Failing", *flags, env={"OCTAVO_CACHE": str(tmp_path)}
    )
    right = all_streams(server, 16)
    assert all(error is None for _, error in right)
    found = all_streams(server, 16, max_tokens=POISON)
    assert found[:15] == right[:15]
    pieces, error = found[15]
    assert error["code"] == "engine_error" and len(pieces) <= 21
    assert server.metric("octavo_replica_restarts_total") == 0
    with server.http() as http:
        assert http.get("/health").status_code == 200
    log = server.wait_for_log("the engine failed at this request: ArithmeticError: injected")
    server.wait_until_idle()

    [dump] = (tmp_path / "dumps").glob("step-*.jsonl")
    assert str(dump) in log and dump.stat().st_mode & 0o077 == 0
    failure = read_dump(dump)
    assert failure.error == "ArithmeticError: injected" and "failing_step.py" in failure.traceback
    assert failure.inputs["sequences"] == len(failure.sequences) > 8  # those that run by then
    assert all(sum(map(len, sequence.tables)) for sequence in failure.sequences)
    assert SECRET not in dump.read_text() and all(sequence.token_ids is None for sequence in failure.sequences)
    make_server(read_recording(dump)).server_close()  # as octavo view
    assert main(["simulate", "--replay", str(dump), "--json", str(tmp_path / "replay.json")]) == 0
    replayed = json.loads((tmp_path / "replay.json").read_text())
    assert replayed["steps"][-1]["step"] == failure.step
    assert replayed["equal"] == len(replayed["steps"])
    assert main(["simulate", "--replay", str(dump)]) == 0
    assert f"step {failure.step} failed: ArithmeticError: injected" in capsys.readouterr().out
