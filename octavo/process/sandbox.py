"""The processes of one frontend, in which its clients take turns."""

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

from octavo.core.errors import ClientLimitError, SandboxError
from octavo.process.sandbox_process import Process, SandboxAnswer, SandboxCall

NUM_PROCESSES = 3
#: Processes that one client may have at a time, so that the first call of another one finds one. Two, so that a slow
#: call of a client does not yet hold up its others.
MOST_OF_CLIENT = NUM_PROCESSES - 1
#: Processes in which a call is tried that is not to blame for the end of one.
MAX_ATTEMPTS = 3
#: Seconds in which a call that nobody waits for any more may end, before its process is killed: most calls are shorter
#: than the start of another process.
_GRACE = 3.0
#: Seconds after which those that a client has taken are forgotten.
_WINDOW = 60

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Job:
    """A call, and those who wait for it."""

    key: Hashable
    call: SandboxCall
    read: Callable[[SandboxAnswer], Any]
    near: Hashable | None
    #: The client of each.
    waiters: dict[Future[Any], str] = field(default_factory=dict)
    #: For each client that waits for it.
    is_queued: bool = True
    #: That it runs in.
    process: Process | None = None


class Sandbox:
    """Calls functions in processes with limits, for clients that take turns; from any thread.

    Processes are started when they are needed. A call that nobody waits for any more is dropped; one that runs has a
    moment to end.
    Invariant: a call is queued only while its clients have ``MOST_OF_CLIENT`` processes each, or all are busy.
    """

    def __init__(self) -> None:
        #: Seconds of processor time that the calls of one client may take within a minute.
        self.seconds_per_minute = math.inf
        self._lock = threading.RLock()
        self._threads = ThreadPoolExecutor(NUM_PROCESSES, thread_name_prefix="octavo-sandbox")
        #: The one used last is taken first, so that more are started only where one is busy.
        self._idle = [Process() for _ in range(NUM_PROCESSES)]
        #: Those that have not ended, by key.
        self._jobs: dict[Hashable, _Job] = {}
        #: Queued ones of each client, by key, in order of arrival; the client whose turn is next comes first.
        self._queues: OrderedDict[str, dict[Hashable, _Job]] = OrderedDict()
        self._running: Counter[str] = Counter()
        #: Seconds taken by each client since the window began.
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
        """Queues a call; the future gives what ``read``, in a thread, makes of its answer. To cancel it drops the call.

        ``key``: calls with the same one are the same, and run once for all who wait for it.
        ``near``: calls with the same one run in the same process where that is idle, which may have kept something.

        Raises (the future too):
            ClientLimitError: the client has taken its seconds.
            SandboxError: in the future only; processes that ran the call were ended from outside.
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
        """A future is done; if it was cancelled, it does not wait for its job any more."""
        with self._lock:
            client = job.waiters.pop(future, None)
            if client is None:
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
        """Ends a call that nobody waits for, if it has not ended."""
        with self._lock:
            if job.process is not None:
                job.process.kill()

    def _unqueue(self, job: _Job, client: str) -> None:
        queue = self._queues.get(client, {})
        queue.pop(job.key, None)
        if not queue:
            self._queues.pop(client, None)

    # --- the threads ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Runs what is queued, as far as clients may have further processes."""
        while (begun := self._begin()) is not None:
            self._run(*begun)

    def _begin(self) -> tuple[_Job, str, Process] | None:
        """The next job, of the client whose turn it is, and a process for it."""
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
                    return job, client, self._take(job.near)
        return None

    def _take(self, near: Hashable | None) -> Process:
        """An idle process: one that has run calls about the same, if there is one."""
        idle = self._idle
        process = idle[-1] if near is None else next((one for one in idle if near in one.near), idle[-1])
        idle.remove(process)
        return process

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
        """Calls the function, once more in a fresh process where the call may not be to blame for the end of one.

        A process may be killed by a person or the kernel, and what an earlier call has broken may end it during this
        one: only what also ends a process of its own counts as the call's doing.
        """
        answer, seconds = SandboxAnswer(), 0.0
        for _ in range(MAX_ATTEMPTS):
            if not job.waiters:
                break
            try:
                process.start()
            except OSError as e:
                raise SandboxError(f"no process can be started that works on this request: {e.strerror}") from e
            with self._lock:
                job.process = process if job.waiters else None  # from here on ``_leave`` can kill it
            if job.process is None:
                break
            if job.near is not None and job.near not in process.near:
                process.near.append(job.near)
            answer = process.call(job.call)
            seconds += answer.seconds
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
