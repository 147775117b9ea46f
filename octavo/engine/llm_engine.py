"""The engine as a program drives it: add requests, step, take outputs."""

from __future__ import annotations

import copy

from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.config import EngineConfig
from octavo.core.errors import EngineStateError, InvalidRequestError, memory_errors
from octavo.core.outputs import RequestOutput
from octavo.core.sampling_params import SamplingParams
from octavo.core.stats import SchedulerStats
from octavo.engine.core import EngineCore
from octavo.engine.input_processor import InputProcessor, Prompt
from octavo.engine.output_processor import OutputProcessor
from octavo.engine.tokenizer import Tokenizer, find_tokenizer
from octavo.loader.resolve import resolve_model


class LLMEngine:
    """A model, its scheduler and its open requests.

    >>> engine = LLMEngine.from_config(make_config(model="smollm2-135m"))
    >>> engine.add_request("a", "The capital of France is", SamplingParams(max_tokens=8))
    >>> while engine.has_unfinished_requests():
    ...     for output in engine.step():
    ...         print(output.outputs[0].text, end="")
    """

    def __init__(self, core: EngineCore, tokenizer: Tokenizer) -> None:
        self.core = core
        self.tokenizer = tokenizer
        self.inputs = InputProcessor(
            tokenizer,
            vocab_size=core.model_config.vocab_size,
            eos_token_ids=core.model_config.eos_token_ids,
            max_model_len=core.max_model_len,
            seed=core.options.seed,
        )
        self._outputs = OutputProcessor(tokenizer)

    @classmethod
    def from_config(cls, options: EngineConfig) -> LLMEngine:
        """Finds (or fetches) the model and makes it ready.

        Raises:
            OctavoError: the model is unknown, unreadable, unsupported, or does not fit.
        """
        folder = resolve_model(
            options.model,
            dtype=options.dtype,
            revision=options.revision,
            weights=options.load_format != "dummy",
        )
        with memory_errors():
            tokenizer = find_tokenizer(options, folder)
            return cls(EngineCore(options, folder), tokenizer)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        streaming: bool = True,
    ) -> None:
        """Queues a request. If ``streaming``, each step gives what it adds to it; else its end gives the whole.

        A lower ``priority`` goes first, under the policies that look at it; different salts share no cached prefix.

        Raises:
            InvalidRequestError: the request cannot be served; the engine is as before.
            EngineStateError: the engine is sleeping.
        """
        if self.core.is_sleeping:
            raise EngineStateError("the engine sleeps: wake_up() must come before a request")
        if request_id in self._outputs:
            raise InvalidRequestError(f"request id {request_id!r} is in use by an unfinished request")
        request = self.inputs.process(
            request_id,
            prompt,
            params if params is not None else SamplingParams(),
            priority=priority,
            cache_salt=cache_salt,
        )
        self._outputs.open(request, streaming=streaming)
        self.core.scheduler.add(request.group)

    def step(self) -> list[RequestOutput]:
        """Runs one step: what it added to each streaming request, and other requests as a whole where they end."""
        if not self.core.scheduler.has_work:
            return []
        ready, stopped = self._outputs.process(self.core.step())
        for group_id, index in stopped:
            self.core.stop(group_id, index)
        return [request.take() for request in ready]

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """Ends a request at once and frees all it holds: its last output, or None if it is not open."""
        request = self._outputs.abort(request_id)
        if request is None:
            return None
        self.core.abort(request.group_id)
        return request.take()

    def reset_prefix_cache(self) -> None:
        """Forgets the contents of all blocks that requests to come could share."""
        self.core.blocks.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Frees memory until ``wake_up``; see ``LLM.sleep`` for the levels, and ``EngineCore.sleep`` for errors."""
        self.core.sleep(level)

    @property
    def is_sleeping(self) -> bool:
        """Whether requests are refused until ``wake_up``."""
        return self.core.is_sleeping

    def wake_up(self) -> None:
        """Restores weights and KV cache; nothing happens if it is not sleeping."""
        self.core.wake_up()

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has something to do."""
        return self._outputs.num_open > 0

    def stats(self) -> SchedulerStats:
        """Queues and blocks now, and what was scheduled, preempted, swapped and found in the prefix cache so far."""
        return copy.copy(self.core.scheduler.stats())  # the scheduler goes on counting in its own
