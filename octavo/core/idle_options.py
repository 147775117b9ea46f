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
