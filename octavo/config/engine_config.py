"""All engine options in one validated model; command-line flags, files and environment variables follow from it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple, Self, get_args

from pydantic import BaseModel, ValidationError, model_validator

from octavo.config.options import CPU_TOKEN_BUDGET as CPU_TOKEN_BUDGET
from octavo.config.options import (
    ENCODER_TOKEN_BUDGET,
    AdapterOptions,
    CacheOptions,
    DeviceOptions,
    ImageOptions,
    ModelOptions,
    OptionPart,
    ParallelOptions,
    SpeculativeOptions,
    StructuredOutputOptions,
    readable,
)
from octavo.config.options import MAX_LOGPROBS as MAX_LOGPROBS
from octavo.config.options import MAX_LOGPROBS_ON_GPU as MAX_LOGPROBS_ON_GPU
from octavo.config.options import TOKEN_BUDGET as TOKEN_BUDGET
from octavo.config.options import SchedulerOptions as SchedulerOptions
from octavo.config.options import Sizes as Sizes
from octavo.config.options import SpeculativeConfig as SpeculativeConfig
from octavo.core.errors import ConfigError, did_you_mean
from octavo.core.request import own_names, own_options

# Options that are accepted and have no effect beside the others that are given: one table, walked at every start.


class IdleOption(NamedTuple):
    """When some options have no effect."""

    names: tuple[str, ...]
    #: Of the options (an ``EngineConfig``, which refuses by this table) and the device ("cpu" or "cuda").
    when: Callable[[Any, str], bool]
    #: Completes "NAME (VALUE) has no effect: ".
    instead: str


#: Said in the log.
IDLE_OPTIONS = (
    IdleOption(
        ("check_plans",),
        lambda options, _: options.distributed_executor_backend != "external_launcher",
        "one scheduler decides for all workers; plans are compared with distributed_executor_backend external_launcher",
    ),
    IdleOption(
        ("aging_limit",),
        lambda options, _: options.distributed_executor_backend == "external_launcher",
        "the clocks of the processes of external_launcher differ, so none of them decides",
    ),
    IdleOption(
        ("data_parallel_routing",),
        lambda options, _: options.data_parallel_size == 1,
        "data_parallel_size is 1, and all requests go to the one replica",
    ),
    IdleOption(
        ("max_loras", "max_lora_rank", "max_cpu_loras"),
        lambda options, _: not options.enable_lora,
        "without enable_lora the engine has no LoRA adapters",
    ),
    IdleOption(
        ("max_prompt_adapters", "max_prompt_adapter_token"),
        lambda options, _: not options.enable_prompt_adapter,
        "without enable_prompt_adapter the engine has no prompt adapters",
    ),
    IdleOption(
        ("chat_template",),
        lambda options, _: options.skip_tokenizer_init,
        "conversations need the tokenizer that skip_tokenizer_init leaves out",
    ),
    IdleOption(
        ("structured_outputs_compile_seconds", "structured_outputs_config"),
        lambda options, _: options.skip_tokenizer_init,
        "structured output needs the tokenizer that skip_tokenizer_init leaves out",
    ),
    IdleOption(
        ("graph_capture",),
        lambda options, device: device == "cpu" or options.enforce_eager,
        "CUDA graphs are captured on a GPU without enforce_eager alone",
    ),
    IdleOption(
        ("enforce_eager",),
        lambda _, device: device == "cpu",
        "on a CPU there are no CUDA graphs, and a step is always one recorded call",
    ),
    IdleOption(
        ("deterministic",),
        lambda _, device: device == "cpu",
        "on a CPU products and attention always have one fixed order",
    ),
    IdleOption(
        ("max_num_partial_prefills",),
        lambda options, _: not options.cuts_prompts,
        "with batching prefill_first, or without enable_chunked_prefill, prompts are computed whole",
    ),
    IdleOption(
        ("enable_chunked_prefill",),
        lambda options, _: options.batching == "prefill_first",
        "with batching prefill_first prompts are computed whole",
    ),
    IdleOption(
        ("num_host_blocks_override", "swap_space"),
        lambda options, _: not options.moves_blocks_to_host,
        "with preemption_mode recompute, and without host_prefix_cache, no block moves to the host",
    ),
    IdleOption(
        ("jump_forward",),
        lambda options, device: options.pipeline_parallel_size == 1 and options.plans_ahead(device),
        "with async_scheduling (the default on a GPU) a step is planned before it is known which tokens are forced",
    ),
)

#: Refused: they would change what the machine's memory holds, or which weights answer.
REFUSED_OPTIONS = (
    IdleOption(
        ("gpu_memory_utilization", "kv_cache_memory_bytes"),
        lambda options, _: options.num_gpu_blocks_override is not None,
        "num_gpu_blocks_override sizes the KV cache",
    ),
    IdleOption(
        ("gpu_memory_utilization",),
        lambda options, _: options.kv_cache_memory_bytes is not None,
        "kv_cache_memory_bytes sizes the KV cache",
    ),
    IdleOption(
        ("swap_space",),
        lambda options, _: options.num_host_blocks_override is not None,
        "num_host_blocks_override says how many blocks the host holds",
    ),
    IdleOption(
        ("revision",),
        lambda options, _: "/" not in options.model or os.path.exists(os.path.expanduser(options.model)),
        "only models of the hub have revisions, and this one is a folder, a file or built in",
    ),
)


def idle_options(options: OptionPart, device: str) -> list[str]:
    """A line for each option that was given (no default), asks for something, and has no effect on this device."""
    return _lines(IDLE_OPTIONS, options, device)


def refused_options(options: OptionPart) -> list[str]:
    """A line for each option that was given and contradicts another."""
    return [f"{line}; leave it out" for line in _lines(REFUSED_OPTIONS, options, "")]


def _lines(table: tuple[IdleOption, ...], options: OptionPart, device: str) -> list[str]:
    # None and what is off or zero ask for nothing.
    return [
        f"{name} ({getattr(options, name)}) has no effect: {instead}"
        for names, when, instead in table
        for name in names
        if name in options.model_fields_set and getattr(options, name) and when(options, device)
    ]


#: The parts of ``EngineConfig``, by the names of their sections in the documentation.
PARTS: dict[str, type[BaseModel]] = {
    "Model": ModelOptions,
    "KV cache": CacheOptions,
    "Scheduler": SchedulerOptions,
    "Speculative decoding": SpeculativeOptions,
    "Structured output": StructuredOutputOptions,
    "Parallelism": ParallelOptions,
    "Adapters": AdapterOptions,
    "Images": ImageOptions,
    "Device": DeviceOptions,
}


class EngineConfig(
    DeviceOptions,
    ImageOptions,
    AdapterOptions,
    ParallelOptions,
    StructuredOutputOptions,
    SpeculativeOptions,
    SchedulerOptions,
    CacheOptions,
    ModelOptions,
):
    """Options of an engine. Every description states its unit; the defaults suit one machine and one user.

    It inherits from each of its parts, so an option has one name everywhere, and code that needs one part can be made
    without the others. Fields are listed from the last base to the first.
    """

    @model_validator(mode="after")
    def _parts_do_not_contradict(self) -> Self:
        if (sizes := self.graph_sizes) is not None:
            if self.enforce_eager:
                raise ValueError("enforce_eager turns CUDA graphs off: give no sizes as graph_capture with it")
            if max(sizes) > self.max_num_seqs:
                raise ValueError(
                    f"graph_capture has {max(sizes)}, but no batch has more than max_num_seqs ({self.max_num_seqs}) "
                    "sequences"
                )
        budget, longest = self.max_num_batched_tokens, self.max_model_len
        if not self.enable_chunked_prefill and longest is not None and budget is not None and budget < longest:
            raise ValueError(
                f"with enable_chunked_prefill off, max_num_batched_tokens ({budget}) must be at least max_model_len "
                f"({longest}), or the longest prompts could never run"
            )
        if self.preemption_mode == "swap" and not self.has_swap_space:
            raise ValueError(
                "preemption_mode 'swap' needs swap space: set swap_space, or num_host_blocks_override, above 0; or "
                "take preemption_mode 'recompute'"
            )
        drafts = self.speculative_config
        if drafts is not None and drafts.drafts_on_workers and self.pipeline_parallel_size > 1:
            raise ValueError(
                f"speculative_config: method {drafts.method!r} is not supported with pipeline_parallel_size "
                f"({self.pipeline_parallel_size}) above 1; use tensor_parallel_size, or method 'ngram' or 'suffix'"
            )
        if refused := refused_options(self):
            raise ValueError("; ".join(refused))
        return self

    @property
    def moves_blocks_to_host(self) -> bool:
        """Whether anything uses host blocks: preemption by swap, or the prefix cache."""
        return self.preemption_mode != "recompute" or self.host_prefix_cache

    def with_token_budget(self, device: str, context_length: int) -> Self:
        """These options with ``max_num_batched_tokens`` resolved for a model of so many tokens on this device.

        On a CPU a step's time is proportional to its tokens, so a smaller budget lets decodes go on beside prompts. A
        prompt that is computed whole needs a step that holds it.
        """
        if self.max_num_batched_tokens is not None:
            return self
        budget = CPU_TOKEN_BUDGET if device == "cpu" and self.batching == "mixed" else TOKEN_BUDGET
        whole = self.batching == "prefill_first" or not self.enable_chunked_prefill
        budget = max(budget, self.max_num_seqs, context_length if whole else 0)
        return self.model_copy(update={"max_num_batched_tokens": budget})

    def for_encoder_decoder(self, device: str, context_length: int) -> Self:
        """As ``with_token_budget``, for an encoder-decoder model.

        Raises:
            ConfigError: what such a model does not do is asked for.
        """
        refused = {name: getattr(self, name) for name in ("shared_prefix", "enable_lora", "enable_prompt_adapter")}
        refused["host_prefix_cache"] = self.host_prefix_cache
        if self.speculative_config is not None and self.speculative_config.drafts_on_workers:
            refused[f"speculative_config with method {self.speculative_config.method!r}"] = True
        if self.pipeline_parallel_size > 1:
            refused["pipeline_parallel_size above 1"] = True
        for name, given in refused.items():
            if given:
                raise ConfigError(f"{name} is not supported with encoder-decoder models: leave it out")
        return self.with_token_budget(device, context_length)

    def for_encoder(self, device: str) -> Self:
        """These options as an encoder needs them, ``max_num_batched_tokens`` resolved.

        Its texts are computed whole, in one step, and nothing of them is kept.

        Raises:
            ConfigError: what an encoder does not do is asked for.
        """
        for name in ("speculative_config", "shared_prefix", "enable_lora", "enable_prompt_adapter"):
            if getattr(self, name, None):
                raise ConfigError(f"{name} is for models that generate text: leave it out")
        budget = self.max_num_batched_tokens
        if budget is None:
            budget = max(ENCODER_TOKEN_BUDGET if device == "cpu" else TOKEN_BUDGET, self.max_num_seqs)
        return self.model_copy(
            update={
                "max_num_batched_tokens": budget,
                "batching": "mixed",
                "enable_chunked_prefill": False,
                "enable_prefix_caching": False,
                "host_prefix_cache": False,
                "preemption_mode": "recompute",
            }
        )


def make_config(**options: Any) -> EngineConfig:
    """Builds an ``EngineConfig``; an unknown option is refused with the nearest right name.

    ``None`` is the default of an option that it is no value of.

    Raises:
        ConfigError: an option is unknown, out of range, or contradicts another.
    """
    names = list(EngineConfig.model_fields)
    options = own_options(own_names(options))
    for name in list(options):
        if name not in EngineConfig.model_fields:
            raise ConfigError(unknown_option(name, names))
        if options[name] is None and type(None) not in get_args(EngineConfig.model_fields[name].annotation):
            del options[name]
    try:
        return EngineConfig(**options)
    except ValidationError as e:
        raise ConfigError("; ".join(readable(dict(error)) for error in e.errors())) from None


def unknown_option(name: str, names: list[str]) -> str:
    """The message for an option that does not exist."""
    return f"unknown option {name!r}; {did_you_mean(name, sorted(names), cutoff=0.5)}"
