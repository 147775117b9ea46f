"""The loop of a worker in another process than its executor (vLLM's ``worker_busy_loop``): messages in, answers out.

``MultiprocExecutor`` starts ``python -m octavo.executor.worker_loop`` with the descriptors of the socket to the
executor and of the memory of its messages, and the rank.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections import deque
from typing import Any

import msgspec

from octavo.core.errors import OctavoError, SequenceError
from octavo.core.plan import StepPlan
from octavo.executor.channels import Receiver
from octavo.executor.executor import reports_of
from octavo.executor.worker import RankCheck, Worker, WorkerSpec
from octavo.process.children import Failure, end_with, send_logs
from octavo.process.start_process import LocalConnections

#: Kinds of answers: to a step or a call, to a failed one (``Failure``), and a ``LogMessage`` in between.
DONE, FAILED, LOG = 0, 1, 2


class WorkerStart(msgspec.Struct, tag=True, array_like=True):
    """The first message: creates the workers. Lists are by rank."""

    spec: WorkerSpec
    connections: list[LocalConnections | None]
    #: Number of each worker on its machine, and the number of workers there.
    places: list[tuple[int, int]]
    log_level: int


class StepMessage(msgspec.Struct, tag=True, array_like=True):
    """Computes a plan."""

    plan: StepPlan
    #: By sequence id, for the other stages: tokens that the last stage has sampled since the last step.
    sampled: dict[int, list[int]] = {}


class WorkerCall(msgspec.Struct, tag=True, array_like=True):
    """Calls ``Worker.call``."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


Message = WorkerStart | StepMessage | WorkerCall


class WorkerLoop:
    def __init__(self, receiver: Receiver, rank: int) -> None:
        self._receiver = receiver
        self._rank = rank
        self._decoder = msgspec.msgpack.Decoder(Message)
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()
        self._queued: deque[Any] = deque()
        self.worker: Worker
        self._samples = self._answers_steps = False

    def run(self) -> None:
        while True:
            # A device computes queued steps meanwhile; their results are waited for when no message has arrived.
            while self._queued and not self._receiver.has_next():
                self._finish_step()
            message = self._decoder.decode(self._receiver.next())
            if not isinstance(message, StepMessage):
                while self._queued:
                    self._finish_step()
            try:
                self._handle(message)
            except Exception as e:
                while self._queued:
                    self._finish_step()
                self._fail(e)

    def _handle(self, message: Message) -> None:
        match message:
            case StepMessage(plan, sampled):
                self._queued.append(self.worker.runner.submit(plan, None if self._samples else sampled))
                if self.worker.runner.device_name == "cpu":  # computed already
                    self._finish_step()
            case WorkerCall(method, args, kwargs):
                self._answer(DONE, self._encoder.encode(self.worker.call(method, args, kwargs)))
            case WorkerStart(spec, connections, places, log_level):
                send_logs(log_level, lambda message: self._answer(LOG, msgspec.msgpack.encode(message)))
                spec.rank, (spec.local_rank, spec.local_size) = self._rank, places[self._rank]
                self.worker = Worker(spec, connections[self._rank])
                layout = self.worker.layout
                self._samples = layout.is_last_stage
                self._answers_steps = layout.rank == layout.output_rank
                self._check = RankCheck(self.worker.options.rank_check_interval if self._samples else 0)
                self._answer(DONE, self._encoder.encode(None))

    def _finish_step(self) -> None:
        try:
            result = self._queued.popleft().wait()
        except Exception as e:
            self._fail(e)
            return
        # One full answer is enough: the workers of the last stage sample the same tokens, and other stages none.
        # But each reports its preparations, and those that sample are compared.
        self._check.add(result)
        *_, result.sampled_digest = self._check.take()
        answer = result if self._answers_steps else reports_of(result)
        self._answer(DONE, b"" if answer is None else self._encoder.encode(answer))

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, OctavoError) or isinstance(error, SequenceError):
            logging.getLogger("octavo").error("worker %d failed", self._rank, exc_info=error)
        self._answer(FAILED, self._encoder.encode(Failure.of(error)))

    def _answer(self, kind: int, content: bytes) -> None:
        with self._lock:  # any thread may log
            self._receiver.answer(kind, content)


def serve(connection: socket.socket, memory: int | None, rank: int) -> None:
    """Serves the executor until it ends, for any reason; this process ends with it, even while it computes."""
    end_with(connection)
    with contextlib.suppress(ConnectionError):  # the executor has ended
        WorkerLoop(Receiver(connection, memory), rank).run()


def main(arguments: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the executor's process handles them
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    descriptor, memory, rank = map(int, arguments)
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    gc.freeze()
    serve(connection, memory, rank)


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(0)  # freeing the weights would only take time
