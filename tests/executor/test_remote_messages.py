"""Messages of an executor that are late, torn, interrupted or errors; its workers are sockets here."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.config.engine_config import make_config
from octavo.core.errors import EngineDeadError, SequenceError
from octavo.core.plan import StepPlan, StepResult
from octavo.executor import channels as broadcast
from octavo.executor import remote
from octavo.executor.channels import Broadcast, Receiver
from octavo.executor.remote import RemoteExecutor
from octavo.executor.worker import WorkerSpec
from octavo.executor.worker_loop import DONE, WorkerLoop
from octavo.models.config_files import read_model_config


class Connected(RemoteExecutor):
    """Workers at the other ends of its sockets, which the tests play."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.start_workers()

    def start_workers(self) -> None:
        pairs = [socket.socketpair() for _ in self._received]
        self._broadcast = Broadcast([ours for ours, _ in pairs], None)
        self.workers = [Receiver(theirs, None) for _, theirs in pairs]
        self.ended = False

    def _exit_reason(self, rank: int | None = None) -> str:
        return "a worker has ended"

    def _end_workers(self, timeout: float) -> None:
        self.ended = True


def connected(model: Path, stages: int) -> Connected:
    options = make_config(model=str(model), device="cpu", pipeline_parallel_size=stages, step_timeout=0.05)
    return Connected(options, WorkerSpec.of(options, read_model_config(model), model, "float32"), 0)


def answer(executor: Connected, rank: int, value: object) -> None:
    executor.workers[rank].answer(DONE, msgspec.msgpack.encode(value))


@pytest.fixture
def executor(tiny_model: Path) -> Connected:
    return connected(tiny_model, 2)


def test_answers_of_an_interrupted_call_are_dropped(executor: Connected, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> list[int]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Broadcast, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            executor.collective_rpc("kv_groups")
    for call in ("interrupted", "next"):
        for rank in range(2):
            answer(executor, rank, [call, rank])
    assert executor.collective_rpc("kv_groups") == [["next", 0], ["next", 1]]
    assert executor._answers == [{}, {}] and not executor.ended


def test_what_is_raised_within_a_message_ends_the_workers(executor: Connected, monkeypatch: pytest.MonkeyPatch) -> None:
    receive = broadcast._receive_exactly

    def interrupted(connection: socket.socket, length: int) -> bytes:
        receive(connection, 1)
        raise KeyboardInterrupt

    answer(executor, 0, "half of it is lost")
    with monkeypatch.context() as patch:
        patch.setattr(broadcast, "_receive_exactly", interrupted)
        with pytest.raises(KeyboardInterrupt):
            executor.collective_rpc("kv_groups")
    assert executor.ended
    with pytest.raises(EngineDeadError, match="KeyboardInterrupt was raised in the middle of a message"):
        executor.collective_rpc("kv_groups")


def test_a_step_that_is_not_answered_in_time_ends_the_workers_and_names_the_silent_one(executor: Connected) -> None:
    first = executor.submit(StepPlan(1))
    for rank in range(2):
        answer(executor, rank, StepResult(1))
    assert first.wait().step == 1
    second = executor.submit(StepPlan(2))
    answer(executor, 0, StepResult(2))
    with pytest.raises(TimeoutError, match=r"workers \[1\] have not answered within 0.05 s"):
        second.wait()
    assert executor.ended
    with pytest.raises(EngineDeadError, match=r"workers \[1\] have not answered"):
        executor.check_health()


def test_the_first_step_may_take_longer_than_the_others(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_STEP_TIMEOUT", 0.1)
    with pytest.raises(TimeoutError, match=r"workers \[0, 1\] have not answered within 0.1 s"):
        connected(tiny_model, 2).submit(StepPlan(1)).wait()


def test_the_sequence_at_which_a_worker_failed_is_told(tiny_model: Path) -> None:
    executor = connected(tiny_model, 1)
    step = executor.submit(StepPlan(1))
    loop = WorkerLoop(executor.workers[0], 0)
    loop._fail(SequenceError.of(7, ValueError("wrong")))
    with pytest.raises(SequenceError, match="ValueError: wrong") as raised:
        step.wait()
    assert raised.value.seq_id == 7
