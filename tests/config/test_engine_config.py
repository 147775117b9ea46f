"""Options that have no effect beside the others: said once at start, or refused, row by row of the table."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from octavo.config.engine_config import IDLE_OPTIONS, REFUSED_OPTIONS, idle_options, make_config
from octavo.config.options import StructuredOutputsConfig
from octavo.config.sources import resolve_config
from octavo.core.errors import ConfigError
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.llm import LLM

Options = dict[str, Any]

COMPACT = StructuredOutputsConfig(disable_any_whitespace=True)

#: The option as it is given, options beside which it has no effect and beside which it has one, the devices of both.
IDLE: list[tuple[Options, Options, Options, tuple[str, str]]] = [
    ({"check_plans": True}, {}, {"distributed_executor_backend": "external_launcher"}, ("cpu", "cpu")),
    ({"aging_limit": 5.0}, {"distributed_executor_backend": "external_launcher"}, {}, ("cpu", "cpu")),
    ({"data_parallel_routing": "prefix"}, {}, {"data_parallel_size": 2}, ("cpu", "cpu")),
    ({"max_loras": 8}, {}, {"enable_lora": True}, ("cpu", "cpu")),
    ({"max_lora_rank": 8}, {}, {"enable_lora": True}, ("cpu", "cpu")),
    ({"kv_disk_bytes": 1 << 20}, {}, {"kv_disk": "a"}, ("cpu", "cpu")),
    ({"max_cpu_loras": 8}, {}, {"enable_lora": True}, ("cpu", "cpu")),
    ({"max_prompt_adapters": 8}, {}, {"enable_prompt_adapter": True}, ("cpu", "cpu")),
    ({"max_prompt_adapter_token": 8}, {}, {"enable_prompt_adapter": True}, ("cpu", "cpu")),
    ({"chat_template": "a.jinja"}, {"skip_tokenizer_init": True}, {}, ("cpu", "cpu")),
    ({"structured_outputs_compile_seconds": 1.0}, {"skip_tokenizer_init": True}, {}, ("cpu", "cpu")),
    ({"structured_outputs_config": COMPACT}, {"skip_tokenizer_init": True}, {}, ("cpu", "cpu")),
    ({"graph_capture": "start"}, {}, {}, ("cpu", "cuda")),
    ({"graph_capture": "start"}, {"enforce_eager": True}, {}, ("cuda", "cuda")),
    ({"graph_capture": [1, 2]}, {}, {}, ("cpu", "cuda")),
    ({"enforce_eager": True}, {}, {}, ("cpu", "cuda")),
    ({"deterministic": True}, {}, {}, ("cpu", "cuda")),
    ({"max_num_partial_prefills": 2}, {"batching": "prefill_first"}, {}, ("cpu", "cpu")),
    ({"max_num_partial_prefills": 2}, {"enable_chunked_prefill": False}, {}, ("cpu", "cpu")),
    ({"enable_chunked_prefill": True}, {"batching": "prefill_first"}, {}, ("cpu", "cpu")),
    ({"num_host_blocks_override": 4}, {"preemption_mode": "recompute"}, {}, ("cpu", "cpu")),
    (
        {"swap_space": 1.0},
        {"preemption_mode": "recompute"},
        {"preemption_mode": "recompute", "host_prefix_cache": True},
        ("cpu", "cpu"),
    ),
    ({"state_checkpoint_tokens": 64}, {"enable_prefix_caching": False}, {}, ("cpu", "cpu")),
    ({"cache_hold_share": 0.3}, {"enable_prefix_caching": False}, {}, ("cpu", "cpu")),
    ({"jump_forward": True}, {"async_scheduling": True}, {"async_scheduling": False}, ("cpu", "cuda")),
    ({"jump_forward": True}, {}, {}, ("cuda", "cpu")),
]

REFUSED: list[tuple[Options, Options]] = [
    ({"gpu_memory_utilization": 0.5}, {"num_gpu_blocks_override": 64}),
    ({"gpu_memory_utilization": 0.5}, {"kv_cache_memory_bytes": 1 << 20}),
    ({"kv_cache_memory_bytes": 1 << 20}, {"num_gpu_blocks_override": 64}),
    ({"swap_space": 1.0}, {"num_host_blocks_override": 64}),
    ({"revision": "v2"}, {"model": "smollm2-135m"}),
    ({"revision": "v2"}, {"model": "/"}),
]


def name_of(value: Any) -> str:
    return " ".join(value) if isinstance(value, dict) else "-".join(value)


@pytest.mark.parametrize(("option", "idle", "used", "devices"), IDLE, ids=name_of)
def test_an_option_without_effect_is_named_with_what_decides_instead(
    option: Options, idle: Options, used: Options, devices: tuple[str, str]
) -> None:
    ((name, value),) = option.items()
    (line,) = [line for line in idle_options(make_config(model="m", **option, **idle), devices[0]) if name in line]
    assert line.startswith(f"{name} ({value}) has no effect: ")
    assert not [
        line for line in idle_options(make_config(model="m", **option, **used), devices[1]) if line.startswith(name)
    ]


@pytest.mark.parametrize(
    ("roles", "options", "problem"),
    [
        ("prefill", {"data_parallel_size": 2}, "must name 2 roles"),
        ("prefill,prefill", {"data_parallel_size": 2}, "at least one replica for decode or both"),
        ("prefill,decode", {"data_parallel_size": 2, "kv_disk": None}, "needs kv_disk or kv_store"),
        ("prefill,other", {"data_parallel_size": 2}, "'other'"),
    ],
)
def test_roles_of_replicas_that_cannot_be(roles: str, options: Options, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_config(**{"model": "m", "kv_disk": "a", "replica_roles": roles} | options)


@pytest.mark.parametrize(("option", "other"), REFUSED, ids=name_of)
def test_what_would_change_memory_or_weights_is_refused(option: Options, other: Options) -> None:
    ((name, value),) = option.items()
    make_config(**{"model": "owner/name", **option})
    with pytest.raises(ConfigError, match=rf"{name} \({value}\) has no effect: .*; leave it out"):
        make_config(**{"model": "owner/name", **option, **other})


def test_every_row_is_tested() -> None:
    assert {name for option, *_ in IDLE for name in option} == {name for row in IDLE_OPTIONS for name in row.names}
    assert len(REFUSED) >= len(REFUSED_OPTIONS)
    assert {name for option, _ in REFUSED for name in option} == {name for row in REFUSED_OPTIONS for name in row.names}


def test_defaults_and_what_is_off_are_not_named() -> None:
    asked = {name: False for name in ("check_plans", "deterministic", "enforce_eager")}
    assert idle_options(make_config(model="m"), "cpu") == []
    assert idle_options(make_config(model="m", **asked, swap_space=0, preemption_mode="recompute"), "cpu") == []


def test_a_refusal_says_where_the_options_come_from() -> None:
    environ = {"OCTAVO_GPU_MEMORY_UTILIZATION": "0.5"}
    with pytest.raises(ConfigError, match="gpu_memory_utilization from OCTAVO_GPU_MEMORY_UTILIZATION"):
        resolve_config({"model": "m", "num_gpu_blocks_override": 8}, environ=environ)


@pytest.mark.parametrize("way", ["LLM", "AsyncLLM"])
def test_each_way_in_says_it_once(way: str, tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: Options = {"max_loras": 8, "enforce_eager": True, "num_gpu_blocks_override": 8}

    async def start() -> None:
        async with AsyncLLM(str(tiny_model), data_parallel_size=2, **options):
            pass

    with caplog.at_level(logging.WARNING, "octavo"):
        if way == "LLM":
            LLM(str(tiny_model), **options)
        else:
            asyncio.run(start())
    said = [record.getMessage().partition(" ")[0] for record in caplog.records if "no effect" in record.getMessage()]
    assert said == ["max_loras", "enforce_eager"]
