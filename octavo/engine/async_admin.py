"""What an operator asks of an engine with an event loop: adapters, shared prefixes, sleep, statistics."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from octavo.core.adapters import AdapterRef, LoRARequest
from octavo.core.errors import EngineDeadError, EngineStateError, OctavoError
from octavo.core.messages import Unpin
from octavo.core.stats import SchedulerStats, sum_stats
from octavo.engine.adapters import AdapterRegistry
from octavo.engine.input_processor import ProcessedRequest, Prompt
from octavo.engine.replicas import Replicas
from octavo.engine.request_stream import QueuedTokens, RequestStream
from octavo.engine.shared_prefixes import SharedPrefix, SharedPrefixes, request_id_of
from octavo.executor.worker import function_name


class AsyncAdmin(ABC):
    """The part of ``AsyncLLM`` that is not about requests."""

    #: The adapters that requests may name.
    adapters: AdapterRegistry
    #: While the engine sleeps, requests are refused.
    is_sleeping: bool
    _replicas: Replicas
    _prefixes: SharedPrefixes
    _queued: QueuedTokens
    _loaded: bool
    #: By name: held while an adapter is read.
    _adapter_locks: WeakValueDictionary[str, asyncio.Lock]
    _unpinning: set[asyncio.Future[None]]

    @abstractmethod
    async def ready(self) -> None:
        """Waits until the model is loaded."""

    @abstractmethod
    def check_alive(self) -> None:
        """Raises if requests cannot be accepted."""

    @property
    @abstractmethod
    def num_open(self) -> int:
        """Requests that have not ended."""

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """Ends a request."""

    @abstractmethod
    async def _tokenize(self, prompt: Prompt) -> Prompt:
        """The prompt, with its token ids if it is a long text."""

    @abstractmethod
    def _send(self, request: ProcessedRequest, streaming: bool, replica: int | None = None) -> RequestStream:
        """Sends a request to a replica."""

    # --- adapters ---------------------------------------------------------------------------------------------------

    async def _find_adapter(self, request: LoRARequest) -> AdapterRef:
        """The adapter that a request names, read in a thread if it is not loaded; one read serves all that wait."""
        ref = self.adapters.find(request)
        if ref is None:
            async with self._adapter_locks.setdefault(request.lora_name, asyncio.Lock()):
                if (ref := self.adapters.find(request)) is None:
                    self.adapters.add(request, await asyncio.to_thread(self.adapters.read, request))
                    return self.adapters.load(request)
        return ref

    async def add_lora(self, lora_request: LoRARequest, *, load_inplace: bool = False) -> bool:
        """As ``LLMEngine.add_lora``, beside the requests that run.

        Raises:
            AdapterError, AdapterConflictError: see there.
        """
        await self.ready()
        ref = await asyncio.to_thread(self.adapters.read, lora_request)
        return self.adapters.add(lora_request, ref, in_place=load_inplace)

    async def remove_lora(self, lora_id: int, *, wait: bool = False) -> bool:
        """Forgets the adapter of this ``lora_int_id``; false if there is none.

        With ``wait`` it takes no new requests, and this returns when its last open one has ended; also if this is
        cancelled before, it is then forgotten.

        Raises:
            AdapterConflictError: requests use it, without ``wait``.
        """
        await self.ready()
        adapter = self.adapters.numbered(lora_id)
        if adapter is None:
            return False
        if wait:
            gone = asyncio.Event()
            self.adapters.retire(adapter.name, gone.set)
            await gone.wait()
        else:
            self.adapters.remove(adapter.name)
        return True

    async def list_loras(self) -> set[int]:
        """The ``lora_int_id`` of each adapter that requests may name."""
        await self.ready()
        return {adapter.number for adapter in self.adapters}

    async def pin_lora(self, lora_id: int) -> bool:
        """Keeps an adapter in host memory and in a slot until it is removed; false if there is none of this number.

        Raises:
            AdapterError: so many are pinned that no other could run.
        """
        await self.ready()
        adapter = self.adapters.numbered(lora_id)
        if adapter is None:
            return False
        await self._replicas.call("pin_adapter", type(None), adapter.ref)
        adapter.pinned = True
        return True

    def _unpin_adapter(self, key: str) -> None:
        async def unpin() -> None:
            with contextlib.suppress(EngineDeadError):
                await self._replicas.call("unpin_adapter", type(None), key)

        task = asyncio.ensure_future(unpin())
        self._unpinning.add(task)  # the event loop itself keeps no task alive
        task.add_done_callback(self._unpinning.discard)

    def adapter_requests(self) -> Iterator[tuple[str, str]]:
        """The adapter's name of each open request that has one, and whether it is "running" or "waiting"."""
        waiting = self._queued.lengths
        return ((name, "waiting" if i in waiting else "running") for i, name in self.adapters.open_requests())

    # --- the engine ---------------------------------------------------------------------------------------------------

    async def stats(self) -> SchedulerStats:
        """The state of queues and blocks between two steps, and totals, of all replicas together."""
        return sum_stats(await self.replica_stats())

    async def replica_stats(self) -> list[SchedulerStats]:
        """``stats`` of each replica that lives."""
        await self.ready()
        return await self._replicas.call("stats", SchedulerStats)

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """As ``LLM.collective_rpc``: the answers of all workers, replica by replica.

        Raises:
            OctavoError: see there.
        """
        await self.ready()
        name = method if isinstance(method, str) else function_name(method)
        answers = await self._replicas.call("collective_rpc", list, name, list(args), dict(kwargs or {}), timeout)
        return [answer for replica in answers for answer in replica]

    async def reset_prefix_cache(self) -> None:
        """Forgets the contents of all blocks that requests to come could share."""
        await self.ready()
        await self._replicas.call("reset_prefix_cache", type(None))
        self._replicas.router.forget_prefixes()

    async def add_shared_prefix(self, prompt: Prompt, name: str | None = None) -> str:
        """As ``LLM.add_shared_prefix``, beside the requests that run.

        Raises:
            ConfigError, InvalidRequestError, EngineStateError: see there.
            WorkerError: it could not be computed.
            EngineDeadError: the engine has died or is being shut down.
        """
        await self.ready()
        prompt = await self._tokenize(prompt)
        self.check_alive()
        if self.is_sleeping:
            raise EngineStateError("the engine sleeps: wake_up() must come before a shared prefix")
        prefix = self._prefixes.add(prompt, name)
        await self._compute_prefix(prefix)
        return prefix.name

    async def _compute_prefix(self, prefix: SharedPrefix) -> None:
        try:
            for replica in self._replicas.router.alive:  # each has a KV cache of its own
                request = self._prefixes.request(prefix)
                with contextlib.closing(self._send(request, streaming=False, replica=replica)) as stream:
                    output = await anext(stream)
        except BaseException:  # such as a cancellation
            self._prefixes.discard(prefix)
            self._replicas.send_all(Unpin(prefix.name))
            raise
        self._prefixes.check(prefix, output)

    async def remove_shared_prefix(self, name: str) -> None:
        """Releases a shared prefix, also one that is being computed; see ``LLM.remove_shared_prefix``.

        Raises:
            ConfigError: there is none of this name.
        """
        await self.ready()
        self._prefixes.remove(name)
        await self.abort(request_id_of(name))
        self._replicas.send_all(Unpin(name))

    def shared_prefixes(self) -> list[SharedPrefix]:
        """The shared prefixes, in the order in which they were added."""
        return list(self._prefixes) if self._loaded else []

    async def sleep(self, level: int = 1) -> None:
        """Frees the engine's memory until ``wake_up``; see ``LLM.sleep`` for the levels.

        Raises:
            EngineStateError: requests are unfinished.
            OctavoError: the weights cannot move.
        """
        await self.ready()
        if self.num_open:
            raise EngineStateError(f"{self.num_open} requests are unfinished: let them end or abort them first")
        self.is_sleeping = True  # from now on requests are refused
        try:
            await self._replicas.call("sleep", type(None), level)
        except OctavoError:
            self.is_sleeping = False
            raise

    async def wake_up(self) -> None:
        """Restores weights, KV cache, pins of adapters and shared prefixes; nothing happens if it is not sleeping."""
        await self.ready()
        await self._replicas.call("wake_up", type(None))
        was_sleeping, self.is_sleeping = self.is_sleeping, False
        if was_sleeping:
            for adapter in self.adapters:
                if adapter.pinned:
                    await self._replicas.call("pin_adapter", type(None), adapter.ref)
            for prefix in self._prefixes:
                await self._compute_prefix(prefix)
