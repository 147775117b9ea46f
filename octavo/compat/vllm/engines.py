"""``LLM`` and ``LLMEngine`` with what vLLM's have beside Octavo's methods."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

from octavo.compat.vllm.batch_processors import BatchProcessors, VllmConfig, split_processors
from octavo.compat.vllm.engine_args import given_options
from octavo.compat.vllm.pooling import PoolingOptions
from octavo.compat.vllm.pooling_methods import PoolingMethods
from octavo.compat.vllm.profiling import Profiler
from octavo.compat.vllm.reader_metrics import Metric, RequestFigures
from octavo.core.config_sources import resolve_config
from octavo.core.outputs import RequestOutput
from octavo.core.pooling_params import PoolingParams
from octavo.core.prompts import Prompt
from octavo.core.request_options import DEFAULT_OPTIONS, RequestOptions
from octavo.core.sampling_params import RequestOutputKind, SamplingParams
from octavo.engine.llm import LLM as OctavoLLM
from octavo.engine.llm_engine import LLMEngine as OctavoEngine
from octavo.engine.model_files import find_files
from octavo.engine.stat_loggers import StatLogger
from octavo.kernels import resolve_device
from octavo.loader.resolve import resolve_model


class _Calls(OctavoEngine):
    """What both engines have."""

    #: None while the engine is made, when it computes shared prefixes.
    _figures: RequestFigures | None = None
    _processors: BatchProcessors
    _profiler: Profiler
    _pooling: PoolingOptions

    def _prepare(self, classes: Sequence[Any], profiler_config: Any, pooling: PoolingOptions) -> None:
        self._pooling = pooling
        pooling.apply(self.front_end.pooling)
        self._figures = RequestFigures()
        #: Tokens so far of the requests whose outputs are increments.
        self._increments: dict[str, int] = {}
        config = VllmConfig(self.core.options, self.core.model_config)
        self._processors = BatchProcessors(classes, config, resolve_device(self.core.options.device))
        self._profiler = Profiler(profiler_config)

    @property
    def model_config(self) -> Any:
        """That of the network, with the longest sequence as ``max_model_len``."""
        return _ModelConfig(self)

    @property
    def vllm_config(self) -> VllmConfig:
        """The engine's options, and ``model_config``."""
        return VllmConfig(self.core.options, self.model_config)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: Any = None,
        options: RequestOptions = DEFAULT_OPTIONS,
        *,
        streaming: bool = True,
        **keywords: Any,
    ) -> None:
        """As Octavo's, with the logits processors that the engine was started with."""
        if isinstance(params, PoolingParams):
            params = self._pooling.filled(params)
        if isinstance(params, SamplingParams):
            params = self._processors.given_to(params)
            if streaming and params.output_kind is RequestOutputKind.DELTA:
                self._increments[request_id] = 0
        super().add_request(request_id, prompt, params, options, streaming=streaming, **keywords)

    def step(self) -> list[RequestOutput]:
        """As Octavo's."""
        outputs = super().step()
        if self._figures is None:
            return outputs
        for output in outputs:
            completions = output.outputs if isinstance(output, RequestOutput) else []  # or a vector
            tokens = sum(len(completion.token_ids) for completion in completions)
            if output.request_id in self._increments:
                self._increments[output.request_id] += tokens
            if output.finished:
                self._figures.add(output, self._increments.pop(output.request_id, tokens))
        return outputs

    def get_metrics(self) -> list[Metric]:
        """Figures by vLLM's names; Octavo's ``LLM.get_metrics`` has its own."""
        assert self._figures is not None
        return self._figures.metrics(self.stats(), self.core.options.model)

    def start_profile(self, *_: object) -> None:
        """Begins a trace; see ``ProfilerConfig``."""
        self._profiler.start()

    def stop_profile(self) -> Path | None:
        """Ends it: the file of the trace."""
        return self._profiler.stop()

    def collective_rpc(  # type: ignore[override]
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """As Octavo's, in vLLM's order of arguments."""
        return super().collective_rpc(method, args, kwargs, timeout)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.tokenizer

    def get_num_unfinished_requests(self) -> int:
        """Requests that have not ended."""
        return self.front_end.outputs.num_open


class _ModelConfig:
    def __init__(self, engine: OctavoEngine) -> None:
        self._config, self.max_model_len = engine.core.model_config, engine.core.max_model_len
        self.model, self.dtype = engine.core.options.model, engine.core.dtype
        self._folder = Path(resolve_model(self.model, revision=engine.core.options.revision))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)

    @property
    def hf_config(self) -> SimpleNamespace:
        """What config.json says, as far as it says it; ``id2label`` by number."""
        content = json.loads((self._folder / "config.json").read_text(encoding="utf-8"))
        return SimpleNamespace(**{**content, "id2label": dict(enumerate(self._config.labels))})

    def get_vocab_size(self) -> int:
        """Token ids of the network."""
        return self._config.vocab_size


class LLMEngine(_Calls):
    """Octavo's engine, made of ``EngineArgs``."""

    @classmethod
    def from_engine_args(
        cls,
        engine_args: Any,
        usage_context: object = None,
        stat_loggers: Sequence[StatLogger] | None = None,
        **_: object,
    ) -> Self:
        """Loads a model with these options.

        Raises:
            OctavoError: an option is wrong, or the model cannot be served.
        """
        options = engine_args.given()
        classes, names = split_processors(options.pop("logits_processors", None))
        profiler_config, pooling = options.pop("profiler_config", None), PoolingOptions(options)
        if names:
            options["logits_processors"] = names
        engine = cls(find_files(resolve_config(options)), stat_loggers or ())
        engine._prepare(classes, profiler_config, pooling)
        return engine


class LLM(_Calls, PoolingMethods, OctavoLLM):  # type: ignore[misc]  # metrics have vLLM's types
    """Octavo's ``LLM``; options that are as ``EngineArgs`` have them by default are as if they were not given."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        logits_processors: Any = None,
        profiler_config: Any = None,
        stat_loggers: Sequence[StatLogger] | None = None,
        **options: Any,
    ) -> None:
        """Loads a model; ``logits_processors`` may be classes of vLLM's kind.

        Raises:
            OctavoError: as ``octavo.LLM``.
        """
        classes, names = split_processors(logits_processors)
        options = given_options(options)
        pooling = PoolingOptions(options)
        if names:
            options["logits_processors"] = names
        OctavoLLM.__init__(self, model, stat_loggers=stat_loggers or (), **options)
        self._prepare(classes, profiler_config, pooling)

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> Self:
        """Loads a model with these options.

        Raises:
            OctavoError: as ``octavo.LLM``.
        """
        options = engine_args.given()
        return cls(options.pop("model", None) or engine_args.create_engine_config().model, **options)
