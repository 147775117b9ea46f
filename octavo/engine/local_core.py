"""An engine core in this process, and the front end that steps it: what ``LLMEngine`` is made of.

Its coroutines, which it shares with ``AsyncLLM``, never wait, so no event loop is needed.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from octavo.core.errors import EngineDeadError, EngineStateError, OctavoError
from octavo.core.outputs import RequestOutput
from octavo.core.request import Prompt, RequestOptions
from octavo.core.sampling_params import RequestOutputKind
from octavo.core.stats import SchedulerStats, ended_stats, sum_stats
from octavo.engine.blame import LastSteps
from octavo.engine.core import EngineCore
from octavo.engine.core_handle import CoreHandle
from octavo.engine.front_end import FrontEnd, Params, SharedPrefix, StatLogger, log_stats
from octavo.engine.messages import StepDone, ToCore
from octavo.engine.model_files import ModelFiles
from octavo.engine.operations import EngineOperations, P, T
from octavo.engine.output_processor import RequestState
from octavo.engine.replicas import Replicas, RestartLimit
from octavo.engine.step_dumps import dump_failed_steps
from octavo.loader.resolve import checkpoint_digest
from octavo.process.interrupts import HeldInterrupts

#: Seconds for which the end of the last request waits until the KV stores have its blocks.
_WRITE_SECONDS = 0.05


def complete(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine that never waits, as those of an engine whose core is in this process."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    work.close()
    raise RuntimeError("a coroutine of an engine in this process has waited for something")


class LocalCore(CoreHandle):
    """A core in this process. It makes no step by itself, and reports no death: ``EnginePump`` sees both."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._last_steps = LastSteps(core.max_in_flight)
        dump_failed_steps(core)
        if not core.executor.in_process:  # else no worker can be lost without this process
            core.record_to(self._last_steps)

    @property
    def pid(self) -> int:
        return os.getpid()

    def connect(self, on_step: Callable[[StepDone], Awaitable[None]], on_death: Callable[[OctavoError], None]) -> None:
        pass

    def send(self, message: ToCore) -> None:
        with contextlib.suppress(EngineDeadError):  # the next step will find it out
            self.core.handle(message)

    async def call(self, method: str, kind: type[T], *args: Any) -> T:
        answer: T = self.core.call(method, args)
        return answer

    def last_groups(self) -> set[int]:
        return self._last_steps.groups

    async def kill(self) -> None:
        self.core.shutdown()


class LocalCores(Replicas[LocalCore]):
    """The one core of an engine in this process. It needs no event loop: nothing here waits."""

    def __init__(self, files: ModelFiles, core: EngineCore) -> None:
        self._files = files
        super().__init__([LocalCore(core)], files.options)
        if core.executor.in_process:  # no worker can be lost without this process
            self.all[0].restarts = RestartLimit(0)
        else:
            self._digest = self._find_digest()

    def _find_digest(self) -> str:
        return checkpoint_digest(self._files.options.model, self._files.folder, self._files.options.revision)

    async def call(self, method: str, kind: type[T], *args: Any) -> list[T]:
        """Calls the core. A worker that is lost meanwhile raises here, and is replaced in the next step."""
        return [await self.all[0].core.call(method, kind, *args)]

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        complete(work)

    async def _start(self, number: int, after: LocalCore) -> LocalCore:
        await after.kill()
        if self._find_digest() != self._digest:
            raise EngineDeadError("the model's files were changed, so that no answer can go on")
        return LocalCore(EngineCore(self._files.options, self._files.folder))


class EnginePump(EngineOperations):
    """A front end that steps its core itself, and keeps the requests with new output until they are taken."""

    _takes_functions = True
    _replicas: LocalCores

    def __init__(self, files: ModelFiles, core: EngineCore, stat_loggers: list[StatLogger]) -> None:
        super().__init__(stat_loggers)
        replicas = LocalCores(files, core)
        self._use(FrontEnd(files, core.max_model_len, crosses_process=not core.executor.in_process), replicas)
        # Without references back to this object: an engine that is dropped frees its memory at once.
        self.adapters.on_unpin = _weak(self._unpin)
        replicas.on_start, replicas.on_death = _weak(self._restore), _weak(self._die)
        replicas.requests.on_failed = _weak(self._fail)
        #: By group: requests with output that ``take`` has not returned, as an interrupt came first.
        self._ready: dict[int, RequestState] = {}
        #: Totals of the cores that have ended.
        self._ended: list[SchedulerStats] = []
        #: Why the core is lost for good.
        self._error: EngineDeadError | None = None

    @property
    def core(self) -> EngineCore:
        return self._replicas.all[0].core.core

    def add(
        self, request_id: str, prompt: Prompt, params: Params | None, options: RequestOptions, kind: RequestOutputKind
    ) -> None:
        self._check_awake("a request")
        named = options.lora_request
        adapter = None if named is None else self.adapters.load(named)
        self._add(self.front_end.add(request_id, prompt, params, options, adapter, kind))

    def abort(self, request_id: str) -> RequestState | None:
        request = self._end(request_id)
        if request is not None:
            self._ready.pop(request.group_id, None)
        return request

    @property
    def has_work(self) -> bool:
        return self.front_end.outputs.num_open > 0 or bool(self._ready)

    def step(self) -> None:
        """Runs one step if there is something to do; after the loss of a worker, in a new core."""
        core = self.core
        if self.has_work:
            self._check_alive()
        if not core.has_work:
            return
        try:
            if self.stat_loggers:
                outputs, stats = core.measured_step()
                log_stats(self.stat_loggers, stats)
            else:
                outputs = core.step()
        except EngineDeadError as error:
            self.lose_core(error)
        else:
            self._process(outputs)
            if core.has_writes:
                with contextlib.suppress(EngineDeadError):  # the next step will find it out
                    core.write_rest(_WRITE_SECONDS)

    def lose_core(self, error: EngineDeadError) -> None:
        """Replaces the core after it has lost a worker: open requests go on in the new one, with the same bits.

        Raises:
            EngineDeadError: there is no other, or the core was shut down on purpose.
        """
        core, replica = self.core, self._replicas.all[0]
        if core.was_shut_down:
            raise error
        self._ended = [sum_stats([*self._ended, ended_stats(core.scheduler.counts())])]
        replica.core.error = error
        self._replicas.lose(replica, replica.core, error)
        self._check_alive()

    def take(self) -> list[RequestOutput]:
        ready, self._ready = self._ready, {}
        return [request.take() for request in ready.values()]

    async def _in_thread(self, call: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
        return call(*args, **keywords)

    def _check_awake(self, what: str) -> None:
        if self.is_sleeping:
            raise EngineStateError(f"the engine sleeps: wake_up() must come before {what}")

    def _check_accepts(self, what: str) -> None:
        self._check_awake(what)
        if self.has_work:
            raise EngineStateError(f"requests are unfinished: {what} cannot be computed now")

    def _notify(self, request: RequestState) -> None:
        self._ready[request.group_id] = request

    def _die(self, error: OctavoError) -> None:
        self._error = error if isinstance(error, EngineDeadError) else EngineDeadError(str(error))

    def _check_alive(self) -> None:
        if self._error is not None:  # another one each time: an error keeps the frames that it was raised in
            raise type(self._error)(str(self._error)) from None

    async def replica_stats(self) -> list[SchedulerStats]:
        return [*self._ended, *await super().replica_stats()]

    async def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        try:
            return await super().wake_up(tags)
        except EngineDeadError as error:
            self.is_sleeping = False
            self.lose_core(error)
            return True

    async def _compute_prefix_on(self, replica: int, prefix: SharedPrefix) -> RequestOutput:
        request = self.front_end.outputs.open(self.front_end.prefixes.request(prefix), RequestOutputKind.FINAL_ONLY)
        self._add(request, replica)
        try:
            while not request.finished:
                self.step()
                if self._replicas.is_available and (block := HeldInterrupts.current) is not None:
                    block.deliver()
        except BaseException:  # an interrupt leaves nothing behind
            self.abort(request.request_id)
            raise
        del self._ready[request.group_id]
        return request.take()


def _weak(method: Callable[P, T]) -> Callable[P, T]:
    """Calls a method without keeping its object alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: P.args, **keywords: P.kwargs) -> T:
        method = reference()
        assert method is not None
        return method(*args, **keywords)

    return call
