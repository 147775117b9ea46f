"""What an operator asks of an engine, such as to load adapters; ``LLM`` and ``AsyncLLM`` have these methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from octavo.core.errors import EngineStateError, OctavoError
from octavo.core.failures import SequenceFailure
from octavo.core.outputs import RequestOutput
from octavo.core.plan import EngineCoreOutputs, GroupOutput
from octavo.core.request import LoRARequest, Prompt, SequenceStatus
from octavo.core.stats import SchedulerStats, sum_stats
from octavo.engine.adapters import AdapterRegistry
from octavo.engine.front_end import FrontEnd, SharedPrefix, StatLogger, request_id_of
from octavo.engine.input_processor import InputProcessor
from octavo.engine.messages import NO_REPLY, Abort, Call, Stop
from octavo.engine.output_processor import RequestState
from octavo.engine.replicas import CORE_ENDED, Replicas
from octavo.engine.tokenizer import Tokenizer
from octavo.executor.worker import function_name

P = ParamSpec("P")
T = TypeVar("T")


class EngineOperations(ABC):
    """A front end with its cores. Subclasses deliver its outputs: ``AsyncLLM`` to streams, ``EnginePump`` by steps.

    The methods of an ``LLM`` or ``LLMEngine`` are the same without ``await``.
    """

    front_end: FrontEnd
    tokenizer: Tokenizer
    inputs: InputProcessor
    adapters: AdapterRegistry
    _replicas: Replicas[Any]
    #: Whether functions can be called on workers without being importable there.
    _takes_functions = False

    def __init__(self, stat_loggers: list[StatLogger]) -> None:
        self.stat_loggers = stat_loggers
        #: Whether requests are refused until ``wake_up``.
        self.is_sleeping = False

    def _use(self, front_end: FrontEnd, replicas: Replicas[Any]) -> None:
        self.front_end, self._replicas = front_end, replicas
        self.tokenizer, self.inputs, self.adapters = front_end.tokenizer, front_end.inputs, front_end.adapters

    async def ready(self) -> None:  # noqa: B027
        """Waits until the model is loaded."""

    @abstractmethod
    async def _in_thread(self, call: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
        """Calls a function that takes long."""

    @abstractmethod
    def _check_accepts(self, what: str) -> None:
        """Raises if ``what`` cannot be computed now."""

    @abstractmethod
    def _notify(self, request: RequestState) -> None:
        """Delivers new output of a request, perhaps its last."""

    @abstractmethod
    async def _compute_prefix_on(self, replica: int, prefix: SharedPrefix) -> RequestOutput:
        """Computes and pins a shared prefix on one core."""

    # --- requests and their outputs -----------------------------------------------------------------------------------

    def _add(self, request: RequestState, replica: int | None = None) -> None:
        """Gives a request to ``replica``, or to the one that the router chooses."""
        try:
            self._replicas.requests.add(request, replica)
        except OctavoError:
            self.front_end.outputs.discard(request)
            raise

    def _end(self, request_id: str) -> RequestState | None:
        """Ends a request; its output is not delivered. None if it is not open."""
        request = self.front_end.outputs.abort(request_id)
        if request is not None:
            self._replicas.requests.send(request.group_id, Abort(request.group_id))
            self._replicas.requests.forget(request.group_id)
        return request

    def _process(self, outputs: EngineCoreOutputs) -> None:
        """Delivers outputs of a core, and tells it which sequences a stop string has ended."""
        ready, stopped = self.front_end.outputs.process(outputs)
        for group_id, index in stopped:
            self._replicas.requests.send(group_id, Stop(group_id, index))
        for request in ready:
            if request.finished:
                self._replicas.requests.forget(request.group_id)
            self._notify(request)

    def _fail(self, request: RequestState, failure: SequenceFailure) -> None:
        end = GroupOutput(request.group_id, SequenceStatus.FINISHED_ERROR.value, failure)
        self._process(EngineCoreOutputs(groups=[end]))

    # --- state --------------------------------------------------------------------------------------------------------

    async def stats(self) -> SchedulerStats:
        """Queues and blocks now, and totals of scheduling, preemption, swapping and prefix hits, over all replicas."""
        return sum_stats(await self.replica_stats())

    async def replica_stats(self) -> list[SchedulerStats]:
        """``stats`` of each living replica."""
        await self.ready()
        return await self._replicas.call("stats", SchedulerStats)

    async def _restore(self, number: int) -> None:
        """Gives a new core the engine's state: sleep, pause, pinned adapters, shared prefixes."""
        core = self._replicas.all[number].core
        if self.is_sleeping:
            await core.call("sleep", type(None), 1)
            return
        if self._replicas.paused:
            await core.call("pause", type(None), True)
        for adapter in self.adapters:
            if adapter.pinned:
                await core.call("pin_adapter", type(None), adapter.ref)
        for prefix in self.front_end.prefixes:
            await self._compute_prefix_on(number, prefix)

    # --- adapters -----------------------------------------------------------------------------------------------------

    async def add_lora(self, lora_request: LoRARequest, *, load_inplace: bool = False) -> bool:
        """Reads and checks an adapter, so that requests may name it; False if the same content is loaded.

        ``load_inplace`` replaces the content of a name in use.

        Raises:
            AdapterError: the model cannot use it, or ``enable_lora`` is off.
            AdapterConflictError: its name or number is taken.
        """
        await self.ready()
        ref = await self._in_thread(self.adapters.read, lora_request)
        return self.adapters.add(lora_request, ref, in_place=load_inplace)

    async def remove_lora(self, lora_id: int) -> bool:
        """Removes the adapter of this ``lora_int_id``; False if there is none.

        Raises:
            AdapterConflictError: requests use it.
        """
        await self.ready()
        adapter = self.adapters.numbered(lora_id)
        if adapter is not None:
            self.adapters.remove(adapter.name)
        return adapter is not None

    async def pin_lora(self, lora_id: int) -> bool:
        """Keeps an adapter in host memory and in a slot until it is removed; False if there is none of this number.

        Raises:
            AdapterError: pinned adapters would fill the slots.
        """
        await self.ready()
        adapter = self.adapters.numbered(lora_id)
        if adapter is not None:
            await self._replicas.call("pin_adapter", type(None), adapter.ref)
            adapter.pinned = True
        return adapter is not None

    async def list_loras(self) -> set[int]:
        """The ``lora_int_id`` of each adapter that requests may name."""
        await self.ready()
        return {adapter.number for adapter in self.adapters}

    def _unpin(self, key: str) -> None:
        self._replicas.send_all(Call(NO_REPLY, "unpin_adapter", [key]))

    # --- workers ------------------------------------------------------------------------------------------------------

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Calls a method of every worker, or a function with each worker as first argument; returns answers by rank.

        The answers of several replicas follow one another. If workers run in other processes, arguments and answers
        must be plain data, and the function importable. ``timeout`` in seconds.

        Raises:
            ConfigError: there is no such method, or an argument cannot be sent.
            EngineDeadError: a worker is lost.
            TimeoutError: a worker has not answered in time; the workers are ended.
            Exception: the method failed on a worker.
        """
        await self.ready()
        name = method if self._takes_functions or isinstance(method, str) else function_name(method)
        answers = await self._replicas.call("collective_rpc", list, name, list(args), dict(kwargs or {}), timeout)
        return [answer for replica in answers for answer in replica]

    # --- sleep --------------------------------------------------------------------------------------------------------

    async def sleep(self, level: int = 1) -> None:
        """Frees memory for other programs until ``wake_up``. Meanwhile requests raise ``EngineStateError``.

        Level 1 drops the KV cache with its prefixes; on a GPU the weights move to host memory, on a CPU they stay.
        Level 2 drops the weights too: ``wake_up`` reads them again from the checkpoint.

        Raises:
            ConfigError: there is no such level.
            EngineStateError: requests are unfinished.
        """
        await self.ready()
        if count := self.front_end.outputs.num_open:
            raise EngineStateError(f"{count} requests are unfinished: let them end or abort them before sleep()")
        was_sleeping, self.is_sleeping = self.is_sleeping, True  # from now on requests are refused
        try:
            await self._replicas.call("sleep", type(None), level)
        except OctavoError:
            self.is_sleeping = was_sleeping
            raise

    async def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Restores weights, KV cache, pinned adapters and shared prefixes; returns whether it is awake.

        ``tags``: "weights", "kv_cache" or both, to restore now; it sleeps until both are there.

        Raises:
            ConfigError: there is no such tag.
        """
        await self.ready()
        awake = all(await self._replicas.call("wake_up", bool, tags))
        was_sleeping, self.is_sleeping = self.is_sleeping, not awake
        if was_sleeping and awake:
            for adapter in self.adapters:
                if adapter.pinned:
                    await self._replicas.call("pin_adapter", type(None), adapter.ref)
            for prefix in self.front_end.prefixes:
                await self._compute_prefix(prefix)
        return awake

    # --- prefix cache -------------------------------------------------------------------------------------------------

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Empties the prefix cache except for shared prefixes; always True.

        ``reset_running_requests``: open requests compute their tokens again, as after a change of the weights.
        """
        await self.ready()
        await self._replicas.call("reset_prefix_cache", type(None), reset_running_requests)
        self._replicas.requests.router.forget_prefixes()
        return True

    async def add_shared_prefix(self, prompt: Prompt, name: str | None = None, ttl: float | None = None) -> str:
        """Computes the beginning of later prompts and keeps its KV cache blocks until ``remove_shared_prefix``.

        >>> name = llm.add_shared_prefix(system_prompt)
        >>> llm.generate(system_prompt + question)[0].metrics.num_cached_tokens

        The text is tokenized like the start of a prompt. Requests without a ``cache_salt`` share all of its tokens;
        their answers stay the same. With ``ttl``, in seconds, the blocks are held until then and not pinned: running
        requests may take them after all others. Returns its name: ``name``, or ``prefix-1`` and so on.

        Raises:
            ConfigError: the prefix cache is off, the name is in use, or too few blocks would be left for a request of
                ``max_model_len`` tokens.
            InvalidRequestError: the prompt is invalid or too long.
            EngineStateError: the engine sleeps; for an ``LLM`` also: requests are unfinished.
            WorkerError: it could not be computed.
        """
        await self.ready()
        prompt = await self._tokenize(prompt)
        self._check_accepts("a shared prefix")
        prefix = self.front_end.prefixes.add(prompt, name, ttl)
        await self._compute_prefix(prefix)
        return prefix.name

    async def _tokenize(self, prompt: Prompt) -> Prompt:
        return prompt

    async def _compute_prefix(self, prefix: SharedPrefix) -> None:
        prefixes, computed = self.front_end.prefixes, None
        try:
            for replica in self._replicas.living:  # each has a KV cache of its own
                output = await self._compute_prefix_on(replica, prefix)
                if output.outputs[0].error_kind != CORE_ENDED.kind:  # its next core will compute all prefixes
                    computed = output
        except BaseException:  # such as a cancellation
            prefixes.discard(prefix)
            self._unpin_prefix(prefix.name)
            raise
        if computed is not None:
            try:
                prefixes.check(prefix, computed)
            except OctavoError:
                self._unpin_prefix(prefix.name)
                raise

    def _unpin_prefix(self, name: str) -> None:
        self._replicas.send_all(Call(NO_REPLY, "unpin_prefix", [name]))

    async def remove_shared_prefix(self, name: str) -> None:
        """Releases a shared prefix, even while it is computed: its blocks stay in the prefix cache until they are
        evicted; held ones are evicted first.

        Raises:
            ConfigError: there is none of this name.
        """
        await self.ready()
        self.front_end.prefixes.remove(name)
        if (request := self._end(request_id_of(name))) is not None:
            self._notify(request)
        self._unpin_prefix(name)

    def shared_prefixes(self) -> list[SharedPrefix]:
        """The shared prefixes, in the order in which they were added."""
        return list(self.front_end.prefixes)
