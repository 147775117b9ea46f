"""Statistics of the scheduler, and of a step of the engine core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

S = TypeVar("S", bound=msgspec.Struct)


class GroupState(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The blocks of one KV group now; see ``SchedulerState``."""

    #: Attention window of its layers, in tokens; None: they keep all.
    window: int | None
    used: int
    cached: int
    free: int
    pinned: int
    host_used: int

    @property
    def counts(self) -> tuple[int, int, int, int, int]:
        """The numbers, in their order."""
        return self.used, self.cached, self.free, self.pinned, self.host_used

    @property
    def available(self) -> int:
        """Blocks that can be allocated: free and cached."""
        return self.free + self.cached

    @property
    def usage(self) -> float:
        """Share of its blocks that are in use or pinned."""
        held = self.used + self.pinned
        return held / max(1, held + self.cached + self.free)


class AdapterStats(msgspec.Struct, array_like=True, gc=False):
    """Adapters now, and totals since the engine started; LoRA and prompt adapters together."""

    # Now:
    in_slots: int = 0
    #: In host memory, those in slots included.
    in_host: int = 0
    loading: int = 0
    # Totals:
    #: Loads that were begun, and those of them that failed.
    loads: int = 0
    failed_loads: int = 0
    #: Adapters that lost their slot, or their place in host memory, to others.
    slot_evictions: int = 0
    host_evictions: int = 0
    #: Admissions of requests whose adapter had its slot, and of those whose adapter was given one.
    slot_hits: int = 0
    slot_misses: int = 0
    #: Seconds in which steps gave adapters their slots or waited for one, in all and the longest of a step.
    seconds: float = 0.0
    longest_seconds: float = 0.0


class GrammarStats(msgspec.Struct):
    """What compiling the grammars of requests has come to; forms that were known do not count."""

    compiled: int = 0
    refused: int = 0
    #: Of processor time.
    seconds: float = 0.0
    #: Requests whose form is being compiled, or waits for it.
    waiting: int = 0


class SpeculationStats(msgspec.Struct, array_like=True):
    """Totals of speculative decoding since the engine started."""

    #: Times that a sequence had draft tokens in a step.
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    #: Of the drafts, how many were accepted up to their first token, their second, ...
    accepted_per_position: list[int] = []
    #: Sequences for which the drafter failed.
    failures: int = 0


class SchedulerState(msgspec.Struct, gc=False):
    """The queues and blocks now, and totals since the engine started."""

    #: Total of steps.
    steps: int = 0
    # Requests and blocks now:
    num_waiting: int = 0
    num_running: int = 0
    num_swapped: int = 0
    # Of all KV groups together:
    blocks_used: int = 0
    #: In use by no sequence, kept for prompts that begin alike.
    blocks_cached: int = 0
    blocks_free: int = 0
    #: Of shared prefixes, in use or not; not counted among those in use.
    blocks_pinned: int = 0
    host_blocks_used: int = 0
    # Totals:
    preemptions_by_recompute: int = 0
    preemptions_by_swap: int = 0
    #: Tokens whose KV entries were given up by preemption.
    recomputed_tokens: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    #: Prompt tokens looked up in the prefix cache, and found there.
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    #: Blocks of each KV group now, if there are several.
    groups: list[GroupState] = []
    #: If adapters are enabled.
    adapters: AdapterStats | None = None
    #: If drafts are made.
    speculation: SpeculationStats | None = None

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks in use or pinned, of the group that has the largest: that one is full first."""
        whole = GroupState(None, self.blocks_used, self.blocks_cached, self.blocks_free, self.blocks_pinned, 0)
        return max(group.usage for group in self.groups or [whole])

    @property
    def num_blocks(self) -> int:
        """KV cache blocks in all."""
        return self.blocks_used + self.blocks_cached + self.blocks_free + self.blocks_pinned


class SchedulerStats(SchedulerState, gc=False):
    """A state of the queues and blocks, and totals up to it."""

    #: Totals of tokens that were computed.
    prefill_tokens: int = 0
    decode_tokens: int = 0
    #: Slots of used blocks that hold no token, now.
    empty_slots: int = 0


class StepStats(SchedulerState, frozen=True, array_like=True, gc=False):  # type: ignore[misc]  # msgspec allows it
    """One step, and the state after it: what a ``StatLogger`` gets.

    Also sent without a step (``steps`` is as before, times and tokens are 0) when an abort has emptied the engine.
    """

    #: Seconds of this step: schedule, execute, update.
    seconds: float = 0.0
    #: Of them, inside the worker, and there inside kernels (measured with ``time_kernels``; 0 without).
    worker_seconds: float = 0.0
    kernel_seconds: float = 0.0
    #: Seconds between the end of the step before and the start of this one, if there was work to do meanwhile:
    #: outputs encoded and sent, messages received.
    between_seconds: float = 0.0
    #: Tokens computed in this step.
    prefill_tokens: int = 0
    decode_tokens: int = 0
    #: Number of the engine core, of several behind one server.
    replica: int = 0


#: Fields of ``SchedulerStats`` that are no totals.
_NOW = (
    *("num_waiting", "num_running", "num_swapped", "host_blocks_used", "empty_slots"),
    *("blocks_used", "blocks_cached", "blocks_free", "blocks_pinned"),
)


def sum_stats(replicas: list[SchedulerStats]) -> SchedulerStats:
    """The statistics of several engine cores together."""
    total = _sum(replicas)
    total.groups = [sum_groups(groups) for groups in zip(*(replica.groups for replica in replicas), strict=True)]
    adapters = [replica.adapters for replica in replicas if replica.adapters is not None]
    if adapters:
        total.adapters = _sum(adapters)
        total.adapters.longest_seconds = max(replica.longest_seconds for replica in adapters)
    speculation = [replica.speculation for replica in replicas if replica.speculation is not None]
    if speculation:
        total.speculation = _sum(speculation)
        positions = zip(*(replica.accepted_per_position for replica in speculation), strict=True)
        total.speculation.accepted_per_position = [*map(sum, positions)]
    return total


def ended_stats(stats: SchedulerStats) -> SchedulerStats:
    """The statistics of an engine core that has ended: the totals, and nothing that there is now."""
    ended = msgspec.structs.replace(stats, **dict.fromkeys(_NOW, 0))
    ended.groups = [GroupState(group.window, 0, 0, 0, 0, 0) for group in stats.groups]
    if stats.adapters is not None:
        ended.adapters = msgspec.structs.replace(stats.adapters, in_slots=0, in_host=0, loading=0)
    return ended


def _sum(parts: Sequence[S]) -> S:
    """The sums of the fields that are numbers; the others have their defaults."""
    total = type(parts[0])()
    for name in total.__struct_fields__:
        if isinstance(getattr(total, name), (int, float)):
            setattr(total, name, sum(getattr(part, name) for part in parts))
    return total


def sum_groups(groups: Sequence[GroupState]) -> GroupState:
    """The blocks of several groups together."""
    if not groups:
        return GroupState(None, 0, 0, 0, 0, 0)
    return GroupState(groups[0].window, *map(sum, zip(*(group.counts for group in groups), strict=True)))
