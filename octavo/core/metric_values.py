"""Figures of an engine as a program reads them: ``LLM.get_metrics``."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.stats import SchedulerStats


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure with its name and unit in one, as in ``octavo_decode_tokens``."""

    name: str
    value: int
    description: str


class Counter(Metric):
    """A total since the engine started; it never falls."""

    __slots__ = ()


class Gauge(Metric):
    """A figure as it is now."""

    __slots__ = ()


#: (kind, name without prefix, field of ``SchedulerStats``, description)
_TABLE = (
    (Gauge, "requests_running", "num_running", "Requests that run."),
    (Gauge, "requests_waiting", "num_waiting", "Requests that wait for their first step, or to be computed again."),
    (Gauge, "requests_swapped", "num_swapped", "Requests whose blocks are in host memory."),
    (Gauge, "kv_cache_blocks_used", "blocks_used", "KV cache blocks that requests hold."),
    (Gauge, "kv_cache_blocks_cached", "blocks_cached", "Blocks kept for prompts that begin alike."),
    (Gauge, "kv_cache_blocks_pinned", "blocks_pinned", "Blocks that hold shared prefixes."),
    (Gauge, "kv_cache_blocks_free", "blocks_free", "Blocks that hold nothing."),
    (Gauge, "kv_cache_host_used_blocks", "host_blocks_used", "Host memory blocks that hold swapped KV."),
    (Counter, "steps", "steps", "Steps of the engine."),
    (Counter, "prefill_tokens", "prefill_tokens", "Prompt tokens computed; recomputed ones again."),
    (Counter, "decode_tokens", "decode_tokens", "Tokens of output computed; of drafts, those accepted."),
    (Counter, "prefix_cache_queried_tokens", "prefix_queried_tokens", "Prompt tokens looked up in the prefix cache."),
    (Counter, "prefix_cache_hit_tokens", "prefix_hit_tokens", "Prompt tokens found in the prefix cache."),
    (Counter, "preemptions_by_recompute", "preemptions_by_recompute", "Requests set back to be computed again."),
    (Counter, "preemptions_by_swap", "preemptions_by_swap", "Requests whose blocks were moved to host memory."),
    (Counter, "recomputed_tokens", "recomputed_tokens", "Tokens whose KV entries were given up by preemption."),
    (Counter, "swapped_out_blocks", "swapped_out_blocks", "Blocks moved to host memory."),
    (Counter, "swapped_in_blocks", "swapped_in_blocks", "Blocks moved back."),
)

#: (name, field of ``SpeculationStats``, description)
_SPECULATION = (
    ("drafts", "drafts", "Drafts that were verified."),
    ("draft_tokens", "draft_tokens", "Tokens of drafts."),
    ("accepted_tokens", "accepted_tokens", "Tokens of drafts that were accepted."),
)


def metrics_of(stats: SchedulerStats) -> list[Metric]:
    """The statistics as a list of named figures."""
    metrics: list[Metric] = [kind(f"octavo_{name}", getattr(stats, field), text) for kind, name, field, text in _TABLE]
    if stats.speculation is not None:
        for name, field, text in _SPECULATION:
            metrics.append(Counter(f"octavo_spec_decode_num_{name}", getattr(stats.speculation, field), text))
    return metrics
