"""Agents whose conversations do not fit the KV cache together: what is found again of their prompts."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from octavo.lab.bench.policies.scenarios import Scenario
from octavo.lab.workloads.agent import AgentTrace
from octavo.lab.workloads.work_items import WorkItem

_TRACE = AgentTrace()
_HOUR = 3600.0
_BLOCK_SIZE = 16
#: The longest prompt with its answer, of all likely seeds.
_CONTEXT = 8192


def _make(cache_ttl: float, capacity: float, seed: int) -> Iterable[WorkItem]:
    return AgentTrace(cache_ttl=cache_ttl, seed=seed)


def _scenario(name: str, cache_ttl: float, hints: str) -> Scenario:
    options = {
        "block_size": _BLOCK_SIZE,
        "num_gpu_blocks_override": _TRACE.num_blocks(_BLOCK_SIZE) // 2,
        "max_model_len": _CONTEXT,
    }
    about = (
        f"{_TRACE.agents} agents at once, {_TRACE.turns} turns each, with {_TRACE.system_len} tokens of system prompt "
        f"and tools and {_TRACE.task_len} of a task; memory for half of their conversations; {hints}"
    )
    return Scenario(name, about, options, partial(_make, cache_ttl))


AGENTS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        _scenario("agent", 0.0, "no cache hints"),
        _scenario("agent-hints", _HOUR, "each prompt asks to be kept for an hour"),
    )
}
