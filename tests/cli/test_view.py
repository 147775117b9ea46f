"""``octavo view``: the page over a recording, for this machine only; what cannot be shown is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import httpx
import msgspec
import pytest

from octavo.cli.main import main
from octavo.cli.view import make_server
from octavo.engine.step_dumps import DumpHeader, StepFailure
from octavo.server.page import POLICY

RECORDING = b'{"format":"octavo-recording","version":1,"title":"a run"}\n'


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    server = make_server(RECORDING)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    with httpx.Client(base_url=f"http://127.0.0.1:{server.server_address[1]}") as client:
        yield client
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_page_knows_that_it_shows_a_recording(http: httpx.Client) -> None:
    page = http.get("/")
    assert 'name="octavo-mode" content="recording"' in page.text
    assert page.headers["content-security-policy"] == POLICY
    assert http.get("/engine/recording").content == RECORDING
    module = http.get("/ui/main.js")
    assert module.headers["content-type"].startswith("text/javascript") and "import" in module.text
    assert http.get("/ui/main.js", headers={"if-none-match": module.headers["etag"]}).status_code == 304


@pytest.mark.parametrize("path", ["/nothing", "/ui/../view.py", "/v1/models"])
def test_nothing_else_is_there(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == 404


def test_a_name_that_was_made_to_lead_here_gets_nothing(http: httpx.Client) -> None:
    for path in ("/", "/engine/recording"):
        assert http.get(path, headers={"host": "evil.example"}).status_code == 404


def test_the_failure_of_a_dump_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = StepFailure(
        step=7, error="ValueError: bad", traceback="Traceback ...", versions={"octavo": "1"}, options={},
        max_model_len=9, block_size=4, groups=[], max_in_flight=1, plan={}, inputs={"tokens": 3, "sequences": 2},
    )  # fmt: skip
    path = tmp_path / "dump.jsonl"
    path.write_bytes(msgspec.json.encode(DumpHeader("octavo-recording", 1, "a step", failure)) + b"\n")
    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", lambda server: None)
    assert main(["view", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "step 7 failed: ValueError: bad\n3 tokens of 2 sequences; octavo 1" in printed and "showing" in printed


def test_what_cannot_be_shown_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}\n")
    for words, expected in (
        ([], "one file"),
        ([str(tmp_path / "none")], "none is missing"),
        ([str(other)], "no recording"),
    ):
        assert main(["view", *words]) == 2
        assert expected in capsys.readouterr().err
