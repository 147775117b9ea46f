"""Functions, metrics, data sets and logits processors that scripts import from vLLM."""

from __future__ import annotations

import argparse
import bisect
import enum
import gc
import importlib
import inspect
import json
import logging
import random
import socket
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from octavo.compat.vllm.config_parts import VllmConfig
from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.foreign import check_foreign
from octavo.core.outputs import RequestOutput
from octavo.core.request import LoRARequest as OctavoLoRARequest
from octavo.core.sampling_params import GUIDED_NAMES, SamplingParams, StructuredOutputsParams, guided_outputs_of
from octavo.core.sampling_params import LogitsProcessor as RequestLogitsProcessor
from octavo.core.stats import SchedulerStats
from octavo.engine.tokenizer import Tokenizer, load_tokenizer
from octavo.kernels import require_torch
from octavo.loader.resolve import resolve_model

#: The version of vLLM whose names these are, for scripts that compare it.
VERSION = "0.33.0+octavo"


def init_logger(name: str) -> logging.Logger:
    """The logger of this name."""
    return logging.getLogger(name)


def random_uuid() -> str:
    """A random id of 32 hexadecimal digits."""
    return uuid.uuid4().hex


def get_open_port() -> int:
    """A port of this machine that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def get_ip() -> str:
    """An address of this machine."""
    return socket.gethostbyname(socket.gethostname())


def get_tokenizer(tokenizer_name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer of a model (name, folder or hub id); never runs a model's code."""
    return load_tokenizer(Path(resolve_model(tokenizer_name, revision=revision)))


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Frees the memory of unreferenced engines: an ``LLM`` ends its workers when it is collected."""
    gc.collect()
    if shutdown_ray:
        import ray

        ray.shutdown()


def destroy_model_parallel() -> None:
    """Has no effect: workers end with their engine."""


destroy_distributed_environment = destroy_model_parallel


class UsageContext(enum.Enum):
    """Without effect: Octavo reports no usage."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


class Platform:
    """The default device of engines on this machine."""

    @property
    def device_type(self) -> str:
        """``cpu`` or ``cuda``."""
        from octavo.kernels import resolve_device

        return resolve_device("auto")

    device_name = device_type

    def is_cpu(self) -> bool:
        """Whether the device is a CPU."""
        return self.device_type == "cpu"

    def is_cuda(self) -> bool:
        """Whether the device is an NVIDIA GPU."""
        return self.device_type == "cuda"

    is_cuda_alike = is_cuda

    def is_rocm(self) -> bool:
        """False: not supported."""
        return False

    is_tpu = is_xpu = is_rocm

    def seed_everything(self, seed: int | None = None) -> None:
        """Seeds Python's ``random``; Octavo itself does not use it."""
        if seed is not None:
            random.seed(seed)


current_platform = Platform()


# ---- metrics of ``get_metrics``, by vLLM's names

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


@dataclass
class Metric:
    """A metric: its name and labels."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A total since the engine started."""

    value: int


@dataclass
class Gauge(Metric):
    """A current value."""

    value: float


@dataclass
class Vector(Metric):
    """Totals by position."""

    values: list[int]


@dataclass
class Histogram(Metric):
    """The number of observations, their sum, and how many are at most each bound (``buckets``)."""

    count: int
    sum: float
    buckets: dict[str, int]


@dataclass
class _Observations:
    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def add(self, value: float) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def histogram(self, name: str, labels: dict[str, str]) -> Histogram:
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        buckets = dict(zip(names, accumulate(self.counts or [0] * len(names)), strict=True))
        return Histogram(name, labels, buckets["+Inf"], self.sum, buckets)


class RequestFigures:
    """Times and tokens of ended requests."""

    def __init__(self) -> None:
        self._seconds = {
            name: _Observations(_SECONDS)
            for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds")
        }
        self._tokens = {name: _Observations(_TOKENS) for name in ("request_prompt_tokens", "request_generation_tokens")}

    def add(self, output: RequestOutput, num_tokens: int) -> None:
        """Counts an ended request with ``num_tokens`` of output."""
        times = output.metrics
        for name, moment in zip(
            self._seconds, (times.first_token_time, times.finished_time, times.first_scheduled_time), strict=True
        ):
            if moment is not None:
                self._seconds[name].add(moment - times.arrival_time)
        self._tokens["request_prompt_tokens"].add(output.num_prompt_tokens)
        self._tokens["request_generation_tokens"].add(num_tokens)

    def metrics(self, stats: SchedulerStats, model: str) -> list[Metric]:
        """The current metrics; tokens and times are those of ended requests."""
        labels = {"model_name": model, "engine": "0"}

        def counter(name: str, value: float) -> Counter:
            return Counter(f"vllm:{name}", labels, int(value))

        metrics: list[Metric] = [
            Gauge("vllm:num_requests_running", labels, stats.num_running),
            Gauge("vllm:num_requests_waiting", labels, stats.num_waiting),
            Gauge("vllm:kv_cache_usage_perc", labels, stats.kv_cache_usage),
            counter("prefix_cache_queries", stats.prefix_queried_tokens),
            counter("prefix_cache_hits", stats.prefix_hit_tokens),
            counter("num_preemptions", stats.preemptions_by_recompute + stats.preemptions_by_swap),
            counter("prompt_tokens", self._tokens["request_prompt_tokens"].sum),
            counter("generation_tokens", self._tokens["request_generation_tokens"].sum),
        ]
        if (drafts := stats.speculation) is not None:
            metrics += [
                counter("spec_decode_num_drafts", drafts.drafts),
                counter("spec_decode_num_draft_tokens", drafts.draft_tokens),
                counter("spec_decode_num_accepted_tokens", drafts.accepted_tokens),
                Vector("vllm:spec_decode_num_accepted_tokens_per_pos", labels, list(drafts.accepted_per_position)),
            ]
        observed = {**self._seconds, **self._tokens}
        return metrics + [each.histogram(f"vllm:{name}", labels) for name, each in observed.items()]


# ---- prompts for benchmark scripts


@dataclass
class SampleRequest:
    """A prompt, its tokens and those of its output."""

    prompt: str
    prompt_len: int
    expected_output_len: int | None = None
    multi_modal_data: None = None


def add_dataset_parser(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``get_samples``."""
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-prompts", type=int, default=1000)
    parser.add_argument(
        "--dataset-name",
        choices=["random", "custom", "sharegpt"],
        default="random",
        help='custom: JSON lines with "prompt"; sharegpt: a JSON list of conversations, whose first message counts',
    )
    parser.add_argument("--dataset-path", type=Path, default=None)
    parser.add_argument("--random-input-len", type=int, default=1024)
    parser.add_argument("--random-output-len", type=int, default=128)


def get_samples(args: argparse.Namespace, tokenizer: Any) -> list[SampleRequest]:
    """``num_prompts`` prompts of a data set; the prompts of a shorter file are repeated."""
    if args.dataset_name == "random":
        draw, size = random.Random(args.seed), len(tokenizer)
        texts = [
            tokenizer.decode([draw.randrange(size) for _ in range(args.random_input_len)])
            for _ in range(args.num_prompts)
        ]
    else:
        texts = list(_texts(args.dataset_path, args.dataset_name))
        texts = (texts * (args.num_prompts // max(1, len(texts)) + 1))[: args.num_prompts]
    expected = args.random_output_len if args.dataset_name == "random" else None
    return [SampleRequest(text, len(tokenizer.encode(text)), expected) for text in texts]


def _texts(path: Path | None, kind: str) -> Iterator[str]:
    if path is None:
        raise ConfigError(f"--dataset-name {kind} needs --dataset-path")
    try:
        content = path.read_text(encoding="utf-8")
        if kind == "custom":
            yield from (json.loads(line)["prompt"] for line in content.splitlines() if line.strip())
        else:
            yield from (entry["conversations"][0]["value"] for entry in json.loads(content) if entry["conversations"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{path} cannot be read as {kind}: {type(e).__name__}: {e}") from e


# ---- adapters


class LoRARequest(OctavoLoRARequest):
    """Octavo's ``LoRARequest`` with vLLM's other names and fields without effect."""

    def __init__(
        self,
        lora_name: str,
        lora_int_id: int,
        lora_path: str | None = None,
        lora_local_path: str | None = None,
        **others: Any,
    ) -> None:
        for name, value in others.items():
            check_foreign("LoRARequest", name, value, "LoRARequest", self.__dataclass_fields__)
        super().__init__(lora_name, lora_int_id, lora_path or lora_local_path)

    @property
    def adapter_id(self) -> int:
        """``lora_int_id``."""
        return self.lora_int_id

    @property
    def name(self) -> str:
        """``lora_name``."""
        return self.lora_name

    @property
    def path(self) -> str | None:
        """``lora_path``."""
        return self.lora_path

    local_path = lora_local_path = path


# ---- structured output, as in versions before 0.11


class GuidedDecodingParams(StructuredOutputsParams, kw_only=True, omit_defaults=True):
    """The former ``StructuredOutputsParams``, for ``SamplingParams(guided_decoding=...)``."""

    backend: str | None = None
    backend_was_auto: bool = False

    @staticmethod
    def from_optional(**fields: Any) -> GuidedDecodingParams | None:
        """The parameters; None without a constraint."""
        return GuidedDecodingParams(**fields) if any(value is not None for value in fields.values()) else None


#: A mapping with fields of ``GuidedDecodingRequest``.
LLMGuidedOptions = dict[str, Any]


class GuidedDecodingRequest(SimpleNamespace):
    """A constraint for ``LLM.generate(guided_options_request=...)``."""

    def __init__(self, **fields: Any) -> None:
        guided_outputs_of(fields)
        super().__init__(**{**dict.fromkeys(GUIDED_NAMES), **fields})


# ---- vLLM's logits processors, which edit the logits of a batch: here always of one request

S = TypeVar("S")


class MoveDirectionality(enum.Enum):
    """How rows of a batch change places; Octavo moves none."""

    UNIDIRECTIONAL = enum.auto()
    SWAP = enum.auto()


@dataclass(frozen=True)
class BatchUpdate:
    """How a batch differs from the last step's; rows are its indices."""

    batch_size: int
    removed: Sequence[int]
    #: (row, parameters, token ids of the prompt, token ids of the output).
    added: Sequence[tuple[int, SamplingParams, list[int] | None, list[int]]]
    #: (row, new row, kind).
    moved: Sequence[tuple[int, int, MoveDirectionality]]


class LogitsProcessor(ABC):
    """A processor of a batch; Octavo's own plug-in is ``octavo.LogitsProcessorPlugin``."""

    @classmethod  # noqa: B027
    def validate_params(cls, params: SamplingParams) -> None:
        """Raises ValueError if the parameters of a request are wrong."""

    def __init__(self, vllm_config: VllmConfig, device: Any, is_pin_memory: bool) -> None:  # noqa: B027
        """``device``: the torch device of the logits."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether the processor never changes the most likely token."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before each ``apply``, with the change of the batch."""

    @abstractmethod
    def apply(self, logits: Any) -> Any:
        """Returns the batch's logits [rows, vocab_size], edited in place or new."""


class AdapterLogitsProcessor(LogitsProcessor):
    """A processor of a batch, made of one processor for each request."""

    def __init__(self, vllm_config: VllmConfig, device: Any, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self._rows: dict[int, Callable[[Any], Any]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The processor of a request; None if the request needs none."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Makes the processors of new requests."""
        process_dict_updates(self._rows, batch_update, self._new)

    def _new(self, params: SamplingParams, prompt: list[int] | None, outputs: list[int]) -> Callable[[Any], Any] | None:
        process = self.new_req_logits_processor(params)
        if process is None:
            return None
        if len(inspect.signature(process).parameters) == 3:
            return lambda logits: process(prompt or [], outputs, logits)
        return lambda logits: process(outputs, logits)

    def apply(self, logits: Any) -> Any:
        """Applies each request's processor to its row."""
        for row, process in self._rows.items():
            logits[row] = process(logits[row])
        return logits


def process_dict_updates(
    req_entries: dict[int, S],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], S | None],
) -> bool:
    """Updates the states of a batch's rows; returns whether one has changed."""
    if batch_update is None:
        return False
    before = dict(req_entries)
    for row in batch_update.removed:
        req_entries.pop(row, None)
    for row, params, prompt, outputs in batch_update.added:
        state = new_state(params, prompt, outputs)
        req_entries.pop(row, None)
        if state is not None:
            req_entries[row] = state
    for source, target, how in batch_update.moved:
        moved, replaced = req_entries.pop(source, None), req_entries.pop(target, None)
        if moved is not None:
            req_entries[target] = moved
        if replaced is not None and how is MoveDirectionality.SWAP:
            req_entries[source] = replaced
    return req_entries != before


class BatchProcessors:
    """An engine's processors of batches, as processors of single requests."""

    def __init__(self, classes: Sequence[type[LogitsProcessor]], config: VllmConfig, device: str) -> None:
        self._processors: list[LogitsProcessor] = []
        if not classes:
            return
        require_torch("vLLM's logits processors")
        import torch

        self._processors = [each(config, torch.device(device), False) for each in classes]

    def add_to(self, params: SamplingParams) -> SamplingParams:
        """Adds the processors of a request to its parameters, and removes ``extra_args``, which they consume."""
        if not self._processors:
            return params
        try:
            for processor in self._processors:
                processor.validate_params(params)
        except ValueError as e:
            raise InvalidRequestError(str(e)) from e
        processors = [
            _for_request(processor, params)
            for processor in self._processors
            if not isinstance(processor, AdapterLogitsProcessor)
            or processor.new_req_logits_processor(params) is not None
        ]
        clone = params.clone()
        clone.extra_args = None
        clone.logits_processors = [*(params.logits_processors or ()), *processors] or None
        return clone


def _for_request(processor: LogitsProcessor, params: SamplingParams) -> RequestLogitsProcessor:
    """Calls the processor with a new batch of this request alone, so that no state of another request remains."""

    def process(prompt: list[int], outputs: list[int], logits: Any) -> Any:
        processor.update_state(BatchUpdate(1, [], [(0, params, list(prompt), list(outputs))], []))
        return processor.apply(logits.reshape(1, -1))[0]

    return process


def split_processors(processors: Any) -> tuple[list[type[LogitsProcessor]], list[str]]:
    """Splits the option ``logits_processors`` into subclasses of ``LogitsProcessor`` and names of Octavo's plug-ins."""
    classes: list[type[LogitsProcessor]] = []
    names: list[str] = []
    for each in [processors] if isinstance(processors, (str, type)) else processors or []:
        kind = each
        if isinstance(each, str):
            module, _, attribute = each.partition(":")
            try:
                kind = getattr(importlib.import_module(module), attribute, None)
            except ImportError as e:
                raise ConfigError(f"logits processor {each!r} cannot be imported: {e}") from e
        if isinstance(kind, type) and issubclass(kind, LogitsProcessor):
            classes.append(kind)
        elif isinstance(each, str):
            names.append(each)
        else:
            raise ConfigError(f"logits_processors must be classes of LogitsProcessor or module:Class, not {each!r}")
    return classes, names
