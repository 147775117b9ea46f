"""The series of ``/metrics`` that come from the state of an engine core, of which each replica has its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import Counter, Gauge

from octavo.core.stats import SchedulerState

#: Kind, text and further labels of each family with a series for each replica. Those of groups begin where layers have
#: blocks of several kinds, those of drafts where drafts are made, those of adapters where adapters are served.
FAMILIES: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "requests": (Gauge, "Requests in the engine now, by state.", ("state",)),
    "kv_cache_blocks": (Gauge, "KV cache blocks now, by state.", ("state",)),
    "kv_cache_group_blocks": (
        Gauge,
        "KV cache blocks now, of each group of layers with equal KV entries, by state. window: tokens that its layers "
        "attend to; all: the whole context.",
        ("group", "window", "state"),
    ),
    "kv_cache_capacity_blocks": (Gauge, "KV cache blocks in all.", ()),
    "kv_cache_host_used_blocks": (Gauge, "Host memory blocks that hold swapped KV.", ()),
    "prefix_cache_queried_tokens": (Counter, "Prompt tokens looked up in the prefix cache.", ()),
    "prefix_cache_hit_tokens": (Counter, "Prompt tokens found in the prefix cache.", ()),
    "preemptions": (Counter, "Requests set back to make room, by kind.", ("kind",)),
    "step_tokens": (Counter, "Tokens computed in steps, by phase; recomputed ones again.", ("phase",)),
    "spec_decode_num_drafts": (Counter, "Drafts that were verified.", ()),
    "spec_decode_num_draft_tokens": (Counter, "Tokens of drafts.", ()),
    "spec_decode_num_accepted_tokens": (Counter, "Tokens of drafts that were accepted.", ()),
    "spec_decode_num_accepted_tokens_per_pos": (
        Counter,
        "Drafts of which the token at this position was accepted.",
        ("position",),
    ),
    "spec_decode_num_failures": (Counter, "Completions that went on without drafts as the drafter failed.", ()),
    "adapters": (Gauge, "Adapters now: in slots on the device, in host memory, being loaded.", ("place",)),
    "adapter_loads": (Counter, "Loads of adapters from files.", ()),
    "adapter_failed_loads": (Counter, "Loads that failed.", ()),
    "adapter_evictions": (Counter, "Adapters that lost their place to others.", ("place",)),
    "adapter_admissions": (
        Counter,
        "Admissions of requests with an adapter: in its slot already (hit), or given one (miss).",
        ("slot",),
    ),
    "adapter_stall_seconds": (Counter, "Time in which steps placed adapters or waited for one.", ()),
    "adapter_longest_stall_seconds": (Gauge, "The longest of these times in one step.", ()),
}
#: A statistic of ``SchedulerState`` -> the family that shows it, and its labels there.
_STATE = {
    "num_running": ("requests", "running"),
    "num_waiting": ("requests", "waiting"),
    "num_swapped": ("requests", "swapped"),
    "blocks_used": ("kv_cache_blocks", "used"),
    "blocks_cached": ("kv_cache_blocks", "cached"),
    "blocks_free": ("kv_cache_blocks", "free"),
    "blocks_pinned": ("kv_cache_blocks", "pinned"),
    "num_blocks": ("kv_cache_capacity_blocks",),
    "host_blocks_used": ("kv_cache_host_used_blocks",),
    "preemptions_by_recompute": ("preemptions", "recompute"),
    "preemptions_by_swap": ("preemptions", "swap"),
    "prefix_queried_tokens": ("prefix_cache_queried_tokens",),
    "prefix_hit_tokens": ("prefix_cache_hit_tokens",),
}
#: The same of ``SpeculationStats`` and of ``AdapterStats``.
_SPECULATION = {
    "drafts": ("spec_decode_num_drafts",),
    "draft_tokens": ("spec_decode_num_draft_tokens",),
    "accepted_tokens": ("spec_decode_num_accepted_tokens",),
    "failures": ("spec_decode_num_failures",),
}
_ADAPTERS = {
    "in_slots": ("adapters", "slot"),
    "in_host": ("adapters", "host"),
    "loading": ("adapters", "loading"),
    "loads": ("adapter_loads",),
    "failed_loads": ("adapter_failed_loads",),
    "slot_evictions": ("adapter_evictions", "slot"),
    "host_evictions": ("adapter_evictions", "host"),
    "slot_hits": ("adapter_admissions", "hit"),
    "slot_misses": ("adapter_admissions", "miss"),
    "seconds": ("adapter_stall_seconds",),
    "longest_seconds": ("adapter_longest_stall_seconds",),
}


class ReplicaMetrics:
    """The series of one engine core, those of groups, drafts and adapters from the time on at which there are any."""

    def __init__(self, families: Mapping[str, Callable[..., Any]], replica: str) -> None:
        """``families``: functions from label values to metrics, of all ``FAMILIES``."""
        self._families, self._replica = families, replica
        self._shown: dict[tuple[str, ...], Callable[[float], None]] = {}
        self.prefill_tokens, self.decode_tokens = (families["step_tokens"](replica, p) for p in ("prefill", "decode"))
        self.show(SchedulerState())

    def show(self, stats: SchedulerState) -> None:
        """Takes queues, blocks and totals."""
        self._show_all(_STATE, stats)
        for number, group in enumerate(stats.groups):
            window = "all" if group.window is None else str(group.window)
            for state in ("used", "cached", "free", "pinned"):
                self._show(getattr(group, state), "kv_cache_group_blocks", str(number), window, state)
        if stats.adapters is not None:
            self._show_all(_ADAPTERS, stats.adapters)
        if stats.speculation is not None:
            self._show_all(_SPECULATION, stats.speculation)
            for position, accepted in enumerate(stats.speculation.accepted_per_position):
                self._show(accepted, "spec_decode_num_accepted_tokens_per_pos", str(position))

    def _show_all(self, series: Mapping[str, tuple[str, ...]], stats: object) -> None:
        for name, which in series.items():
            self._show(getattr(stats, name), *which)

    def _show(self, value: float, *which: str) -> None:
        """Sets a gauge, or the total of a counter, of this family and these labels."""
        show = self._shown.get(which)
        if show is None:
            family, *labels = which
            metric = self._families[family](self._replica, *labels)
            show = self._shown[which] = metric.set if isinstance(metric, Gauge) else Total(metric).set_total
        show(value)


class Total:
    """A counter that follows a running total."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._last = 0.0

    def set_total(self, total: float) -> None:
        """Counts what it has grown by since the last one; an engine core that was started again begins at 0."""
        self._counter.inc(total - self._last if total >= self._last else total)
        self._last = total
