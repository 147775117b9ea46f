"""The series of ``/metrics`` that come from the state of an engine core, of which each replica has its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import Counter

if TYPE_CHECKING:
    from octavo.core.stats import AdapterStats, SchedulerState, SpeculationStats


class ReplicaMetrics:
    """The series of one engine core."""

    def __init__(self, families: dict[str, Any], replica: str) -> None:
        """``families`` as ``Metrics`` made them, by a short name."""
        requests, blocks, tokens, preemptions = (
            families[name] for name in ("requests", "blocks", "step_tokens", "preemptions")
        )
        self._gauges = {
            "num_running": requests(replica, "running"),
            "num_waiting": requests(replica, "waiting"),
            "num_swapped": requests(replica, "swapped"),
            "blocks_used": blocks(replica, "used"),
            "blocks_cached": blocks(replica, "cached"),
            "blocks_free": blocks(replica, "free"),
            "blocks_pinned": blocks(replica, "pinned"),
            "num_blocks": families["capacity"](replica),
            "host_blocks_used": families["host_blocks"](replica),
        }
        self._group_blocks = lambda *labels: families["group_blocks"](replica, *labels)
        self._totals = {
            "preemptions_by_recompute": Total(preemptions(replica, "recompute")),
            "preemptions_by_swap": Total(preemptions(replica, "swap")),
            "prefix_queried_tokens": Total(families["queried"](replica)),
            "prefix_hit_tokens": Total(families["hits"](replica)),
        }
        self._adapters = lambda: _AdapterMetrics(families, replica)
        self._shown_adapters: _AdapterMetrics | None = None
        self._drafts = lambda positions: _SpeculationMetrics(families, replica, positions)
        self._shown_drafts: _SpeculationMetrics | None = None
        self.prefill_tokens, self.decode_tokens = tokens(replica, "prefill"), tokens(replica, "decode")

    def show(self, stats: SchedulerState) -> None:
        """Takes queues, blocks and totals."""
        for name, gauge in self._gauges.items():
            gauge.set(getattr(stats, name))
        for number, group in enumerate(stats.groups):
            window = "all" if group.window is None else str(group.window)
            for state in ("used", "cached", "free", "pinned"):
                self._group_blocks(str(number), window, state).set(getattr(group, state))
        for name, total in self._totals.items():
            total.set_total(getattr(stats, name))
        if stats.adapters is not None:
            self._shown_adapters = self._shown_adapters or self._adapters()
            self._shown_adapters.show(stats.adapters)
        if (drafts := stats.speculation) is not None:
            self._shown_drafts = self._shown_drafts or self._drafts(len(drafts.accepted_per_position))
            self._shown_drafts.show(drafts)


class _SpeculationMetrics:
    """The series of one engine core that makes drafts."""

    def __init__(self, families: dict[str, Any], replica: str, positions: int) -> None:
        """``positions``: most tokens of a draft."""
        self._totals = {
            "drafts": Total(families["drafts"](replica)),
            "draft_tokens": Total(families["draft_tokens"](replica)),
            "accepted_tokens": Total(families["accepted"](replica)),
            "failures": Total(families["draft_failures"](replica)),
        }
        self._positions = [Total(families["accepted_at"](replica, str(i))) for i in range(positions)]

    def show(self, stats: SpeculationStats) -> None:
        """Takes totals."""
        for name, total in self._totals.items():
            total.set_total(getattr(stats, name))
        for position, accepted in zip(self._positions, stats.accepted_per_position, strict=True):
            position.set_total(accepted)


class _AdapterMetrics:
    """The series of one engine core that serves adapters."""

    def __init__(self, families: dict[str, Any], replica: str) -> None:
        places, evictions, lookups = (families[f"adapter{name}"] for name in ("s", "_evictions", "_lookups"))
        self._gauges = {
            "in_slots": places(replica, "slot"),
            "in_host": places(replica, "host"),
            "loading": places(replica, "loading"),
            "longest_seconds": families["adapter_longest"](replica),
        }
        self._totals = {
            "loads": Total(families["adapter_loads"](replica)),
            "failed_loads": Total(families["adapter_failures"](replica)),
            "slot_evictions": Total(evictions(replica, "slot")),
            "host_evictions": Total(evictions(replica, "host")),
            "slot_hits": Total(lookups(replica, "hit")),
            "slot_misses": Total(lookups(replica, "miss")),
            "seconds": Total(families["adapter_seconds"](replica)),
        }

    def show(self, stats: AdapterStats) -> None:
        """Takes counts and totals."""
        for name, gauge in self._gauges.items():
            gauge.set(getattr(stats, name))
        for name, total in self._totals.items():
            total.set_total(getattr(stats, name))


class Total:
    """A counter that follows a running total."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._last = 0.0

    def set_total(self, total: float) -> None:
        """Counts what it has grown by since the last one; an engine core that was started again begins at 0."""
        self._counter.inc(total - self._last if total >= self._last else total)
        self._last = total
