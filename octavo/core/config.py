"""All engine options in one validated model; command-line flags, files and environment variables follow from it."""

from __future__ import annotations

from typing import Any, Self, get_args

from pydantic import BaseModel, ValidationError, model_validator

from octavo.core.errors import ConfigError
from octavo.core.foreign_options import own_names, own_options
from octavo.core.idle_options import refused_options
from octavo.core.image_options import ImageOptions
from octavo.core.near_names import did_you_mean
from octavo.core.option_part import readable
from octavo.core.option_parts import MAX_LOGPROBS as MAX_LOGPROBS
from octavo.core.option_parts import MAX_LOGPROBS_ON_GPU as MAX_LOGPROBS_ON_GPU
from octavo.core.option_parts import (
    AdapterOptions,
    CacheOptions,
    DeviceOptions,
    ModelOptions,
    ParallelOptions,
)
from octavo.core.option_parts import Sizes as Sizes
from octavo.core.scheduler_options import CPU_TOKEN_BUDGET as CPU_TOKEN_BUDGET
from octavo.core.scheduler_options import ENCODER_TOKEN_BUDGET
from octavo.core.scheduler_options import TOKEN_BUDGET as TOKEN_BUDGET
from octavo.core.scheduler_options import SchedulerOptions as SchedulerOptions
from octavo.core.speculative_options import SpeculativeConfig as SpeculativeConfig
from octavo.core.speculative_options import SpeculativeOptions
from octavo.core.structured_outputs_options import StructuredOutputOptions

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
