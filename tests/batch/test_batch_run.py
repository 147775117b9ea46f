"""``octavo batch run``: the server's answers to a file of requests, each row once, however often the run is stopped."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo import LLM, SamplingParams
from octavo.batch.runner import BatchRowError, Result, ResultFile, new_id
from octavo.cli.main import main
from octavo.core.errors import OctavoError
from tests.busy_machine import PATIENCE, eventually
from tests.embedding_models import make_encoder
from tests.server.running_server import Running

FLAGS = ("--num-gpu-blocks-override", "400", "--num-threads", "1", "--max-num-seqs", "8")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def row(custom_id: str, url: str = COMPLETIONS, method: str = "POST", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": method, "url": url, "body": body}


#: Rows that reach a route.
REQUESTS = [
    row("greedy", prompt="Hello", temperature=0, max_tokens=5),
    row("seeded", prompt=["one", "two"], n=2, seed=7, max_tokens=9, logprobs=2, model="tiny"),
    row("chat", CHAT, messages=[{"role": "user", "content": "hi"}], max_tokens=6, temperature=0),
    row("other model", prompt="Hello", temperature=0, max_tokens=5, model="other"),
    row("too cold", prompt="Hello", temperature=-1, model="tiny"),
    row("too long", CHAT, messages=[{"role": "user", "content": "x" * 5000}]),
    row("no prompt", max_tokens=5),
    row("vectors", "/v1/embeddings", input=["one", "two"], encoding_format="base64"),
    row("ranking", "/v1/rerank", query="a", documents=["b"]),
]
#: Lines that reach none, and what is said of them.
BAD_LINES = [
    (json.dumps(row("put", method="PUT", prompt="a")), "put", "method must be 'POST', not 'PUT'"),
    (json.dumps(row("files", "/v1/files", input="a")), "files", "url must be one of /v1/chat"),
    ('{"custom_id": "no body", "method": "POST", "url": "/v1/completions"}', "no body", "required field `body`"),
    ('{"custom_id": 7, "method": "POST", "url": "/v1/completions", "body": {}}', None, "line 13: Expected `str`"),
    ("Hello", None, "line 14: JSON is malformed"),
]


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(model: Path, folder: Path, *flags: str) -> int:
    files = ("-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"))
    return main(["batch", "run", *files, str(model), *FLAGS, *flags])


def plain(body: dict[str, Any]) -> dict[str, Any]:
    """A body without what differs from request to request: its id, its time, and what it found in the prefix cache."""
    usage = {key: value for key, value in (body.get("usage") or {}).items() if key != "prompt_tokens_details"}
    return {key: value for key, value in body.items() if key not in ("id", "created")} | {"usage": usage}


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A batch that has run: in.jsonl, out.jsonl and the summary."""
    folder = tmp_path_factory.mktemp("batch")
    lines = [*map(json.dumps, REQUESTS), *(line for line, _, _ in BAD_LINES)]
    lines += ["", json.dumps(row("stream", prompt="a", stream=True))]
    (folder / "in.jsonl").write_text("\n".join(lines))
    code = run(tiny_model, folder, "--served-model-name", "tiny,alias", "--json", str(folder / "summary"))
    assert code == 1, "some rows have failed"
    return folder


def test_requests_are_answered_as_the_server_answers_them(folder: Path, tiny_server: Running) -> None:
    found = {result["custom_id"]: result for result in results(folder / "out.jsonl")}
    with tiny_server.http() as http:
        for request in REQUESTS * 2:  # prompts that the server has cached, too
            result = found[request["custom_id"]]
            response = http.post(request["url"], json=request["body"])
            assert result["error"] is None
            assert result["response"]["status_code"] == response.status_code
            assert plain(result["response"]["body"]) == plain(response.json())
            assert result["response"]["request_id"].startswith("req-")


def test_a_bad_line_fails_alone(folder: Path) -> None:
    found = results(folder / "out.jsonl")
    for _, custom_id, said in BAD_LINES:
        [result] = [r for r in found if r["custom_id"] == custom_id and r["error"] and said in r["error"]["message"]]
        assert result["response"] is None
    [stream] = [r for r in found if r["custom_id"] == "stream"]
    assert stream["response"]["status_code"] == 400
    assert stream["response"]["body"]["error"]["param"] == "stream"


def test_the_summary_counts_every_row(folder: Path) -> None:
    summary = json.loads((folder / "summary").read_text())
    found = results(folder / "out.jsonl")
    assert len(found) == len({result["id"] for result in found}) == len(REQUESTS) + len(BAD_LINES) + 1
    assert (summary["requests"], summary["skipped"], summary["failed"]) == (len(found), 0, len(found) - 4)
    used = [
        result["response"]["body"]["usage"] for result in found if (result["response"] or {}).get("status_code") == 200
    ]
    assert summary["output_tokens"] == sum(usage.get("completion_tokens", 0) for usage in used) > 0
    assert summary["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in used)


def test_failed_rows_are_answered_again_only_on_demand(folder: Path, tiny_model: Path, tmp_path: Path) -> None:
    for name in ("in.jsonl", "out.jsonl"):
        shutil.copy(folder / name, tmp_path)
    before = results(tmp_path / "out.jsonl")
    assert run(tiny_model, tmp_path) == 1
    assert results(tmp_path / "out.jsonl") == before
    assert run(tiny_model, tmp_path, "--served-model-name", "tiny,other", "--retry-failed") == 1
    after = results(tmp_path / "out.jsonl")
    assert len(after) == len(before)
    kept = [result for result in before if (result["response"] or {}).get("status_code") == 200]
    assert after[: len(kept)] == kept
    texts = {
        r["custom_id"]: r["response"]["body"]["choices"][0]["text"]
        for r in after
        if r["custom_id"] in ("greedy", "other model")
    }
    assert texts["greedy"] == texts["other model"]


def until_rows(process: subprocess.Popen[str], out: Path, rows: int) -> None:
    """Waits until ``out`` holds so many rows, or the run has ended."""
    eventually(lambda: process.poll() is not None or (out.exists() and len(out.read_bytes().splitlines()) >= rows))


def kill_half_way(command: list[str], out: Path, rows: int, victim: str) -> str:
    """Starts a run, kills it, its engine or a replica once ``out`` holds so many rows; what it has said."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    until_rows(process, out, rows)
    engines = psutil.Process(process.pid).children()
    os.kill(process.pid if victim == "run" else engines[0].pid, signal.SIGKILL)
    said = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == {"run": -signal.SIGKILL, "engine": 1, "replica": 0}[victim], said
    assert psutil.wait_procs(engines, timeout=PATIENCE)[1] == [], "no process is left"
    return said


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_was_killed_goes_on_and_answers_every_row_once(
    replicas: int, tiny_model: Path, tmp_path: Path
) -> None:
    rows = [row(f"row {i}", prompt=f"{i}", temperature=0, max_tokens=40, ignore_eos=True) for i in range(60)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    out = tmp_path / "out.jsonl"
    files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(out)]
    command = [sys.executable, "-m", "octavo", "batch", "run", *files, str(tiny_model), *FLAGS, "--max-in-flight", "2"]

    kill_half_way(command, out, 8, "run")
    data = out.read_bytes()
    *whole, last = data.splitlines(keepends=True)
    assert 6 <= len(whole) < 30, "it was to be killed before it was done"
    out.write_bytes(data[: -len(last) // 2])  # as if the kill had come in the middle of the last write

    assert "the engine's process was ended by signal 9" in kill_half_way(
        [*command, "--engine-restarts", "0"], out, len(whole) + 8, "engine"
    )
    found = results(out)
    assert len(whole) + 6 <= len(found) < 50, "it was to be killed before it was done"
    assert all(result["response"]["status_code"] == 200 for result in found), "a dead engine is no answer"

    if replicas == 2:
        said = kill_half_way([*command, "--data-parallel-size", "2"], out, len(found) + 8, "replica")
        assert "replica 0 of 2 has ended" in said
    else:
        assert main([*command[3:], "--max-in-flight", "8"]) == 0
    assert out.read_bytes().startswith(b"".join(whole))
    found = results(out)
    assert sorted(result["custom_id"] for result in found) == sorted(r["custom_id"] for r in rows)
    assert all(result["response"]["body"]["usage"]["completion_tokens"] == 40 for result in found)


@pytest.mark.slow
def test_a_run_goes_on_by_itself_when_its_engine_or_a_worker_is_killed(tiny_model: Path, tmp_path: Path) -> None:
    same: dict[str, Any] = {"temperature": 0.9, "max_tokens": 60, "ignore_eos": True}
    rows = [row(f"row {i}", prompt=f"{i}", seed=i, **same) for i in range(40)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    out = tmp_path / "out.jsonl"
    flags = [*FLAGS, "--tensor-parallel-size", "2", "--max-in-flight", "4"]
    files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(out)]
    command = [sys.executable, "-m", "octavo", "batch", "run", *files, str(tiny_model), *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    run, seen = psutil.Process(process.pid), set[psutil.Process]()
    for count, victim in ((5, "engine"), (20, "worker")):
        until_rows(process, out, count)
        seen |= set(run.children(recursive=True))
        [engine] = [child for child in run.children() if "octavo.engine.core_process" in child.cmdline()]
        os.kill(engine.pid if victim == "engine" else engine.children()[1].pid, signal.SIGKILL)
    said = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 0, said
    assert "the engine's process was ended by signal 9" in said and "worker 1" in said
    assert psutil.wait_procs(seen, timeout=PATIENCE)[1] == [], "no process is left"
    found = {r["custom_id"]: r["response"]["body"]["choices"][0]["text"] for r in results(out)}
    llm = LLM(str(tiny_model), num_gpu_blocks_override=400, num_threads=1)
    params = [SamplingParams(seed=i, **same) for i in range(40)]
    outputs = llm.generate([f"{i}" for i in range(40)], params, use_tqdm=False)
    assert found == {f"row {i}": output.outputs[0].text for i, output in enumerate(outputs)}
    assert len(results(out)) == len(rows)


def test_a_row_that_is_there_twice_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps(row(name, prompt="a")) for name in ("a", "b", "a")]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    assert run(Path("no-such-model"), tmp_path) == 2
    assert "custom_id 'a' is on lines 1 and 3" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: (folder / "in.jsonl").unlink(), "No such file"),
        (lambda folder: (folder / "in.jsonl").write_text("\n\n"), "holds no request"),
        (lambda folder: (folder / "out.jsonl").write_text("a diary\n"), "line 1 of"),
        (lambda folder: (folder / "out.jsonl").write_text("a diary"), "line 1 of"),
        (lambda folder: (folder / "out.jsonl").mkdir(), "cannot write"),
        (lambda folder: (folder / "out.jsonl").symlink_to("/dev/full"), "must be a file"),
    ],
)
def test_files_that_cannot_be_used_are_refused_and_left_alone(
    change: Callable[[Path], Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps(row("a", prompt="a")))
    change(tmp_path)
    assert run(Path("no-such-model"), tmp_path) == 2
    assert said in capsys.readouterr().err
    out = tmp_path / "out.jsonl"
    assert not out.is_file() or out.read_text().startswith("a diary")


def test_a_full_disk_ends_the_run_and_the_line_it_cut_short_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    made = [Result(new_id(), name, None, BatchRowError("code", "failed", 1)) for name in "abc"]
    output = ResultFile(path)
    output.append(made[0])
    size = path.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size * 3 // 2, before[1]))
    try:
        for result in made[1:]:
            with pytest.raises(OctavoError, match="cannot write"):
                output.append(result)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    output.close()
    assert path.stat().st_size == size * 3 // 2
    output = ResultFile(path)
    assert output.done == {"a": True}
    output.append(made[1])
    output.close()
    assert [result["custom_id"] for result in results(path)] == ["a", "b"]


def test_results_of_other_rows_are_kept_when_failed_ones_are_answered_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    output = ResultFile(path)
    for name in ("mine", "of another input"):
        output.append(Result(new_id(), name, None, BatchRowError("code", "failed", 1)))
    output.drop_failed({"mine"})
    output.append(Result(new_id(), "mine", None, None))
    output.close()
    assert [result["custom_id"] for result in results(path)] == ["of another input", "mine"]


def test_two_runs_do_not_write_to_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps(row("a", prompt="a")))
    other = ResultFile(tmp_path / "out.jsonl")
    try:
        assert run(Path("no-such-model"), tmp_path) == 2
    finally:
        other.close()
    assert "another run writes to" in capsys.readouterr().err


def test_vectors_and_scores_of_an_encoder(tmp_path: Path) -> None:
    texts = ["a river", "bread"]
    rows = [
        row("vectors", "/v1/embeddings", input=texts, encoding_format="base64"),
        row("ranking", "/v1/rerank", query="river", documents=texts),
        row("scores", "/v1/score", text_1="river", text_2=texts),
        row("text", prompt="a river"),
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code = run(make_encoder(tmp_path / "model"), tmp_path, "--json", str(tmp_path / "summary"))
    assert code == 1, "an encoder does not generate"
    found = {result["custom_id"]: result["response"] for result in results(tmp_path / "out.jsonl")}
    assert [found[request["custom_id"]]["status_code"] for request in rows] == [200, 200, 200, 400]
    scores = {entry["index"]: entry["relevance_score"] for entry in found["ranking"]["body"]["results"]}
    assert [scores[0], scores[1]] == [entry["score"] for entry in found["scores"]["body"]["data"]]
    summary = json.loads((tmp_path / "summary").read_text())
    usage = sum(found[name]["body"]["usage"]["prompt_tokens"] for name in ("vectors", "ranking", "scores"))
    assert (summary["prompt_tokens"], summary["output_tokens"], summary["failed"]) == (usage, 0, 1)
