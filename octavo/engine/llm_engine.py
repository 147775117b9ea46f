"""The engine as a program drives it: add requests, step, take outputs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Concatenate

from octavo.config.engine_config import EngineConfig
from octavo.core.errors import memory_errors
from octavo.core.outputs import RequestOutput
from octavo.core.request import DEFAULT_OPTIONS, Prompt, RequestOptions, options_from_keywords
from octavo.core.sampling_params import RequestOutputKind
from octavo.engine.core import EngineCore
from octavo.engine.front_end import Params, SharedPrefix, StatLogger, make_stat_loggers
from octavo.engine.local_core import EnginePump, complete
from octavo.engine.model_files import ModelFiles, find_files
from octavo.engine.operations import EngineOperations, P, T
from octavo.process.interrupts import HeldInterrupts, holding_interrupts


def _synchronous(
    method: Callable[Concatenate[EngineOperations, P], Coroutine[Any, Any, T]], *, is_held: bool = True
) -> Callable[Concatenate[LLMEngine, P], T]:
    """A method of ``EngineOperations`` for ``LLMEngine``; ``is_held``: Ctrl-C takes effect after it."""

    @functools.wraps(method)
    def run(self: LLMEngine, *args: P.args, **keywords: P.kwargs) -> T:
        with HeldInterrupts() if is_held else contextlib.nullcontext():
            # By name, as the pump has methods of its own.
            return complete(getattr(self._pump, method.__name__)(*args, **keywords))

    return run


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
        self._stat_loggers = make_stat_loggers(files.options, stat_loggers)
        with memory_errors():
            self._pump = EnginePump(files, core or EngineCore(files.options, files.folder), self._stat_loggers)
        self.front_end = self._pump.front_end
        self.tokenizer, self.inputs, self.adapters = self._pump.tokenizer, self._pump.inputs, self._pump.adapters
        for text, name in files.prefixes:
            self.add_shared_prefix(text, name)

    @staticmethod
    def from_config(options: EngineConfig, stat_loggers: Sequence[StatLogger] = ()) -> LLMEngine:
        """Finds or downloads the model and loads it; ``stat_loggers`` get the statistics of each step.

        Raises:
            OctavoError: the model is unknown, unreadable, unsupported, or does not fit.
        """
        return LLMEngine(find_files(options), stat_loggers)

    @property
    def core(self) -> EngineCore:
        """The engine core: after the loss of a worker, another one."""
        return self._pump.core

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
        options = options_from_keywords("add_request", keywords, options)
        kind = RequestOutputKind.CUMULATIVE if streaming else RequestOutputKind.FINAL_ONLY
        self._pump.add(request_id, prompt, params, options, kind)

    def step(self) -> list[RequestOutput]:
        """Runs one step; returns the requests that it added to (see ``add_request``).

        If a worker is lost, all workers are restarted and open requests continue. Changes made on workers by
        ``collective_rpc`` are lost.

        Raises:
            EngineDeadError: that has happened more than ``engine_restarts`` times within ten minutes.
        """
        with HeldInterrupts():
            self._pump.step()
        return self._pump.take()

    @holding_interrupts
    def abort_request(self, request_id: str | Iterable[str]) -> Any:
        """Ends a request at once; returns its last output (``RequestOutput``), or None if it is not open.

        Of several ids: the list of their outputs, or None, in this order.
        """
        if not isinstance(request_id, str):
            return [self.abort_request(one) for one in request_id]
        request = self._pump.abort(request_id)
        return None if request is None else request.take()

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has something to do."""
        return self._pump.has_work

    @property
    def is_sleeping(self) -> bool:
        """Whether requests are refused until ``wake_up``."""
        return self._pump.is_sleeping

    def shared_prefixes(self) -> list[SharedPrefix]:
        """The shared prefixes, in the order in which they were added."""
        return self._pump.shared_prefixes()

    add_lora = _synchronous(EngineOperations.add_lora)
    remove_lora = _synchronous(EngineOperations.remove_lora)
    pin_lora = _synchronous(EngineOperations.pin_lora)
    list_loras = _synchronous(EngineOperations.list_loras)
    collective_rpc = _synchronous(EngineOperations.collective_rpc, is_held=False)
    reset_prefix_cache = _synchronous(EngineOperations.reset_prefix_cache)
    add_shared_prefix = _synchronous(EngineOperations.add_shared_prefix)
    remove_shared_prefix = _synchronous(EngineOperations.remove_shared_prefix)
    sleep = _synchronous(EngineOperations.sleep)
    wake_up = _synchronous(EngineOperations.wake_up)
    stats = _synchronous(EngineOperations.stats)
