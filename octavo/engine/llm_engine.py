"""The engine as a program drives it: add requests, step, take outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.core.adapters import LoRARequest, PromptAdapterRequest, one_adapter
from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.config import EngineConfig
from octavo.core.errors import EngineStateError, InvalidRequestError, memory_errors
from octavo.core.interrupts import HeldInterrupts, holding_interrupts
from octavo.core.messages import check_sendable
from octavo.core.outputs import RequestOutput
from octavo.core.sampling_params import SamplingParams
from octavo.core.stats import SchedulerStats
from octavo.engine.adapters import make_registry
from octavo.engine.core import EngineCore
from octavo.engine.input_processor import InputProcessor, Prompt
from octavo.engine.model_files import ModelFiles, find_files
from octavo.engine.output_processor import OutputProcessor, check_increments
from octavo.engine.shared_prefixes import SharedPrefix, SharedPrefixes
from octavo.engine.stat_loggers import StatLogger, log_stats, make_stat_loggers
from octavo.engine.step_meter import StepMeter
from octavo.engine.tokenizer import Tokenizer


class LLMEngine:
    """A model, its scheduler and its open requests.

    >>> engine = LLMEngine.from_config(make_config(model="smollm2-135m"))
    >>> engine.add_request("a", "The capital of France is", SamplingParams(max_tokens=8))
    >>> while engine.has_unfinished_requests():
    ...     for output in engine.step():
    ...         print(output.outputs[0].text, end="")

    What changes it holds Ctrl-C back until it is done, see ``HeldInterrupts``: the engine can be used after each.
    """

    def __init__(
        self,
        core: EngineCore,
        tokenizer: Tokenizer,
        stat_loggers: Sequence[StatLogger] = (),
        default_sampling: Mapping[str, Any] | None = None,
    ) -> None:
        """``stat_loggers`` get the statistics of each step; ``default_sampling``: see ``InputProcessor``."""
        self.core = core
        self._stat_loggers = make_stat_loggers(core.options, stat_loggers)
        self._meter = StepMeter(core) if self._stat_loggers else None
        self.tokenizer = tokenizer
        self.inputs = InputProcessor(
            tokenizer,
            core.options,
            vocab_size=core.model_config.vocab_size,
            eos_token_ids=core.model_config.eos_token_ids,
            max_model_len=core.max_model_len,
            default_sampling=default_sampling or {},
        )
        self._outputs = OutputProcessor(tokenizer)
        #: The adapters that requests may name.
        self.adapters = make_registry(core.options, core.model_config)
        self.adapters.on_unpin = core.unpin_adapter
        self._prefixes = SharedPrefixes(core.options, self.inputs)
        #: Of a step at whose end an interrupt came.
        self._not_returned: list[RequestOutput] = []

    @classmethod
    def from_config(cls, options: EngineConfig, stat_loggers: Sequence[StatLogger] = ()) -> LLMEngine:
        """Finds (or fetches) the model and makes it ready; ``stat_loggers`` get the statistics of each step.

        Raises:
            OctavoError: the model is unknown, unreadable, unsupported, or does not fit.
        """
        return cls.from_files(find_files(options), stat_loggers)

    @classmethod
    def from_files(cls, files: ModelFiles, stat_loggers: Sequence[StatLogger] = ()) -> LLMEngine:
        """Reads the weights of a model that was found; see ``from_config``."""
        with memory_errors():
            core = EngineCore(files.options, files.folder)
            engine = cls(core, files.tokenizer, stat_loggers, files.default_sampling)
        for text, name in files.prefixes:
            engine.add_shared_prefix(text, name)
        return engine

    @holding_interrupts
    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | None = None,
        *,
        priority: float = 0,
        arrival_time: float | None = None,
        cache_salt: str = "",
        user: str | None = None,
        ttft_target: float | None = None,
        tpot_target: float | None = None,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        prediction: str | Sequence[int] | None = None,
        streaming: bool = True,
    ) -> None:
        """Queues a request. If ``streaming``, each step gives what it adds to it; else its end gives the whole.

        Without ``params`` it has the model's defaults (see ``EngineConfig.generation_config``).
        ``priority``: an integer or a finite float; the lower goes first. Refused, if not 0, under a policy that does
        not look at it. ``arrival_time``: a past moment in seconds of ``time.monotonic()``, by default now; policies,
        ageing, the scheduler's delay and the metrics count from it. Different salts share no cached prefix.
        ``user``: whose request it is, for policies that look at it. ``ttft_target``, ``tpot_target``: seconds to the
        first token and between those after it, refused under a policy that does not look at them.
        ``lora_request`` or ``prompt_adapter_request``: the adapter that it runs with, which is loaded if it is not yet.
        ``prediction``: what the output is likely to be, as text or token ids. Tokens that it has indeed come sooner,
        and the output does not depend on it.
        ``output_kind`` FINAL_ONLY of the parameters means the same as ``streaming=False``.

        Raises:
            InvalidRequestError: the request cannot be served; the engine is as before.
            AdapterError: the adapter cannot be used; likewise.
            EngineStateError: the engine is sleeping.
        """
        if self.core.is_sleeping:
            raise EngineStateError("the engine sleeps: wake_up() must come before a request")
        if streaming:
            check_increments(params)
        if request_id in self._outputs:
            raise InvalidRequestError(f"request id {request_id!r} is in use by an unfinished request")
        named = one_adapter(lora_request, prompt_adapter_request)
        adapter = None if named is None else self.adapters.load(named)
        request = self.inputs.process(
            request_id,
            prompt,
            params if params is not None else self.inputs.default_params(),
            priority=priority,
            arrival_time=arrival_time,
            cache_salt=cache_salt,
            user=user,
            ttft_target=ttft_target,
            tpot_target=tpot_target,
            prediction=prediction,
            adapter=adapter,
        )
        if not self.core.executor.in_process:
            check_sendable(request.group)
        self._outputs.open(request, streaming=streaming)
        self.core.scheduler.add(request.group)
        if adapter is not None:
            self.adapters.begin(request.group.group_id, adapter)

    def step(self) -> list[RequestOutput]:
        """Runs one step: what it added to each streaming request, and other requests as a whole where they end."""
        with HeldInterrupts():
            if self.core.scheduler.has_work:
                self._not_returned += self._step()
        outputs, self._not_returned = self._not_returned, []
        return outputs

    def _step(self) -> list[RequestOutput]:
        if self._meter is None:
            outputs = self.core.step()
        else:
            outputs, stats = self._meter.step()
            log_stats(self._stat_loggers, stats)
        ready, stopped = self._outputs.process(outputs)
        for group_id, index in stopped:
            self.core.stop(group_id, index)
        if self.adapters.in_use:
            for request in ready:
                if request.finished:
                    self.adapters.end(request.group_id)
        return [request.take() for request in ready]

    @holding_interrupts
    def abort_request(self, request_id: str) -> RequestOutput | None:
        """Ends a request at once and frees all it holds: its last output, or None if it is not open."""
        request = self._outputs.abort(request_id)
        if request is None:
            return None
        self.core.abort(request.group_id)
        self.adapters.end(request.group_id)
        return request.take()

    @holding_interrupts
    def add_lora(self, lora_request: LoRARequest, *, load_inplace: bool = False) -> bool:
        """Reads and checks an adapter, so that requests may name it; false if it was loaded with the same content.

        ``load_inplace``: a name that is taken means this content from now on.

        Raises:
            AdapterError: it cannot be used with this model, or ``enable_lora`` is off.
            AdapterConflictError: its name or number is taken.
        """
        return self.adapters.add(lora_request, self.adapters.read(lora_request), in_place=load_inplace)

    @holding_interrupts
    def remove_lora(self, lora_id: int) -> bool:
        """Forgets the adapter of this ``lora_int_id``; false if there is none.

        Raises:
            AdapterConflictError: requests use it.
        """
        adapter = self.adapters.numbered(lora_id)
        if adapter is not None:
            self.adapters.remove(adapter.name)
        return adapter is not None

    @holding_interrupts
    def pin_lora(self, lora_id: int) -> bool:
        """Keeps an adapter in host memory and in a slot until it is removed; false if there is none of this number.

        Raises:
            AdapterError: so many are pinned that no other could run.
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
        """Calls a method of every worker, or a function with each worker; see ``LLM.collective_rpc``."""
        return self.core.executor.collective_rpc(method, args, kwargs, timeout)

    @holding_interrupts
    def reset_prefix_cache(self) -> None:
        """Forgets the contents of all blocks that requests to come could share."""
        self.core.blocks.reset_prefix_cache()

    def add_shared_prefix(self, prompt: Prompt, name: str | None = None) -> str:
        """Computes the beginning of prompts to come, and keeps its blocks until ``remove_shared_prefix``; its name.

        Raises:
            ConfigError: the prefix cache is off, the name is in use, or too few blocks would be left for a request of
                ``max_model_len`` tokens.
            InvalidRequestError: it is no prompt, or too long.
            EngineStateError: requests are unfinished, or the engine sleeps.
            WorkerError: it could not be computed.
        """
        if self.core.is_sleeping or self.has_unfinished_requests():
            state = "the engine sleeps" if self.core.is_sleeping else "requests are unfinished"
            raise EngineStateError(f"{state}: a shared prefix cannot be computed now")
        with HeldInterrupts() as interrupts:
            prefix = self._prefixes.add(prompt, name)
            self._compute_prefix(prefix, interrupts)
        return prefix.name

    def _compute_prefix(self, prefix: SharedPrefix, interrupts: HeldInterrupts) -> None:
        request = self._prefixes.request(prefix)
        self._outputs.open(request, streaming=False)
        self.core.scheduler.add(request.group)
        outputs: list[RequestOutput] = []
        try:
            while not outputs:
                outputs = self.step()
                interrupts.deliver()
        except BaseException:  # an interrupt leaves nothing behind
            self.abort_request(request.request_id)
            self.remove_shared_prefix(prefix.name)
            raise
        self._prefixes.check(prefix, outputs[0])

    @holding_interrupts
    def remove_shared_prefix(self, name: str) -> None:
        """Releases a shared prefix: its blocks stay in the prefix cache until they are needed, as any others.

        Raises:
            ConfigError: there is none of this name.
        """
        self._prefixes.remove(name)
        self.core.blocks.pinned.remove(name)

    def shared_prefixes(self) -> list[SharedPrefix]:
        """The shared prefixes, in the order in which they were added."""
        return list(self._prefixes)

    @holding_interrupts
    def sleep(self, level: int = 1) -> None:
        """Frees memory until ``wake_up``; see ``LLM.sleep`` for the levels, and ``EngineCore.sleep`` for errors."""
        self.core.sleep(level)

    @property
    def is_sleeping(self) -> bool:
        """Whether requests are refused until ``wake_up``."""
        return self.core.is_sleeping

    def wake_up(self) -> None:
        """Restores weights, KV cache, pins of adapters and shared prefixes; nothing happens if it is not sleeping."""
        was_sleeping = self.core.is_sleeping
        with HeldInterrupts() as interrupts:
            self.core.wake_up()
            if was_sleeping:
                for adapter in self.adapters:
                    if adapter.pinned:
                        self.core.pin_adapter(adapter.ref)
                for prefix in self._prefixes:
                    self._compute_prefix(prefix, interrupts)

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has something to do."""
        return self._outputs.num_open > 0 or bool(self._not_returned)

    def stats(self) -> SchedulerStats:
        """Queues and blocks now, and what was scheduled, preempted, swapped and found in the prefix cache so far."""
        return copy.copy(self.core.scheduler.stats())  # the scheduler goes on counting in its own
