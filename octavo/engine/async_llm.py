"""The engine for a program with an event loop; here what its operator asks of it, such as to load adapters."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from octavo.core.adapters import LoRARequest
from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.engine_view import EngineView
from octavo.core.errors import ConfigError, EngineStateError, OctavoError
from octavo.core.messages import Unpin
from octavo.core.outputs import RequestOutput
from octavo.core.pooling_outputs import Pooled
from octavo.core.pooling_params import PoolingParams
from octavo.core.prompts import Prompt
from octavo.core.request_options import DEFAULT_OPTIONS, RequestOptions, options_from_keywords
from octavo.core.sampling_params import RequestOutputKind, SamplingParams
from octavo.core.stats import SchedulerStats, sum_stats
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.replica import ReplicaState
from octavo.engine.shared_prefixes import SharedPrefix, request_id_of
from octavo.engine.tokenizer import Tokenizer
from octavo.engine.view_names import name_adapters, name_requests
from octavo.executor.worker import function_name

if TYPE_CHECKING:
    from octavo.speech.audio_files import Audio, AudioLimits, OpenedAudio
    from octavo.speech.audio_reader import SandboxRecording
    from octavo.speech.segments import Segment, Transcription
    from octavo.speech.transcription_params import TranscriptionParams

#: What becomes of open requests, see ``AsyncLLM.pause_generation``.
PauseMode = Literal["abort", "wait", "keep"]


class AsyncLLM(AsyncEngine):
    """A model that serves many requests at once; its engine core is another process, so nothing here slows a step.

    >>> llm = AsyncLLM("smollm2-135m", max_num_seqs=64)
    >>> async for output in llm.generate("a", "The capital of France is", SamplingParams(max_tokens=8)):
    ...     print(output.outputs[0].text)
    >>> await llm.shutdown()

    Made like an ``LLM``. The model is loaded by what is awaited first, a request or ``ready()``; ``async with`` does
    that and shuts it down. ``front_end`` and what is beside it exist from then on. A bad request raises
    ``InvalidRequestError``; the others go on. All methods are for one event loop.
    """

    async def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        await self.ready()
        return self.tokenizer

    async def generate(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | BeamSearchParams | None = None,
        *,
        streaming: bool = True,
        **keywords: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Iterates over the outputs of one request, each with everything so far; ``submit`` gives increments instead.

        So does ``output_kind`` DELTA of the parameters; FINAL_ONLY gives one output, as ``streaming=False`` does. The
        request is aborted when the iteration is left before its end or its task is cancelled. ``keywords``: the fields
        of ``RequestOptions``, and those of other engines, see ``LLM``.

        Raises:
            InvalidRequestError, AdapterError, EngineDeadError, EngineStateError: as for ``submit``.
        """
        options = options_from_keywords("generate", keywords)
        kind = RequestOutputKind.CUMULATIVE if streaming else RequestOutputKind.FINAL_ONLY
        with contextlib.closing(await self.submit(request_id, prompt, sampling_params, options, kind=kind)) as stream:
            async for output in stream:
                yield output

    async def pool(
        self,
        request_id: str,
        prompt: Prompt,
        params: PoolingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
        **keywords: Any,
    ) -> Pooled:
        """The vector or scores of a prompt, as ``PoolingOutput``; if this is cancelled, the request is aborted.

        Raises:
            InvalidRequestError, AdapterError, EngineDeadError, EngineStateError: as for ``submit``.
        """
        stream = await self.submit(request_id, prompt, params, options, streaming=False, **keywords)
        with contextlib.closing(stream):
            output: Any = await anext(stream)
        return output

    async def transcribe(
        self,
        request_id: str,
        audio: Audio | OpenedAudio | SandboxRecording,
        params: TranscriptionParams | None = None,
        options: RequestOptions = DEFAULT_OPTIONS,
        *,
        limits: AudioLimits | None = None,
        scores: bool = False,
        **keywords: Any,
    ) -> AsyncGenerator[Segment | Transcription, None]:
        """Iterates over the segments of a recording as they are certain, and at last over all of it.

        Its windows are requests of the engine with its priority and arrival; if the iteration is left, they end.
        ``audio``, ``params`` and ``limits`` as in ``LLM.transcribe``; of an opened one only ``pieces`` is called.
        Files are decoded in threads of this process, which have ended when the iteration is left or cancelled; for
        those of strangers ``audio`` is what ``AudioReader.open`` gives, which are decoded in the sandbox.
        ``scores``: segments have ``no_speech_prob`` although nothing depends on it.

        Raises:
            InvalidRequestError: the model does not read sound or cannot do what is asked, or as ``Recording``.
            WorkerError: the engine failed at a window.
            EngineDeadError, EngineStateError: as for ``submit``.
        """
        await self.ready()
        options = options_from_keywords("transcribe", keywords, options)
        from octavo.engine.async_transcription import AsyncTranscription

        run = AsyncTranscription(self, request_id, params, options, scores)
        async with contextlib.aclosing(run.hear(audio, limits)) as made:
            async for part in made:
                yield part

    # --- adapters ---------------------------------------------------------------------------------------------------

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

    def adapter_requests(self) -> Iterator[tuple[str, str]]:
        """The adapter's name of each open request that has one, and whether it is "running" or "waiting"."""
        waiting = self._open.queued.lengths
        return ((name, "waiting" if i in waiting else "running") for i, name in self.adapters.open_requests())

    # --- the engine ---------------------------------------------------------------------------------------------------

    @property
    def is_available(self) -> bool:
        """Whether a core computes requests now; else they wait for one that is being started, unless it has died."""
        return self._error is None and self._loaded and self._replicas.is_available

    @property
    def retry_after(self) -> int:
        """Whole seconds after which a core that is being started may be ready."""
        return max(1, math.ceil(self._replicas.starter.start_seconds))

    def replica_states(self) -> list[ReplicaState]:
        """The engine's replicas as they are now."""
        return self._replicas.states() if self._loaded else []

    @property
    def num_standby(self) -> int:
        """Engine cores in reserve that are ready."""
        return self._replicas.starter.num_reserve if self._loaded else 0

    @property
    def num_resumed(self) -> int:
        """Requests that went on at another core than the one that had begun them, or on one that was started again."""
        return self._replicas.requests.num_resumed if self._loaded else 0

    async def drain_replica(self, number: int) -> int:
        """Has a replica take no more requests, and the others go on with those that it has: how many; no stream breaks.

        Raises:
            ConfigError: there is no such replica.
            EngineStateError: no other one takes requests.
        """
        await self.ready()
        return await self._migration.drain(number)

    async def undrain_replica(self, number: int) -> None:
        """Has a drained replica take requests again.

        Raises:
            ConfigError: there is no such replica.
        """
        await self.ready()
        self._migration.undrain(number)

    async def restart_replicas(self) -> None:
        """Starts the core of each replica again, one after the other; see ``Migration.restart``. No stream breaks.

        Raises:
            EngineStateError: this is being done already, or the engine sleeps.
            ConfigError: the model's configuration or tokenizer was changed.
            EngineDeadError, OctavoError: a core could not be started.
        """
        await self.ready()
        self._check_accepts("restart_replicas()")
        await self._migration.restart()

    async def stats(self) -> SchedulerStats:
        """The state of queues and blocks between two steps, and totals, of all replicas together."""
        return sum_stats(await self.replica_stats())

    async def replica_stats(self) -> list[SchedulerStats]:
        """``stats`` of each replica that lives."""
        await self.ready()
        return await self._replicas.call("stats", SchedulerStats)

    async def engine_views(self, *, fresh: bool = False) -> list[EngineView]:
        """What each replica that lives looks like between two steps: its blocks, its queues, its steps since last time.

        ``fresh``: all steps that are known. For one who watches; two would take each other's steps.
        """
        await self.ready()
        views = await self._replicas.views(fresh)
        for view in views:
            name_requests(view, self.front_end.outputs.id_of_group)
            name_adapters(view, self.adapters.names_of)
        return views

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

    async def pause_generation(self, *, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Stops between two steps until ``resume_generation``, for which new requests wait: to change the weights.

        Args:
            mode: open requests are aborted ("abort"), end before this returns ("wait"), or go on when it resumes
                ("keep").
            clear_cache: the prefix cache is reset. It stays with "keep", as what is kept goes on in it;
                ``reset_prefix_cache(reset_running_requests=True)`` resets both.

        Raises:
            ConfigError: there is no such mode.
        """
        if mode not in get_args(PauseMode):
            raise ConfigError(f"mode must be {', '.join(get_args(PauseMode))}, not {mode!r}")
        await self.ready()
        self._accepts.clear()
        if mode == "keep" and self.num_open:
            self._replicas.paused = True
            await self._replicas.call("pause", type(None), True)
        if mode == "keep":
            return
        if mode == "abort":
            self._abort_all()
        await self._open.no_stream()
        if clear_cache:
            await self.reset_prefix_cache()

    async def resume_generation(self) -> None:
        """Goes on after ``pause_generation``; nothing happens if it is not paused."""
        await self.ready()
        await self._replicas.call("pause", type(None), False)
        self._replicas.paused = False
        self._accepts.set()

    async def is_paused(self) -> bool:
        """Whether new requests wait for ``resume_generation``."""
        return not self._accepts.is_set()

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """As ``LLM.reset_prefix_cache``."""
        await self.ready()
        await self._replicas.call("reset_prefix_cache", type(None), reset_running_requests)
        self._replicas.requests.router.forget_prefixes()
        return True

    async def add_shared_prefix(self, prompt: Prompt, name: str | None = None) -> str:
        """As ``LLM.add_shared_prefix``, beside the requests that run.

        Raises:
            ConfigError, InvalidRequestError, EngineStateError: see there.
            WorkerError: it could not be computed.
            EngineDeadError: the engine has died or is being shut down.
        """
        await self.ready()
        prompt = await self.front_end.tokenize(prompt)
        self._check_accepts("a shared prefix")
        prefix = self.front_end.prefixes.add(prompt, name)
        await self._compute_prefix(prefix)
        return prefix.name

    async def remove_shared_prefix(self, name: str) -> None:
        """Releases a shared prefix, also one that is being computed; see ``LLM.remove_shared_prefix``.

        Raises:
            ConfigError: there is none of this name.
        """
        await self.ready()
        self.front_end.prefixes.remove(name)
        await self.abort(request_id_of(name))
        self._replicas.send_all(Unpin(name))

    def shared_prefixes(self) -> list[SharedPrefix]:
        """The shared prefixes, in the order in which they were added."""
        return list(self.front_end.prefixes) if self._loaded else []

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

    async def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Restores weights, KV cache, pins of adapters and shared prefixes; see ``LLM.wake_up`` for ``tags``.

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
