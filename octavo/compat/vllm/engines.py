"""vLLM's ``LLM``, ``LLMEngine`` and ``AsyncLLM``: Octavo's classes with vLLM's further methods and argument order."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from octavo.compat.vllm.config_parts import PART_NAMES, VllmConfig
from octavo.compat.vllm.engine_args import non_default_options
from octavo.compat.vllm.helpers import BatchProcessors, Metric, RequestFigures, split_processors
from octavo.config.sources import resolve_config
from octavo.core.errors import ConfigError, InvalidRequestError, UnexpectedKeywordError
from octavo.core.foreign import FOREIGN
from octavo.core.model_config import model_tasks
from octavo.core.outputs import POOLING_TASKS, Pooled, PoolingKind, PoolingOutput, PoolingRequestOutput, RequestOutput
from octavo.core.outputs import PoolingParams as OctavoPoolingParams
from octavo.core.request import Prompt, RequestOptions
from octavo.core.sampling_params import RequestOutputKind, SamplingParams
from octavo.engine.async_llm import AsyncLLM as OctavoAsyncLLM
from octavo.engine.front_end import StatLogger
from octavo.engine.llm import LLM as OctavoLLM
from octavo.engine.llm_engine import LLMEngine as OctavoEngine
from octavo.engine.model_files import find_files
from octavo.kernels import require_torch, resolve_device

if TYPE_CHECKING:
    from octavo.engine.input_processor import PoolingInputs


# ---- pooling

_KINDS: dict[str, PoolingKind] = {"CLS": "cls", "LAST": "last", "MEAN": "mean"}
#: Former names of ``use_activation``.
_ACTIVATIONS = ("normalize", "softmax", "activation")
_FORMER_TASKS = {"embedding": "embed", "reward": "auto"}


class PoolingParams(OctavoPoolingParams, kw_only=True, omit_defaults=True):
    """Octavo's parameters with vLLM's further fields: synonyms, and fields without effect or refused."""

    normalize: bool | None = None
    softmax: bool | None = None
    activation: bool | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: Any = None

    def __post_init__(self) -> None:
        try:
            self.use_activation = _activation(self)
            for name in _ACTIVATIONS:
                setattr(self, name, None)  # use_activation holds the value
            _refuse(self, "PoolingParams")
        except ConfigError as e:
            raise InvalidRequestError(str(e)) from None
        for name in ("skip_reading_prefix_cache", "output_kind", "extra_kwargs"):
            setattr(self, name, None)
        self.requires_token_ids = False
        super().__post_init__()

    def clone(self) -> PoolingParams:
        """A copy."""
        return msgspec.structs.replace(self)


@dataclasses.dataclass
class PoolerConfig:
    """Overrides how the model's files make vectors and scores."""

    task: str | None = None
    pooling_type: str | None = None
    seq_pooling_type: str | None = None
    tok_pooling_type: str | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    softmax: bool | None = None
    activation: bool | None = None
    dimensions: int | None = None
    enable_chunked_processing: bool | None = None
    max_embed_len: int | None = None
    logit_mean: float | None = None
    logit_sigma: float | None = None
    logit_bias: float | None = None
    logit_scale: float | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None

    def apply(self, pooling: PoolingInputs) -> OctavoPoolingParams:
        """Sets the model's pooling; returns the defaults of requests. Refuses unsupported fields."""
        _refuse(self, "PoolerConfig")
        for name in ("pooling_type", "seq_pooling_type", "tok_pooling_type"):
            kind = getattr(self, name)
            if kind is None or (name != "seq_pooling_type" and kind == "ALL"):
                continue
            if kind not in _KINDS or name == "tok_pooling_type":
                kinds = "ALL" if name == "tok_pooling_type" else ", ".join(_KINDS)
                raise ConfigError(f"pooler_config: {name} must be one of {kinds}, not {kind!r}")
            pooling.pooler = dataclasses.replace(pooling.pooler, kind=_KINDS[kind])
        try:
            if self.task is not None and self.task in POOLING_TASKS:
                pooling.require(self.task)
            return OctavoPoolingParams(dimensions=self.dimensions, use_activation=_activation(self))
        except InvalidRequestError as e:
            raise ConfigError(f"pooler_config: {e}") from None


class PoolingOptions:
    """An engine's options of pooling: removed from its other options, and applied to the engine once it is made."""

    def __init__(self, options: dict[str, Any]) -> None:
        """Removes the pooling options from ``options``, and renames the others to Octavo's names."""
        values = [options.pop(name, None) for name in ("pooler_config", "override_pooler_config")]
        configs = [config for config in values if config is not None]
        if len(configs) > 1:
            raise ConfigError("pooler_config and override_pooler_config are the same: give one of them")
        self._config = _as_config(configs[0]) if configs else None
        #: Defaults of requests.
        self.defaults = OctavoPoolingParams()
        self._is_pooling = options.get("runner") == "pooling" or options.get("convert") == "embed"
        if options.get("task") in _FORMER_TASKS:
            options["task"] = _FORMER_TASKS[options["task"]]
        overrides = options.get("hf_overrides")
        if isinstance(overrides, Mapping) and "classifier_from_token" in overrides:
            # A language model as a yes/no judge; vLLM turns it into a classifier.
            options["hf_overrides"] = {name: value for name, value in overrides.items() if name != "architectures"}
            options["task"] = "score"
            self._is_pooling = False

    def apply(self, pooling: PoolingInputs) -> None:
        """Changes the engine's pooling, and the defaults of its requests."""
        if self._is_pooling and pooling.config.head == "lm" and "generate" in pooling.tasks:
            pooling.tasks = model_tasks(pooling.config, "embed")
        if self._config is not None:
            self.defaults = self._config.apply(pooling)

    def fill_defaults(self, params: OctavoPoolingParams) -> OctavoPoolingParams:
        """A request's parameters with the configuration's defaults."""
        fields: dict[str, Any] = {}
        if params.use_activation is None:
            fields["use_activation"] = self.defaults.use_activation
        if params.dimensions is None and params.task in (None, "embed", "token_embed"):
            fields["dimensions"] = self.defaults.dimensions
        return msgspec.structs.replace(params, **fields)


def with_tensors(outputs: Sequence[Pooled]) -> list[Pooled]:
    """The outputs with torch tensors in place of NumPy arrays, if torch is installed."""
    if find_spec("torch") is not None:
        import torch

        for output in outputs:
            if isinstance(output.outputs, PoolingOutput):
                data: Any = torch.from_numpy(output.outputs.data.copy())
                output.outputs.data = data
    return list(outputs)


def print_embeddings(values: Sequence[float], prefix: str = "Embeddings") -> None:
    """Prints the first four numbers and the size of a vector."""
    first = [str(value) for value in values[:4]] + (["..."] if len(values) > 4 else [])
    print(f"{prefix}: [{', '.join(first)}] (size={len(values)})")


def _as_config(config: Any) -> PoolerConfig:
    if isinstance(config, PoolerConfig):
        return config
    names = {field.name for field in dataclasses.fields(PoolerConfig)}
    if not isinstance(config, Mapping) or not config.keys() <= names:
        raise ConfigError(
            f"pooler_config must be a PoolerConfig or have its fields ({', '.join(names)}), not {config!r}"
        )
    return PoolerConfig(**config)


def _activation(config: Any) -> bool | None:
    """The value of ``use_activation`` and its synonyms, which must agree."""
    values = {name: getattr(config, name) for name in ("use_activation", *_ACTIVATIONS)}
    values = {name: value for name, value in values.items() if value is not None}
    if len(set(values.values())) > 1:
        raise ConfigError(f"{' and '.join(values)} mean the same here, and must not differ")
    return next(iter(values.values()), None)


def _refuse(config: Any, place: str) -> None:
    for name, meaning in FOREIGN[place].items():
        if meaning.accepted is not None and getattr(config, name, None):
            raise ConfigError(f"{name} must be left out, not {getattr(config, name)!r}: {meaning.reason}")


_PAIRS = "pairs have the form that the model's tokenizer gives them, or the prompt that Qwen3-Reranker is trained with"


def _with_truncation(keywords: dict[str, Any]) -> dict[str, Any]:
    params = _take_truncation(keywords.pop("pooling_params", None), keywords)
    return {**keywords, "pooling_params": params}


def _take_truncation(params: Any, keywords: dict[str, Any]) -> Any:
    """Moves ``truncate_prompt_tokens`` from the keywords into the parameters."""
    more = dict(keywords.pop("tokenization_kwargs", None) or {})
    most = keywords.pop("truncate_prompt_tokens", None)
    most = more.pop("truncate_prompt_tokens", None) if most is None else most
    if more:
        keywords["tokenization_kwargs"] = more  # refused by name
    if most is None:
        return params
    if isinstance(params, Sequence) and not isinstance(params, Mapping):
        return [msgspec.structs.replace(each, truncate_prompt_tokens=most) for each in params]
    return msgspec.structs.replace(params or OctavoPoolingParams(), truncate_prompt_tokens=most)


# ---- traces of torch's profiler


@dataclass
class ProfilerConfig:
    """The folder of traces. CPU kernels are not torch's: ``octavo bench kernels`` and ``time_kernels`` show these."""

    profiler: str | None = "torch"
    #: Folder of the traces, for chrome://tracing and Perfetto.
    torch_profiler_dir: str = ""
    #: Without effect, like ``max_iterations``: a trace has all steps between start and stop.
    delay_iterations: int = 0
    max_iterations: int = 0


class Profiler:
    """Traces of the engine's own process, one at a time. Default folder: the variable VLLM_TORCH_PROFILER_DIR."""

    def __init__(self, config: ProfilerConfig | dict[str, Any] | None) -> None:
        if config is None:
            config = ProfilerConfig(torch_profiler_dir=os.environ.get("VLLM_TORCH_PROFILER_DIR", ""))
        self._config = ProfilerConfig(**config) if isinstance(config, dict) else config
        if self._config.profiler not in (None, "torch"):
            raise ConfigError(f"profiler_config: profiler must be 'torch', not {self._config.profiler!r}")
        self._trace: Any = None
        self._number = 0

    def start(self) -> None:
        """Begins a trace; needs a folder, and torch."""
        if not self._config.torch_profiler_dir:
            raise ConfigError("start_profile needs a folder: LLM(profiler_config={'torch_profiler_dir': FOLDER})")
        require_torch("traces of vLLM's profiler")
        import torch

        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._trace = torch.profiler.profile(activities=activities)
        self._trace.start()

    def stop(self) -> Path | None:
        """Ends the trace and writes it; returns its file, None without a trace."""
        if self._trace is None:
            return None
        self._trace.stop()
        folder = Path(self._config.torch_profiler_dir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"octavo-{os.getpid()}-{self._number}.pt.trace.json"
        self._number += 1
        self._trace.export_chrome_trace(str(path))
        self._trace = None
        return path


# ---- engines


class _VllmEngine(OctavoEngine):
    """Methods that ``LLM`` and ``LLMEngine`` share."""

    #: None in the constructor, where shared prefixes are computed.
    _figures: RequestFigures | None = None
    _processors: BatchProcessors
    _profiler: Profiler
    _pooling: PoolingOptions

    def _prepare(self, classes: Sequence[Any], profiler_config: Any, pooling: PoolingOptions) -> None:
        self._pooling = pooling
        pooling.apply(self.front_end.pooling)
        self._figures = RequestFigures()
        #: Tokens so far of requests with RequestOutputKind.DELTA.
        self._increments: dict[str, int] = {}
        self._processors = BatchProcessors(classes, self.vllm_config, resolve_device(self.core.options.device))
        self._profiler = Profiler(profiler_config)

    @property
    def vllm_config(self) -> VllmConfig:
        """The engine's options by vLLM's names."""
        return VllmConfig(self.core.options, self.core)

    def __getattr__(self, name: str) -> Any:
        """A part of ``vllm_config``, as ``model_config`` or ``get_model_config()``."""
        part = name.removeprefix("get_")
        if part in PART_NAMES:
            value = getattr(self.vllm_config, part)
            return value if part == name else lambda: value
        hint = f"; {ABSENT_ATTRIBUTES[name]}" if name in ABSENT_ATTRIBUTES else ""
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{hint}")

    def add_request(
        self,
        request_id: str,
        prompt: Prompt | None = None,
        params: Any = None,
        *more: Any,
        streaming: bool = True,
        **keywords: Any,
    ) -> None:
        """Octavo's ``add_request``, with the engine's logits processors and defaults of pooling.

        ``inputs`` is a former name of ``prompt``, ``sampling_params`` of ``params``. Further arguments are Octavo's
        ``options`` or in vLLM's order, also the one before 0.5 (``prompt_token_ids``, ``arrival_time``). Arrival times
        may be those of ``time.time()``.
        """
        prompt = keywords.pop("inputs", None) if prompt is None else prompt
        params = keywords.pop("sampling_params", None) if params is None else params
        if more and not isinstance(more[0], RequestOptions):
            has_ids = isinstance(more[0], Sequence) or (more[0] is None and isinstance(more[-1], float))
            keywords, more = _named("add_request, before 0.5" if has_ids else "add_request", more, keywords), ()
        if (token_ids := keywords.pop("prompt_token_ids", None)) is not None:
            fields = prompt if isinstance(prompt, Mapping) else {"prompt": prompt}
            prompt = {**fields, "prompt_token_ids": list(token_ids)}
        if prompt is None:
            raise InvalidRequestError("must be text, a list of token ids or a dictionary", path="prompt", got=None)
        now, arrival = time.monotonic(), keywords.get("arrival_time")
        if isinstance(arrival, float) and arrival > now:
            keywords["arrival_time"] = now - max(0.0, time.time() - arrival)
        if isinstance(params, OctavoPoolingParams):
            params = self._pooling.fill_defaults(params)
        if isinstance(params, SamplingParams):
            params = self._processors.add_to(params)
            if streaming and params.output_kind is RequestOutputKind.DELTA:
                self._increments[request_id] = 0
        super().add_request(request_id, prompt, params, *more, streaming=streaming, **keywords)

    def step(self) -> list[RequestOutput]:
        """Octavo's ``step``; counts ended requests for ``get_metrics``."""
        outputs = super().step()
        if self._figures is None:
            return outputs
        for output in outputs:
            completions = output.outputs if isinstance(output, RequestOutput) else []
            tokens = sum(len(completion.token_ids) for completion in completions)
            if output.request_id in self._increments:
                self._increments[output.request_id] += tokens
            if output.finished:
                self._figures.add(output, self._increments.pop(output.request_id, tokens))
        return outputs

    def get_metrics(self) -> list[Metric]:
        """Metrics by vLLM's names; those of Octavo's ``LLM.get_metrics`` differ."""
        assert self._figures is not None
        return self._figures.metrics(self.stats(), self.core.options.model)

    def start_profile(self, *_: object) -> None:
        """Begins a trace in the folder of ``ProfilerConfig``."""
        self._profiler.start()

    def stop_profile(self) -> Path | None:
        """Ends the trace; returns its file."""
        return self._profiler.stop()

    def collective_rpc(  # type: ignore[override]
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Octavo's ``collective_rpc``, in vLLM's order of arguments."""
        return super().collective_rpc(method, args, kwargs, timeout)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.tokenizer

    def get_num_unfinished_requests(self) -> int:
        """Requests that have not ended."""
        return self.front_end.outputs.num_open


#: Attributes of vLLM's engines without a counterpart, and what to write instead.
ABSENT_ATTRIBUTES = {
    "scheduler": "stats() has the numbers of waiting, running and swapped requests; scheduling_policy sets the order",
    "model_executor": "collective_rpc(function) calls a function with each worker",
    "cache_engine": "stats() has the numbers of blocks",
    "apply_model": "collective_rpc(function) calls a function with each worker",
    "set_tokenizer": "the tokenizer is an option: LLM(model, tokenizer=...)",
    "do_log_stats": "the option log_stats_interval writes status lines",
    "add_prompt_adapter": "give prompt_adapter_request with a request, or load it by add_lora",
}
#: vLLM's order of arguments that are keywords here, of older versions where they differ.
_ORDERS = {
    "generate": "prompt_token_ids use_tqdm lora_request prompt_adapter_request guided_options_request priority",
    "chat": "use_tqdm lora_request chat_template chat_template_content_format add_generation_prompt "
    "continue_final_message tools chat_template_kwargs mm_processor_kwargs",
    "beam_search": "lora_request use_tqdm concurrency_limit",
    "add_request": "arrival_time lora_request tokenization_kwargs trace_headers priority",
    "add_request, before 0.5": "prompt_token_ids arrival_time lora_request",
}


def _named(method: str, values: Sequence[Any], keywords: dict[str, Any]) -> dict[str, Any]:
    """The keywords, with those given by position in ``_ORDERS``."""
    names = _ORDERS[method].split()
    if len(values) > len(names):
        raise UnexpectedKeywordError(f"{method}: these arguments may be given by position: {', '.join(names)}")
    return dict(zip(names, values, strict=False)) | keywords


class LLMEngine(_VllmEngine):
    """Octavo's engine, made from ``EngineArgs``."""

    @classmethod
    def from_engine_args(
        cls,
        engine_args: Any,
        usage_context: object = None,
        stat_loggers: Sequence[StatLogger] | None = None,
        **_: object,
    ) -> Self:
        """Loads a model with these options."""
        options = engine_args.non_default()
        classes, names = split_processors(options.pop("logits_processors", None))
        profiler_config, pooling = options.pop("profiler_config", None), PoolingOptions(options)
        if names:
            options["logits_processors"] = names
        engine = cls(find_files(resolve_config(options)), stat_loggers or ())
        engine._prepare(classes, profiler_config, pooling)
        return engine

    @classmethod
    def from_vllm_config(
        cls, vllm_config: VllmConfig, usage_context: object = None, stat_loggers: Any = None, **_: object
    ) -> Self:
        """Loads a model with the options of ``EngineArgs.create_engine_config``."""
        engine = cls(find_files(vllm_config.engine_config), stat_loggers or ())
        engine._prepare((), None, PoolingOptions({}))
        return engine


class LLM(_VllmEngine, OctavoLLM):  # type: ignore[misc]  # metrics have vLLM's types
    """Octavo's ``LLM``; options that equal the defaults of ``EngineArgs`` count as not set.

    ``truncate_prompt_tokens`` is a keyword of the pooling methods, or one of their ``tokenization_kwargs``.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        logits_processors: Any = None,
        profiler_config: Any = None,
        stat_loggers: Sequence[StatLogger] | None = None,
        **options: Any,
    ) -> None:
        """Loads a model; ``logits_processors`` may be classes of vLLM's ``LogitsProcessor``."""
        classes, names = split_processors(logits_processors)
        options = non_default_options(options)
        pooling = PoolingOptions(options)
        if names:
            options["logits_processors"] = names
        OctavoLLM.__init__(self, model, stat_loggers=stat_loggers or (), **options)
        self._prepare(classes, profiler_config, pooling)

    def generate(self, prompts: Any = None, sampling_params: Any = None, *more: Any, **keywords: Any) -> Any:
        """Octavo's ``generate``, also with the arguments' former order."""
        return super().generate(prompts, sampling_params, **_named("generate", more, keywords))

    def chat(self, messages: Any, sampling_params: Any = None, *more: Any, **keywords: Any) -> Any:
        """Octavo's ``chat``, also with the arguments' former order."""
        return super().chat(messages, sampling_params, **_named("chat", more, keywords))

    def beam_search(self, prompts: Any, params: Any, *more: Any, **keywords: Any) -> Any:
        """Octavo's ``beam_search``, also with vLLM's order of arguments."""
        return super().beam_search(prompts, params, **_named("beam_search", more, keywords))

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> Self:
        """Loads a model with these options."""
        options = engine_args.non_default()
        return cls(options.pop("model", None) or engine_args.create_engine_config().model, **options)

    def encode(self, prompts: Any = None, pooling_params: Any = None, **keywords: Any) -> list[PoolingRequestOutput]:
        """Octavo's ``encode``; ``data`` is a tensor if torch is installed."""
        return with_tensors(super().encode(prompts, _take_truncation(pooling_params, keywords), **keywords))

    def reward(self, prompts: Any, **keywords: Any) -> list[PoolingRequestOutput]:
        """Octavo's ``reward``."""
        return super().reward(prompts, **_with_truncation(keywords))

    def embed(self, prompts: Any, **keywords: Any) -> list[PoolingRequestOutput]:
        """Octavo's ``embed``."""
        return super().embed(prompts, **_with_truncation(keywords))

    def classify(self, prompts: Any, **keywords: Any) -> list[PoolingRequestOutput]:
        """Octavo's ``classify``."""
        return super().classify(prompts, **_with_truncation(keywords))

    def score(
        self, data_1: Any, data_2: Any, *, chat_template: str | None = None, **keywords: Any
    ) -> list[PoolingRequestOutput]:
        """Octavo's ``score``; refuses a ``chat_template``."""
        if chat_template is not None:
            raise InvalidRequestError(f"must be None in score: {_PAIRS}", path="chat_template")
        return super().score(data_1, data_2, **_with_truncation(keywords))


class AsyncLLM(OctavoAsyncLLM):
    """Octavo's ``AsyncLLM`` with vLLM's order of arguments; the first request loads the model."""

    @classmethod
    def from_engine_args(
        cls,
        engine_args: Any,
        start_engine_loop: bool = True,
        usage_context: object = None,
        stat_loggers: Sequence[StatLogger] | None = None,
        **_: object,
    ) -> Self:
        """An engine with these options."""
        return cls(engine_args.create_engine_config().engine_config, stat_loggers=stat_loggers or ())

    @classmethod
    def from_vllm_config(
        cls, vllm_config: VllmConfig, *_: object, stat_loggers: Sequence[StatLogger] | None = None, **__: object
    ) -> Self:
        """An engine with the options of ``EngineArgs.create_engine_config``."""
        return cls(vllm_config.engine_config, stat_loggers=stat_loggers or ())

    async def get_vllm_config(self) -> VllmConfig:
        """The engine's options by vLLM's names."""
        await self.ready()
        return VllmConfig(self.front_end.files.options)

    async def get_model_config(self) -> Any:
        """The part ``model_config`` of ``get_vllm_config``."""
        return (await self.get_vllm_config()).model_config

    async def generate(  # type: ignore[override]
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        **keywords: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Octavo's ``generate``, whose order is request, prompt, parameters."""
        async for output in super().generate(request_id, prompt, sampling_params, **keywords):
            yield output

    async def encode(
        self, prompt: Prompt, pooling_params: OctavoPoolingParams, request_id: str, **keywords: Any
    ) -> AsyncGenerator[Pooled, None]:
        """The output of ``pool``, as the only one of a stream."""
        yield await self.pool(request_id, prompt, pooling_params, **keywords)

    async def collective_rpc(  # type: ignore[override]
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Octavo's ``collective_rpc``, in vLLM's order of arguments."""
        return await super().collective_rpc(method, args, kwargs, timeout)

    async def check_health(self) -> None:
        """Raises EngineDeadError if the engine has died or was shut down."""
        self.check_alive()

    async def do_log_stats(self) -> None:
        """Has no effect: the option ``log_stats_interval`` writes status lines."""

    @property
    def errored(self) -> bool:
        """Whether the engine has died."""
        return self._error is not None

    @property
    def is_running(self) -> bool:
        """Whether requests can be accepted."""
        return self._error is None

    @property
    def dead_error(self) -> BaseException | None:
        """The error that ended the engine."""
        return self._error
