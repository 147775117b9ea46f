"""Options that are accepted and have no effect beside the others that are given: one table, walked at every start.

An option that asks for something is never ignored in silence. Where nothing but speed could differ, the log says once
what decides instead; where memory or answers would not be those that were asked for, the options are refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from octavo.core.option_part import OptionPart


class IdleOption(NamedTuple):
    """When an option has no effect."""

    name: str
    #: Of the options (an ``EngineConfig``, which refuses by this table) and the device ("cpu" or "cuda").
    when: Callable[[Any, str], bool]
    #: Completes "NAME (VALUE) has no effect: ".
    instead: str


def _no_graphs(options: Any, device: str) -> bool:
    return device == "cpu" or options.enforce_eager


def _without_lora(options: Any, _: str) -> bool:
    return not options.enable_lora


def _without_prompt_adapters(options: Any, _: str) -> bool:
    return not options.enable_prompt_adapter


def _one_replica(options: Any, _: str) -> bool:
    return options.data_parallel_size == 1


def _blocks_are_given(options: Any, _: str) -> bool:
    return options.num_gpu_blocks_override is not None


def _nothing_swapped(options: Any, _: str) -> bool:
    return not options.moves_blocks_to_host


def _without_tokenizer(options: Any, _: str) -> bool:
    return options.skip_tokenizer_init


_BLOCKS_ARE_GIVEN = "num_gpu_blocks_override sizes the KV cache"
_NO_TOKENIZER = "structured output needs the tokenizer that skip_tokenizer_init leaves out"
_LORA = "without enable_lora the engine has no LoRA adapters"
_PROMPT_ADAPTERS = "without enable_prompt_adapter the engine has no prompt adapters"
_ONE_REPLICA = "data_parallel_size is 1, and all requests go to the one replica"
_NO_GRAPHS = "CUDA graphs are captured on a GPU without enforce_eager alone"
_WHOLE_PROMPTS = "with batching prefill_first, or without enable_chunked_prefill, prompts are computed whole"
_NOTHING_SWAPPED = "with preemption_mode recompute, and without host_prefix_cache, no block moves to the host"

#: Said in the log.
IDLE_OPTIONS = (
    IdleOption(
        "check_plans",
        lambda options, _: options.distributed_executor_backend != "external_launcher",
        "one scheduler decides for all workers; plans are compared with distributed_executor_backend external_launcher",
    ),
    IdleOption(
        "aging_limit",
        lambda options, _: options.distributed_executor_backend == "external_launcher",
        "the clocks of the processes of external_launcher differ, so none of them decides",
    ),
    IdleOption("data_parallel_retry", _one_replica, _ONE_REPLICA),
    IdleOption("data_parallel_routing", _one_replica, _ONE_REPLICA),
    IdleOption("max_loras", _without_lora, _LORA),
    IdleOption("max_lora_rank", _without_lora, _LORA),
    IdleOption("max_cpu_loras", _without_lora, _LORA),
    IdleOption("max_prompt_adapters", _without_prompt_adapters, _PROMPT_ADAPTERS),
    IdleOption("max_prompt_adapter_token", _without_prompt_adapters, _PROMPT_ADAPTERS),
    IdleOption(
        "chat_template",
        lambda options, _: options.skip_tokenizer_init,
        "conversations need the tokenizer that skip_tokenizer_init leaves out",
    ),
    IdleOption("structured_outputs_compile_seconds", _without_tokenizer, _NO_TOKENIZER),
    IdleOption("structured_outputs_config", _without_tokenizer, _NO_TOKENIZER),
    IdleOption("graph_capture", _no_graphs, _NO_GRAPHS),
    IdleOption(
        "enforce_eager",
        lambda _, device: device == "cpu",
        "on a CPU there are no CUDA graphs, and a step is always one recorded call",
    ),
    IdleOption(
        "deterministic",
        lambda _, device: device == "cpu",
        "on a CPU products and attention always have one fixed order",
    ),
    IdleOption("max_num_partial_prefills", lambda options, _: not options.cuts_prompts, _WHOLE_PROMPTS),
    IdleOption(
        "enable_chunked_prefill",
        lambda options, _: options.batching == "prefill_first",
        "with batching prefill_first prompts are computed whole",
    ),
    IdleOption("num_host_blocks_override", _nothing_swapped, _NOTHING_SWAPPED),
    IdleOption("swap_space", _nothing_swapped, _NOTHING_SWAPPED),
    IdleOption(
        "jump_forward",
        lambda options, device: options.pipeline_parallel_size == 1 and options.plans_ahead(device),
        "with async_scheduling (the default on a GPU) a step is planned before it is known which tokens are forced",
    ),
)

#: Refused: they would change what the machine's memory holds, or which weights answer.
REFUSED_OPTIONS = (
    IdleOption("gpu_memory_utilization", _blocks_are_given, _BLOCKS_ARE_GIVEN),
    IdleOption("kv_cache_memory_bytes", _blocks_are_given, _BLOCKS_ARE_GIVEN),
    IdleOption(
        "gpu_memory_utilization",
        lambda options, _: options.kv_cache_memory_bytes is not None,
        "kv_cache_memory_bytes sizes the KV cache",
    ),
    IdleOption(
        "swap_space",
        lambda options, _: options.num_host_blocks_override is not None,
        "num_host_blocks_override says how many blocks the host holds",
    ),
    IdleOption(
        "revision",
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
    found = []
    for name, when, instead in table:
        value = getattr(options, name)
        # None and what is off or zero ask for nothing.
        if name in options.model_fields_set and value and when(options, device):
            found.append(f"{name} ({value}) has no effect: {instead}")
    return found
