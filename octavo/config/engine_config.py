"""``EngineConfig``: all engine options in one validated model, from which flags, files and variables follow."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple, Self, get_args

from pydantic import BaseModel, ValidationError, model_validator

from octavo.config.options import (
    CPU_TOKEN_BUDGET,
    ENCODER_TOKEN_BUDGET,
    MAX_BLOCK_SIZE,
    TOKEN_BUDGET,
    AdapterOptions,
    CacheOptions,
    DeviceOptions,
    ImageOptions,
    ModelOptions,
    OptionPart,
    ParallelOptions,
    SchedulerOptions,
    SpeculativeOptions,
    StructuredOutputOptions,
    error_text,
)
from octavo.core.errors import ConfigError, did_you_mean
from octavo.core.foreign import own_names, own_options

#: Groups of options by the titles of their sections in the documentation.
PARTS: dict[str, type[BaseModel]] = {
    "Model": ModelOptions, "KV cache": CacheOptions, "Scheduler": SchedulerOptions,
    "Speculative decoding": SpeculativeOptions, "Structured output": StructuredOutputOptions,
    "Parallelism": ParallelOptions, "Adapters": AdapterOptions, "Images": ImageOptions, "Device": DeviceOptions,
}  # fmt: skip


_REFUSED_BY_ENCODERS = ("speculative_config", "shared_prefix", "enable_prompt_adapter", "kv_disk", "kv_store")
_REFUSED_BY_ENCODER_DECODERS = (
    *("shared_prefix", "enable_lora", "enable_prompt_adapter", "host_prefix_cache", "kv_disk", "kv_store"),
)


class EngineConfig(
    DeviceOptions, ImageOptions, AdapterOptions, ParallelOptions, StructuredOutputOptions, SpeculativeOptions,
    SchedulerOptions, CacheOptions, ModelOptions,
):  # fmt: skip
    """Options of an engine. Every description has its unit; the defaults suit one machine and one user.

    It inherits from each group, so that code can take one group alone; fields come from the last base to the first.
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
        if self.moves_decodes and not self.has_stores:
            raise ValueError("replica_roles with prefill needs kv_disk or kv_store, where prompts go from there")
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
        if refused := _lines(REFUSED_OPTIONS, self, ""):
            raise ValueError("; ".join(f"{line}; leave it out" for line in refused))
        return self

    @property
    def moves_blocks_to_host(self) -> bool:
        """Whether preemption by swap or the prefix cache uses host blocks."""
        return self.preemption_mode != "recompute" or self.host_prefix_cache

    @property
    def kept_draft_tokens(self) -> int:
        """Draft tokens for which blocks of recurrent states have room; 0: such models have no drafts."""
        drafts = self.speculative_config
        return 0 if drafts is None or drafts.method == "none" else drafts.num_speculative_tokens

    def with_token_budget(self, device: str, context_length: int) -> Self:
        """The options with ``max_num_batched_tokens`` resolved; a prompt that is computed whole must fit a step."""
        if self.max_num_batched_tokens is not None:
            return self
        # On a CPU a step's time is proportional to its tokens: a smaller budget keeps decodes fast beside prompts.
        budget = CPU_TOKEN_BUDGET if device == "cpu" and self.batching == "mixed" else TOKEN_BUDGET
        whole = self.batching == "prefill_first" or not self.enable_chunked_prefill
        budget = max(budget, self.max_num_seqs, context_length if whole else 0)
        return self.model_copy(update={"max_num_batched_tokens": budget})

    def for_encoder_decoder(self, device: str, context_length: int) -> Self:
        """``with_token_budget`` for an encoder-decoder model; raises ConfigError for unsupported options."""
        refused = {name: getattr(self, name) for name in _REFUSED_BY_ENCODER_DECODERS}
        if self.speculative_config is not None and self.speculative_config.drafts_on_workers:
            refused[f"speculative_config with method {self.speculative_config.method!r}"] = True
        if self.pipeline_parallel_size > 1:
            refused["pipeline_parallel_size above 1"] = True
        for name, value in refused.items():
            if value:
                raise ConfigError(f"{name} is not supported with encoder-decoder models: leave it out")
        return self.with_token_budget(device, context_length)

    def for_transformers(self, device: str, context_length: int) -> Self:
        """``with_token_budget`` for a model that transformers computes; raises ConfigError for unsupported options."""
        names = ("enable_lora", "enable_prompt_adapter")
        refused = {name: getattr(self, name) for name in names}
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            refused[f"{name} above 1"] = getattr(self, name) > 1
        refused[f"quantization={self.quantization!r}"] = self.quantization not in ("auto", "none")
        if self.speculative_config is not None and self.speculative_config.method not in ("ngram", "suffix"):
            refused[f"speculative_config with method {self.speculative_config.method!r}"] = True
        for name, value in refused.items():
            if value:
                raise ConfigError(
                    f"{name} is not supported with models that run through transformers' code (model_impl): leave it "
                    "out"
                )
        return self.with_token_budget(device, context_length)

    def for_states(self, architecture: str) -> Self:
        """The options of a model of recurrent states alone, whose blocks are its checkpoints.

        One of ``block_size`` and ``state_checkpoint_tokens`` sets the other. Raises ConfigError if both are given and
        differ.
        """
        names = ("block_size", "state_checkpoint_tokens")
        given = {name: getattr(self, name) for name in names if name in self.model_fields_set}
        if len(sizes := set(given.values()) or {self.state_checkpoint_tokens}) > 1:
            raise ConfigError(
                f"block_size ({self.block_size}) and state_checkpoint_tokens ({self.state_checkpoint_tokens}) must be "
                f"equal, as all layers of {architecture} have recurrent states: give one of them"
            )
        if (size := sizes.pop()) > MAX_BLOCK_SIZE:
            raise ConfigError(
                f"state_checkpoint_tokens must be at most {MAX_BLOCK_SIZE}, not {size}: it is the block size, as all "
                f"layers of {architecture} have recurrent states"
            )
        return self.model_copy(update=dict.fromkeys(names, size))

    def without_refused(self, *, is_encoder: bool) -> Self:
        """The options that an encoder, or an encoder-decoder model, has of those that all models of a server share."""
        names = _REFUSED_BY_ENCODERS if is_encoder else (*_REFUSED_BY_ENCODER_DECODERS, "speculative_config")
        return type(self).model_validate(self.model_dump(exclude_unset=True, exclude={*names, "kv_disk_bytes"}))

    def for_encoder(self, device: str) -> Self:
        """``with_token_budget`` for an encoder, without a KV cache; raises ConfigError for unsupported options."""
        for name in _REFUSED_BY_ENCODERS:
            if getattr(self, name):
                raise ConfigError(f"{name} is for models that generate text: leave it out")
        if (budget := self.max_num_batched_tokens) is None:
            budget = max(ENCODER_TOKEN_BUDGET if device == "cpu" else TOKEN_BUDGET, self.max_num_seqs)
        off = dict.fromkeys(("enable_chunked_prefill", "enable_prefix_caching", "host_prefix_cache"), False)
        fixed = {"max_num_batched_tokens": budget, "batching": "mixed", "preemption_mode": "recompute"}
        return self.model_copy(update=off | fixed)


def make_config(**options: Any) -> EngineConfig:
    """Builds an ``EngineConfig``; None means the default if it is no value. Raises ConfigError for invalid options."""
    options = own_options(own_names(options))
    for name in list(options):
        if name not in EngineConfig.model_fields:
            raise ConfigError(unknown_option(name, list(EngineConfig.model_fields)))
        if options[name] is None and type(None) not in get_args(EngineConfig.model_fields[name].annotation):
            del options[name]
    try:
        return EngineConfig(**options)
    except ValidationError as e:
        raise ConfigError("; ".join(error_text(dict(error)) for error in e.errors())) from None


def unknown_option(name: str, names: list[str]) -> str:
    return f"unknown option {name!r}; {did_you_mean(name, sorted(names), cutoff=0.5)}"


# Option conflicts: options without effect beside others.


class IdleOption(NamedTuple):
    """A condition under which options have no effect."""

    names: tuple[str, ...]
    #: Of an ``EngineConfig`` and the device ("cpu" or "cuda").
    when: Callable[[Any, str], bool]
    #: Completes "NAME (VALUE) has no effect: ".
    instead: str


#: Logged at start.
IDLE_OPTIONS = (
    IdleOption(
        ("check_plans",), lambda o, _: o.distributed_executor_backend != "external_launcher",
        "one scheduler decides for all workers; plans are compared with distributed_executor_backend external_launcher",
    ),
    IdleOption(
        ("aging_limit",), lambda o, _: o.distributed_executor_backend == "external_launcher",
        "the clocks of the processes of external_launcher differ, so none of them decides",
    ),
    IdleOption(
        ("data_parallel_routing",), lambda o, _: o.data_parallel_size == 1,
        "data_parallel_size is 1, and all requests go to the one replica",
    ),
    IdleOption(
        ("kv_disk_bytes",), lambda o, _: o.kv_disk is None, "without kv_disk there is no store on disk",
    ),
    IdleOption(
        ("max_loras", "max_lora_rank", "max_cpu_loras"), lambda o, _: not o.enable_lora,
        "without enable_lora the engine has no LoRA adapters",
    ),
    IdleOption(
        ("max_prompt_adapters", "max_prompt_adapter_token"), lambda o, _: not o.enable_prompt_adapter,
        "without enable_prompt_adapter the engine has no prompt adapters",
    ),
    IdleOption(
        ("chat_template", "structured_outputs_compile_seconds", "structured_outputs_config"),
        lambda o, _: o.skip_tokenizer_init, "it needs the tokenizer that skip_tokenizer_init leaves out",
    ),
    IdleOption(
        ("graph_capture",), lambda o, device: device == "cpu" or o.enforce_eager,
        "CUDA graphs are only captured on a GPU without enforce_eager",
    ),
    IdleOption(
        ("enforce_eager",), lambda _, device: device == "cpu",
        "on a CPU there are no CUDA graphs, and a step is always one recorded call",
    ),
    IdleOption(
        ("deterministic",), lambda _, device: device == "cpu",
        "on a CPU products and attention always have one fixed order",
    ),
    IdleOption(
        ("max_num_partial_prefills",), lambda o, _: not o.cuts_prompts,
        "with batching prefill_first, or without enable_chunked_prefill, prompts are computed whole",
    ),
    IdleOption(
        ("enable_chunked_prefill",), lambda o, _: o.batching == "prefill_first",
        "with batching prefill_first prompts are computed whole",
    ),
    IdleOption(
        ("num_host_blocks_override", "swap_space"), lambda o, _: not o.moves_blocks_to_host,
        "with preemption_mode recompute, and without host_prefix_cache, no block moves to the host",
    ),
    IdleOption(
        ("state_checkpoint_tokens",),
        lambda o, _: not o.enable_prefix_caching and o.state_checkpoint_tokens != o.block_size,
        "without enable_prefix_caching no state is found again",
    ),
    IdleOption(
        ("cache_hold_share",), lambda o, _: not o.enable_prefix_caching,
        "without enable_prefix_caching there is nothing to hold",
    ),
    IdleOption(
        ("jump_forward",), lambda o, device: o.pipeline_parallel_size == 1 and o.plans_ahead(device),
        "with async_scheduling (the default on a GPU) a step is planned before it is known which tokens are forced",
    ),
)  # fmt: skip
#: Refused, as they would change the use of memory, or the weights.
REFUSED_OPTIONS = (
    IdleOption(
        ("gpu_memory_utilization", "kv_cache_memory_bytes"), lambda o, _: o.num_gpu_blocks_override is not None,
        "num_gpu_blocks_override sizes the KV cache",
    ),
    IdleOption(
        ("gpu_memory_utilization",), lambda o, _: o.kv_cache_memory_bytes is not None,
        "kv_cache_memory_bytes sizes the KV cache",
    ),
    IdleOption(
        ("swap_space",), lambda o, _: o.num_host_blocks_override is not None,
        "num_host_blocks_override says how many blocks the host holds",
    ),
    IdleOption(
        ("revision",), lambda o, _: "/" not in o.model or os.path.exists(os.path.expanduser(o.model)),
        "only models of the hub have revisions, and this one is a folder, a file or built in",
    ),
)  # fmt: skip


def idle_options(options: OptionPart, device: str) -> list[str]:
    """A log line for each explicit option, unless it is off, that has no effect on this device."""
    return _lines(IDLE_OPTIONS, options, device)


def _lines(table: tuple[IdleOption, ...], options: OptionPart, device: str) -> list[str]:
    return [
        f"{name} ({getattr(options, name)}) has no effect: {instead}"
        for names, when, instead in table
        for name in names
        if name in options.model_fields_set and getattr(options, name) and when(options, device)
    ]
