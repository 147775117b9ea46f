"""A server whose engine has several workers, and what is left of it when one of them is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import httpx
import psutil
import pytest

from tests.busy_machine import PATIENCE, eventually
from tests.server.running_server import Running


@pytest.mark.slow  # by default test_recovery.py kills workers, and test_faults.py ends a server with its engine
@pytest.mark.parametrize("busy", [pytest.param(True, id="under load"), pytest.param(False, id="idle")])
def test_a_killed_worker_ends_the_server_with_the_reason_and_no_process_is_left(
    busy: bool, serve: Callable[..., Running]
) -> None:
    server = serve("--tensor-parallel-size", "2", "--engine-restarts", "0")
    family = psutil.Process(server.process.pid).children(recursive=True)
    workers = [process for process in family if "octavo.executor.worker_loop" in process.cmdline()]
    assert len(workers) == 2
    if busy:
        fields = {"prompt": "x", "max_tokens": 240, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=fields, timeout=PATIENCE) as response:
            assert response.status_code == 200
            lines = response.iter_lines()
            next(lines)
            os.kill(workers[1].pid, signal.SIGKILL)
            said = "\n".join(lines)
        assert "[DONE]" in said or '"code": "engine_dead"' in said
    else:
        os.kill(workers[1].pid, signal.SIGKILL)
    assert server.process.wait(PATIENCE) == 70
    assert "was ended by signal 9 (SIGKILL)" in server.log.read_text()
    eventually(lambda: not any(process.is_running() and process.status() != "zombie" for process in family))
