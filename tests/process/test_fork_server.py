"""Processes that are forked from one with their imports."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from octavo.core.errors import EngineKilledError
from octavo.engine.core_process import MODULES
from octavo.process.fork_server import ForkedProcess, ForkServer
from tests.busy_machine import PATIENCE, eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has pidfds")
MODULE = "tests.process.forked_calls"


@pytest.fixture
def forks() -> Iterator[ForkServer]:
    server = ForkServer(MODULE)
    server.start()
    eventually(lambda: server.is_ready)
    yield server
    server.close()


def fork(server: ForkServer, *arguments: object) -> tuple[ForkedProcess, int]:
    """A child, and the read end of a pipe whose write end it inherits."""
    read, write = os.pipe()
    try:
        process = server.fork(arguments, [write])
    finally:
        os.close(write)
    assert process is not None
    return process, read


def server_pid(server: ForkServer) -> int:
    assert server._process is not None
    return server._process.pid


def test_a_child_has_its_arguments_and_descriptors_and_none_of_others(forks: ForkServer) -> None:
    (first, one), (second, other) = fork(forks, "tell", "a b"), fork(forks, "tell", "ü")
    for process, read, text in ((first, one, "a b"), (second, other, "ü")):
        pid, parent, group, descriptors, told = os.read(read, 1000).decode().split(" ", 4)
        assert (int(pid), int(parent), int(group)) == (process.pid, server_pid(forks), process.pid)
        # Standard input, output and error, and the pipe.
        assert (int(descriptors), told) == (4, text)
        assert os.read(read, 1) == b"", "nobody else holds the pipe"
        assert process.wait(PATIENCE) == process.poll() == 7
        os.close(read)


def test_how_a_child_ended(forks: ForkServer) -> None:
    for what, code in (("raise", 1), ("kill", -signal.SIGSEGV)):
        process, read = fork(forks, what)
        assert process.wait(PATIENCE) == code
        os.close(read)
    process, read = fork(forks, "sleep")
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.kill()
    assert process.wait(PATIENCE) == -signal.SIGKILL
    process.kill()  # no effect, whoever has its number now
    assert not psutil.pid_exists(process.pid)
    os.close(read)


def test_children_outlive_the_server(forks: ForkServer) -> None:
    process, read = fork(forks, "sleep")
    os.kill(server_pid(forks), signal.SIGKILL)
    eventually(lambda: not forks.is_ready)
    assert process.poll() is None and psutil.pid_exists(process.pid)
    assert forks.fork(["tell", "x"], [read]) is None
    before = server_pid(forks)
    forks.start()
    eventually(lambda: forks.is_ready)
    assert server_pid(forks) != before
    another, told = fork(forks, "tell", "x")
    assert another.wait(PATIENCE) == 7
    process.kill()
    assert process.wait(PATIENCE) == -signal.SIGKILL
    os.close(read)
    os.close(told)


def test_a_server_that_hangs_is_killed(forks: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.process.fork_server._PATIENCE", 0.1)
    os.kill(server_pid(forks), signal.SIGSTOP)
    pid = server_pid(forks)
    with pytest.raises(EngineKilledError):
        forks.fork(["tell", "x"], [])
    assert not psutil.pid_exists(pid) and forks.fork(["tell", "x"], []) is None


def test_the_server_ends_with_its_parent() -> None:
    program = (
        f"from octavo.process.fork_server import ForkServer\nserver = ForkServer({MODULE!r})\nserver.start()\n"
        "while not server.is_ready: pass\nprint(server._process.pid, flush=True)\nimport time\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        parent.kill()
    eventually(lambda: not psutil.pid_exists(pid))


def test_what_engines_are_forked_with_can_be_imported() -> None:
    """The fork server goes on without what is missing."""
    pytest.importorskip("octavo._cpu", reason="the CPU kernels are not built")
    for module in MODULES:
        importlib.import_module(module)


def test_ctrl_c_and_a_supervisors_signal_are_for_the_parent(forks: ForkServer) -> None:
    assert os.getpgid(server_pid(forks)) == server_pid(forks)
