"""The engine as a program drives it: add requests, step, take outputs."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.config.engine_config import EngineConfig
from octavo.core.errors import EngineDeadError, EngineKilledError, EngineStateError, OctavoError, memory_errors
from octavo.core.outputs import RequestOutput
from octavo.core.plan import EngineCoreOutputs, GroupOutput
from octavo.core.request import (
    DEFAULT_OPTIONS,
    LoRARequest,
    Prompt,
    RequestOptions,
    SequenceStatus,
    options_from_keywords,
)
from octavo.core.sampling_params import RequestOutputKind
from octavo.core.stats import SchedulerStats, ended_stats, sum_stats
from octavo.engine.blame import GUILTY, Blame, LastSteps
from octavo.engine.core import EngineCore
from octavo.engine.core_client import RESTART_WINDOW, RestartLimit
from octavo.engine.front_end import (
    FrontEnd,
    Params,
    SharedPrefix,
    StatLogger,
    log_stats,
    make_stat_loggers,
    request_id_of,
)
from octavo.engine.model_files import ModelFiles, find_files
from octavo.loader.resolve import checkpoint_digest
from octavo.process.interrupts import HeldInterrupts, holding_interrupts

logger = logging.getLogger("octavo")


class LLMEngine:
    """A model, its scheduler and its open requests.

    >>> engine = LLMEngine.from_config(make_config(model="smollm2-135m"))
    >>> engine.add_request("a", "The capital of France is", SamplingParams(max_tokens=8))
    >>> while engine.has_unfinished_requests():
    ...     for output in engine.step():
    ...         if output.finished:
    ...             print(output.outputs[0].text)

    Methods that change it hold Ctrl-C back until they are done (``HeldInterrupts``), so it stays usable.
    """

    def __init__(
        self, files: ModelFiles, stat_loggers: Sequence[StatLogger] = (), core: EngineCore | None = None
    ) -> None:
        """Loads the weights, unless ``core`` has loaded them; ``stat_loggers`` get the statistics of each step.

        Raises:
            OctavoError: the model is unreadable, unsupported, or does not fit.
        """
        with memory_errors():
            self.core = core or EngineCore(files.options, files.folder)
            self._stat_loggers = make_stat_loggers(files.options, stat_loggers)
            self.front_end = FrontEnd(files, self.core.max_model_len, crosses_process=not self.core.executor.in_process)
        self.tokenizer, self.inputs = self.front_end.tokenizer, self.front_end.inputs
        self.adapters = self.front_end.adapters
        self.adapters.on_unpin = self.core.scheduler.preparations.unpin
        #: None where no worker can be lost without this process.
        self._recovery = None if self.core.executor.in_process else Recovery(self.front_end, self.core)
        #: Of a step at whose end an interrupt came.
        self._not_returned: list[RequestOutput] = []
        for text, name in files.prefixes:
            self.add_shared_prefix(text, name)

    @staticmethod
    def from_config(options: EngineConfig, stat_loggers: Sequence[StatLogger] = ()) -> LLMEngine:
        """Finds or downloads the model and loads it; ``stat_loggers`` get the statistics of each step.

        Raises:
            OctavoError: the model is unknown, unreadable, unsupported, or does not fit.
        """
        return LLMEngine(find_files(options), stat_loggers)

    @holding_interrupts
    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: Params | None = None,
        options: RequestOptions = DEFAULT_OPTIONS,
        *,
        streaming: bool = True,
        **keywords: Any,
    ) -> None:
        """Queues a request. If ``streaming``, each step that adds to it returns all of it so far; else its end does.

        Without ``params`` it gets the model's defaults (``EngineConfig.generation_config``). ``output_kind`` DELTA
        makes each step return what it adds; FINAL_ONLY is as ``streaming=False``. ``keywords``: fields of
        ``RequestOptions``. The output for ``PoolingParams`` is a ``PoolingRequestOutput``.

        Raises:
            InvalidRequestError: the request cannot be served; the engine is unchanged.
            AdapterError: the adapter cannot be used.
            EngineStateError: the engine is sleeping.
        """
        if self.core.is_sleeping:
            raise EngineStateError("the engine sleeps: wake_up() must come before a request")
        options = options_from_keywords("add_request", keywords, options)
        named = options.lora_request
        adapter = None if named is None else self.adapters.load(named)
        kind = RequestOutputKind.CUMULATIVE if streaming else RequestOutputKind.FINAL_ONLY
        request = self.front_end.add(request_id, prompt, params, options, adapter, kind)
        self.core.add(request.group)

    def step(self) -> list[RequestOutput]:
        """Runs one step; returns the requests that it added to (see ``add_request``).

        If a worker is lost, all workers are restarted and open requests continue.

        Raises:
            EngineDeadError: that has happened more than ``engine_restarts`` times within ten minutes.
        """
        with HeldInterrupts():
            if self.core.has_work:
                self._not_returned += self._step()
        outputs, self._not_returned = self._not_returned, []
        return outputs

    def _step(self) -> list[RequestOutput]:
        try:
            if self._stat_loggers:
                outputs, stats = self.core.measured_step()
                log_stats(self._stat_loggers, stats)
            else:
                outputs = self.core.step()
        except EngineDeadError as error:
            outputs = self._replace_core(error)
        ready, stopped = self.front_end.outputs.process(outputs)
        with contextlib.suppress(EngineDeadError):  # the next step will find it out
            for group_id, index in stopped:
                self.core.stop(group_id, index)
        return [request.take() for request in ready]

    def _replace_core(self, error: EngineDeadError) -> EngineCoreOutputs:
        if self._recovery is None:
            raise error
        self.core, ended = self._recovery.recover(self.core, error)
        return ended

    @holding_interrupts
    def abort_request(self, request_id: str) -> RequestOutput | None:
        """Ends a request at once; returns its last output, or None if it is not open."""
        request = self.front_end.outputs.abort(request_id)
        if request is None:
            return None
        with contextlib.suppress(EngineDeadError):  # the next step will find it out
            self.core.abort(request.group_id)
        return request.take()

    @holding_interrupts
    def add_lora(self, lora_request: LoRARequest, *, load_inplace: bool = False) -> bool:
        """Reads and checks an adapter, so that requests may name it; False if the same content is loaded.

        ``load_inplace`` replaces the content of a name in use.

        Raises:
            AdapterError: the model cannot use it, or ``enable_lora`` is off.
            AdapterConflictError: its name or number is taken.
        """
        return self.adapters.add(lora_request, self.adapters.read(lora_request), in_place=load_inplace)

    @holding_interrupts
    def remove_lora(self, lora_id: int) -> bool:
        """Removes the adapter of this ``lora_int_id``; False if there is none.

        Raises:
            AdapterConflictError: requests use it.
        """
        adapter = self.adapters.numbered(lora_id)
        if adapter is not None:
            self.adapters.remove(adapter.name)
        return adapter is not None

    @holding_interrupts
    def pin_lora(self, lora_id: int) -> bool:
        """Keeps an adapter in host memory and in a slot until it is removed; False if there is none of this number.

        Raises:
            AdapterError: pinned adapters would fill the slots.
        """
        adapter = self.adapters.numbered(lora_id)
        if adapter is not None:
            self.core.pin_adapter(adapter.ref)
            adapter.pinned = True
        return adapter is not None

    def list_loras(self) -> set[int]:
        """The ``lora_int_id`` of each adapter that requests may name."""
        return {adapter.number for adapter in self.adapters}

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Calls a method of every worker, or a function with each worker as first argument; returns answers by rank.

        If workers run in other processes, arguments and answers must be plain data, and the function importable.
        ``timeout`` in seconds.

        Raises:
            ConfigError: there is no such method, or an argument cannot be sent.
            EngineDeadError: a worker is lost.
            TimeoutError: a worker has not answered in time; the workers are ended.
            Exception: the method failed on a worker.
        """
        return self.core.executor.collective_rpc(method, args, kwargs, timeout)

    @holding_interrupts
    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Empties the prefix cache except for shared prefixes; always True.

        ``reset_running_requests``: open requests compute their tokens again, as after a change of the weights.
        """
        self.core.scheduler.reset_prefix_cache(reset_running_requests)
        return True

    def add_shared_prefix(self, prompt: Prompt, name: str | None = None) -> str:
        """Computes the beginning of later prompts and keeps its KV cache blocks until ``remove_shared_prefix``.

        >>> name = llm.add_shared_prefix(system_prompt)
        >>> llm.generate(system_prompt + question)[0].metrics.num_cached_tokens

        The text is tokenized like the start of a prompt. Requests without a ``cache_salt`` share all of its tokens;
        their answers stay the same. Returns its name: ``name``, or ``prefix-1`` and so on.

        Raises:
            ConfigError: the prefix cache is off, the name is in use, or too few blocks would be left for a request of
                ``max_model_len`` tokens.
            InvalidRequestError: the prompt is invalid or too long.
            EngineStateError: requests are unfinished, or the engine sleeps.
            WorkerError: it could not be computed.
        """
        if self.core.is_sleeping or self.has_unfinished_requests():
            state = "the engine sleeps" if self.core.is_sleeping else "requests are unfinished"
            raise EngineStateError(f"{state}: a shared prefix cannot be computed now")
        with HeldInterrupts() as interrupts:
            prefix = self.front_end.prefixes.add(prompt, name)
            self._compute_prefix(prefix, interrupts)
        return prefix.name

    def _compute_prefix(self, prefix: SharedPrefix, interrupts: HeldInterrupts) -> None:
        request = self.front_end.prefixes.request(prefix)
        self.front_end.outputs.open(request, RequestOutputKind.FINAL_ONLY)
        self.core.add(request.group)
        outputs: list[RequestOutput] = []
        try:
            while not outputs:
                outputs = self.step()
                interrupts.deliver()
        except BaseException:  # an interrupt leaves nothing behind
            self.abort_request(request.request_id)
            self.remove_shared_prefix(prefix.name)
            raise
        self.front_end.prefixes.check(prefix, outputs[0])

    @holding_interrupts
    def remove_shared_prefix(self, name: str) -> None:
        """Releases a shared prefix: its blocks stay in the prefix cache until they are evicted.

        Raises:
            ConfigError: there is none of this name.
        """
        self.front_end.prefixes.remove(name)
        self.core.blocks.pinned.remove(name)

    def shared_prefixes(self) -> list[SharedPrefix]:
        """The shared prefixes, in the order in which they were added."""
        return list(self.front_end.prefixes)

    @holding_interrupts
    def sleep(self, level: int = 1) -> None:
        """Frees memory for other programs until ``wake_up``. Meanwhile requests raise ``EngineStateError``.

        Level 1 drops the KV cache with its prefixes; on a GPU the weights move to host memory, on a CPU they stay.
        Level 2 drops the weights too: ``wake_up`` reads them again from the checkpoint.

        Raises:
            ConfigError: there is no such level.
            EngineStateError: requests are unfinished.
        """
        self.core.sleep(level)

    @property
    def is_sleeping(self) -> bool:
        """Whether requests are refused until ``wake_up``."""
        return self.core.is_sleeping

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Restores weights, KV cache, pinned adapters and shared prefixes; returns whether it is awake.

        ``tags``: "weights", "kv_cache" or both, to restore now; it sleeps until both are there.

        Raises:
            ConfigError: there is no such tag.
        """
        was_sleeping = self.core.is_sleeping
        with HeldInterrupts() as interrupts:
            try:
                awake = self.core.wake_up(tags)
            except EngineDeadError as error:
                self._replace_core(error)
                return True
            if was_sleeping and awake:
                for adapter in self.adapters:
                    if adapter.pinned:
                        self.core.pin_adapter(adapter.ref)
                for prefix in self.front_end.prefixes:
                    self._compute_prefix(prefix, interrupts)
        return awake

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has something to do."""
        return self.front_end.outputs.num_open > 0 or bool(self._not_returned)

    def stats(self) -> SchedulerStats:
        """Queues and blocks now, and totals of scheduling, preemption, swapping and prefix hits."""
        if self._recovery is not None:
            return self._recovery.stats(self.core)
        return copy.copy(self.core.scheduler.stats())  # the scheduler goes on counting in its own


class Recovery:
    """Replaces the core of an in-process engine after it lost a worker.

    A worker that is killed, hangs or crashes ends its core with all workers. The new core gets the same adapters and
    shared prefixes, and open requests continue there with the same bits, by arrival. Changes made on workers by
    ``collective_rpc`` are lost.
    """

    def __init__(self, front_end: FrontEnd, core: EngineCore) -> None:
        self._front_end = front_end
        self._restarts = RestartLimit(core.options.engine_restarts)
        self._blame = Blame()
        self._digest = self._find_digest()
        self._totals: SchedulerStats | None = None
        self._watch(core)

    def stats(self, core: EngineCore) -> SchedulerStats:
        """The core's statistics plus the totals of earlier cores."""
        stats = core.scheduler.stats()
        return sum_stats([stats] if self._totals is None else [self._totals, stats])

    def recover(self, dead: EngineCore, error: EngineDeadError) -> tuple[EngineCore, EngineCoreOutputs]:
        """Replaces a core that raised ``error``; returns the new core with the open requests, and the culprit's end.

        Raises ``EngineDeadError`` if the core was shut down on purpose, the restart limit is reached, or the model has
        changed.
        """
        if dead.was_shut_down:
            raise error
        requests, guilty = self._front_end.outputs.open_requests(), None
        if not isinstance(error, EngineKilledError):
            verdict = self._blame.observe_death(self._last_steps.groups, requests)
            if verdict is not None:
                guilty = verdict.group_id
                self._restarts.forgive(len(verdict.replicas))
        core = self._replace(dead, error)
        ended = ended_stats(dead.scheduler.counts())
        self._totals = ended if self._totals is None else sum_stats([self._totals, ended])
        outputs = EngineCoreOutputs()
        for request in requests:
            if request.group_id == guilty:
                reason = GUILTY.format(error)
                outputs.groups.append(GroupOutput(guilty, SequenceStatus.FINISHED_ERROR.value, reason))
            else:
                core.add(request.resume(self._blame.alone(request)))
        return core, outputs

    def _replace(self, core: EngineCore, error: EngineDeadError) -> EngineCore:
        files = self._front_end.files
        while self._restarts.take():
            logger.warning(
                "%s; they are started again, for the %d. time in %g minutes, and %d open requests go on",
                error, self._restarts.num_recent, RESTART_WINDOW / 60, self._front_end.outputs.num_open,
            )  # fmt: skip
            core.shutdown()
            if self._find_digest() != self._digest:
                raise EngineDeadError(f"{error}; the model's files were changed, so that no answer can go on")
            try:
                core = EngineCore(files.options, files.folder, core.replica)
                self._make_like_before(core)
                return core
            except OctavoError as e:
                error = e if isinstance(e, EngineDeadError) else EngineDeadError(f"{error}; there is no other: {e}")
        raise error

    def _make_like_before(self, core: EngineCore) -> None:
        """Pins the adapters and shared prefixes again."""
        self._watch(core)
        front_end = self._front_end
        front_end.adapters.on_unpin = core.scheduler.preparations.unpin
        for adapter in front_end.adapters:
            if adapter.pinned:
                core.pin_adapter(adapter.ref)
        for prefix in front_end.prefixes:
            if request_id_of(prefix.name) not in front_end.outputs:  # else it goes on as other requests do
                core.add(front_end.prefixes.request(prefix).group)
        while core.has_work:
            core.step()

    def _watch(self, core: EngineCore) -> None:
        self._last_steps = LastSteps(core.max_in_flight)
        core.record_to(self._last_steps)

    def _find_digest(self) -> str:
        files = self._front_end.files
        return checkpoint_digest(files.options.model, files.folder)
