"""Lines of the server's log."""

from __future__ import annotations

import json
import logging
import os
import re
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.core.errors import ConfigError
from octavo.server import logging as server_logging
from tests.busy_machine import PATIENCE


@pytest.fixture
def log_file(tmp_path: Path) -> Path:
    return tmp_path / "server.log"


def test_json_lines(log_file: Path) -> None:
    writer = server_logging.start_logging("json", path=log_file)
    token = server_logging.request_id.set("req-1")
    server_logging.log_access("POST", "/v1/x\n2026 INFO forged", 200, 0.0123, client="127.0.0.1", tokens=5)
    server_logging.request_id.reset(token)
    logging.getLogger("octavo").warning("odd %s \ud800", "thing")
    logging.getLogger("octavo").debug("not shown")
    try:
        raise ValueError("inner\nlines")
    except ValueError:
        logging.getLogger("uvicorn.error").exception("failed")
    writer.stop(PATIENCE)
    access, odd, failed = (json.loads(line) for line in log_file.read_text().splitlines())
    assert access["message"] == "POST /v1/x\\n2026 INFO forged"
    assert (access["status"], access["ms"], access["client"], access["tokens"]) == (200, 12.3, "127.0.0.1", 5)
    assert (access["request_id"], access["level"], access["logger"]) == ("req-1", "info", "octavo.server")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", access["time"])
    assert odd["message"] == "odd thing \\ud800" and "request_id" not in odd
    assert "ValueError: inner" in failed["exception"]


def test_plain_lines(log_file: Path) -> None:
    writer = server_logging.start_logging("plain", path=log_file)
    server_logging.log_access("GET", "/health", 200, 0.001, request_id="req-2", note="two words\n")
    logging.getLogger("uvicorn.access").info("twice")
    writer.stop(PATIENCE)
    (line,) = log_file.read_text().splitlines()
    assert re.fullmatch(r"\S+ \S+ INFO GET /health status=200 ms=1.0 note='two words\\n' request_id=req-2", line)


def test_prompts_are_cut(log_file: Path) -> None:
    writer = server_logging.start_logging("json", path=log_file)
    server_logging.log_prompt("x" * 100_000)
    server_logging.log_prompt([1, 2, 3])
    writer.stop(PATIENCE)
    text, ids = (json.loads(line) for line in log_file.read_text().splitlines())
    assert (len(text["prompt"]), text["length"]) == (2000, 100_000)
    assert ids["prompt"] == [1, 2, 3]


def test_ids_are_all_different() -> None:
    assert len({server_logging.new_request_id() for _ in range(1000)}) == 1000


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_costs_lines_and_nothing_else(restored_loggers: None, capfd: pytest.CaptureFixture[str]) -> None:
    writer = server_logging.start_logging("plain", path=Path("/dev/full"))
    for number in range(50):
        logging.getLogger("octavo").info("line %d", number)
    writer.stop(PATIENCE)
    assert writer.dropped == 50
    assert capfd.readouterr() == ("", "")


def test_a_stuck_reader_does_not_block_logging(restored_loggers: None, tries: Callable[..., None]) -> None:
    tries(log_to_a_stuck_reader)


def log_to_a_stuck_reader() -> dict[str, bool]:
    """Logs more than an unread pipe and the queue hold, and checks that this does not take long."""
    reading, writing = os.pipe()
    try:
        writer = server_logging.LineWriter(writing)
        logger = logging.Logger("alone")
        logger.addHandler(writer)
        start = time.monotonic()
        logger.info("x" * 100)
        select.select([reading], [], [], PATIENCE)  # the thread has begun to write
        for _ in range(server_logging.QUEUE_LINES + 4999):
            logger.info("x" * 100)
        writer.stop(timeout=0.1)
        seconds = time.monotonic() - start
        assert 0 < writer.dropped < 5000
        return {f"logging takes less than 10 s, not {seconds} s": seconds < 10}
    finally:
        os.close(reading)  # the thread's write fails, and it goes on to the end
        writer.stop(PATIENCE)
        os.close(writing)


def test_a_record_that_cannot_be_formatted_is_dropped(log_file: Path) -> None:
    writer = server_logging.start_logging("plain", path=log_file)
    logging.getLogger("octavo").info("%d", "no number")
    logging.getLogger("octavo").info("fine")
    writer.stop(PATIENCE)
    assert writer.dropped == 1 and log_file.read_text().endswith("INFO fine\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"log_format": "xml"}, "log_format must be one of plain, json"),
        ({"path": Path("/no/x")}, "cannot write the log"),
    ],
)
def test_wrong_log_options_are_refused(restored_loggers: None, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        server_logging.start_logging(**options)
