"""What clients send is run in processes with limits, and clients take turns."""

from __future__ import annotations

import gc
import os
import signal
import sys
from concurrent.futures import CancelledError, Future
from pathlib import Path

import psutil
import pytest

from octavo.core.errors import ClientLimitError, SandboxError
from octavo.process import sandbox as pool
from octavo.process.sandbox import MOST_OF_CLIENT, Sandbox
from octavo.process.sandbox_process import SandboxAnswer, SandboxCall
from tests.busy_machine import PATIENCE, eventually

CALLS = "tests.process.sandbox_calls"


@pytest.fixture
def sandbox() -> Sandbox:
    return Sandbox()


def submit(
    sandbox: Sandbox, name: str, content: object = b"", seconds: float = 60.0, **who: str
) -> Future[SandboxAnswer]:
    given = content if isinstance(content, bytes) else os.fsencode(str(content))
    return sandbox.submit(SandboxCall(f"{CALLS}:{name}", given, seconds), lambda answer: answer, **who)


def answer(sandbox: Sandbox, name: str, content: object = b"", seconds: float = 60.0, **who: str) -> SandboxAnswer:
    return submit(sandbox, name, content, seconds, **who).result(PATIENCE)


def test_a_call_is_answered_by_the_process_that_is_there(sandbox: Sandbox) -> None:
    assert answer(sandbox, "echo", b"hi").content == b"hi"
    numbers = {answer(sandbox, "process").content for _ in range(5)}
    assert len(numbers) == 1 and numbers != {str(os.getpid()).encode()}


def test_a_call_that_fails_says_why_and_the_next_is_answered(sandbox: Sandbox) -> None:
    found = answer(sandbox, "loop", seconds=0.2)
    assert found.failure == "time" and 0 < found.seconds <= 0.2
    assert answer(sandbox, "fill").failure == "memory"
    assert answer(sandbox, "recurse").failure == "depth"
    assert answer(sandbox, "crash", int(signal.SIGSEGV)).failure == "depth"
    assert answer(sandbox, "crash", int(signal.SIGABRT)).failure == "memory"
    wrong = answer(sandbox, "fail", "too bad")
    assert (wrong.failure, wrong.details) == ("error", "ValueError: too bad")
    assert answer(sandbox, "echo", b"after").content == b"after"


def test_a_supervisors_signal_ends_no_call(sandbox: Sandbox, tmp_path: Path) -> None:
    go = tmp_path / "go"
    process = psutil.Process(int(answer(sandbox, "process").content))
    held = submit(sandbox, "hold", go)
    eventually(lambda: len(sandbox._idle) == pool.NUM_PROCESSES - 1)
    process.terminate()
    go.touch()
    assert held.result(PATIENCE) == SandboxAnswer(seconds=held.result().seconds)
    assert answer(sandbox, "process").content == str(process.pid).encode()


def test_a_call_whose_process_is_killed_is_answered_by_another(sandbox: Sandbox, tmp_path: Path) -> None:
    held = submit(sandbox, "number_then_hold", tmp_path)
    eventually(lambda: bool([*tmp_path.iterdir()]))
    [first] = tmp_path.iterdir()
    os.kill(int(first.name), signal.SIGKILL)
    eventually(lambda: len([*tmp_path.iterdir()]) == 2)
    (tmp_path / "go").touch()
    found = held.result(PATIENCE)
    assert not found.failure
    assert found.content.decode() in {path.name for path in tmp_path.iterdir()} - {first.name}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_a_call_whose_processes_are_killed_one_after_another_ends_as_the_sandboxs_fault(
    sandbox: Sandbox, number: signal.Signals
) -> None:
    with pytest.raises(SandboxError):
        answer(sandbox, "crash", int(number))
    assert answer(sandbox, "echo", b"after").content == b"after"


def test_a_process_that_cannot_start_is_the_sandboxs_fault(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere/python")
        with pytest.raises(SandboxError):
            answer(sandbox, "echo")
    assert answer(sandbox, "echo", b"after").content == b"after"


def test_what_an_earlier_call_broke_is_not_the_fault_of_the_next(sandbox: Sandbox) -> None:
    answer(sandbox, "break_process")
    found = answer(sandbox, "crash_if_broken", int(signal.SIGSEGV))
    assert (found.content, found.failure) == (b"fine", "")


def test_data_comes_beside_the_content(sandbox: Sandbox) -> None:
    large = os.urandom(5 << 20)
    call = SandboxCall(f"{CALLS}:join", b"a", 60, large)
    assert sandbox.submit(call, lambda answer: answer.content).result(PATIENCE) == b"a" + large
    empty = SandboxCall(f"{CALLS}:join", b"", 60, b"")
    assert sandbox.submit(empty, lambda answer: (answer.content, answer.failure)).result(PATIENCE) == (b"", "")


def test_calls_about_the_same_run_in_the_same_process(sandbox: Sandbox, tmp_path: Path) -> None:
    go = tmp_path / "go"
    held = submit(sandbox, "hold", go)
    eventually(lambda: len(sandbox._idle) == pool.NUM_PROCESSES - 1)
    number = answer(sandbox, "process", near="a").content
    go.touch()
    held.result(PATIENCE)
    eventually(lambda: len(sandbox._idle) == pool.NUM_PROCESSES)  # and the other was used last
    assert answer(sandbox, "process", near="b").content != number
    assert answer(sandbox, "process", near="a").content == number


def test_clients_take_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pool, "NUM_PROCESSES", 1)
    monkeypatch.setattr(pool, "MOST_OF_CLIENT", 1)
    sandbox, go, order = Sandbox(), tmp_path / "go", list[str]()

    def queue(client: str, number: int) -> Future[None]:
        call = SandboxCall(f"{CALLS}:echo", b"", 60)
        return sandbox.submit(call, lambda _: order.append(f"{client}{number}"), client=client)

    held = submit(sandbox, "hold", go, client="a")
    eventually(lambda: not sandbox._idle)
    queued = [queue("a", i) for i in range(20)] + [queue("b", 0), queue("c", 0), queue("b", 1)]
    go.touch()
    for future in queued:
        future.result(PATIENCE)
    assert held.done() and order[:6] == ["a0", "b0", "c0", "a1", "b1", "a2"]


def test_one_client_leaves_a_process_to_others(sandbox: Sandbox, tmp_path: Path) -> None:
    go = tmp_path / "go"
    held = [submit(sandbox, "hold", go, client="a") for _ in range(MOST_OF_CLIENT + 48)]
    assert answer(sandbox, "echo", b"b", client="b").content == b"b"
    assert answer(sandbox, "echo", b"c", client="c").content == b"c"
    assert not any(future.done() for future in held)
    go.touch()
    for future in held:
        future.result(PATIENCE)


def test_equal_calls_run_once_and_in_the_turn_of_whoever_waits_for_them(sandbox: Sandbox, tmp_path: Path) -> None:
    go = tmp_path / "go"
    held = [submit(sandbox, "hold", go, client="a") for _ in range(MOST_OF_CLIENT)]
    behind = submit(sandbox, "process", client="a", key="same")
    assert not behind.done()
    assert submit(sandbox, "process", client="b", key="same").result(PATIENCE) is behind.result(PATIENCE)
    assert not any(future.done() for future in held)
    go.touch()


def test_what_nobody_waits_for_is_dropped_from_the_queue(sandbox: Sandbox, tmp_path: Path) -> None:
    go = tmp_path / "go"
    held = [submit(sandbox, "hold", go, client="a") for _ in range(MOST_OF_CLIENT)]
    eventually(lambda: sandbox._running["a"] == MOST_OF_CLIENT)
    left, shared, stays = (submit(sandbox, "hold", tmp_path / "never", client="a", key=key) for key in ("x", "y", "z"))
    also = submit(sandbox, "hold", tmp_path / "never", client="a", key="y")
    assert left.cancel() and shared.cancel()
    assert [*sandbox._queues["a"]] == ["y", "z"]
    assert also.cancel() and stays.cancel()
    assert not sandbox._queues
    go.touch()
    for future in held:
        future.result(PATIENCE)
    assert not sandbox._jobs and not sandbox._running


def test_what_nobody_waits_for_is_stopped(sandbox: Sandbox, tmp_path: Path) -> None:
    path = tmp_path / "number"
    endless = submit(sandbox, "begin", path)
    eventually(path.exists)
    assert endless.cancel()
    eventually(lambda: not psutil.pid_exists(int(path.read_text())) or not sandbox._running)
    eventually(lambda: len(sandbox._idle) == pool.NUM_PROCESSES)
    assert answer(sandbox, "echo", b"after").content == b"after"
    with pytest.raises(CancelledError):
        endless.result()


def test_what_nobody_waits_for_and_ends_soon_keeps_its_process(sandbox: Sandbox, tmp_path: Path) -> None:
    go = tmp_path / "go"
    number = answer(sandbox, "process").content
    held = submit(sandbox, "hold", go)
    eventually(lambda: any(job.process is not None for job in sandbox._jobs.values()))
    assert held.cancel()
    go.touch()
    eventually(lambda: len(sandbox._idle) == pool.NUM_PROCESSES)
    assert answer(sandbox, "process").content == number


def test_the_time_of_a_call_that_is_stopped_is_that_of_its_processor(sandbox: Sandbox, tmp_path: Path) -> None:
    answer(sandbox, "process")
    before = sandbox._taken[""]
    waits = submit(sandbox, "begin", tmp_path / "number")
    eventually((tmp_path / "number").exists)
    assert waits.cancel()
    eventually(lambda: len(sandbox._idle) == pool.NUM_PROCESSES)
    assert sandbox._taken[""] - before < pool._GRACE / 2  # it slept


def test_the_seconds_of_a_client_are_limited(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox.seconds_per_minute = 0.3
    slow = [submit(sandbox, "loop", seconds=0.2, client="a") for _ in range(20)]
    errors = [error for future in slow if (error := future.exception(PATIENCE)) is not None]
    assert 15 <= len(errors) <= 18  # two or three took the seconds, and one more may have begun meanwhile
    assert all(isinstance(error, ClientLimitError) and 0 < error.retry_after <= 60 for error in errors)
    with pytest.raises(ClientLimitError, match=r"0\.3 seconds .*sandbox_seconds_per_client"):
        submit(sandbox, "echo", client="a")
    assert answer(sandbox, "echo", b"b", client="b").content == b"b"
    monkeypatch.setattr(pool, "_WINDOW", 0)
    assert answer(sandbox, "echo", b"a", client="a").content == b"a"


def test_an_error_of_the_reader_is_that_of_the_call(sandbox: Sandbox) -> None:
    def read(answer: SandboxAnswer) -> None:
        raise KeyError("no")

    with pytest.raises(KeyError):
        sandbox.submit(SandboxCall(f"{CALLS}:echo", b"", 60), read).result(PATIENCE)
    assert answer(sandbox, "echo", b"after").content == b"after"


def test_the_processes_end_with_the_sandbox() -> None:
    sandbox = Sandbox()
    number = int(answer(sandbox, "process").content)

    def child() -> bool:
        return number in {process.pid for process in psutil.Process().children()}

    assert child()
    del sandbox
    gc.collect()
    eventually(lambda: not child())
