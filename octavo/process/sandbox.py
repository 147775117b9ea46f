"""The sandbox: a pool of limited processes that runs functions on clients' data, with clients in turn."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec

from octavo.core.errors import ClientLimitError, ConfigError, InvalidRequestError, SandboxError
from octavo.process.children import Failure
from octavo.process.sandbox_process import Process, SandboxAnswer, SandboxCall

NUM_PROCESSES = 3
#: Maximum processes of one client: fewer than all, so that another client's first call finds one.
MOST_OF_CLIENT = NUM_PROCESSES - 1
#: Maximum processes in which a call is tried while it is not to blame for their end.
MAX_ATTEMPTS = 3
#: Seconds that a cancelled call may still run before its process is killed: most calls are faster than a new process.
_GRACE = 3.0
#: Seconds after which the processor time of clients is forgotten.
_WINDOW = 60

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Job:
    key: Hashable
    call: SandboxCall
    read: Callable[[SandboxAnswer], Any]
    near: Hashable | None
    waiters: dict[Future[Any], str] = field(default_factory=dict)
    is_queued: bool = True
    process: Process | None = None


class Sandbox:
    """Runs functions in limited processes, started on demand, with clients in turn; thread-safe.

    Invariant: a call is queued only while its clients have ``MOST_OF_CLIENT`` processes each, or all are busy.
    """

    def __init__(self) -> None:
        #: Limit of processor seconds that one client's calls may take within a minute.
        self.seconds_per_minute = math.inf
        self._lock = threading.RLock()
        self._threads = ThreadPoolExecutor(NUM_PROCESSES, thread_name_prefix="octavo-sandbox")
        #: Used as a stack, so that processes start only while others are busy.
        self._idle = [Process() for _ in range(NUM_PROCESSES)]
        self._jobs: dict[Hashable, _Job] = {}
        #: Queued jobs of each client in order of arrival; the client whose turn is next comes first.
        self._queues: OrderedDict[str, dict[Hashable, _Job]] = OrderedDict()
        self._running: Counter[str] = Counter()
        #: Processor seconds of each client since the window began.
        self._taken: dict[str, float] = {}
        self._window = 0.0

    def submit(
        self,
        call: SandboxCall,
        read: Callable[[SandboxAnswer], T],
        *,
        client: str = "",
        key: Hashable | None = None,
        near: Hashable | None = None,
    ) -> Future[T]:
        """Queues a call; the future gives ``read(answer)``, computed in a thread. Cancelling it drops the call.

        ``key``: calls with equal keys run once for all waiters. ``near``: calls with equal values share a process if it
        is idle, for state that it keeps. Raises ClientLimitError, also in the future, if the client has used up its
        processor time; SandboxError, in the future only, if the call's processes were killed from outside.
        """
        future: Future[T] = Future()
        with self._lock:
            if (error := self._limit_error(client)) is not None:
                raise error
            key = object() if key is None else key
            job = self._jobs.setdefault(key, _Job(key, call, read, near))
            job.waiters[future] = client
            if job.is_queued:
                self._queues.setdefault(client, {})[key] = job
        future.add_done_callback(partial(self._leave, job))
        self._threads.submit(self._work)
        return future

    def _leave(self, job: _Job, future: Future[Any]) -> None:
        """Called when a future is done; a cancelled one leaves its job."""
        with self._lock:
            if (client := job.waiters.pop(future, None)) is None:
                return
            if client not in job.waiters.values():
                self._unqueue(job, client)
            if job.waiters:
                return
            del self._jobs[job.key]
            if job.process is not None:
                timer = threading.Timer(_GRACE, self._kill, (job,))
                timer.daemon = True
                timer.start()

    def _kill(self, job: _Job) -> None:
        with self._lock:
            if job.process is not None:
                job.process.kill()

    def _unqueue(self, job: _Job, client: str) -> None:
        queue = self._queues.get(client, {})
        queue.pop(job.key, None)
        if not queue:
            self._queues.pop(client, None)

    # The threads.

    def _work(self) -> None:
        """Runs queued jobs as long as their clients may have further processes."""
        while (job_and_process := self._begin()) is not None:
            self._run(*job_and_process)

    def _begin(self) -> tuple[_Job, str, Process] | None:
        with self._lock:
            for client in [*self._queues]:
                if (error := self._limit_error(client)) is not None:
                    self._refuse(client, error)
                elif self._running[client] < MOST_OF_CLIENT:
                    job = next(iter(self._queues[client].values()))
                    for waiting in {*job.waiters.values()}:
                        self._unqueue(job, waiting)
                    if client in self._queues:
                        self._queues.move_to_end(client)
                    job.is_queued = False
                    self._running[client] += 1
                    idle, near = self._idle, job.near
                    process = next((p for p in idle if near is not None and near in p.near), idle[-1])
                    idle.remove(process)
                    return job, client, process
        return None

    def _refuse(self, client: str, error: ClientLimitError) -> None:
        for job in [*self._queues[client].values()]:
            for future in [future for future, waiting in job.waiters.items() if waiting == client]:
                if future.set_running_or_notify_cancel():
                    future.set_exception(error)  # which calls ``_leave``

    def _run(self, job: _Job, client: str, process: Process) -> None:
        answer, result, error = SandboxAnswer(), None, None
        try:
            answer = self._answer(job, process)
            if job.waiters and answer.failure == "killed":
                raise SandboxError(
                    f"{MAX_ATTEMPTS} processes that worked on this request were ended from outside, one after another"
                )
            if job.waiters:
                result = job.read(answer)
        except BaseException as e:
            error = e
        with self._lock:
            self._taken[client] = self._taken.get(client, 0.0) + answer.seconds
            self._running[client] -= 1
            self._running += Counter()  # without zeros
            self._idle.append(process)
            job.process = None
            if self._jobs.get(job.key) is job:
                del self._jobs[job.key]
            waiters = [future for future in job.waiters if future.set_running_or_notify_cancel()]
            job.waiters.clear()
        for future in waiters:
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    def _answer(self, job: _Job, process: Process) -> SandboxAnswer:
        """Runs the call, and again in a fresh process if the end of the first may not be its fault."""
        answer, seconds = SandboxAnswer(), 0.0
        for _ in range(MAX_ATTEMPTS):
            if not job.waiters:
                break
            try:
                process.start()
            except OSError as e:
                raise SandboxError(f"no process can be started that works on this request: {e.strerror}") from e
            with self._lock:
                job.process = process if job.waiters else None  # from now on ``_leave`` can kill it
            if job.process is None:
                break
            if job.near is not None and job.near not in process.near:
                process.near.append(job.near)
            answer = process.call(job.call)
            seconds += answer.seconds
            # Somebody may have killed the process, or an earlier call damaged it.
            is_blamed = answer.failure != "killed" and (answer.failure == "time" or process.num_calls == 1)
            if process.is_running or is_blamed:
                break
        answer.seconds = seconds
        return answer

    def _limit_error(self, client: str) -> ClientLimitError | None:
        now = time.monotonic()
        if now >= self._window + _WINDOW:
            self._taken.clear()
            self._window = now
        if self._taken.get(client, 0.0) < self.seconds_per_minute:
            return None
        return ClientLimitError(
            f"new schemas, grammars, templates, images and recordings of this client have taken "
            f"{self.seconds_per_minute:g} seconds of processor time within a minute, the limit of this server "
            "(sandbox_seconds_per_client); try again later",
            math.ceil(self._window + _WINDOW - now),
        )


# Decoders of files, which report errors as messages.


def encode_result(decode: Callable[[], object]) -> bytes:
    """In the sandbox: a result, or the failure of the request or of the server; for ``read_result``."""
    try:
        return msgspec.msgpack.encode((decode(), None))
    except (InvalidRequestError, ConfigError) as e:
        return msgspec.msgpack.encode((None, Failure.of(e)))


def read_result(
    answer: SandboxAnswer, kind: type[T], error: type[InvalidRequestError], name: str, seconds: float, advice: str
) -> T:
    """The result of ``encode_result``; raises ``error``, about the file ``name``, or ConfigError."""
    if answer.failure:
        reason = {
            "time": f"takes more than {seconds:g} seconds to be decoded",
            "memory": "needs too much memory to be decoded",
            "depth": "cannot be decoded: its decoder failed",
        }.get(answer.failure, f"cannot be decoded: {answer.details}")
        raise error(f"{reason}; {advice}", path=name)
    result_type: Any = tuple[kind | None, Failure | None]  # type: ignore[valid-type]
    result, failure = msgspec.msgpack.decode(answer.content, type=result_type)
    if failure is not None:
        raise failure.error()
    decoded: T = result
    return decoded
